"""Sending answers to clients that may leave at any moment.

Invariant: whatever is being awaited for a client is cancelled once when that client leaves, and its
clean-up (recording, closing the engine's connection) runs to the end. Plain asyncio on purpose: its
cancellation is delivered once, so that clean-up code may await.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client left first; `work` is then cancelled and awaited."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        await _drop(gone)
        if not task.done():
            await _drop(task)


class EventStream:
    """An ASGI response that sends server-sent events until they end or the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._events = events
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
