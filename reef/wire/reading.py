"""What was said, in any dialect: the messages of a recorded request and the reply of its answer.

Tolerant: it reads records of traffic that was answered once, so nothing it meets is an error; what it
can't read is left out. Reasoning, annotations and ids are not part of what was said. Pure functions;
whether a request is valid is each dialect's own business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reef.wire import chat
from reef.wire.exchange import Api, Exchange, Message

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "refusal"})


def messages_of(exchange: Exchange) -> tuple[Message, ...]:
    """The conversation a request carries, system text first where it stands beside the messages."""
    request = exchange.request
    match exchange.api:
        case Api.CHAT:
            return chat.messages_of(request.get("messages"))
        case Api.MESSAGES:
            system = _text(request.get("system"))
            told = [Message("system", system)] if system else []
            return (*told, *(n for m in _dicts(request.get("messages")) for n in _anthropic(m)))
        case Api.RESPONSES:
            return tuple(_responses(request))
        case Api.COMPLETIONS:
            return (Message("user", _prompt(request.get("prompt"))),)


def reply_of(exchange: Exchange) -> Message | None:
    """The reply of an answer; None if it has no text and calls no tool."""
    response = exchange.response
    if not isinstance(response, dict):
        return None
    match exchange.api:
        case Api.CHAT:
            reply = chat.reply_of(response)
        case Api.MESSAGES:
            blocks = response.get("content")
            reply = next(iter(_anthropic({"role": "assistant", "content": blocks})), None) if blocks else None
        case Api.RESPONSES:
            reply = next((m for m in _items(_dicts(response.get("output"))) if m.role == "assistant"), None)
        case Api.COMPLETIONS:
            choice = next(iter(_dicts(response.get("choices"))), {})
            reply = Message("assistant", _text(choice.get("text")))
    return reply if reply and (reply.content or reply.tool_calls) else None


def finish_reason_of(exchange: Exchange) -> str | None:
    """Why the answer ended, in chat's words: stop, length, tool_calls."""
    response = exchange.response
    if not isinstance(response, dict):
        return None
    match exchange.api:
        case Api.MESSAGES:
            said = response.get("stop_reason")
            return {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}.get(
                str(said), said
            )
        case Api.RESPONSES:
            if (response.get("incomplete_details") or {}).get("reason") == "max_output_tokens":
                return "length"
            reply = reply_of(exchange)
            return "tool_calls" if reply and reply.tool_calls else "stop"
        case _:
            return next((c.get("finish_reason") for c in _dicts(response.get("choices"))), None)


def call_ids_of(exchange: Exchange) -> list[str]:
    """The ids of the tool calls an answer makes, letters and digits only: some clients drop the rest."""
    response = exchange.response if isinstance(exchange.response, dict) else {}
    match exchange.api:
        case Api.CHAT:
            choices = _dicts(response.get("choices"))
            calls = (choices[0].get("message") or {}).get("tool_calls") if choices else None
            if not calls:
                return []
            ids = [c.get("id") for c in _dicts(calls)]
        case Api.MESSAGES:
            ids = [b.get("id") for b in _dicts(response.get("content")) if b.get("type") == "tool_use"]
        case Api.RESPONSES:
            ids = [i.get("call_id") for i in _dicts(response.get("output"))]
        case Api.COMPLETIONS:
            ids = []
    return [_bare_id(i) for i in ids if isinstance(i, str)]


def result_ids_of(exchange: Exchange) -> list[str]:
    """The ids of the calls whose results stand at the end of a request."""
    request = exchange.request
    listed = request.get("input" if exchange.api is Api.RESPONSES else "messages")
    out: list[str] = []
    for item in reversed(listed) if isinstance(listed, list) else ():
        if not isinstance(item, dict):
            continue
        if item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning"):
            break
        found = item.get("tool_call_id") or item.get("call_id")
        if isinstance(found, str):
            out.append(_bare_id(found))
        if exchange.api is Api.MESSAGES:
            named = [b.get("tool_use_id") for b in _dicts(item.get("content"))]
            out += [_bare_id(i) for i in named if isinstance(i, str)]
    return out


def _bare_id(id: str) -> str:
    return "".join(c for c in id if c.isalnum())


def response_id_of(exchange: Exchange) -> str | None:
    """The answer's own id, by which `previous_response_id` may name it."""
    id = exchange.response.get("id") if isinstance(exchange.response, dict) else None
    return id if isinstance(id, str) and exchange.api is Api.RESPONSES else None


def _responses(request: Mapping[str, Any]) -> Iterable[Message]:
    instructions = _text(request.get("instructions"))
    if instructions:
        yield Message("system", instructions)
    asked = request.get("input")
    if isinstance(asked, str):
        yield Message("user", asked)
    else:
        yield from _items(_dicts(asked))


def _items(items: Sequence[Mapping[str, Any]]) -> Iterable[Message]:
    """Responses items as messages: text and calls that follow each other are one assistant message."""
    texts: list[str] = []
    calls: list[tuple[str, str]] = []

    def spoken() -> Iterable[Message]:
        if texts or calls:
            yield Message("assistant", "\n".join(texts), tuple(calls))
            texts.clear()
            calls.clear()

    for item in items:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message" and item.get("role") == "assistant":
            if calls:
                yield from spoken()
            texts.append(_text(item.get("content")))
        elif kind in ("function_call", "custom_tool_call"):
            calls.append((str(item.get("name", "")), str(item.get("arguments", item.get("input", "")))))
        elif kind == "local_shell_call":
            calls.append(("local_shell", json.dumps(item.get("action"))))
        elif kind and kind.endswith("_output"):
            yield from spoken()
            yield Message("tool", _text(item.get("output")))
        elif kind == "message":
            yield from spoken()
            said = str(item.get("role"))
            yield Message({"developer": "system"}.get(said, said), _text(item.get("content")))
    yield from spoken()


def _anthropic(raw: Mapping[str, Any]) -> Iterable[Message]:
    """A Messages message: tool results stand before the user's own words."""
    said = str(raw.get("role", "user"))
    content = raw.get("content")
    if isinstance(content, str):
        yield Message(said, content)
        return
    blocks = _dicts(content)
    for block in blocks:
        if block.get("type") == "tool_result":
            yield Message("tool", _text(block.get("content")))
    text = "\n".join(str(b["text"]) for b in blocks if b.get("type") == "text" and "text" in b)
    calls = tuple(
        (str(b.get("name", "")), json.dumps(b.get("input"), ensure_ascii=False))
        for b in blocks
        if b.get("type") == "tool_use"
    )
    if text or calls or not any(b.get("type") == "tool_result" for b in blocks):
        yield Message(said, text, calls)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = [p if isinstance(p, str) else p.get("text", p.get("refusal")) for p in _parts(content)]
    return "\n".join(p for p in parts if isinstance(p, str))


def _parts(content: Any) -> Iterable[Any]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str) or (isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS):
            yield part


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else ""


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
