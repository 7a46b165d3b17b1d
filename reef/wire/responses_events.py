"""The Responses dialect, answers: chat chunks become output items and their events.

The same code makes whole answers: they are one big chunk whose events nobody sends. Invariant: the
items of the final event are what the events before it added up to. Knows no sockets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from reef.errors import BadRequest, ReefError, UpstreamError
from reef.wire import sse
from reef.wire.answer import Answer
from reef.wire.dialect import Dialect, as_chunk
from reef.wire.exchange import Api
from reef.wire.openai_errors import openai_error
from reef.wire.responses import RECEIPT_PREFIX, check_request, custom_tools, offered_tools, to_chat
from reef.wire.toolcalls import InOrder, Step, ToolCall, What

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "reasoning": None, "store": True, "temperature": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "top_logprobs": 0, "top_p": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""request fields a response repeats, and what it says where they were absent"""


class ResponsesTranslator:
    """Builds the response, item by item."""

    def __init__(self, request: Mapping[str, Any], receipt: str, answer: Answer) -> None:
        self.finished = False
        self._receipt = receipt
        self._answer = answer
        self._custom = custom_tools(request)
        self._wants_logprobs = bool(to_logprobs(request))
        self._head = {
            "id": RECEIPT_PREFIX + receipt,
            "object": "response",
            "created_at": int(time.time()),
            "model": request.get("model") or "",
            **{name: off if request.get(name) is None else request[name] for name, off in _ECHOED.items()},
            "tools": offered_tools(request),
        }
        self._items: list[dict[str, Any]] = []
        self._calls = InOrder(f"call_{receipt}_")
        self._later: list[tuple[str, str, Mapping[str, Any] | None]] = []
        self._events: list[bytes] = []
        self._sequence = 0
        self._opened = False
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None

    @property
    def response(self) -> dict[str, Any] | None:
        return self._response() if self._opened else None

    def whole(self, shown: dict[str, Any]) -> dict[str, Any]:
        self.chunk(as_chunk(shown))
        self.final()
        return self._response()

    def chunk(self, shown: dict[str, Any]) -> bytes:
        self._open()
        if shown.get("usage"):
            self._usage = _usage(shown["usage"])
        for choice in shown.get("choices") or []:
            delta = choice.get("delta") or {}
            self._text("reasoning", delta.get("reasoning_content") or delta.get("reasoning"), None)
            self._text("message", delta.get("content"), choice.get("logprobs"))
            self._text("refusal", delta.get("refusal"), None)
            self._call_steps(self._calls.add(delta.get("tool_calls") or []))
            if choice.get("finish_reason"):
                self._finish, self.finished = choice["finish_reason"], True
        return self._flush()

    def final(self) -> bytes:
        self._open()
        self._call_steps(self._calls.finish())
        for kind, text, logprobs in self._later:
            self._text(kind, text, logprobs)
        self._close_text()
        prompt, reply = len(self._answer.prompt_ids), len(self._answer.token_ids)
        if self._usage is None and reply:
            self._usage = _usage({"prompt_tokens": prompt, "completion_tokens": reply})
        reason = _INCOMPLETE.get(self._finish or "")
        self._status = "incomplete" if reason else "completed"
        self._emit(f"response.{self._status}", response=self._response())
        return self._flush()

    def failed(self, error: ReefError) -> bytes:
        self._open()
        self._status = "failed"
        code = error.code if isinstance(error, BadRequest) and error.code else "server_error"
        if isinstance(error, UpstreamError) and error.status == 429:
            code = "rate_limit_exceeded"
        self._error = {"code": code, "message": str(error)}
        self._emit("response.failed", response=self._response())
        return self._flush()

    def keep_alive(self) -> bytes:
        """An event with data: clients of this dialect time the silence between events."""
        if not self._opened:
            self._open()
        else:
            self._emit("response.in_progress", response=self._response())
        return self._flush()

    def _response(self) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self._finish or "") if self._status == "incomplete" else None
        return {
            **self._head,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [dict(item) for item in self._items],
            "usage": self._usage,
        }

    def _emit(self, kind: str, **payload: Any) -> None:
        self._events.append(sse.event({"type": kind, "sequence_number": self._sequence, **payload}, kind))
        self._sequence += 1

    def _flush(self) -> bytes:
        out, self._events = b"".join(self._events), []
        return out

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._emit("response.created", response=self._response())
            self._emit("response.in_progress", response=self._response())

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _add_item(self, item: dict[str, Any]) -> None:
        item["id"] = f"{item.pop('prefix')}_{self._receipt}_{len(self._items)}"
        self._items.append(item)
        self._emit("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _end_item(self, status: str = "completed") -> None:
        item = self._items[-1]
        item["status"] = status
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _open_text(self) -> dict[str, Any] | None:
        """The newest item, if it is one of text that still grows."""
        item = self._items[-1] if self._items else None
        return item if item and item["type"] in ("reasoning", "message") and item["status"] == "in_progress" else None

    def _text(self, kind: str, text: Any, logprobs: Mapping[str, Any] | None) -> None:
        """More text of an item of this kind, which is begun if it isn't the newest."""
        if not isinstance(text, str) or not text:
            return
        self._call_steps(self._calls.settle())
        if self._calls.busy:  # one open item at a time: it follows the call
            self._later.append((kind, text, logprobs))
            return
        part = self._part(kind)
        entries = ((logprobs or {}).get("content") or []) if self._wants_logprobs else []
        field = "refusal" if kind == "refusal" else "text"
        part[field] += text
        if kind == "message":
            part["logprobs"] = part["logprobs"] + entries
        extra = {"logprobs": entries} if kind == "message" else {}
        self._emit(f"response.{_EVENT[kind]}.delta", **self._where(), content_index=0, delta=text, **extra)

    def _part(self, kind: str) -> dict[str, Any]:
        item = self._open_text()
        if item is None or item["content"][0]["type"] != _PART[kind]:
            self._close_text()
            common: dict[str, Any] = {"status": "in_progress", "content": []}
            if kind == "reasoning":
                item = {"prefix": "rs", "type": "reasoning", "summary": [], **common}
            else:
                item = {"prefix": "msg", "type": "message", "role": "assistant", **common}
            self._add_item(item)
            field = "refusal" if kind == "refusal" else "text"
            part: dict[str, Any] = {"type": _PART[kind], field: ""}
            if kind == "message":
                part.update(annotations=[], logprobs=[])
            self._emit("response.content_part.added", **self._where(), content_index=0, part=part)
            item["content"] = [part]
        return item["content"][0]

    def _close_text(self) -> None:
        item = self._open_text()
        if item is None:
            return
        part = item["content"][0]
        where = {**self._where(), "content_index": 0}
        if part["type"] == "refusal":
            self._emit("response.refusal.done", **where, refusal=part["refusal"])
        elif part["type"] == "reasoning_text":
            self._emit("response.reasoning_text.done", **where, text=part["text"])
        else:
            self._emit("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
        self._emit("response.content_part.done", **where, part=part)
        self._end_item("incomplete" if self._finish in _INCOMPLETE else "completed")

    def _call_steps(self, steps: list[Step]) -> None:
        for step in steps:
            custom = step.call.name in self._custom
            match step.what:
                case What.OPEN:
                    self._close_text()
                    self._open_call(step.call, custom)
                case What.ARGUMENTS if not custom:
                    self._items[-1]["arguments"] += step.text
                    self._emit("response.function_call_arguments.delta", **self._where(), delta=step.text)
                case What.CLOSE if custom:
                    text = _free_text(step.call.arguments)
                    self._items[-1]["input"] = text
                    self._emit("response.custom_tool_call_input.delta", **self._where(), delta=text)
                    self._emit("response.custom_tool_call_input.done", **self._where(), input=text)
                    self._end_item()
                case What.CLOSE:
                    whole = {"name": step.call.name, "arguments": step.call.arguments}
                    self._emit("response.function_call_arguments.done", **self._where(), **whole)
                    self._end_item()
                case _:
                    pass

    def _open_call(self, call: ToolCall, custom: bool) -> None:
        common = {"call_id": call.id, "name": call.name, "status": "in_progress"}
        if custom:
            self._add_item({"prefix": "ctc", "type": "custom_tool_call", **common, "input": ""})
        else:
            self._add_item({"prefix": "fc", "type": "function_call", **common, "arguments": ""})


_EVENT = {"reasoning": "reasoning_text", "message": "output_text", "refusal": "refusal"}
_PART = {"reasoning": "reasoning_text", "message": "output_text", "refusal": "refusal"}


def to_logprobs(request: Mapping[str, Any]) -> bool:
    """Whether the client wants log-probs with the output text."""
    return "message.output_text.logprobs" in (request.get("include") or ()) or bool(request.get("top_logprobs"))


def _free_text(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed["input"] if isinstance(parsed, dict) and isinstance(parsed.get("input"), str) else arguments


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    prompt, reply = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": reply,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": prompt + reply,
    }


RESPONSES = Dialect(Api.RESPONSES, "/v1/chat/completions", check_request, to_chat, ResponsesTranslator, openai_error)
