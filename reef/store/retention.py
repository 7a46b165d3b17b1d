"""How long words and tokens are kept: by age, by size, and which release folders.

Only what has come to its end is removed: a turn that waits (open, queued, judged) or is in a running step
keeps its words, however old or large the log is. Runs in the gateway for the log (which it alone writes)
and in the learner for releases. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Row, func, select, tuple_, update

from reef.releases.chain import Release, list_releases
from reef.releases.publish import KEEP_LOADED
from reef.sessions.fate import WAITING
from reef.store.forget import erase_in_log, scrub
from reef.store.log import LogReader
from reef.store.schema import claims, exchanges, releases, reports, steps, turns
from reef.store.transactions import writing
from reef.store.writer import LogWriter

log = logging.getLogger("reef.retention")
PASS = 500
"""exchanges looked at in one go"""


@dataclass(frozen=True, slots=True)
class Limits:
    """None keeps everything."""

    days: float | None = None
    bytes: int | None = None

    def __bool__(self) -> bool:
        return self.days is not None or self.bytes is not None


class Retention:
    """Empties the oldest finished exchanges of a log."""

    def __init__(self, log_engine: Engine, learn: Engine, writer: LogWriter, limits: Limits) -> None:
        self._log = log_engine
        self._learn = learn
        self._writer = writer
        self._limits = limits

    async def apply(self, now: float | None = None) -> int:
        """Remove what is beyond the limits; returns how many exchanges lost their words."""
        removed = 0
        at = time.time() if now is None else now
        if self._limits.days is not None:
            before = at - self._limits.days * 86400
            removed += await self._sweep("age", before, None)
            old = (reports.c.time < before) & reports.c.feedback.is_not(None)
            await self._writer.change(lambda c: c.execute(update(reports).where(old).values(feedback=None)).rowcount)
        if self._limits.bytes is not None:
            removed += await self._sweep("size", None, await asyncio.to_thread(self.size) - self._limits.bytes)
        if removed:
            await asyncio.to_thread(scrub, self._log)
            log.info("removed the words of %d exchanges", removed)
        return removed

    def size(self) -> int:
        """Bytes of the words and tokens that are kept, as JSON."""
        with self._log.connect() as c:
            return c.execute(select(func.sum(exchanges.c.size)).where(exchanges.c.erased.is_(None))).scalar() or 0

    async def _sweep(self, why: str, before: float | None, excess: int | None) -> int:
        """Oldest first, until nothing is older than `before` or `excess` bytes are gone."""
        after, removed = (0.0, 0), 0
        while excess is None or excess > 0:
            rows = await asyncio.to_thread(self._page, after, before)
            if not rows:
                break
            after = (rows[-1].time, rows[-1].seq)
            finished = await asyncio.to_thread(self._finished, [row.id for row in rows])
            ids = []
            for row in rows:
                if row.id in finished and (excess is None or excess > 0):
                    ids.append(row.id)
                    excess = None if excess is None else excess - row.size
            if ids:
                await self._writer.change(lambda c, ids=ids: erase_in_log(c, ids, why))
                removed += len(ids)
        return removed

    def _page(self, after: tuple[float, int], before: float | None) -> Sequence[Row[*tuple[Any, ...]]]:
        place = tuple_(exchanges.c.time, exchanges.c.seq)
        query = select(exchanges.c.seq, exchanges.c.time, exchanges.c.id, exchanges.c.size)
        query = query.where(exchanges.c.erased.is_(None), place > after)
        if before is not None:
            query = query.where(exchanges.c.time < before)
        with self._log.connect() as c:
            return c.execute(query.order_by(exchanges.c.time, exchanges.c.seq).limit(PASS)).all()

    def _finished(self, ids: list[str]) -> set[str]:
        with self._learn.connect() as c:
            ended = select(turns.c.id).where(turns.c.id.in_(ids), turns.c.fate.not_in([f.value for f in WAITING]))
            training = select(claims.c.turn).join(steps, steps.c.id == claims.c.step)
            busy = training.where(claims.c.turn.in_(ids), steps.c.status == "running")
            return set(c.execute(ended).scalars()) - set(c.execute(busy).scalars())


class Pruning:
    """Removes release folders beyond each scenario's newest `keep` that can be served, and as many that can't.

    Kept besides: what is served or not yet published, and the parents of running steps. The row stays,
    as `pruned`, so that it is still known what was learned from what.
    """

    def __init__(self, folder: Path, learn: Engine, log_reader: LogReader, keep: int) -> None:
        self._folder = folder
        self._learn = learn
        self._log = log_reader
        self._keep = max(keep, KEEP_LOADED + 1)  # those an engine may still hold

    def apply(self) -> list[str]:
        """Returns the names of the releases that were removed."""
        gone = []
        served = self._log.served()
        with self._learn.connect() as c:
            running = c.execute(select(steps.c.scenario, steps.c.parent).where(steps.c.status == "running"))
            parents = {(r.scenario, r.parent) for r in running}
            rows = c.execute(select(releases)).all()
        fresh = {(r.scenario, r.version) for r in rows if r.status == "released" and r.published is None}
        status = {(r.scenario, r.version): r.status for r in rows}
        for scenario in sorted({r.scenario for r in rows}):
            found = list_releases(self._folder, scenario)
            half = [r for r in found if status.get((scenario, r.version)) == "pruned"]  # killed before the folder went
            good = [r for r in found if r.servable and status.get((scenario, r.version)) != "rolled_back"]
            good, bad = [r for r in good if r not in half], [r for r in found if r not in good and r not in half]
            for release in sorted([*half, *good[: -self._keep], *bad[: -self._keep]], key=lambda r: r.version):
                name = (scenario, release.version)
                if name in parents | fresh or name not in status or served.get(scenario, 0) == release.version:
                    continue
                self._remove(release)
                gone.append(f"{scenario}@{release.version}")
        for leftover in self._folder.glob("*/.pruned-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if gone:
            log.info("pruned releases %s", ", ".join(gone))
        return gone

    def _remove(self, release: Release) -> None:
        with writing(self._learn) as c:
            mine = (releases.c.scenario == release.scenario) & (releases.c.version == release.version)
            c.execute(update(releases).where(mine).values(status="pruned"))
        doomed = release.folder.with_name(f".pruned-{release.folder.name}")
        release.folder.rename(doomed)  # at once, so that nobody loads half of it
        shutil.rmtree(doomed, ignore_errors=True)
