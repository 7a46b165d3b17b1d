"""The Anthropic Messages dialect, answers: chat chunks become content blocks and their events.

The same code makes whole answers: they are one big chunk whose events nobody sends. Invariant: the
content of the message is what the events added up to, one open block at a time. Knows no sockets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from reef.errors import ReefError
from reef.wire import sse
from reef.wire.answer import Answer
from reef.wire.dialect import Dialect, as_chunk
from reef.wire.exchange import Api
from reef.wire.messages import anthropic_error, check_request, to_chat, wants_thinking
from reef.wire.toolcalls import InOrder, Step, What

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
PING = sse.event({"type": "ping"}, "ping")


class MessagesTranslator:
    """Builds the message, block by block."""

    def __init__(self, request: Mapping[str, Any], receipt: str, answer: Answer) -> None:
        self.finished = False
        self._answer = answer
        self._think = wants_thinking(request)
        self._stops = request.get("stop_sequences") or []
        self._message: dict[str, Any] = {
            "id": f"msg_{receipt}",
            "type": "message",
            "role": "assistant",
            "model": request.get("model") or "",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._calls = InOrder(f"toolu_{receipt}_")
        self._later: list[tuple[str, str]] = []
        self._events: list[bytes] = []
        self._opened = False
        self._open_block: str | None = None
        self._arguments = ""
        """of the open call, as far as they are told"""

    @property
    def response(self) -> dict[str, Any] | None:
        if not self._opened:
            return None
        content = list(self._message["content"])
        if self._open_block == "tool_use":  # the client left within a call: what it had of it
            content[-1] = {**content[-1], "input": _input(self._arguments)}
        return {**self._message, "content": content}

    def whole(self, shown: dict[str, Any]) -> dict[str, Any]:
        self.chunk(as_chunk(shown))
        self.final()
        return self._message

    def chunk(self, shown: dict[str, Any]) -> bytes:
        self._open()
        if shown.get("usage"):
            self._message["usage"] = _usage(shown["usage"])
        for choice in shown.get("choices") or []:
            delta = choice.get("delta") or {}
            if self._think:
                self._text("thinking", delta.get("reasoning_content") or delta.get("reasoning"))
            self._text("text", delta.get("content") or delta.get("refusal"))
            self._call_steps(self._calls.add(delta.get("tool_calls") or []))
            if choice.get("finish_reason"):
                self.finished = True
                self._stop(choice)
        return self._flush()

    def final(self) -> bytes:
        self._open()
        self._call_steps(self._calls.finish())
        for kind, text in self._later:
            self._text(kind, text)
        self._close_block()
        usage = self._message["usage"]
        if not usage["output_tokens"]:
            usage.update(input_tokens=len(self._answer.prompt_ids), output_tokens=len(self._answer.token_ids))
        ended = {"stop_reason": self._message["stop_reason"], "stop_sequence": self._message["stop_sequence"]}
        self._emit("message_delta", delta=ended, usage=usage)
        self._emit("message_stop")
        return self._flush()

    def failed(self, error: ReefError) -> bytes:
        return sse.event(anthropic_error(error), "error")

    def keep_alive(self) -> bytes:
        """An event with data: clients of this dialect time the silence between events."""
        self._open()
        return self._flush() + PING

    def _emit(self, kind: str, **payload: Any) -> None:
        self._events.append(sse.event({"type": kind, **payload}, kind))

    def _flush(self) -> bytes:
        out, self._events = b"".join(self._events), []
        return out

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self._message["usage"]["input_tokens"] = len(self._answer.prompt_ids)
            self._emit("message_start", message=self._message)

    def _stop(self, choice: Mapping[str, Any]) -> None:
        reason, matched = choice["finish_reason"], choice.get("stop_reason")
        if reason == "stop" and isinstance(matched, str) and matched in self._stops:
            self._message.update(stop_reason="stop_sequence", stop_sequence=matched)
        else:
            self._message["stop_reason"] = _REASONS.get(reason, "end_turn")

    def _index(self) -> int:
        return len(self._message["content"]) - 1

    def _begin(self, block: dict[str, Any], shown: dict[str, Any]) -> None:
        """Open a block; `shown` is how it looks before anything was added."""
        self._close_block()
        self._message["content"].append(block)
        self._open_block = block["type"]
        self._emit("content_block_start", index=self._index(), content_block=shown)

    def _close_block(self) -> None:
        if self._open_block is None:
            return
        block = self._message["content"][-1]
        if self._open_block == "thinking":
            # opaque to clients, who must send it back; it lets a block of ours be told from others
            block["signature"] = hashlib.blake2b(block["thinking"].encode(), digest_size=24).hexdigest()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            self._emit("content_block_delta", index=self._index(), delta=delta)
        self._open_block = None
        self._emit("content_block_stop", index=self._index())

    def _text(self, kind: str, text: Any) -> None:
        if not isinstance(text, str) or not text:
            return
        self._call_steps(self._calls.settle())
        if self._calls.busy:  # one open block at a time: it follows the call
            self._later.append((kind, text))
            return
        if self._open_block != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            self._begin(block, block)
        self._message["content"][-1][kind] += text
        self._emit("content_block_delta", index=self._index(), delta={"type": f"{kind}_delta", kind: text})

    def _call_steps(self, steps: list[Step]) -> None:
        for step in steps:
            match step.what:
                case What.OPEN:
                    block = {"type": "tool_use", "id": step.call.id, "name": step.call.name, "input": {}}
                    self._begin(block, block)
                    self._arguments = ""
                case What.ARGUMENTS:
                    self._arguments += step.text
                    delta = {"type": "input_json_delta", "partial_json": step.text}
                    self._emit("content_block_delta", index=self._index(), delta=delta)
                case What.CLOSE:
                    self._message["content"][-1]["input"] = _input(step.call.arguments)
                    self._close_block()


def _input(arguments: str) -> Any:
    """A call's arguments as an object; what is none is kept under a name of its own."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return {"__unparsed__": arguments}
    return parsed if isinstance(parsed, dict) else {"__unparsed__": arguments}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt, reply = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {"input_tokens": prompt - cached, "output_tokens": reply, "cache_read_input_tokens": cached}


MESSAGES = Dialect(Api.MESSAGES, "/v1/chat/completions", check_request, to_chat, MessagesTranslator, anthropic_error)
