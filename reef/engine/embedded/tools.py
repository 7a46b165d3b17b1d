"""Tool calls in generated text, in the form most open models are taught (Hermes, Qwen):

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>

Invariant: whatever is not a well-formed call comes out as the text it is. Tokens and log-probs are not
touched by this; it knows no request and no transport.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(slots=True)
class Said:
    """What became certain: text for the reader, and calls as a chat delta has them."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.calls)


class ToolText:
    """Splits an answer's text, as it grows, into content and calls."""

    def __init__(self) -> None:
        self._pending = ""
        self._count = 0

    @property
    def called(self) -> bool:
        return self._count > 0

    def push(self, text: str, *, final: bool = False) -> Said:
        """Add text; `final` lets out what was held back."""
        self._pending += text
        said = Said()
        while True:
            start = self._pending.find(_OPEN)
            if start < 0:
                cut = len(self._pending) if final else len(self._pending) - _overlap(self._pending)
                self._say(said, self._pending[:cut])
                self._pending = self._pending[cut:]
                return said
            end = self._pending.find(_CLOSE, start)
            if end < 0 and not final:
                self._say(said, self._pending[:start])
                self._pending = self._pending[start:]
                return said
            inner = self._pending[start + len(_OPEN) : end if end >= 0 else None]
            call = self._call(inner)
            after = end + len(_CLOSE) if end >= 0 else len(self._pending)
            self._say(said, self._pending[:start] if call else self._pending[:after])
            if call:
                said.calls.append(call)
            self._pending = self._pending[after:]

    def _say(self, said: Said, text: str) -> None:
        if text.strip() or not self.called:  # blanks between calls are not said to anyone
            said.content += text

    def _call(self, inner: str) -> dict[str, Any] | None:
        try:
            parsed = json.loads(inner)
        except ValueError:
            return None
        if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
            return None
        given = parsed.get("arguments", parsed.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        index, self._count = self._count, self._count + 1
        function = {"name": parsed["name"], "arguments": arguments}
        return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that begins the opening mark."""
    for size in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if text.endswith(_OPEN[:size]):
            return size
    return 0
