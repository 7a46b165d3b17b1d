"""The learner: log -> bindings -> verdicts -> steps -> releases, one process, one loop.

Each part keeps a durable state of its own, so the order here only decides how soon things happen, and
the process may die anywhere. Knows the gateway as one URL that switches versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

import httpx

from reef.learner.canary import Canaries
from reef.learner.erasing import Erasing
from reef.learner.judging import Judging
from reef.learner.observer import Observer
from reef.learner.steps import Steps
from reef.store.learn import LearnStore
from reef.store.lock import Held
from reef.store.log import LogReader
from reef.store.retention import Pruning

PRUNE_EVERY_S = 600.0
PUBLISH_PAUSE_S = 2.0
log = logging.getLogger("reef.learner")


@dataclass(frozen=True, slots=True)
class GatewayAdmin:
    """Where and as whom versions are switched."""

    url: str
    key: str | None = None


class Learner:
    def __init__(
        self,
        log_reader: LogReader,
        learn: LearnStore,
        observer: Observer,
        judging: Judging,
        steps: Steps | None,
        gateway: GatewayAdmin | None,
        canaries: Canaries | None = None,
        *,
        erasing: Erasing | None = None,
        pruning: Pruning | None = None,
        lock: Held | None = None,
    ) -> None:
        self._log = log_reader
        self._learn = learn
        self._observer = observer
        self._judging = judging
        self._steps = steps
        self._gateway = gateway
        self._erasing = erasing
        self._pruning = pruning
        self._lock = lock
        self._canaries = canaries
        self._publish_after: dict[str, float] = {}
        """when a scenario whose release could not be served is tried again"""
        self._prune_after = 0.0
        self._judged = 0

    async def run(self, stop: asyncio.Event, *, tick_s: float = 0.2) -> None:
        """Work until `stop` is set. Trouble in one part is logged and tried again; the others go on."""
        headers = {"x-reef-by": "learner"}
        if self._gateway and self._gateway.key:
            headers["authorization"] = f"Bearer {self._gateway.key}"
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            while not stop.is_set():
                busy = 0
                parts = (
                    self._observe,
                    self._erase,
                    self._judge,
                    self._train,
                    lambda: self._publish(http),
                    lambda: self._watch(http),
                )
                for part in parts:
                    try:
                        busy += await part()
                    except Exception:
                        log.exception("%s failed; it is tried again", getattr(part, "__name__", "publishing"))
                        await asyncio.sleep(1.0)
                if not busy:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), tick_s)
        await self._judging.close()
        if self._lock is not None:
            self._lock.close()

    async def _observe(self) -> int:
        rows = await asyncio.to_thread(self._observer.step)
        await asyncio.to_thread(self._observer.expire)
        return rows

    async def _erase(self) -> int:
        rows = await asyncio.to_thread(self._erasing.step) if self._erasing else 0
        if self._pruning is not None and time.monotonic() >= self._prune_after:
            self._prune_after = time.monotonic() + PRUNE_EVERY_S
            await asyncio.to_thread(self._pruning.apply)
        return rows

    async def _judge(self) -> int:
        before, self._judged = self._judged, self._judging.verdicts
        self._judging.step()
        return self._judged - before

    async def _train(self) -> int:
        if self._steps is None:
            return 0
        ended = await asyncio.to_thread(self._steps.collect)
        return ended + len(await asyncio.to_thread(self._steps.form))

    async def _watch(self, http: httpx.AsyncClient) -> int:
        return await self._canaries.step(http) if self._canaries else 0

    async def _publish(self, http: httpx.AsyncClient) -> int:
        """Have the gateway serve new releases, unless an operator has chosen another version since. One that
        it refuses keeps its scenario waiting, and no other."""
        if self._gateway is None:
            return 0
        now = time.monotonic()  # one for all, so that a scenario's later release never overtakes its earlier one
        served = self._log.served()
        done = 0
        for row in self._learn.steps.unpublished():
            if now < self._publish_after.get(row.scenario, 0.0):
                continue
            if served.get(row.scenario, 0) == row.version:
                with self._learn.begin() as c:
                    self._learn.steps.published(c, row.scenario, row.version)
                continue
            if served.get(row.scenario, 0) != row.parent:
                with self._learn.begin() as c:
                    self._learn.steps.hold(c, row.scenario, row.version)
                log.warning("version %d of %s is held: another version was chosen", row.version, row.scenario)
                continue
            url = f"{self._gateway.url}/reef/releases/{row.version}/serve"
            try:
                response = await http.post(url, headers={"x-reef-scenario": row.scenario})
                response.raise_for_status()
            except httpx.HTTPError as error:
                log.warning("version %d of %s is not served yet: %s", row.version, row.scenario, error)
                self._publish_after[row.scenario] = time.monotonic() + PUBLISH_PAUSE_S
                if isinstance(error, httpx.HTTPStatusError):
                    continue
                return done  # no answer at all: the others would wait for it as long
            with self._learn.begin() as c:
                self._learn.steps.published(c, row.scenario, row.version)
            self._publish_after.pop(row.scenario, None)
            served[row.scenario] = row.version
            done += 1
        return done
