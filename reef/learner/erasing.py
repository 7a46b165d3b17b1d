"""Following the log's erasures: what was derived from an erased exchange loses its words and tokens too.

Invariant: the cursor commits with the rows that were emptied. A stored job names the receipts its words come
from; once its step has ended it loses all its samples if one of them is erased. A step that still runs keeps
its job. Knows no reason for an erasure.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Engine

from reef.store.files import write_json
from reef.store.forget import erase_in_learn, scrub
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
        """`forget`: what else has to drop what it remembers of turns; it may be asked more than once."""
        self._log = log_reader
        self._learn = learn
        self._engine = engine
        self._forget = tuple(forget)
        self._ended = steps / ENDED
        self._cursor = learn.cursor(CURSOR)
        self._scrub = self._cursor > 0
        self._sources: dict[str, frozenset[str] | None] = {}
        """of ended steps' jobs that hold words; None where the job doesn't say"""
        self._later: set[str] = set()
        """steps whose jobs are read once they have ended"""
        self._unread = True

    def step(self) -> int:
        """Take in new erasures; returns how many there were."""
        rows = self._log.erasures(self._cursor)
        for row in rows:  # the cursor moves on last, so that a crash in between does all of it again
            self._read_ended()
            self._clean_jobs(set(row.turns))
            for drop in self._forget:
                drop(row.turns)
            with self._learn.begin() as c:
                erase_in_learn(c, row.turns, row.why)
                self._learn.advance(c, CURSOR, row.seq)
            self._cursor = row.seq
            self._scrub = True
        if self._unread or any((self._ended / step).exists() for step in self._later):
            self._read_ended()
        if self._scrub:
            self._scrub = not scrub(self._engine)
        return len(rows)

    def _read_ended(self) -> None:
        """Take in jobs of steps that have ended, without the words that were erased while they ran."""
        self._unread = True
        self._later |= {step.id for step in self._learn.steps.running()}
        for file in self._ended.glob("*/job.json"):
            step = file.parent.name
            self._later.discard(step)
            if step in self._sources:
                continue
            try:
                job = json.loads(file.read_text())
                named, words = job.get("sources"), bool(job["samples"] or job.get("held_out"))
            except (OSError, ValueError, KeyError) as error:  # no reason to follow no erasure at all
                log.warning("%s can't be read, so it keeps what it holds: %r", file, error)
                named, words = [], False
            if words and (self._log.erased(named) if named is not None else self._cursor):
                self._clean(step)
            else:
                self._sources[step] = None if named is None and words else frozenset(named or ())
        self._unread = False

    def _clean_jobs(self, gone: set[str]) -> None:
        for step, named in list(self._sources.items()):
            if named is None or named & gone:
                self._clean(step)

    def _clean(self, step: str) -> None:
        """All of a job's samples go: those of other turns may quote the erased one."""
        file = self._ended / step / "job.json"
        if file.exists():
            write_json(file, {**json.loads(file.read_text()), "samples": [], "held_out": []})
            log.info("removed the samples of step %s: words in them were erased", step)
        self._sources[step] = frozenset()
