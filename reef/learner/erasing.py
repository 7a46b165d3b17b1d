"""Following the log's erasures: what was derived from an erased exchange loses its words and tokens too.

Invariant: the cursor commits with the rows that were emptied. Stored jobs of ended steps lose the samples
made of those turns; a step that still runs keeps its job, and is cleaned once it has ended. Knows no
reason for an erasure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sqlalchemy import Engine

from reef.store.files import write_json
from reef.store.forget import erase_in_learn, scrub, steps_of
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.train.jobs import ENDED

log = logging.getLogger("reef.erase")
CURSOR = "erasures"


class Erasing:
    def __init__(
        self,
        log_reader: LogReader,
        learn: LearnStore,
        engine: Engine,
        steps: Path,
        forget: Sequence[Callable[[Sequence[str]], None]] = (),
    ) -> None:
        """`forget`: what else has to drop what it remembers of turns."""
        self._log = log_reader
        self._learn = learn
        self._engine = engine
        self._forget = tuple(forget)
        self._ended = steps / ENDED
        self._cursor = learn.cursor(CURSOR)
        self._unclean: dict[str, set[str]] = {}
        self._scrub = self._cursor > 0
        for erasure in log_reader.erasures(0, limit=10**6) if self._cursor else ():
            self._remember(erasure.turns)

    def step(self) -> int:
        """Take in new erasures; returns how many there were."""
        rows = self._log.erasures(self._cursor)
        for row in rows:
            with self._learn.begin() as c:
                erase_in_learn(c, row.turns, row.why)
                self._learn.advance(c, CURSOR, row.seq)
            for drop in self._forget:
                drop(row.turns)
            self._cursor = row.seq
            self._remember(row.turns)
            self._scrub = True
        self._clean_jobs()
        if self._scrub:
            self._scrub = not scrub(self._engine)
        return len(rows)

    def _remember(self, turns: Iterable[str]) -> None:
        gone = set(turns)
        with self._engine.connect() as c:
            for step in steps_of(c, sorted(gone)):
                self._unclean.setdefault(step, set()).update(gone)

    def _clean_jobs(self) -> None:
        for step in list(self._unclean):
            file = self._ended / step / "job.json"
            if not file.exists():
                continue  # it still runs, or its folder is gone
            job = json.loads(file.read_text())
            kept = [s for s in job["samples"] if s["turn"] not in self._unclean[step]]
            if len(kept) < len(job["samples"]):
                write_json(file, {**job, "samples": kept})
                log.info("removed %d erased samples from step %s", len(job["samples"]) - len(kept), step)
            del self._unclean[step]
