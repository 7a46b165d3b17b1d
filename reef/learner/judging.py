"""Asking the recipe what each reaction says, and storing its verdicts.

Invariant: a turn is judged once per reaction; trouble with the judge leaves it queued, to be asked again
with growing pauses, and never makes it neutral. Knows no weights.
"""

from __future__ import annotations

import asyncio
import logging
import time

from reef.errors import JudgeError
from reef.learner.turns import Turns, charged_turns
from reef.recipe import Recipe, Turn, Verdict
from reef.sessions.fate import Fate
from reef.store.learn import LearnStore

log = logging.getLogger("reef.judge")
PAUSE_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class Judging:
    def __init__(self, learn: LearnStore, turns: Turns, recipe: Recipe, *, concurrency: int) -> None:
        self._learn = learn
        self._turns = turns
        self._recipe = recipe
        self._concurrency = concurrency
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}

    def step(self) -> int:
        """Start judging what waits, as far as the concurrency allows; returns how many run."""
        now = time.monotonic()
        for row in self._learn.with_fate(Fate.QUEUED):
            if len(self._running) >= self._concurrency:
                break
            if row.id in self._running or self._not_before.get(row.id, 0.0) > now:
                continue
            self._running[row.id] = asyncio.create_task(self._judge(row.id))
        return len(self._running)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _judge(self, id: str) -> None:
        try:
            turn = await asyncio.to_thread(self._turns.build, id)
            if turn is None:
                return
            started = time.monotonic()
            verdict = await self._recipe.judge(turn)
            await asyncio.to_thread(self._store, turn, verdict, time.monotonic() - started)
            self._failures.pop(id, None)
            self._not_before.pop(id, None)
        except JudgeError as error:
            self._postpone(id, str(error))
        except Exception as error:  # a broken recipe must not end the learner; the turn says why it waits
            log.exception("judging %s failed", id)
            self._postpone(id, f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(id, None)

    def _postpone(self, id: str, reason: str) -> None:
        failures = self._failures.get(id, 0)
        self._failures[id] = failures + 1
        self._not_before[id] = time.monotonic() + PAUSE_S[min(failures, len(PAUSE_S) - 1)]
        if failures == 0:
            log.warning("the judge gave no verdict on %s: %s", id, reason)
            with self._learn.begin() as c:
                self._learn.set_fate(c, id, Fate.QUEUED, "judge_retry", reason)

    def _store(self, turn: Turn, verdict: Verdict | None, seconds: float) -> None:
        binding = self._learn.binding(turn.id)
        with self._learn.begin() as c:
            if verdict is None:
                self._learn.set_fate(c, turn.id, Fate.NEUTRAL, "recipe", "the recipe has nothing to say about it")
                return
            charges = [(id, value) for id, value in charged_turns(turn, verdict) if value]
            source = binding.seq if binding else None
            if not charges:
                self._learn.add_verdict(c, turn.id, source, None, 0, verdict)
                self._learn.set_fate(c, turn.id, Fate.NEUTRAL, "judge", "neither accepted nor rejected")
                return
            for id, value in charges:
                self._learn.add_verdict(c, turn.id, source, id, value, verdict)
                word = "accepted" if value > 0 else "rejected"
                self._learn.set_fate(c, id, Fate.JUDGED, "judge", f"{word} by {verdict.judge} in {seconds:.1f} s")
            if turn.id not in dict(charges):
                self._learn.set_fate(c, turn.id, Fate.NEUTRAL, "judge", "the reaction is about an earlier reply")
