"""A load generator on plain sockets: closed loop, open loop, one request. Loopback only.

Knows HTTP/1.1 answers just well enough to see where one ends, and costs about 60 microseconds a request,
so that the numbers are the gateway's. Bodies are bytes made once. An answer counts as good if its status
is 200 and it ended properly.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Samples:
    """What one measurement saw. Seconds."""

    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    """processor seconds of the process that answered, where the caller has measured them"""

    @property
    def rate(self) -> float:
        """Good answers a second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0


def quantile(values: Iterable[float], q: float) -> float:
    """The q-quantile, NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def chat_request(size: int, *, stream: bool) -> bytes:
    """The body of a chat request of `size` bytes: a conversation in messages of about a kilobyte, a hundred
    of them at most, that ends with the user's."""
    messages = [{"role": "user", "content": ""}]
    body = {"model": "canned", "stream": stream, "messages": messages}
    each = max(1000, size // 100)
    while len(messages) % 2 == 0 or len(messages) * each < size:
        messages.append({"role": "assistant" if len(messages) % 2 else "user", "content": ""})
    room = max(0, size - len(json.dumps(body)))
    for n, message in enumerate(messages):
        message["content"] = ("some words " * (room // len(messages) // 11 + 1))[: room // len(messages)]
        if n == 0:
            message["content"] += "x" * (room % len(messages))
    return json.dumps(body).encode()


def post(path: str, body: bytes) -> bytes:
    """The bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nx-reef-scenario: default\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    def __init__(self) -> None:
        self._done: asyncio.Future[bool] | None = None
        self.first = 0.0
        self.alive = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._end(False)

    def ask(self, request: bytes) -> asyncio.Future[bool]:
        """A future that says whether a good answer came."""
        self.first, self._head, self._left, self._tail = 0.0, b"", -1, b""
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if not self.first:
            self.first = time.perf_counter()
        if self._left == -1 and self._tail == b"":
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            self._good = head[9:12] == b"200"
            _, found, rest = head.partition(b"content-length:")
            self._left = int(rest.partition(b"\r\n")[0]) if found else -2
        if self._left == -2:
            self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
            if self._tail == LAST_CHUNK:
                self._end(self._good)
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._end(self._good)

    def _end(self, good: bool) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(good)


async def _connect(url: str) -> _Connection:
    parts = urlsplit(url)
    if parts.hostname != "127.0.0.1" or parts.port is None:
        raise ValueError(f"load is for loopback only, not for {url}")
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, parts.hostname, parts.port)
    return connection


async def one(url: str, request: bytes) -> float:
    """Seconds of one request on a connection of its own. Raises ConnectionError on a bad answer."""
    connection = await _connect(url)
    began = time.perf_counter()
    good = await connection.ask(request)
    connection.transport.close()
    if not good:
        raise ConnectionError(f"{url} gave no good answer")
    return time.perf_counter() - began


async def closed_loop(
    url: str, request: bytes, concurrent: int, seconds: float, *, count: int | None = None
) -> Samples:
    """`concurrent` clients, each asking again as soon as it is answered, for `seconds` or `count` requests."""
    samples = Samples()
    began = time.perf_counter()
    left = [count if count is not None else 2**62]

    async def client() -> None:
        connection: _Connection | None = None
        while left[0] > 0 and (start := time.perf_counter()) < began + seconds:
            left[0] -= 1
            try:
                if connection is None or not connection.alive:
                    connection = await _connect(url)
            except OSError:
                samples.failed += 1
                await asyncio.sleep(0.1)
                continue
            if await connection.ask(request):
                samples.latencies.append(time.perf_counter() - start)
                samples.first_bytes.append(connection.first - start)
            else:
                samples.failed += 1
        if connection is not None:
            connection.transport.close()

    await asyncio.gather(*(client() for _ in range(concurrent)))
    samples.seconds = time.perf_counter() - began
    return samples


@dataclass(slots=True)
class Timed:
    """An open loop's answers: (when it was due since the start, latency from then), in order of answering."""

    answers: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0

    @property
    def latencies(self) -> list[float]:
        return [latency for _, latency in self.answers]


async def open_loop(url: str, request: bytes, rate: float, seconds: float) -> Timed:
    """`rate` requests a second, due at fixed times whether or not earlier ones are answered; latency counts
    from when a request was due, so that a stall shows in every request it held up."""
    timed = Timed()
    idle: list[_Connection] = [await _connect(url) for _ in range(8)]
    began = time.perf_counter() + 0.05
    running: set[asyncio.Task[None]] = set()

    async def ask(due: float) -> None:
        connection = idle.pop() if idle else await _connect(url)
        if not connection.alive:
            connection = await _connect(url)
        if await connection.ask(request):
            timed.answers.append((due - began, time.perf_counter() - due))
            idle.append(connection)
        else:
            timed.failed += 1

    for n in range(int(rate * seconds)):
        due = began + n / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.ensure_future(ask(due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    for connection in idle:
        connection.transport.close()
    return timed
