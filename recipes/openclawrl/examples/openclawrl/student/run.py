"""A run: session after session, four side by side, and the untrained control beside it.

Invariant: sessions start in order and each finished one is one line of `sessions.jsonl`, written
and synced before the next event; a restarted run does the missing ones only. The control asks the
same problems with the same sampling seeds, first replies only, of a scenario that never learns.
This module knows the service as a base URL and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from reef.errors import ConfigError

from .problems import Problem, generated
from .session import Reply, Session, Settings, ask, hold, request_seed

CONTROL_HEADERS = {"x-reef-scenario": "control", "x-reef-train": "off"}
"""A scenario of its own, opted out: it answers with version 0 for good."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something a viewer may want to show."""

    kind: Literal["resumed", "started", "reply", "ended", "control"]
    """resumed: a session of an earlier start, told before anything else"""
    session: int
    """from 0"""
    turn: int = 0
    reply: Reply | None = None
    record: Session | None = None
    """the whole session, when it ended or was resumed"""


@dataclass(frozen=True, slots=True)
class Result:
    """All sessions of a run in their order, those of an earlier start included."""

    sessions: tuple[Session, ...]
    seed: int
    seconds: float
    """wall time of all starts of the run; of a killed one, up to its last finished session"""

    @property
    def passes(self) -> list[bool]:
        return [s.first_reply_passes for s in self.sessions]

    @property
    def failed_requests(self) -> int:
        return sum(s.failed_requests for s in self.sessions)

    @property
    def exchanges(self) -> int:
        return sum(s.exchanges for s in self.sessions)

    def labels(self) -> dict[str, bool]:
        """The rule's verdict by receipt: what a judge should have found. Kept by the student."""
        return {r.receipt: r.check.passes for s in self.sessions for r in s.replies if r.receipt}


@dataclass(frozen=True, slots=True)
class Control:
    """First replies of the untrained policy, in session order."""

    replies: tuple[Reply, ...]
    failed_requests: int
    seconds: float

    @property
    def passes(self) -> list[bool]:
        return [r.check.passes for r in self.replies]

    @property
    def pass_rate(self) -> float:
        return sum(self.passes) / len(self.replies) if self.replies else 0.0


async def no_wait(session: int) -> None:
    """The default `before_session`: learning is never waited for."""


def no_event(event: Event) -> None:
    """The default `on_event`: nobody watches."""


async def run_student(
    base_url: str,
    out: Path,
    sessions: int,
    seed: int,
    *,
    parallel: int = 4,
    on_event: Callable[[Event], None] = no_event,
    before_session: Callable[[int], Awaitable[None]] = no_wait,
    problem: Callable[[int], Problem] | None = None,
    settings: Settings | None = None,
    api_key: str = "student",
) -> Result:
    """Hold `sessions` sessions against `base_url` (ending in /v1) and keep them in `out/sessions.jsonl`.

    `before_session(k)` is awaited before session k (from 0) starts, when a place is free: the caller
    can let learning catch up there. `problem` maps a session index to its homework, by default
    `generated(seed, k)`. Raises ConfigError when `out` holds a run with another seed or settings.
    """
    settings, problem = settings or Settings(), problem or (lambda k: generated(seed, k))
    journal = Journal(out / "sessions.jsonl", {"seed": seed, **asdict(settings)})
    done = {row["index"]: Session.from_json(row) for row in journal.rows}
    places = asyncio.Semaphore(parallel)
    for k in sorted(done):
        on_event(Event("resumed", k, record=done[k]))

    running: set[asyncio.Task[None]] = set()
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def one(k: int) -> None:
            try:
                on_event(Event("started", k))
                record = await hold(
                    client,
                    settings,
                    problem(k),
                    seed,
                    k,
                    time.monotonic,
                    lambda turn, reply: on_event(Event("reply", k, turn, reply)),
                )
                journal.append(record.to_json())
                done[k] = record
                on_event(Event("ended", k, record=record))
            finally:
                places.release()

        try:
            for k in range(sessions):
                if k in done:
                    continue
                await places.acquire()
                for task in [t for t in running if t.done()]:
                    running.remove(task)
                    task.result()  # a full disk ends the run here, not after the last session
                await before_session(k)
                running.add(asyncio.create_task(one(k)))
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return Result(tuple(done[k] for k in sorted(done) if k < sessions), seed, journal.elapsed)


async def run_control(
    base_url: str,
    out: Path,
    n: int,
    seed: int,
    *,
    parallel: int = 12,
    on_event: Callable[[Event], None] = no_event,
    problem: Callable[[int], Problem] | None = None,
    settings: Settings | None = None,
    headers: Mapping[str, str] = CONTROL_HEADERS,
    api_key: str = "student",
) -> Control:
    """Ask for the first reply to problems 0..n-1 of the same stream, `parallel` at a time, untrained.

    Kept in `out/control.jsonl` and resumed like the run. Raises ConfigError as `run_student` does;
    a failed request leaves its reply out and is counted.
    """
    settings, problem = settings or Settings(), problem or (lambda k: generated(seed, k))
    journal = Journal(out / "control.jsonl", {"seed": seed, **asdict(settings)})
    done = {row["index"]: Session.from_json(row).replies[0] for row in journal.rows}
    places, failed = asyncio.Semaphore(parallel), 0

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, default_headers=headers) as client:

        async def one(k: int) -> None:
            nonlocal failed
            async with places:
                task = problem(k)
                sent: list[ChatCompletionMessageParam] = [{"role": "user", "content": task.text}]
                answer = await ask(client, settings, sent, request_seed(seed, k, 0), settings.max_tokens)
                if answer is None:
                    failed += 1
                    return
                reply = answer.judged(task, settings.strict)
                record = Session(k, task.name, task.text, (reply,), 1, 0, 0.0)
                journal.append(record.to_json())
                done[k] = reply
                on_event(Event("control", k, reply=reply))

        await asyncio.gather(*(one(k) for k in range(n) if k not in done))

    return Control(tuple(done[k] for k in sorted(done) if k < n), failed, journal.elapsed)


class Journal:
    """An append-only JSON-lines file whose first line says which run it belongs to.

    Each line carries the run's seconds so far, over all starts. A line cut off by a crash is dropped
    on opening. Raises ConfigError when the first line names another run.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) != len(whole):
            os.truncate(path, len(kept))
        lines: list[dict[str, Any]] = [json.loads(line) for line in kept.splitlines()]
        self.rows = lines[1:]
        self._earlier: float = lines[-1]["elapsed_s"] if lines else 0.0
        self._opened = time.monotonic()
        if not lines:
            self.append({"run": run})
        elif lines[0]["run"] != run:
            raise ConfigError(f"{path} belongs to another run ({lines[0]['run']}); choose another folder")

    @property
    def elapsed(self) -> float:
        """Seconds this run has taken so far, earlier starts included."""
        return self._earlier + time.monotonic() - self._opened

    def append(self, row: dict[str, Any]) -> None:
        """Add a line; it is on disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "elapsed_s": round(self.elapsed, 3)}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
