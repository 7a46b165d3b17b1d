"""The chat-completions dialect: reading requests, injecting what Reef records, and reading answers.

Invariant: what Reef adds to a request and what the engine answers because of it never reaches the
client; what the client asked for itself does. Pure functions and one accumulator; no sockets.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from reef.errors import BadRequest
from reef.wire.exchange import Message, Sampled, Sampling

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
INJECTED = ("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids")


def check_request(body: Any) -> dict[str, Any]:
    """The body as a dict, if it is a chat request at all. Raises BadRequest naming the field.

    Deeper checks are the engine's: unknown fields pass through.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a non-empty list", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where} must be an object", param=where)
        if message.get("role") not in ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise BadRequest(f"{where}.content must be a string, a list of parts or null", param=f"{where}.content")
    if not isinstance(body.get("model", ""), str):
        raise BadRequest("'model' must be a string", param="model")
    if not isinstance(body.get("stream", False), bool | None):
        raise BadRequest("'stream' must be true or false", param="stream")
    for name in ("temperature", "top_p"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise BadRequest(f"'{name}' must be a number", param=name)
    if body.get("n") not in (None, 1):
        raise BadRequest("'n' must be 1: one exchange records one answer", param="n")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("the body contains a lone surrogate, which is not text") from None
    return body


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of parts, or null."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return "\n".join(texts)
    return ""


def message_of(raw: Mapping[str, Any]) -> Message:
    """One chat message; `raw` has a role."""
    calls = []
    for call in raw.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            calls.append((str(function.get("name", "")), str(function.get("arguments", ""))))
    said = str(raw["role"])
    role = {"developer": "system", "function": "tool"}.get(said, said)
    return Message(role, text_of(raw.get("content")), tuple(calls))


def messages_of(request: Mapping[str, Any]) -> tuple[Message, ...]:
    """The request's conversation."""
    return tuple(message_of(m) for m in request.get("messages", []))


def reply_of(response: Mapping[str, Any] | None) -> Message | None:
    """The reply of a chat answer, or None if there is none."""
    choices = (response or {}).get("choices")
    if not choices or not isinstance(choices[0].get("message"), dict):
        return None
    return message_of({"role": "assistant", **choices[0]["message"]})


def finish_reason(response: Mapping[str, Any] | None) -> str | None:
    choices = (response or {}).get("choices")
    return choices[0].get("finish_reason") if choices else None


def sampling_of(request: Mapping[str, Any]) -> Sampling:
    """The sampling settings of a request as sent to the engine."""

    def number(name: str, default: float) -> float:
        value = request.get(name)
        return default if value is None else float(value)

    guided = any(
        request.get(name) not in (None, 0, 0.0, {}, [])
        for name in ("presence_penalty", "frequency_penalty", "logit_bias", "min_p", "guided_json", "guided_regex")
    )
    return Sampling(
        tau=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        penalties=guided
        or number("repetition_penalty", 1.0) != 1.0
        or (request.get("response_format") or {}).get("type", "text") != "text",
    )


def inject(request: Mapping[str, Any], *, model: str, top_logprobs: int, exact: bool) -> dict[str, Any]:
    """The request as the engine gets it. `exact` asks for token ids (vLLM's field names)."""
    sent = copy.deepcopy(dict(request))
    sent["model"] = model
    if exact:
        asked = sent.get("top_logprobs") or 0
        sent.update(
            logprobs=True,
            top_logprobs=max(top_logprobs, asked if isinstance(asked, int) else 0),
            return_token_ids=True,
            return_tokens_as_token_ids=True,
        )
    return sent


def _text_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    raw = entry.get("bytes")
    text = bytes(raw).decode("utf-8", "replace") if raw else ""
    return {"token": text, "logprob": entry["logprob"], "bytes": raw}


def _token_id(token: str) -> int:
    return int(token.rpartition(":")[2])


class Answer:
    """Reads an answer, whole or in chunks: what the client may see, and what was sampled.

    Feed it one whole response with `whole`, or each stream chunk with `chunk`; both return what is
    left for the client. Afterwards `response` is the reassembled answer and `sampled()` the record.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._asked_logprobs = bool(request.get("logprobs"))
        self._asked_top = int(request.get("top_logprobs") or 0)
        self._asked_ids = bool(request.get("return_token_ids"))
        self._asked_tokens_as_ids = bool(request.get("return_tokens_as_token_ids"))
        self._model = request.get("model")
        self.model: str | None = None
        """the name the engine says has generated the answer"""
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.topk: list[tuple[tuple[int, float], ...]] = []
        self.response: dict[str, Any] | None = None
        self._tools: dict[int, dict[str, Any]] = {}

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        """A non-streamed answer; returns it as the client may see it."""
        self._read(response)
        shown = self._strip(response)
        self.response = shown
        return shown

    def chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """One stream chunk; returns it as the client may see it."""
        self._read(chunk)
        shown = self._strip(chunk)
        self._assemble(shown)
        return shown

    def sampled(self, version: int, sampling: Sampling) -> Sampled | None:
        """What was sampled; None unless every token has an id and a log-prob."""
        if not self.token_ids or len(self.token_ids) != len(self.logprobs) or not self.prompt_ids:
            return None
        return Sampled(
            prompt_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            topk=tuple(self.topk),
            version=version,
            sampling=sampling,
        )

    def _read(self, part: Mapping[str, Any]) -> None:
        self.model = part.get("model", self.model)
        if part.get("prompt_token_ids"):
            self.prompt_ids = list(part["prompt_token_ids"])
        for choice in part.get("choices") or []:
            self.token_ids += choice.get("token_ids") or []
            for entry in (choice.get("logprobs") or {}).get("content") or []:
                self.logprobs.append(float(entry["logprob"]))
                top = entry.get("top_logprobs") or []
                self.topk.append(tuple((_token_id(t["token"]), float(t["logprob"])) for t in top if ":" in t["token"]))

    def _strip(self, part: Mapping[str, Any]) -> dict[str, Any]:
        shown = dict(part)
        if not self._asked_ids:
            shown.pop("prompt_token_ids", None)
        if self._model is not None and "model" in shown:
            shown["model"] = self._model
        shown["choices"] = [self._strip_choice(choice) for choice in part.get("choices") or []]
        return shown

    def _strip_choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        shown = dict(choice)
        if not self._asked_ids:
            shown.pop("token_ids", None)
        if "logprobs" not in shown:
            return shown
        content = (shown["logprobs"] or {}).get("content")
        if not self._asked_logprobs:
            shown["logprobs"] = None
        elif content is not None and not self._asked_tokens_as_ids:
            entries = [
                {**_text_entry(e), "top_logprobs": [_text_entry(t) for t in e["top_logprobs"][: self._asked_top]]}
                for e in content
            ]
            shown["logprobs"] = {**shown["logprobs"], "content": entries}
        return shown

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
            for name in ("content", "reasoning_content", "refusal"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            self._add_tool_calls(message, delta.get("tool_calls") or [])
            if choice.get("finish_reason"):
                mine["finish_reason"] = choice["finish_reason"]

    def _add_tool_calls(self, message: dict[str, Any], deltas: Sequence[Mapping[str, Any]]) -> None:
        for delta in deltas:
            index = delta.get("index")
            index = len(self._tools) if index is None else index
            call = self._tools.setdefault(
                index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = delta.get("id") or call["id"]
            function = delta.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
            message["tool_calls"] = [self._tools[i] for i in sorted(self._tools)]
