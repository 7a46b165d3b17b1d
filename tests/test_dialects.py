"""Each dialect's own clients over real sockets: what they see, and that the record is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from reef.wire import completions, messages, responses
from reef.wire.answer import Answer
from reef.wire.chat import message_of
from reef.wire.exchange import Api, Delivered, Exchange, Message
from reef.wire.toolcalls import InOrder, ToolCalls, What
from tests.scripted_engine import ids, logprob
from tests.stack import Stack, stack

HTTP = httpx.Client(timeout=60, verify=False)  # one for all: each would load the system's certificates
ASK: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("dialects")) as s:
        yield s


@pytest.fixture
def running(shared: Stack) -> Stack:
    script = shared.script
    script.pieces, script.finish, script.stop_reason, script.break_after = None, "stop", None, None
    script.requests.clear()
    return shared


def claude(running: Stack, **headers: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="k", max_retries=0, default_headers=headers)


def newest(running: Stack) -> Exchange:
    exchanges = running.log.tail(0, 10_000)
    return exchanges[-1]


def _conversation(body: dict[str, Any]) -> tuple[Message, ...]:
    return tuple(message_of(m) for m in body["messages"])


def call_piece(index: int | None, id: str | None = None, name: str | None = None, arguments: str = "") -> Any:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    call: dict[str, Any] = {"type": "function", "function": function}
    if id:
        call["id"] = id
    return {**call, "index": index}


PARIS, OSLO = '{"city": "Paris"}', '{"city": "Oslo"}'
STREAMED_CALLS: dict[str, list[Any]] = {
    "one after another": [
        [call_piece(0, "a", "weather")],
        *[[call_piece(0, arguments=c)] for c in PARIS],
        [call_piece(1, "b", "weather")],
        *[[call_piece(1, arguments=c)] for c in OSLO],
    ],
    "interleaved": [
        [call_piece(0, "a", "weather"), call_piece(1, "b", "weather")],
        [call_piece(0, arguments=PARIS[:5]), call_piece(1, arguments=OSLO[:7])],
        [call_piece(1, arguments=OSLO[7:])],
        [call_piece(0, arguments=PARIS[5:])],
    ],
    "null index": [
        [call_piece(None, "a", "weather", PARIS[:4])],
        [call_piece(None, None, None, PARIS[4:])],
        [call_piece(None, "b", "weather", OSLO)],
    ],
    "the same index for all": [[call_piece(0, "a", "weather", PARIS)], [call_piece(0, "b", "weather", OSLO)]],
    "the same index and no ids": [[call_piece(0, None, "weather", PARIS)], [call_piece(0, None, "weather", OSLO)]],
    "id and name with every piece": [
        [call_piece(0, "a", "weather", PARIS[:4])],
        [call_piece(0, "a", "weather", PARIS[4:])],
        [call_piece(1, "b", "weather", OSLO)],
    ],
}
EXPECTED = [("weather", PARIS), ("weather", OSLO)]


@pytest.mark.parametrize("pieces", STREAMED_CALLS.values(), ids=STREAMED_CALLS.keys())
def test_pieces_of_calls_find_their_call_and_come_out_in_order(pieces: list[Any]) -> None:
    calls, ordered = ToolCalls(), InOrder("call_")
    steps = []
    for deltas in pieces:
        calls.add(deltas)
        steps += ordered.add(deltas)
    steps += ordered.finish()
    assert [(c.name, c.arguments) for c in calls.calls] == EXPECTED
    told: list[Any] = []
    opened = None
    for step in steps:
        if step.what is What.OPEN:
            assert opened is None, "two calls open at once"
            opened = step.call
            told.append([step.call.name, ""])
        elif step.what is What.ARGUMENTS:
            told[-1][1] += step.text
        else:
            opened = None
    assert opened is None
    assert [tuple(t) for t in told] == EXPECTED
    assert len({step.call.id for step in steps}) == 2


@pytest.mark.parametrize("pieces", STREAMED_CALLS.values(), ids=STREAMED_CALLS.keys())
def test_tool_calls_stream_in_every_dialect(running: Stack, pieces: list[Any]) -> None:
    script = running.script
    first: tuple[dict[str, Any], str] = ({"role": "assistant", "content": "Let me look."}, "Let me look.")
    script.pieces = [first, *(({"tool_calls": deltas}, "x") for deltas in pieces)]
    script.finish = "tool_calls"
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER}
    done: Any = None
    for event in running.client().responses.create(model="m", input="hello", tools=[tool], stream=True):
        if event.type == "response.completed":
            done = event.response
    assert [i.type for i in done.output] == ["message", "function_call", "function_call"]
    assert [(i.name, i.arguments) for i in done.output[1:]] == EXPECTED
    with claude(running).messages.stream(
        model="m", max_tokens=99, messages=ASK, tools=[{"name": "weather", "input_schema": WEATHER}]
    ) as stream:
        message: Any = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert [b.type for b in message.content] == ["text", "tool_use", "tool_use"]
    assert [b.input for b in message.content[1:]] == [json.loads(PARIS), json.loads(OSLO)]
    recorded = newest(running)
    assert recorded.response is not None
    assert [b.get("input") for b in recorded.response["content"]] == [None, json.loads(PARIS), json.loads(OSLO)]
    assert recorded.sampled is not None and len(recorded.sampled.token_ids) == len(first[1]) + len(pieces)


def test_responses_stream_has_the_documented_sequence(running: Stack) -> None:
    stream = running.client().responses.create(model="m", input="hi", stream=True)
    events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == list("reply to hi")
    exchange = newest(running)
    assert exchange.api is Api.RESPONSES
    final: Any = events[-1]
    assert exchange.response == json.loads(final.response.model_dump_json(exclude_unset=True))
    assert final.response.id == f"resp_{exchange.id}"
    assert exchange.sampled is not None and list(exchange.sampled.token_ids) == ids("reply to hi")
    assert exchange.request == {"model": "m", "input": "hi", "stream": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_answer_is_the_same_streamed_and_not(running: Stack, stream: bool) -> None:
    running.script.pieces = [
        ({"role": "assistant", "reasoning_content": "Hm."}, "Hm."),
        ({"content": "Yes."}, "Yes."),
    ]
    running.script.finish = "length"
    answer: Any = running.client().responses.create(model="m", input="hi", max_output_tokens=7, stream=stream)
    if stream:
        answer = list(answer)[-1].response
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [i.type for i in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Hm."
    assert answer.output_text == "Yes."
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 7)
    assert running.script.requests[-1]["max_completion_tokens"] == 7


def test_responses_log_probs_come_only_where_asked(running: Stack) -> None:
    client = running.client()
    plain: Any = client.responses.create(model="m", input="hi")
    assert plain.output[0].content[0].logprobs == []
    asked: Any = client.responses.create(
        model="m", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    entries = asked.output[0].content[0].logprobs
    assert [e.token for e in entries] == list("reply to hi")
    assert entries[0].logprob == logprob(ord("r"))
    assert len(entries[0].top_logprobs) == 2


def test_a_response_continues_a_stored_one(running: Stack) -> None:
    client = running.client()
    first = client.responses.create(model="m", input="one", instructions="be brief")
    second = client.responses.create(model="m", input="two", previous_response_id=first.id, stream=True)
    last: Any = list(second)[-1]
    client.responses.create(model="m", input="three", previous_response_id=last.response.id)
    assert [(m["role"], m["content"]) for m in running.script.requests[-1]["messages"]] == [
        ("user", "one"),
        ("assistant", "reply to one"),
        ("user", "two"),
        ("assistant", "reply to two"),
        ("user", "three"),
    ]
    assert client.responses.retrieve(first.id).output_text == "reply to one"
    private = client.responses.create(model="m", input="one", store=False)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="m", input="two", previous_response_id=private.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(private.id)


def test_custom_tools_take_free_text(running: Stack) -> None:
    call = call_piece(0, "a", "apply_patch", json.dumps({"input": "*** Begin\n+x"}))
    running.script.pieces = [({"role": "assistant", "tool_calls": [call]}, "tokens")]
    running.script.finish = "tool_calls"
    tools: list[Any] = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}]
    answer: Any = running.client().responses.create(model="m", input="hi", tools=tools)
    (item,) = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", "*** Begin\n+x")
    assert [t.type for t in answer.tools] == ["custom"]
    offered = running.script.requests[-1]["tools"]
    assert [t["function"]["name"] for t in offered] == ["apply_patch"]


def test_a_messages_stream_has_the_documented_sequence(running: Stack) -> None:
    running.script.pieces = [
        ({"role": "assistant", "reasoning_content": "Hm."}, "Hm."),
        ({"content": "Yes"}, "Yes"),
        ({"content": "."}, "."),
    ]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with claude(running).messages.stream(model="m", max_tokens=2000, messages=ASK, thinking=thinking) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "thinking", "signature")]
        message: Any = stream.get_final_message()
    assert kinds == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes.")
    assert message.content[0].signature
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 7)
    exchange = newest(running)
    assert (exchange.api, exchange.delivered) == (Api.MESSAGES, Delivered.FULL)
    assert exchange.response is not None and exchange.response["content"][1] == {"type": "text", "text": "Yes."}
    assert exchange.sampled is not None and list(exchange.sampled.token_ids) == ids("Hm.Yes.")


def test_thinking_is_shown_only_where_asked(running: Stack) -> None:
    running.script.pieces = [({"role": "assistant", "reasoning_content": "Hm."}, "Hm."), ({"content": "Yes."}, "Yes.")]
    message = claude(running).messages.create(model="m", max_tokens=9, messages=ASK)
    assert [b.type for b in message.content] == ["text"]


def test_a_stop_sequence_is_named(running: Stack) -> None:
    running.script.stop_reason = "END"
    for stream in (False, True):
        answer: Any = claude(running).messages.create(
            model="m", max_tokens=9, messages=ASK, stop_sequences=["END"], stream=stream
        )
        if stream:
            answer = next(event.delta for event in answer if event.type == "message_delta")
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert running.script.requests[-1]["stop"] == ["END"]


def test_messages_become_chat_and_mean_the_same() -> None:
    request = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "And Oslo?"},
                ],
            },
        ],
    }
    sent = messages.to_chat(messages.check_request(request))
    assert _conversation(sent) == (
        Message("system", "Be\nkind."),
        Message("user", "Weather?"),
        Message("assistant", "Looking.", (("weather", '{"city": "Paris"}'),)),
        Message("tool", "sunny"),
        Message("user", "And Oslo?"),
    )
    assert sent["messages"][2]["reasoning_content"] == "Hm."
    assert sent["messages"][3]["tool_call_id"] == "t1"


def test_response_items_become_chat_and_mean_the_same() -> None:
    request = {
        "instructions": "Be kind.",
        "input": [
            {"role": "developer", "content": "Dev."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": PARIS},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": OSLO},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "snow"}]},
            {"role": "user", "content": "Thanks."},
        ],
    }
    sent = responses.to_chat(responses.check_request(request))
    assert _conversation(sent) == (
        Message("system", "Be kind."),
        Message("system", "Dev."),
        Message("user", "Weather?"),
        Message("assistant", "Looking.", (("weather", PARIS), ("weather", OSLO))),
        Message("tool", "sunny"),
        Message("tool", "snow"),
        Message("user", "Thanks."),
    )
    assert sent["messages"][3]["reasoning_content"] == "Hm."


def test_an_answer_told_in_two_messages_is_one() -> None:
    given = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert _conversation(responses.to_chat({"input": given})) == (Message("assistant", "a\nb"),)


@pytest.mark.parametrize(
    ("api", "to_chat", "request_"),
    [
        (Api.RESPONSES, responses.to_chat, {"input": "hi", "instructions": "Be kind."}),
        (
            Api.RESPONSES,
            responses.to_chat,
            {
                "input": [
                    {"role": "developer", "content": "Dev."},
                    {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
                    {"type": "reasoning", "summary": []},
                    {"role": "assistant", "content": "x"},
                    {"role": "assistant", "content": "y"},
                    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": PARIS},
                    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
                    {"role": "assistant", "content": "z"},
                ]
            },
        ),
        (Api.COMPLETIONS, completions.to_chat, {"prompt": ["hi"]}),
        (Api.COMPLETIONS, completions.to_chat, {"prompt": [1, 2]}),
        (
            Api.MESSAGES,
            messages.to_chat,
            {
                "system": [{"type": "text", "text": t} for t in ("Be", "kind.")],
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": {"a": 1}}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "q"},
                            {"type": "tool_result", "tool_use_id": "i", "content": "r"},
                        ],
                    },
                    {"role": "user", "content": []},
                ],
            },
        ),
    ],
)
def test_matching_reads_what_the_engine_is_sent(api: Api, to_chat: Any, request_: dict[str, Any]) -> None:
    reading = pytest.importorskip("reef.wire.reading")
    recorded = Exchange("i", 0, 0, api, "default", None, {}, request_, None, 200, Delivered.FULL, None)
    assert _conversation(to_chat(request_)) == reading.messages_of(recorded)


def test_completions_pass_through_and_are_recorded(running: Stack) -> None:
    client = running.client()
    answer: Any = client.completions.create(model="m", prompt="fish")
    assert answer.choices[0].text == " and fish"
    assert answer.choices[0].logprobs is None
    chunks = list(client.completions.create(model="m", prompt="fish", stream=True))
    assert [c.choices[0].text for c in chunks] == list(" and fish")
    for exchange in running.log.tail(0, 10_000)[-2:]:
        assert exchange.api is Api.COMPLETIONS
        assert exchange.response is not None and exchange.response["choices"][0]["text"] == " and fish"
        assert exchange.sampled is not None
        assert list(exchange.sampled.token_ids) == ids(" and fish")
        assert list(exchange.sampled.prompt_ids) == ids("fish")
        assert exchange.sampled.topk[0][0] == (ord(" "), logprob(ord(" ")))
    assert _conversation(completions.to_chat({"prompt": "fish"})) == (Message("user", "fish"),)


def test_log_probs_of_the_tokens_alone_are_given_where_a_completion_asks_for_them(running: Stack) -> None:
    for stream in (False, True):
        answer: Any = running.client().completions.create(model="m", prompt="fish", logprobs=0, stream=stream)
        choice = next(iter(answer)).choices[0] if stream else answer.choices[0]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs[0] == logprob(ord(" "))


def test_log_probs_of_an_engine_that_was_asked_for_no_ids_are_passed_on_as_they_are() -> None:
    told = [{"token": "hé", "logprob": -0.5, "bytes": None}, {"token": "!", "logprob": 0.0, "top_logprobs": None}]
    shown = Answer({"logprobs": True}).whole({"choices": [{"logprobs": {"content": told}}]})
    assert shown["choices"][0]["logprobs"]["content"] == [{**entry, "top_logprobs": []} for entry in told]


def test_tokens_are_counted_by_the_engine(running: Stack) -> None:
    before = running.log.count()
    counted = claude(running).messages.count_tokens(model="m", system="abc", messages=ASK)
    assert counted.input_tokens == len("abchello")
    assert running.log.count() == before


def test_models_are_listed_in_the_clients_dialect(running: Stack) -> None:
    names = ["scripted-base", "default"]
    assert [m.id for m in running.client().models.list()] == names
    assert [m.id for m in claude(running).models.list()] == names
    assert claude(running).models.retrieve("default").display_name == "default"


USER = {"role": "user", "content": "x"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"messages": [USER], "n": 2}, "n"),
    ("chat/completions", {"messages": [USER], "n": True}, "n"),
    ("chat/completions", {"messages": [USER], "tools": "all"}, "tools"),
    ("chat/completions", {"messages": [USER], "stop": 5}, "stop"),
    ("chat/completions", {"messages": [USER], "seed": "x"}, "seed"),
    ("chat/completions", {"messages": [USER], "seed": 10**30}, "seed"),
    ("chat/completions", {"messages": [USER], "top_k": "many"}, "top_k"),
    ("chat/completions", {"messages": [USER], "top_logprobs": "2"}, "top_logprobs"),
    ("chat/completions", {"messages": [USER], "response_format": "json"}, "response_format"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": "x", "echo": True}, "echo"),
    ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "x", "n": 2}, "n"),
    ("responses", {"input": "x", "n": 2}, "n"),
    ("messages", {"messages": [USER], "max_tokens": 5, "n": 2}, "n"),
    ("responses", {}, "input"),
    ("responses", {"input": 5}, "input"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ("responses", {"input": "x", "background": True}, "background"),
    ("responses", {"input": "x", "conversation": "c"}, "conversation"),
    ("responses", {"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
    ("responses", {"input": "x", "previous_response_id": "\0"}, "previous_response_id"),
    ("responses", {"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type"),
    ("responses", {"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ("responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("messages", {"messages": [USER]}, "max_tokens"),
    ("messages", {"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ("messages", {"messages": [], "max_tokens": 5}, "messages"),
    ("messages", {"messages": [{"role": "user", "content": None}], "max_tokens": 5}, "messages[0].content"),
    ("messages", {"messages": [USER], "max_tokens": 5, "mcp_servers": [{}]}, "mcp_servers"),
    ("messages", {"messages": [USER], "max_tokens": 5, "tools": [{"type": "bash_20250124"}]}, "tools[0].type"),
    ("messages", {"messages": [USER], "max_tokens": 5, "stop_sequences": [1]}, "stop_sequences"),
    ("messages", {"messages": [USER], "max_tokens": 5, "thinking": {"type": "deep"}}, "thinking.type"),
    ("messages/count_tokens", {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
]


@pytest.mark.parametrize(("route", "body", "field"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(running: Stack, route: str, body: dict[str, Any], field: str) -> None:
    response = HTTP.post(f"{running.url}/v1/{route}", json=body)
    assert response.status_code == 400, response.text
    if route.startswith("messages"):
        told = response.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert f"'{field}'" in told["error"]["message"]
    else:
        assert response.json()["error"]["param"] == field
    assert not running.script.requests


def test_the_engine_gets_what_was_asked(running: Stack) -> None:
    client = running.client()
    prefilled: Any = [*ASK, {"role": "assistant", "content": "Well"}]
    shape: Any = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    client.responses.create(
        model="m",
        input="x",
        text={"format": shape},
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        extra_body={"seed": 7, "stop": ["z"], "made_up": 1},
    )
    sent = running.script.requests[-1]
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (sent["seed"], sent["stop"], sent["made_up"], sent["parallel_tool_calls"]) == (7, ["z"], 1, False)
    exchange = newest(running)
    assert exchange.sampled is not None and not exchange.sampled.sampling.trainable
    claude(running).messages.create(
        model="m",
        max_tokens=5,
        messages=prefilled,
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"top_k": 3},
    )
    sent = running.script.requests[-1]
    assert (sent["tool_choice"], sent["parallel_tool_calls"], sent["top_k"]) == ("required", False, 3)
    assert sent["continue_final_message"] is True


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
            "input[0].content[0]",
        ),
        (
            "messages",
            {
                "max_tokens": 5,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}],
                    }
                ],
            },
            "messages[0].content[0]",
        ),
    ],
)
def test_images_are_passed_on_or_refused_by_name(
    running: Stack, tmp_path: Path, route: str, body: dict[str, Any], field: str
) -> None:
    assert HTTP.post(f"{running.url}/v1/{route}", json=body).status_code == 200
    (part,) = running.script.requests[-1]["messages"][-1]["content"]
    assert part["type"] == "image_url"
    with stack(tmp_path, engine__vision="false") as blind:
        response = HTTP.post(f"{blind.url}/v1/{route}", json=body)
        assert response.status_code == 400
        assert field in response.text


@pytest.mark.parametrize("status", [429, 400, 500])
def test_engine_errors_arrive_as_the_clients_own(running: Stack, status: int) -> None:
    running.script.status = status
    try:
        with pytest.raises(anthropic.APIStatusError, match="scripted failure") as told:
            claude(running).messages.create(model="m", max_tokens=5, messages=ASK)
        assert told.value.status_code == status
        with pytest.raises(openai.APIStatusError, match="scripted failure"):
            running.client().responses.create(model="m", input="x", stream=True)
    finally:
        running.script.status = 200


def test_an_engine_that_breaks_off_is_an_error_event_in_every_dialect(running: Stack) -> None:
    running.script.break_after = 3
    with pytest.raises(anthropic.APIStatusError):
        list(claude(running).messages.create(model="m", max_tokens=5, messages=ASK, stream=True))
    events = list(running.client().responses.create(model="m", input="hello", stream=True))
    assert events[-1].type == "response.failed"
