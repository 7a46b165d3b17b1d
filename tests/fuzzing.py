"""Fuzzing the gateway: many odd requests in flight at once, and what must be true of every answer.

Invariant checked: no 5xx, an answer within `LIMIT_S`, errors are JSON in the route's dialect, and each
request for which the engine was asked is exactly one record, under the receipt its client was given and with
the status it saw. Collects what is not so instead of stopping at it. Knows no way of making requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from reef.gateway.dialects import ROUTES
from tests.chopper import Chopper
from tests.fuzz_cases import Case, Mutator
from tests.scripted_engine import Pieces, Script, scripted_app
from tests.stack import Stack, stack

RECEIPT = "x-reef-agent-record-id"
NUMBER = "x-fuzz-number"
"""request header by which a record is told from the others"""
LIMIT_S = 30.0
REFUSED = 0.03
"""share of requests that the engine itself refuses"""
_CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}
_MORE = {"index": 0, "function": {"arguments": '{"at": "é"}'}}
REPLIES: tuple[Pieces, ...] = (
    [({"role": "assistant", "content": "f"}, "f"), ({"content": "ine"}, "ine")],
    [({"role": "assistant", "reasoning_content": "hm"}, "hm"), ({"content": "ü€😀"}, "ü€😀")],
    [({"role": "assistant", "tool_calls": [_CALL]}, "c"), ({"tool_calls": [_MORE]}, "all")],
    [({"role": "assistant", "content": ""}, "."), ({"content": "\x00\x1a\u2028"}, "abc")],
)


@dataclass
class Engine:
    """The scripted engine, cut and counted; refuses a few requests itself."""

    app: ASGIApp
    chance: random.Random
    asked: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("completions"):
            self.asked += 1
            if self.chance.random() < REFUSED:
                error = {"message": "not with this engine", "type": "BadRequestError", "param": None, "code": 400}
                await JSONResponse({"error": error}, 400)(scope, receive, send)
                return
        await self.app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Failure:
    """What was not as it must be, and the request that showed it."""

    why: str
    case: Case | None = None


@dataclass
class Fuzzing:
    """A gateway under fire, and what was seen of it."""

    reef: Stack
    engine: Engine
    mutator: Mutator
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(route, status) -> answers"""
    receipts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """receipt -> (request's number, status)"""
    failures: list[Failure] = field(default_factory=list)
    requests: int = 0
    slowest: tuple[float, Case | None] = (0.0, None)
    """seconds, and what took them"""
    unsendable: int = 0
    """cases that are no HTTP"""

    def send_all(self, cases: Iterable[Case], concurrent: int = 8) -> None:
        """Send every case, `concurrent` at a time."""
        asyncio.run(self._send_all(iter(cases), concurrent))

    async def _send_all(self, cases: Iterator[Case], concurrent: int) -> None:
        async def client(session: aiohttp.ClientSession) -> None:
            for case in cases:
                await self._send(session, case)

        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as session:
            await asyncio.gather(*(client(session) for _ in range(concurrent)))

    async def _send(self, session: aiohttp.ClientSession, case: Case) -> None:
        number = self.requests
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            headers = {**case.headers, NUMBER: str(number)}
            url = URL(self.reef.url + case.target, encoded=True)
            asked = session.request(case.method, url, data=case.body, headers=headers, allow_redirects=False)
        except (ValueError, UnicodeError):
            self.unsendable += 1
            return
        self.requests += 1
        try:
            async with asked as response:
                body = await response.read()
        except ValueError:  # aiohttp finds a header no HTTP
            self.unsendable += 1
            self.requests -= 1
            return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failures.append(Failure(f"no answer: {error!r}", case))
            return
        if (took := loop.time() - began) > self.slowest[0]:
            self.slowest = took, case
        self.statuses[case.route, response.status] += 1
        receipt = response.headers.get(RECEIPT)
        if receipt is not None:
            if receipt in self.receipts:
                self.failures.append(Failure(f"receipt {receipt} was given out twice", case))
            self.receipts[receipt] = (number, response.status)
            self.mutator.known.append(receipt)
        kind = response.headers.get("content-type", "")
        why = _wrong(case, response.status, kind, body, receipt)
        if why is not None:
            self.failures.append(Failure(f"{response.status}: {why}: {body[:300]!r}", case))

    def check_records(self) -> None:
        """Every exchange the engine was asked for is in the log once, as its client saw it."""
        recorded: Counter[str] = Counter()
        at = 0
        while rows := self.reef.log.tail(at, tokens=False):
            for exchange in rows:
                recorded[exchange.id] += 1
                number, status = self.receipts.get(exchange.id, (-1, 0))
                if number < 0:
                    self.failures.append(Failure(f"record {exchange.id} belongs to no answer"))
                elif (exchange.headers.get(NUMBER), exchange.status) != (str(number), status):
                    self.failures.append(Failure(f"record {exchange.id} is not of request {number}, {status}"))
            at = rows[-1].seq
        self.failures += [Failure(f"receipt {id} has no record") for id in self.receipts if not recorded[id]]
        if not len(self.receipts) == self.engine.asked == self.reef.log.count() == recorded.total():
            counts = f"{self.engine.asked} asked, {len(self.receipts)} receipts, {recorded.total()} records"
            self.failures.append(Failure(f"the engine's requests and the records differ: {counts}"))

    def check_learner(self) -> None:
        """The learner can read all of it, and what it decided adds up."""
        observer = self.reef.observer()
        while observer.step():
            pass
        funnel = self.reef.views.funnel()
        if not sum(funnel["fates"].values()) == funnel["exchanges"] == len(self.receipts):
            self.failures.append(Failure(f"the funnel does not add up: {funnel}"))


@contextmanager
def fuzzing(tmp: Path, start: int) -> Iterator[Fuzzing]:
    """A gateway on a real socket with a SQLite log; everything random follows from `start`."""
    chance = random.Random(start)
    engines: list[Engine] = []

    def engine(script: Script) -> ASGIApp:
        chopper = Chopper(
            scripted_app(script), lambda: ([chance.randrange(9000) for _ in range(chance.randrange(20))], 0)
        )
        engines.append(Engine(chopper, random.Random(start + 1)))
        return engines[0]

    with stack(tmp, engine=engine) as reef:
        reef.script.keep = 0
        reef.script.reply = lambda _body: chance.choice(REPLIES)
        yield Fuzzing(reef, engines[0], Mutator(random.Random(start + 2)))


def _wrong(case: Case, status: int, kind: str, body: bytes, receipt: str | None) -> str | None:
    """What is wrong with an answer, if anything."""
    dialect = ROUTES.get(case.target.partition("?")[0]) if case.method == "POST" else None
    if status >= 500:
        return "a server error"
    if status >= 400:
        if not kind.startswith("application/json"):
            return f"an error as {kind}"
        return _wrong_error(json.loads(body), case.target.startswith("/v1/messages"))
    if dialect is not None and receipt is None:
        return "an answer without a receipt"
    if kind.startswith("text/event-stream"):
        return _wrong_stream(case.target, body)
    json.loads(body)
    return None


def _wrong_error(told: Any, anthropic: bool) -> str | None:
    error = told.get("error") if isinstance(told, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error["message"]:
        return "an error that says nothing"
    if anthropic and told.get("type") != "error":
        return "an error in another dialect"
    return None


_ENDS = {
    "/v1/chat/completions": r"data: \[DONE\]\n\n$",
    "/v1/completions": r"data: \[DONE\]\n\n$",
    "/v1/messages": r'event: message_stop\ndata: \{"type":"message_stop"\}\n\n$',
    "/v1/responses": r"event: response\.(completed|incomplete)\ndata: [^\n]*\n\n$",
}


def _wrong_stream(target: str, body: bytes) -> str | None:
    text = body.decode()  # strict: half a character would fail here
    end = _ENDS[target.partition("?")[0]]
    return None if re.search(end, text) else "a stream that does not end as its dialect ends"
