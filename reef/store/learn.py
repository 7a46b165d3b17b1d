"""The learn database: sessions, bindings, verdicts, steps, releases and the history of every fate.

Written by the learner only. Invariant: the cursor into the log commits together with the rows derived
from it; a turn's fate is the newest row of its history, and `trained` is final; a turn is claimed by one
step at most. Methods that write take the connection of a transaction that the caller opens with `begin`,
so that what belongs together commits together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Engine, Row, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from reef.recipe import Report, Verdict
from reef.sessions.fate import Fate
from reef.sessions.matcher import Decision
from reef.store.columns import key
from reef.store.memo import MemoStore
from reef.store.schema import (
    bindings,
    cursors,
    fates,
    turn_reports,
    turns,
    verdicts,
)
from reef.store.steps import StepStore
from reef.store.transactions import writing


class LearnStore:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps = StepStore(engine)
        self.memo = MemoStore(engine)
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        return self._engine

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction. One at a time, so that a fate read in it is still the fate when it writes."""
        with self._lock, writing(self._engine) as connection:
            yield connection

    # reading

    def cursor(self, name: str) -> int:
        with self._engine.connect() as c:
            return c.execute(select(cursors.c.seq).where(cursors.c.name == name)).scalar() or 0

    def fate(self, turn: str) -> Fate | None:
        with self._engine.connect() as c:
            value = c.execute(select(turns.c.fate).where(turns.c.id == turn)).scalar()
        return Fate(value) if value else None

    def fate_in(self, c: Connection, turn: str) -> Fate | None:
        """The fate as the open transaction sees it."""
        value = c.execute(select(turns.c.fate).where(turns.c.id == turn)).scalar()
        return Fate(value) if value else None

    def reports_on(self, turn: str) -> tuple[Report, ...]:
        with self._engine.connect() as c:
            query = select(turn_reports).where(turn_reports.c.turn == turn)
            rows = c.execute(query.order_by(turn_reports.c.seq, turn_reports.c.report))
            return tuple(Report(r.report, r.score, r.feedback) for r in rows)

    def with_fate(self, fate: Fate, limit: int = 1000, *, before: float | None = None) -> list[Row[Any]]:
        """Turns of a fate, in log order; only those whose record is older than `before`."""
        query = select(turns).where(turns.c.fate == fate.value)
        if before is not None:
            query = query.where(turns.c.time < before)
        with self._engine.connect() as c:
            return list(c.execute(query.order_by(turns.c.seq).limit(limit)))

    def scenarios_with(self, fate: Fate) -> list[str]:
        """Scenarios that have a turn of this fate, by name."""
        with self._engine.connect() as c:
            query = select(turns.c.scenario).where(turns.c.fate == fate.value).distinct()
            return sorted(c.execute(query).scalars())

    def oldest_with(self, fate: Fate, scenario: str, limit: int) -> list[Row[Any]]:
        """A scenario's oldest turns of a fate, in log order."""
        with self._engine.connect() as c:
            here = (turns.c.fate == fate.value) & (turns.c.scenario == scenario)
            return list(c.execute(select(turns).where(here).order_by(turns.c.seq).limit(limit)))

    def waiting(self, fate: Fate, limit: int = 1000) -> list[Row[*tuple[Any, ...]]]:
        """(id, scenario) of turns of a fate, in log order."""
        query = select(turns.c.id, turns.c.scenario).where(turns.c.fate == fate.value)
        with self._engine.connect() as c:
            return list(c.execute(query.order_by(turns.c.seq).limit(limit)))

    def turn(self, id: str) -> Row[Any] | None:
        with self._engine.connect() as c:
            return c.execute(select(turns).where(turns.c.id == id)).first()

    def binding_in(self, c: Connection, turn: str) -> int | None:
        """The number of a turn's newest binding that no longer waits, as the open transaction sees it."""
        here = (bindings.c.turn == turn) & bindings.c.firm.is_(True)
        return c.execute(select(func.max(bindings.c.seq)).where(here)).scalar()

    def binding(self, turn: str) -> Row[Any] | None:
        """The newest binding of a turn that no longer waits."""
        with self._engine.connect() as c:
            query = (
                select(bindings)
                .where(bindings.c.turn == turn, bindings.c.firm.is_(True))
                .order_by(bindings.c.seq.desc())
                .limit(1)
            )
            return c.execute(query).first()

    def verdict_on(self, turn: str) -> Row[Any] | None:
        """The newest verdict that charges a turn."""
        with self._engine.connect() as c:
            query = select(verdicts).where(verdicts.c.charged == turn).order_by(verdicts.c.seq.desc()).limit(1)
            return c.execute(query).first()

    def refused(self, turn: str) -> bool:
        """Whether the newest verdict about a turn refuses it, also one too unsure to charge it."""
        about = (verdicts.c.charged == turn) | ((verdicts.c.turn == turn) & verdicts.c.charged.is_(None))
        with self._engine.connect() as c:
            row = c.execute(select(verdicts).where(about).order_by(verdicts.c.seq.desc()).limit(1)).first()
        return row is not None and (row.verdict if row.charged else row.body["verdict"]) < 0

    def accepted(self, scenario: str, limit: int) -> list[Row[Any]]:
        """The newest accepted turns of a scenario, oldest first, with their verdicts. The newest verdict on a
        turn counts: one that was accepted first and refused later is not among them."""
        with self._engine.connect() as c:
            newest = (
                select(func.max(verdicts.c.seq)).where(verdicts.c.charged.is_not(None)).group_by(verdicts.c.charged)
            )
            query = (
                select(verdicts)
                .join(turns, turns.c.id == verdicts.c.charged)
                .where(turns.c.scenario == scenario, verdicts.c.verdict == 1, verdicts.c.seq.in_(newest))
                .order_by(verdicts.c.seq.desc())
                .limit(limit)
            )
            return list(reversed(list(c.execute(query))))

    def ancestors(self, turn: str, limit: int = 8) -> list[str]:
        """Earlier turns of the conversation along the bindings, oldest first."""
        out: list[str] = []
        with self._engine.connect() as c:
            current: str | None = turn
            while current and len(out) < limit:
                current = c.execute(select(turns.c.binds).where(turns.c.id == current)).scalar()
                if current:
                    out.append(current)
        return out[::-1]

    def since(self, turn: str) -> float | None:
        """When a turn's present fate began."""
        with self._engine.connect() as c:
            return c.execute(select(func.max(fates.c.time)).where(fates.c.turn == turn)).scalar()

    def changed_in(self, c: Connection, turn: str, since: float) -> bool:
        """Whether a turn's fate was set again since then, as the open transaction sees it."""
        newest = c.execute(select(func.max(fates.c.time)).where(fates.c.turn == turn)).scalar()
        return newest is not None and since < newest <= time.time()  # a clock that was put back says nothing

    # writing, inside a transaction of the caller

    def advance(self, c: Connection, name: str, seq: int) -> None:
        kind = pg_insert if c.dialect.name == "postgresql" else sqlite_insert
        statement = kind(cursors).values(name=name, seq=seq)
        c.execute(statement.on_conflict_do_update(index_elements=["name"], set_={"seq": seq}))

    def add_turn(
        self, c: Connection, decision: Decision, *, seq: int, time: float, scenario: str, version: int | None
    ) -> None:
        c.execute(
            insert(turns).values(
                id=decision.id,
                seq=seq,
                time=time,
                scenario=scenario,
                session=key(decision.session),
                turn_type=decision.turn_type,
                binds=decision.binds,
                method=decision.method,
                score=decision.score,
                reason=decision.reason,
                fate=decision.fate.value,
                version=version,
            )
        )
        self.set_fate(c, decision.id, decision.fate, decision.rule, decision.fate_reason, at=time)

    def bind(self, c: Connection, turn: str, child: str, role: str, text: str, at: float, *, firm: bool = True) -> None:
        """Say what came after a turn's reply. A later row replaces the earlier ones."""
        c.execute(insert(bindings).values(turn=turn, child=child, role=role, next_state=text, firm=firm, time=at))

    def revise_turn(self, c: Connection, id: str, **changes: Any) -> None:
        """What matching has learned of an earlier exchange: its turn_type, or what it binds."""
        c.execute(update(turns).where(turns.c.id == id).values(**changes))

    def tentative(self) -> list[Row[Any]]:
        """The newest binding of each turn, where it still waits. One that was taken back does not."""
        newest = select(func.max(bindings.c.seq)).group_by(bindings.c.turn)
        stands = (turns.c.id == bindings.c.child) & (turns.c.binds == bindings.c.turn)
        with self._engine.connect() as c:
            query = select(bindings).join(turns, stands)
            query = query.where(bindings.c.firm.is_(False), bindings.c.seq.in_(newest))
            return list(c.execute(query.order_by(bindings.c.seq)))

    def set_fate(
        self,
        c: Connection,
        turn: str,
        fate: Fate,
        rule: str,
        reason: str,
        *,
        at: float | None = None,
        version: int | None = None,
    ) -> None:
        """Append to a turn's history. A trained turn keeps its fate, whatever comes later."""
        if self.fate_in(c, turn) is Fate.TRAINED:
            return
        row = {"turn": turn, "fate": fate.value, "rule": rule, "reason": reason, "version": version}
        c.execute(insert(fates).values(**row, time=time.time() if at is None else at))
        c.execute(update(turns).where(turns.c.id == turn).values(fate=fate.value))

    def add_verdict(
        self, c: Connection, turn: str, binding: int | None, charged: str | None, value: int, verdict: Verdict
    ) -> None:
        c.execute(
            insert(verdicts).values(
                turn=turn,
                binding=binding,
                charged=charged,
                verdict=value,
                body=asdict(verdict),
                judge=verdict.judge,
                seconds=verdict.seconds,
                time=time.time(),
            )
        )

    def contradict(self, c: Connection, turn: str, value: int, judge: str) -> bool:
        """Note on a turn that is trained already that its verdict has changed; True if it has.

        The turn stays trained and is never trained again.
        """
        if self.fate_in(c, turn) is not Fate.TRAINED:
            return False
        query = select(verdicts.c.verdict).where(verdicts.c.charged == turn).order_by(verdicts.c.seq.desc()).limit(1)
        return self._contradicted(c, turn, c.execute(query).scalar(), value, judge)

    def contradict_since(self, c: Connection, turn: str, formed: float) -> bool:
        """`contradict` for a turn that has just been trained by a step formed then: its verdict may have changed
        while the step ran."""
        query = select(verdicts).where(verdicts.c.charged == turn).order_by(verdicts.c.seq.desc())
        newest = c.execute(query.limit(1)).first()
        was = c.execute(query.where(verdicts.c.time <= formed).limit(1)).first()
        if was is None or newest is None:
            return False
        return self._contradicted(c, turn, was.verdict, newest.verdict, newest.judge)

    def _contradicted(self, c: Connection, turn: str, was: int | None, value: int, judge: str) -> bool:
        if was is None or was == value:
            return False
        reason = f"trained as {was:+d}, now {value:+d} by {judge}; it is not trained again"
        row = {"turn": turn, "fate": Fate.TRAINED.value, "rule": "contradicted", "reason": reason, "version": None}
        c.execute(insert(fates).values(**row, time=time.time()))
        return True

    def add_report(self, c: Connection, turn: str, report: Report, seq: int) -> None:
        values = {"score": report.score, "feedback": report.feedback, "seq": seq}
        c.execute(insert(turn_reports).values(report=report.id, turn=turn, **values))
