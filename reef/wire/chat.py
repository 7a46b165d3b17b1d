"""The chat-completions dialect: reading requests and answers, and streaming chunks through.

It is what engines speak, so a request passes as it is and a chunk leaves as it came, less what Reef
added (see `answer`). Pure functions and one accumulator; no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reef.wire import fields
from reef.wire.answer import Answer
from reef.wire.dialect import Dialect
from reef.wire.exchange import Api, Message
from reef.wire.openai_errors import openai_error
from reef.wire.passthrough import PassThrough
from reef.wire.toolcalls import ToolCalls

_OTHER_NAMES = {"developer": "system", "function": "tool"}
_PLAIN = ("user", "assistant", "system", "tool")
"""roles that keep their name"""
ROLES = ("assistant", "developer", "function", "system", "tool", "user")


def check_request(body: Any) -> dict[str, Any]:
    """The body as a dict, if it is a chat request at all. Raises BadRequest naming the field.

    Checked is what Reef reads itself; everything else is the engine's to check, unknown fields pass.
    """
    body = fields.check_body(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", "must be a non-empty list")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    check_common(body)
    fields.flag(body, "logprobs")
    fields.whole_number(body, "top_logprobs", low=0)
    for name in ("max_tokens", "max_completion_tokens"):
        fields.whole_number(body, name, low=1)
    fields.objects(body, "tools")
    return body


def check_common(body: Mapping[str, Any]) -> None:
    """What chat and text completions have in common."""
    fields.text(body, "model")
    fields.flag(body, "stream")
    fields.mapping(body, "stream_options")
    fields.mapping(body, "response_format")
    fields.mapping(body, "logit_bias")
    fields.sampling(body)
    fields.stops(body, "stop")


def _check_message(message: Any, at: str) -> None:
    if not isinstance(message, dict):
        fields.refuse(at, "must be an object")
    if message.get("role") not in ROLES:
        fields.refuse(f"{at}.role", f"must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        fields.refuse(f"{at}.content", "must be a string, a list of parts or null")
    if isinstance(content, list):
        fields.objects(message, "content", f"{at}.")
    for number, call in enumerate(fields.objects(message, "tool_calls", f"{at}.")):
        fields.mapping(call, "function", f"{at}.tool_calls[{number}].")


def to_engine(request: Mapping[str, Any]) -> dict[str, Any]:
    """A chat request as the engine takes it: as it is."""
    return dict(request)


to_chat = to_engine


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or null."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return "\n".join(texts)
    return ""


def messages_of(raw: Any) -> tuple[Message, ...]:
    """The messages of a request, those left out that are none."""
    return tuple(
        [
            # nearly every message: without a look at what it hasn't got, nor through the constructor written in Python
            tuple.__new__(Message, (m["role"], m["content"], ()))
            if len(m) == 2 and m["role"] in _PLAIN and type(m.get("content")) is str
            else message_of(m)
            for m in (raw if isinstance(raw, list) else ())
            if isinstance(m, dict) and "role" in m
        ]
    )


def message_of(raw: Mapping[str, Any]) -> Message:
    """One chat message, an answer's where it names no role."""
    role = str(raw.get("role", "assistant"))
    calls = raw.get("tool_calls")
    return Message(_OTHER_NAMES.get(role, role), text_of(raw.get("content")), _calls_of(calls) if calls else ())


def _calls_of(calls: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return tuple((str(f.get("name", "")), str(f.get("arguments", ""))) for f in functions if isinstance(f, dict))


def reply_of(response: Mapping[str, Any] | None) -> Message | None:
    """The reply of a chat answer, or None if there is none."""
    choices = (response or {}).get("choices")
    message = choices[0].get("message") if choices else None
    return message_of(message) if isinstance(message, dict) else None


class ChatTranslator(PassThrough):
    """Puts a chat completion together from its chunks."""

    def __init__(self, request: Mapping[str, Any], receipt: str, answer: Answer) -> None:
        super().__init__(request, receipt, answer)
        self._calls = ToolCalls()

    def _assemble(self, chunk: Mapping[str, Any]) -> None:
        if self.response is None:
            self.response = {
                "id": chunk.get("id"),
                "object": "chat.completion",
                "created": chunk.get("created"),
                "model": chunk.get("model"),
                "choices": [{"index": 0, "message": {"role": "assistant", "content": None}, "finish_reason": None}],
            }
        if chunk.get("usage"):
            self.response["usage"] = chunk["usage"]
        for choice in chunk.get("choices") or []:
            mine = self.response["choices"][0]
            delta = choice.get("delta") or {}
            message = mine["message"]
            for name in ("content", "reasoning_content", "reasoning", "refusal"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            if delta.get("tool_calls"):
                self._calls.add(delta["tool_calls"])
                message["tool_calls"] = self._calls.message()
            entries = (choice.get("logprobs") or {}).get("content")
            if entries:
                mine.setdefault("logprobs", {"content": []})["content"] += entries
            if choice.get("finish_reason"):
                mine["finish_reason"] = choice["finish_reason"]
                self.finished = True


CHAT = Dialect(Api.CHAT, "/v1/chat/completions", check_request, to_engine, ChatTranslator, openai_error)
