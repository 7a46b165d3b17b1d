"""Server-sent events: splitting a byte stream into data lines, and writing them.

Tolerates any chopping of the bytes, CRLF, comments and several data lines per event. Knows nothing
of what the data mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""keeps a connection busy; no client takes it for an event"""


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event, in order. An unterminated last event is dropped, not guessed at."""
    rest: list[bytes] = []
    data: list[str] = []
    async for chunk in chunks:
        first, *lines = chunk.split(b"\n")
        rest.append(first)
        if not lines:
            continue
        lines.insert(0, b"".join(rest))
        rest = [lines.pop()]
        for raw in lines:
            line = raw.rstrip(b"\r")
            if not line:
                if data:
                    yield "\n".join(data)
                data = []
            elif line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))


def event(payload: Any, name: str | None = None) -> bytes:
    """One event with a JSON payload, named if the dialect names its events."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(payload) + b"\n\n"
