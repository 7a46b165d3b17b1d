"""Server-sent events: splitting a byte stream into data lines, and writing them.

Tolerates any chopping of the bytes, CRLF, comments and several data lines per event. Knows nothing
of what the data mean.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

DONE = b"data: [DONE]\n\n"


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event, in order. An unterminated last event is dropped, not guessed at."""
    buffer = b""
    data: list[str] = []
    async for chunk in chunks:
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if not line:
                if data:
                    yield "\n".join(data)
                data = []
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))


def event(payload: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
