"""What a gateway does besides answering: keep the log within its limits, follow the others' switches,
read the memo it serves.

Owns the timers. Trouble is logged and tried again; it never touches a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy import Engine

from reef.gateway.memo import REFRESH_S, ServedMemo
from reef.releases.publish import Publisher
from reef.store.log import LogReader, LogWriter
from reef.store.pieces import LEFTOVER_S, remove_leftovers
from reef.store.retention import Retention

log = logging.getLogger("reef.upkeep")
FOLLOW_S = 0.5
SWEEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Upkeep:
    """The parts to keep up; None for what the configuration does not ask for."""

    publisher: Publisher
    reader: LogReader
    writer: LogWriter
    shared_log: bool
    """other gateways may write the log, and switch versions, too"""
    retention: Retention | None = None
    memo: ServedMemo | None = None

    async def run(self) -> None:
        """Until cancelled."""
        work = [_every(SWEEP_S, "removing unfinished records", self._tidy)]
        if self.shared_log:
            work.append(_every(FOLLOW_S, "following the served versions", self._follow))
        if self.retention is not None:
            work.append(_every(SWEEP_S, "keeping the log within its limits", self.retention.apply))
        if self.memo is not None:
            work.append(_every(REFRESH_S, "reading the memo", self.memo.refresh))
        await asyncio.gather(*work)

    async def _tidy(self) -> None:
        before = time.time() - LEFTOVER_S
        await self.writer.change(lambda c: remove_leftovers(c, before))

    async def _follow(self) -> None:
        await self.publisher.follow(lambda: asyncio.to_thread(self.reader.served))


async def _every(seconds: float, what: str, work: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed; it is tried again", what)
        await asyncio.sleep(seconds)


def shared(engine: Engine) -> bool:
    """Whether several gateways may share this log."""
    return engine.dialect.name == "postgresql"
