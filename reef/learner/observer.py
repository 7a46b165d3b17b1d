"""From the log to bound turns: the first derived step.

Tails the log, lets the matcher decide, and commits decisions together with the cursor. Invariant: after
any crash the next run continues at the cursor and decides the same. Knows no judge and no trainer.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection

from reef.recipe import Report
from reef.sessions.fate import REOPENS, Fate, trainable
from reef.sessions.matcher import Decision, Matcher
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.wire.exchange import Exchange

HORIZON = 50_000
"""exchanges before the cursor that the matcher reads again at start"""


class Observer:
    def __init__(self, log: LogReader, learn: LearnStore, matcher: Matcher, *, session_ttl_s: float) -> None:
        self._log = log
        self._learn = learn
        self._matcher = matcher
        self._ttl = session_ttl_s
        self._cursor = learn.cursor("exchanges")
        self._report_cursor = learn.cursor("reports")
        self._restore()

    def _restore(self) -> None:
        at = max(0, self._cursor - HORIZON)
        while at < self._cursor:
            for exchange in self._log.tail(at, limit=min(256, self._cursor - at)):
                self._matcher.observe(exchange)
                at = exchange.seq

    def step(self) -> int:
        """Process what is new; returns how many rows that was."""
        rows = self._log.tail(self._cursor)
        if rows:
            with self._learn.begin() as c:
                for exchange in rows:
                    self._take(c, exchange, self._matcher.observe(exchange))
                self._learn.advance(c, "exchanges", rows[-1].seq)
            self._cursor = rows[-1].seq
        return len(rows) + self._take_reports()

    def expire(self, now: float | None = None) -> int:
        """End sessions nobody has continued for the TTL, counted from their records' own time."""
        limit = (time.time() if now is None else now) - self._ttl
        old = [row.id for row in self._learn.with_fate(Fate.OPEN) if row.time < limit]
        if old:
            with self._learn.begin() as c:
                for turn in old:
                    self._learn.set_fate(c, turn, Fate.NO_NEXT_STATE, "ttl", f"nothing followed within {self._ttl:g} s")
        return len(old)

    def _take(self, c: Connection, exchange: Exchange, decision: Decision) -> None:
        version = exchange.sampled.version if exchange.sampled else None
        learn = self._learn
        learn.add_turn(c, decision, seq=exchange.seq, time=exchange.time, scenario=exchange.scenario, version=version)
        for replaced in decision.replaced:
            if learn.fate_in(c, replaced.id) in REOPENS:
                learn.set_fate(c, replaced.id, replaced.fate, decision.method, replaced.reason, at=exchange.time)
        if decision.binds is None or decision.next_state is None:
            return
        state = decision.next_state
        learn.bind(c, decision.binds, exchange.id, state.role, state.text, exchange.time)
        if learn.fate_in(c, decision.binds) in REOPENS:
            self._queue(c, decision.binds, decision.method, f"answered by {exchange.id}", exchange.time)

    def _queue(self, c: Connection, turn: str, rule: str, reason: str, at: float) -> None:
        exchange = self._log.get(turn)
        problem = trainable(exchange) if exchange else (Fate.UPSTREAM_ERROR, "its record is gone")
        if problem is not None:
            self._learn.set_fate(c, turn, problem[0], "trainable", problem[1], at=at)
        else:
            self._learn.set_fate(c, turn, Fate.QUEUED, rule, reason, at=at)

    def _take_reports(self) -> int:
        rows = self._log.reports(self._report_cursor)
        if not rows:
            return 0
        with self._learn.begin() as c:
            for row in rows:
                for receipt in dict.fromkeys(row.references):
                    if self._learn.fate_in(c, receipt) is None:
                        continue  # a receipt nobody has: the report is kept in the log
                    self._learn.add_report(c, receipt, Report(row.id, row.score, row.feedback))
                    if self._learn.fate_in(c, receipt) is not Fate.OPTED_OUT:
                        self._queue(c, receipt, "report", f"explicit report {row.id}", time.time())
            self._learn.advance(c, "reports", rows[-1].seq)
        self._report_cursor = rows[-1].seq
        return len(rows)
