"""Following the log's erasures: what was derived from an erased exchange loses its words and tokens too.

Invariant: the cursor commits with the rows that were emptied. Stored jobs of ended steps lose the samples
made of those turns; a step that still runs keeps its job, and is cleaned once it has ended. Knows no
reason for an erasure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
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
        self._scrub = self._cursor > 0
        self._later: dict[str, set[str]] = {}
        for step in learn.steps.running():
            self._later[step.id] = {turn for turn in step.turns if self._is_erased(turn)}

    def step(self) -> int:
        """Take in new erasures; returns how many there were."""
        rows = self._log.erasures(self._cursor)
        for row in rows:
            self._clean_jobs(row.turns)
            with self._learn.begin() as c:
                erase_in_learn(c, row.turns, row.why)
                self._learn.advance(c, CURSOR, row.seq)
            for drop in self._forget:
                drop(row.turns)
            self._cursor = row.seq
            self._scrub = True
        for step in [s for s in self._later if (self._ended / s).exists()]:
            self._clean(step, self._later.pop(step))
        if self._scrub:
            self._scrub = not scrub(self._engine)
        return len(rows)

    def _is_erased(self, turn: str) -> bool:
        exchange = self._log.get(turn)
        return exchange is None or not exchange.request

    def _clean_jobs(self, turns: Sequence[str]) -> None:
        """Before the cursor moves on, so that a crash in between cleans them again."""
        with self._engine.connect() as c:
            steps = steps_of(c, turns)
        for step in steps:
            if not self._clean(step, set(turns)):
                self._later.setdefault(step, set()).update(turns)

    def _clean(self, step: str, gone: set[str]) -> bool:
        """Whether the step has ended, so that its job could be cleaned."""
        file = self._ended / step / "job.json"
        if not file.exists():
            return False
        job = json.loads(file.read_text())
        kept = [s for s in job["samples"] if s["turn"] not in gone]
        if len(kept) < len(job["samples"]):
            write_json(file, {**job, "samples": kept})
            log.info("removed %d erased samples from step %s", len(job["samples"]) - len(kept), step)
        return True
