"""The record against the tokens themselves: a real (tiny) model behind the gateway, read back by its own
tokenizer. Ids, log-probs and text must agree whatever the text is made into."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reef.config import load_config
from reef.engine.embedded.tools import ToolText
from reef.gateway.__main__ import gateway_app
from reef.model import ModelTokenizer
from reef.store.database import open_database
from reef.store.log import LogReader
from reef.store.migrations import LOG
from reef.wire.exchange import Exchange
from tests.sockets import serving

HTTP = httpx.Client(timeout=60, verify=False)  # one for all: each would load the system's certificates
ASK: list[Any] = [{"role": "user", "content": "Tom has 12 apples 🦈"}]


@pytest.fixture(scope="module")
def gateway(tiny_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LogReader]]:
    data = str(tmp_path_factory.mktemp("exact"))
    config = load_config(None, [("store.dir", data), ("engine.url", tiny_engine), ("engine.top_logprobs", "3")], {})
    with serving(gateway_app(config)) as url:
        yield url, LogReader(open_database(config.store.log_url, LOG))


def ask(gateway: tuple[str, LogReader], route: str, body: dict[str, Any]) -> tuple[str, Exchange]:
    """(the raw answer, its record)."""
    url, log = gateway
    response = HTTP.post(f"{url}/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    exchange = log.get(response.headers["x-reef-agent-record-id"])
    assert exchange is not None and exchange.sampled is not None
    return response.text, exchange


def text_of(exchange: Exchange) -> str:
    assert exchange.response is not None
    return exchange.response["choices"][0]["message"]["content"]


@pytest.mark.parametrize("seed", range(4))
def test_streamed_and_whole_answers_have_one_record(
    gateway: tuple[str, LogReader], tiny_model_dir: Path, seed: int
) -> None:
    """A random model's tokens are full of split characters."""
    body = {"messages": ASK, "seed": seed, "max_tokens": 40, "temperature": 1.3}
    _, whole = ask(gateway, "chat/completions", body)
    raw, streamed = ask(gateway, "chat/completions", {**body, "stream": True})
    assert streamed.sampled == whole.sampled
    assert whole.sampled is not None
    tokenizer = ModelTokenizer(tiny_model_dir)
    ended = whole.sampled.token_ids[-1] == 2
    assert len(whole.sampled.token_ids) == 40 or ended
    assert text_of(streamed) == text_of(whole) == tokenizer.decode(whole.sampled.token_ids)
    assert list(whole.sampled.prompt_ids) == tokenizer.render(ASK)
    assert all(len(row) == 3 for row in whole.sampled.topk)
    for token, logprob, row in zip(whole.sampled.token_ids, whole.sampled.logprobs, whole.sampled.topk, strict=True):
        assert {int(i): p for i, p in row}.get(token, logprob) == pytest.approx(logprob)
    shown = "".join(
        (json.loads(line[6:])["choices"] or [{"delta": {}}])[0]["delta"].get("content") or ""
        for line in raw.splitlines()
        if line.startswith("data: {")
    )
    assert shown == text_of(whole)
    assert "token_ids" not in raw and '"top_logprobs"' not in raw


def test_a_client_sees_the_chunks_the_engine_would_have_sent_it(
    gateway: tuple[str, LogReader], tiny_engine: str
) -> None:
    body = {"messages": ASK, "seed": 3, "max_tokens": 40, "temperature": 1.3, "stream": True}

    def chunks(url: str) -> list[Any]:
        lines = HTTP.post(f"{url}/v1/chat/completions", json=body).text.splitlines()
        return [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]

    assert chunks(gateway[0]) == chunks(tiny_engine)


def test_a_stop_string_ends_the_text_and_the_ids_run_up_to_it(
    gateway: tuple[str, LogReader], tiny_model_dir: Path
) -> None:
    body = {"messages": ASK, "seed": 5, "max_tokens": 60}
    _, free = ask(gateway, "chat/completions", body)
    text = text_of(free)
    stop = text[len(text) // 2 :][:2]
    _, cut = ask(gateway, "messages", {"messages": ASK, "seed": 5, "max_tokens": 60, "stop_sequences": [stop]})
    assert cut.response is not None and cut.sampled is not None and free.sampled is not None
    assert (cut.response["stop_reason"], cut.response["stop_sequence"]) == ("stop_sequence", stop)
    assert cut.response["content"][0]["text"] == text[: text.index(stop)]
    assert cut.sampled.token_ids == free.sampled.token_ids[: len(cut.sampled.token_ids)]
    assert stop in ModelTokenizer(tiny_model_dir).decode(cut.sampled.token_ids)
    assert cut.response["usage"]["output_tokens"] == len(cut.sampled.token_ids)


def test_every_dialect_records_the_same_tokens(gateway: tuple[str, LogReader]) -> None:
    common = {"seed": 9, "temperature": 1.0}
    bodies = {
        "chat/completions": {"messages": ASK, "max_tokens": 12, **common},
        "responses": {"input": ASK[0]["content"], "max_output_tokens": 12, **common},
        "messages": {"messages": ASK, "max_tokens": 12, **common},
    }
    records = [
        ask(gateway, route, {**body, "stream": stream})[1].sampled
        for route, body in bodies.items()
        for stream in (False, True)
    ]
    first = records[0]
    assert first is not None and all(record == first for record in records)
    _, plain = ask(gateway, "completions", {"prompt": list(first.prompt_ids), "max_tokens": 12, **common})
    assert plain.sampled == first


def test_tokens_are_counted_as_the_prompt_that_would_be_served(gateway: tuple[str, LogReader]) -> None:
    body = {"model": "m", "system": "Be kind.", "messages": ASK}
    counted = HTTP.post(f"{gateway[0]}/v1/messages/count_tokens", json=body).json()
    _, served = ask(gateway, "messages", {**body, "max_tokens": 1})
    assert served.sampled is not None
    assert counted == {"input_tokens": len(served.sampled.prompt_ids)}


def test_what_the_embedded_engine_cannot_do_is_named(gateway: tuple[str, LogReader]) -> None:
    for extra, field in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    ):
        refused = HTTP.post(f"{gateway[0]}/v1/chat/completions", json={"messages": ASK, **extra})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🦈"}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_out_of_text_however_it_is_cut(size: int) -> None:
    text = f"Let me look < here.{CALL}\n{CALL}"
    parser = ToolText()
    said = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.push("", final=True)]
    assert "".join(s.content for s in said) == "Let me look < here."
    calls = [call for s in said for call in s.calls]
    assert [(c["index"], c["function"]["name"]) for c in calls] == [(0, "weather"), (1, "weather")]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Zürich 🦈"}


@pytest.mark.parametrize("text", ["<tool_call>no json</tool_call> x", "a <tool_call", '<tool_call>{"name": 5}'])
def test_what_is_no_call_stays_text(text: str) -> None:
    parser = ToolText()
    said = [parser.push(char) for char in text] + [parser.push("", final=True)]
    assert "".join(s.content for s in said) == text
    assert not any(s.calls for s in said)
