"""Server-sent events: splitting a byte stream into data lines, and writing them.

Tolerates any chopping of the bytes, CRLF, comments and several data lines per event. Knows nothing
of what the data mean.
"""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""keeps a connection busy; no client takes it for an event"""


class Splitter:
    """The data of each event, in order, from bytes in pieces of any size. An unterminated last event is
    dropped, not guessed at."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        """of a line whose end has not come yet"""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        first, *lines = piece.split(b"\n")
        self._rest.append(first)
        if not lines:
            return []
        lines.insert(0, b"".join(self._rest))
        self._rest = [lines.pop()]
        complete: list[bytes] = []
        for raw in lines:
            line = raw.rstrip(b"\r")
            if not line:
                if self._data:
                    complete.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return complete


def event(payload: Any, name: str | None = None) -> bytes:
    """One event with a JSON payload, named if the dialect names its events."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(payload) + b"\n\n"
