"""From the log to bound turns: the first derived step.

Tails the log, lets the matcher decide, and commits decisions, the matcher's memory and the cursor
together. Invariant: after any crash the next run continues at the cursor and decides the same. A reaction
that may be a side branch waits until its conversation goes on from it, or for `tentative_s`. Knows no judge
and no trainer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection

from reef.config import SessionsConfig
from reef.recipe import NextState, Report, Verdict
from reef.sessions.fate import REOPENS, Fate, trainable
from reef.sessions.index import Index
from reef.sessions.matcher import Decision, Matcher, Revision
from reef.store.archive import MatchArchive
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.wire.exchange import Exchange

REBUILD = 50_000
"""exchanges before the cursor that are read again where the matcher's memory is empty"""
PRUNE_S = 3600.0
"""pause between two looks for what is older than the horizon"""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A reaction that may turn out to be a side branch."""

    turn: str
    state: NextState
    since: float


class Observer:
    def __init__(self, log: LogReader, learn: LearnStore, config: SessionsConfig, *, session_ttl_s: float) -> None:
        self._log = log
        self._learn = learn
        self._config = config
        self._ttl = session_ttl_s
        self._archive = MatchArchive(learn.engine)
        self._pruned = 0.0
        self._behind = False
        self._load()
        if self._cursor and self._archive.empty():
            self._rebuild()

    def step(self) -> int:
        """Process what is new; returns how many rows that was."""
        if self._failed:
            self._load()
        newest = self._log.newest_seq()  # before the read, so that steady traffic is no backlog
        rows = self._log.tail(self._cursor)
        if rows:
            try:
                self._take_all(rows)
            except BaseException:
                self._failed = True  # the memory has seen what was not committed
                raise
            self._cursor = rows[-1].seq
        self._behind = self._cursor < newest
        return len(rows) + self._take_reports()

    def expire(self, now: float | None = None) -> int:
        """End sessions nobody has continued for the TTL, and hand on reactions that have waited long enough.

        Both count from the records' own time, and wait while a backlog is read: what follows may be in it.
        """
        if self._failed:
            self._load()
        if self._behind:
            return 0
        now = time.time() if now is None else now
        due = [child for child, w in self._waiting.items() if w.since + self._config.tentative_s <= now]
        if due:
            with self._learn.begin() as c:
                for child in due:
                    self._hand_on(c, child, f"nothing else followed within {self._config.tentative_s:g} s", now)
            for child in due:
                del self._waiting[child]
        waited_for = {w.turn for w in self._waiting.values()}
        old = [row.id for row in self._learn.with_fate(Fate.OPEN, before=now - self._ttl) if row.id not in waited_for]
        if old:
            with self._learn.begin() as c:
                for turn in old:
                    self._learn.set_fate(c, turn, Fate.NO_NEXT_STATE, "ttl", f"nothing followed within {self._ttl:g} s")
        if now - self._pruned > PRUNE_S:
            self._pruned = now
            with self._learn.begin() as c:
                self._archive.prune(c, now - self._config.horizon_days * 86400)
        return len(old) + len(due)

    def forget(self, ids: Iterable[str]) -> None:
        """Drop exchanges whose words were erased from the matcher's memory, and reactions that would be handed on."""
        gone = set(ids)
        for id in gone:
            self._matcher.index.drop(id)
        self._waiting = {child: waiting for child, waiting in self._waiting.items() if not gone & {child, waiting.turn}}

    def _load(self) -> None:
        """Go on from what is committed, as at the start."""
        self._cursor = self._learn.cursor("exchanges")
        self._report_cursor = self._learn.cursor("reports")
        self._matcher = self._new_matcher()
        self._waiting = {
            row.child: _Waiting(row.turn, NextState(row.role, row.next_state), row.time)
            for row in self._learn.tentative()
        }
        self._failed = False

    def _new_matcher(self) -> Matcher:
        config = self._config
        return Matcher(
            Index(self._archive, capacity=config.memory),
            side_models=config.side_models,
            id_headers=config.id_headers,
            live_s=config.live_s,
        )

    def _rebuild(self) -> None:
        """Fill the matcher's memory from the log; what was decided stays decided."""
        at = max(0, self._cursor - REBUILD)
        while at < self._cursor:
            for exchange in self._log.tail(at, limit=min(256, self._cursor - at), tokens=False):
                self._matcher.observe(exchange)
                at = exchange.seq
            with self._learn.begin() as c:
                self._remember(c)

    def _take_all(self, rows: list[Exchange]) -> None:
        with self._learn.begin() as c:
            for exchange in rows:
                self._take(c, exchange, self._matcher.observe(exchange))
            self._remember(c)
            self._learn.advance(c, "exchanges", rows[-1].seq)

    def _remember(self, c: Connection) -> None:
        self._archive.save(c, list(self._matcher.index.touched.values()))
        self._matcher.index.touched.clear()

    def _take(self, c: Connection, exchange: Exchange, decision: Decision) -> None:
        version = exchange.sampled.version if exchange.sampled else None
        learn = self._learn
        learn.add_turn(c, decision, seq=exchange.seq, time=exchange.time, scenario=exchange.scenario, version=version)
        for revision in decision.revisions:
            self._revise(c, revision, decision, exchange.time)
        if decision.binds is None or decision.next_state is None or decision.repeats:
            return
        state = decision.next_state
        self._learn.bind(c, decision.binds, exchange.id, state.role, state.text, exchange.time, firm=decision.firm)
        if decision.firm:
            self._answered(c, decision.binds, decision.method, f"answered by {exchange.id}", exchange.time)
        else:
            self._waiting[exchange.id] = _Waiting(decision.binds, state, exchange.time)

    def _revise(self, c: Connection, revision: Revision, cause: Decision, at: float) -> None:
        learn = self._learn
        if revision.turn_type:
            learn.revise_turn(c, revision.id, turn_type=revision.turn_type)
        if revision.fate is not None and learn.fate_in(c, revision.id) in REOPENS | {Fate.SIDE_TASK}:
            learn.set_fate(c, revision.id, revision.fate, cause.method, revision.reason, at=at)
        if revision.rebound and revision.binds is None:
            if self._waiting.pop(revision.id, None):  # what the judge has been given stays
                learn.revise_turn(c, revision.id, binds=None)
        elif revision.rebound and revision.binds and revision.next_state:
            if learn.fate_in(c, revision.binds) in REOPENS:
                learn.revise_turn(c, revision.id, binds=revision.binds)
                learn.bind(c, revision.binds, revision.id, revision.next_state.role, revision.next_state.text, at)
                self._queue(c, revision.binds, "revised", revision.reason, at)
        elif revision.firm and revision.id in self._waiting:
            self._hand_on(c, revision.id, revision.reason, at)
            del self._waiting[revision.id]

    def _hand_on(self, c: Connection, child: str, reason: str, at: float) -> None:
        waiting = self._waiting[child]
        self._learn.bind(c, waiting.turn, child, waiting.state.role, waiting.state.text, at)
        self._answered(c, waiting.turn, "tentative", f"answered by {child}: {reason}", at)

    def _answered(self, c: Connection, turn: str, rule: str, reason: str, at: float) -> None:
        if self._learn.fate_in(c, turn) in REOPENS:
            self._queue(c, turn, rule, reason, at)

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
                    self._learn.add_report(c, receipt, Report(row.id, row.score, row.feedback), row.seq)
                    fate = self._learn.fate_in(c, receipt)
                    if fate is Fate.TRAINED:
                        self._correct(c, receipt, row.id, row.score)
                    elif fate is not Fate.OPTED_OUT:
                        self._queue(c, receipt, "report", f"explicit report {row.id}", time.time())
            self._learn.advance(c, "reports", rows[-1].seq)
        self._report_cursor = rows[-1].seq
        return len(rows)

    def _correct(self, c: Connection, turn: str, report: str, score: float | None) -> None:
        """A report on a trained turn: the verdict it changes is noted, training is not repeated."""
        value = ((score or 0.0) > 0) - ((score or 0.0) < 0)
        if self._learn.contradict(c, turn, value, f"report {report}"):
            self._learn.add_verdict(c, turn, None, turn, value, Verdict(value, None, confidence=1.0, judge="report"))
