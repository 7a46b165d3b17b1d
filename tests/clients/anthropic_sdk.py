"""The `anthropic` package: Messages, whole and streamed, with and without a tool."""

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic

from tests.clients.openai_sdk import DESCRIPTION, PARAMETERS
from tests.clients.story import ASKS, TOOL, count_apples


def _client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="k", max_retries=0)


def messages(url: str) -> list[str]:
    client = _client(url)
    said: list[str] = []
    history: list[Any] = []
    for ask in ASKS:
        history.append({"role": "user", "content": ask})
        answer = client.messages.create(model="scripted-base", max_tokens=200, system="Be kind.", messages=history)
        said.append("".join(block.text for block in answer.content if block.type == "text"))
        history.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]})
    return said


def messages_tools(url: str) -> list[str]:
    return _with_tool(url, stream=False)


def messages_stream_tools(url: str) -> list[str]:
    return _with_tool(url, stream=True)


def _with_tool(url: str, *, stream: bool) -> list[str]:
    tools: list[Any] = [{"name": TOOL, "description": DESCRIPTION, "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"model": "scripted-base", "max_tokens": 200, "tools": tools}
    client = _client(url)
    said: list[str] = []
    history: list[Any] = []
    for ask in ASKS:
        history.append({"role": "user", "content": ask})
        while True:
            if stream:
                with client.messages.stream(messages=history, **asked) as events:
                    text = "".join(events.text_stream)
                    answer = events.get_final_message()
                assert text == "".join(block.text for block in answer.content if block.type == "text")
            else:
                answer = client.messages.create(messages=history, **asked)
            kept = [b.model_dump(exclude_none=True, exclude={"parsed_output"}) for b in answer.content]
            history.append({"role": "assistant", "content": kept})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = []
            for call in calls:
                said.append(f"tool {call.name} {json.dumps(call.input)}")
                arguments: Any = call.input
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": count_apples(**arguments)})
            history.append({"role": "user", "content": results})
        said.append("".join(block.text for block in answer.content if block.type == "text"))
    return said
