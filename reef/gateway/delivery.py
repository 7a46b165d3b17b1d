"""Sending answers to clients that may leave at any moment.

Invariant: whatever is being awaited for a client is cancelled once when that client leaves, and its
clean-up (recording, closing the engine's connection) runs to the end. Plain asyncio on purpose: its
cancellation is delivered once, so that clean-up code may await.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive, Send

T = TypeVar("T")
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if the client left first; `work` is then cancelled and awaited."""
    task = asyncio.ensure_future(work)
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        return await task  # if this is cancelled itself, so is the work, and it is awaited
    except asyncio.CancelledError:
        if not left or not task.cancelled():
            raise
        return None
    finally:
        watcher.cancel()


class EventStream:
    """The client's end of a streamed answer."""

    def __init__(self, send: Send, headers: Callable[[], Mapping[str, str]]) -> None:
        """`headers` is asked when the answer starts."""
        self._send = send
        self._headers = headers
        self.started = False
        """the status is out: whatever goes wrong now has to be said in the stream"""
        self.wrote = False
        """the client has something of the answer"""
        self._busy = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._quiet_since = self._loop.time()
        self._timer: asyncio.TimerHandle
        self._reminding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Send status 200 and the headers, once."""
        if not self.started:
            self.started = True
            headers = {**_STREAM_HEADERS, **self._headers()}
            raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, events: bytes) -> None:
        """Send events of the answer."""
        if events:
            self.wrote = True
            await self._put(events)

    async def end(self, events: bytes = b"") -> None:
        """Send the last events, and that they are the last."""
        if events:
            self.wrote = True
        await self._put(events, last=True)

    async def _put(self, events: bytes, *, last: bool = False) -> None:
        async with self._busy:
            await self.start()
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})
            self._quiet_since = self._loop.time()

    @asynccontextmanager
    async def kept_alive(self, event: Callable[[], bytes], pause_s: float) -> AsyncIterator[None]:
        """Send `event()` whenever nothing was sent for `pause_s`, as long as the context lasts."""
        self._remind(event, pause_s)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._reminding is not None and not self._reminding.done():
                self._reminding.cancel()
                await asyncio.gather(self._reminding, return_exceptions=True)

    def _remind(self, event: Callable[[], bytes], pause_s: float) -> None:
        """Look now and at the end of each pause. A method and not a function within `kept_alive`: one that names
        itself is a cycle, and would keep the whole answer until the collector comes by."""
        now = self._loop.time()
        if self._busy.locked():
            self._quiet_since = now  # the client is slow to read: it needs no reminder
        elif now >= self._quiet_since + pause_s:
            self._quiet_since = now
            self._reminding = asyncio.ensure_future(self._put(event()))
        self._timer = self._loop.call_at(self._quiet_since + pause_s, self._remind, event, pause_s)
