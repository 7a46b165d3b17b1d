"""The `openai` package: chat completions and Responses, whole and streamed, with and without a tool."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

from tests.clients.story import ASKS, TOOL, count_apples

PARAMETERS = {
    "type": "object",
    "properties": {"start": {"type": "integer"}, "given": {"type": "integer"}},
    "required": ["start", "given"],
}
DESCRIPTION = "Count the apples that are left."


def _client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def chat(url: str) -> list[str]:
    client = _client(url)
    said: list[str] = []
    messages: list[Any] = []
    for ask in ASKS:
        messages.append({"role": "user", "content": ask})
        answer = client.chat.completions.create(model="scripted-base", messages=messages)
        said.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def chat_stream(url: str) -> list[str]:
    """Says how many pieces and tokens each reply had, so that a stream cut up differently would show."""
    client = _client(url)
    said: list[str] = []
    messages: list[Any] = []
    for ask in ASKS:
        messages.append({"role": "user", "content": ask})
        stream = client.chat.completions.create(
            model="scripted-base", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        usage = chunks[-1].usage
        said.append(f"{''.join(pieces)} ({len(pieces)} pieces, {usage.completion_tokens if usage else 'no'} tokens)")
        messages.append({"role": "assistant", "content": "".join(pieces)})
    return said


def chat_tools(url: str) -> list[str]:
    return _with_tool(url, stream=False)


def chat_stream_tools(url: str) -> list[str]:
    return _with_tool(url, stream=True)


def _with_tool(url: str, *, stream: bool) -> list[str]:
    tools: list[Any] = [
        {"type": "function", "function": {"name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS}}
    ]
    completions = _client(url).chat.completions
    said: list[str] = []
    messages: list[Any] = []
    for ask in ASKS:
        messages.append({"role": "user", "content": ask})
        while True:
            if stream:
                with completions.stream(model="scripted-base", messages=messages, tools=tools) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                created = completions.create(model="scripted-base", messages=messages, tools=tools)
                message = created.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                said.append(f"tool {call.id} {call.function.name} {call.function.arguments}")  # type: ignore[union-attr]
                result = count_apples(**json.loads(call.function.arguments))  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        said.append(message.content or "")
    return said


def responses(url: str) -> list[str]:
    """The whole conversation sent along each time, as items."""
    client = _client(url)
    said: list[str] = []
    items: list[Any] = []
    for ask in ASKS:
        items.append({"role": "user", "content": ask})
        answer = client.responses.create(model="scripted-base", input=items)
        said.append(answer.output_text)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
    return said


def responses_chained(url: str) -> list[str]:
    """Only what is new sent along, with `previous_response_id`."""
    client = _client(url)
    said: list[str] = []
    before: str | None = None
    for ask in ASKS:
        answer = client.responses.create(model="scripted-base", input=ask, previous_response_id=before)
        said.append(answer.output_text)
        before = answer.id
    return said


def responses_stream_tools(url: str) -> list[str]:
    tools: list[Any] = [
        {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": False}
    ]
    client = _client(url)
    said: list[str] = []
    items: list[Any] = []
    for ask in ASKS:
        items.append({"role": "user", "content": ask})
        while True:
            deltas = ""
            with client.responses.stream(model="scripted-base", input=items, tools=tools) as events:
                for event in events:
                    if event.type == "response.output_text.delta":
                        deltas += event.delta
                answer = events.get_final_response()
            assert deltas == answer.output_text
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                said.append(f"tool {call.name} {call.arguments}")
                result = count_apples(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        said.append(answer.output_text)
    return said
