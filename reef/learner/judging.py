"""Asking the recipe what each reaction says, and storing its verdicts.

Invariant: a turn is judged once per reaction; trouble with the judge leaves it queued, to be asked again
with growing pauses, and never makes it neutral. A verdict is stored only while its turn still waits for
it, by the reaction it was given for. While the judge answers nobody, one turn at a time asks whether it is
back; then all that waited are asked at once. Knows no weights.
"""

from __future__ import annotations

import asyncio
import logging
import time

from sqlalchemy import Connection

from reef.errors import JudgeError
from reef.learner.turns import Turns, charged_turns
from reef.recipe import Recipe, Remembers, Turn, Verdict
from reef.sessions.fate import Fate
from reef.store.learn import LearnStore

log = logging.getLogger("reef.judge")
PAUSE_S = (1.0, 2.0, 5.0, 15.0, 60.0)
OUTAGE = 8
"""failures in a row after which the judge counts as down"""
OUTAGE_PAUSE_S = 5.0
CHARGEABLE = frozenset(
    {Fate.OPEN, Fate.QUEUED, Fate.JUDGED, Fate.NEUTRAL, Fate.NO_NEXT_STATE, Fate.STALE, Fate.GATE_REJECTED}
)
"""fates of a turn that a verdict on a later reaction may charge; an opted-out text is never trained"""


class Judging:
    def __init__(self, learn: LearnStore, turns: Turns, recipe: Recipe, *, concurrency: int) -> None:
        self._learn = learn
        self._turns = turns
        self._recipe = recipe
        self._concurrency = concurrency
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._in_a_row = 0
        self._ask_again = 0.0
        self.verdicts = 0
        """turns judged since the start"""

    def step(self) -> int:
        """Start judging what waits, as far as the concurrency allows; returns how many run."""
        now = time.monotonic()
        down = self._in_a_row >= OUTAGE
        if down and now < self._ask_again:
            return len(self._running)
        rows = self._learn.waiting(Fate.QUEUED)
        if down:  # not always the same one, which may be what the judge can't answer
            rows.sort(key=lambda row: self._failures.get(row.id, 0))
        for row in rows:
            if len(self._running) >= (1 if down else self._concurrency):
                break
            if row.id in self._running or (self._not_before.get(row.id, 0.0) > now and not down):
                continue
            self._running[row.id] = asyncio.create_task(self._judge(row.id))
        return len(self._running)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _judge(self, id: str) -> None:
        try:
            binding = await asyncio.to_thread(self._learn.binding, id)  # before the turn: see `_store`
            turn = await asyncio.to_thread(self._turns.build, id)
            if turn is None:
                with self._learn.begin() as c:
                    self._learn.set_fate(c, id, Fate.MISSING_LOGPROBS, "record", "its record is gone")
                return
            started = time.monotonic()
            verdict = await self._recipe.judge(turn)
            source = binding.seq if binding else None
            await asyncio.to_thread(self._store, turn, source, verdict, time.monotonic() - started)
            self._answered(id)
        except JudgeError as error:
            self._postpone(id, str(error))
        except Exception as error:  # a broken recipe must not end the learner; the turn says why it waits
            log.exception("judging %s failed", id)
            self._postpone(id, f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(id, None)

    def _answered(self, id: str) -> None:
        if self._in_a_row >= OUTAGE:
            log.warning("the judge answers again; what waited for it is asked now")
            self._not_before.clear()
        self._in_a_row = 0
        self.verdicts += 1
        self._failures.pop(id, None)
        self._not_before.pop(id, None)

    def _postpone(self, id: str, reason: str) -> None:
        self._in_a_row += 1
        self._ask_again = time.monotonic() + OUTAGE_PAUSE_S
        if self._in_a_row == OUTAGE:
            log.error("the judge has failed %d times in a row, last: %s", OUTAGE, reason)
        failures = self._failures.get(id, 0)
        self._failures[id] = failures + 1
        self._not_before[id] = time.monotonic() + PAUSE_S[min(failures, len(PAUSE_S) - 1)]
        if failures == 0:
            log.warning("the judge gave no verdict on %s: %s", id, reason)
            with self._learn.begin() as c:
                self._learn.set_fate(c, id, Fate.QUEUED, "judge_retry", reason)

    def _store(self, turn: Turn, source: int | None, verdict: Verdict | None, seconds: float) -> None:
        learn = self._learn
        with learn.begin() as c:
            if learn.fate_in(c, turn.id) is not Fate.QUEUED or learn.binding_in(c, turn.id) != source:
                return  # judged by another task, forgotten, or bound to another reaction meanwhile
            if verdict is None:
                learn.set_fate(c, turn.id, Fate.NEUTRAL, "recipe", "the recipe has nothing to say about it")
                return
            said = [(id, value) for id, value in charged_turns(turn, verdict) if value]
            for id, value in said:
                if learn.contradict(c, id, value, verdict.judge):
                    learn.add_verdict(c, turn.id, source, id, value, verdict)
            charges = [(i, v) for i, v in said if i == turn.id or learn.fate_in(c, i) in CHARGEABLE]
            if not charges:
                learn.add_verdict(c, turn.id, source, None, 0, verdict)
                learn.set_fate(c, turn.id, Fate.NEUTRAL, "judge", _why_neutral(verdict))
                return
            for id, value in charges:
                learn.add_verdict(c, turn.id, source, id, value, verdict)
                word = "accepted" if value > 0 else "rejected"
                learn.set_fate(c, id, Fate.JUDGED, "judge", f"{word} by {verdict.judge} in {seconds:.1f} s")
            if turn.id not in dict(charges):
                learn.set_fate(c, turn.id, Fate.NEUTRAL, "judge", "the reaction is about an earlier reply")
            self._remember(c, turn, verdict)

    def _remember(self, c: Connection, turn: Turn, verdict: Verdict) -> None:
        """Let a recipe that keeps a memo add to it what the verdict says."""
        if not isinstance(self._recipe, Remembers):
            return
        rules = self._learn.memo.of(turn.scenario)
        kept = tuple(self._recipe.remember(rules, turn, verdict))
        if kept != rules:
            self._learn.memo.set(c, turn.scenario, kept, f"displaced by the verdict on {turn.id}")


def _why_neutral(verdict: Verdict) -> str:
    if not verdict.verdict:
        return "neither accepted nor rejected"
    if not verdict.charges:
        how = "" if verdict.confidence is None else f", {verdict.confidence:.0%}"
        return f"{verdict.judge} is too unsure to charge anybody ({verdict.verdict:+d}{how})"
    return "the reaction is about a reply that is not trained here"
