"""An engine whose event streams arrive in pieces of any size and may stop early.

Guarantees that the bytes are the wrapped engine's, with characters instead of escapes, so that a cut can go
through the middle of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Choice = tuple[Sequence[int], int]
"""where to cut (modulo the length), and how many bytes at the end never come"""


class Chopper:
    def __init__(self, app: ASGIApp, choose: Callable[[], Choice] = lambda: ((), 0)) -> None:
        """`choose` is asked once for each stream."""
        self._app = app
        self.choose = choose

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = bytearray()
        streaming = False

        async def forward(message: Message) -> None:
            nonlocal streaming
            if message["type"] == "http.response.start":
                streaming = any(b"event-stream" in value for _, value in message["headers"])
            if not streaming or message["type"] != "http.response.body":
                return await send(message)
            stream.extend(message.get("body", b""))
            if not message.get("more_body"):
                for piece in _pieces(_as_utf8(bytes(stream)), *self.choose()):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, receive, forward)


def _pieces(stream: bytes, cuts: Sequence[int], lost: int) -> list[bytes]:
    stream = stream[: max(0, len(stream) - lost)]
    at = sorted({cut % (len(stream) + 1) for cut in cuts} | {0, len(stream)})
    return [stream[a:b] for a, b in pairwise(at)]


def _as_utf8(stream: bytes) -> bytes:
    """The same events with their characters as bytes, not as escapes."""
    lines = stream.decode().split("\n")
    for n, line in enumerate(lines):
        if line.startswith("data: {"):
            lines[n] = "data: " + json.dumps(json.loads(line[6:]), ensure_ascii=False)
    return "\n".join(lines).encode()
