"""The learn database: sessions, bindings, verdicts, steps, releases and the history of every fate.

Written by the learner only. Invariant: the cursor into the log commits together with the rows derived
from it; a turn's fate is the newest row of its history, and `trained` is final; a turn is claimed by one
step at most. Methods that write take the connection of a transaction that the caller opens with `begin`,
so that what belongs together commits together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, Select, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from reef.errors import StoreError
from reef.recipe import Report, Rule, Verdict
from reef.sessions.fate import Fate
from reef.sessions.matcher import Decision
from reef.store.columns import key
from reef.store.schema import (
    bindings,
    claims,
    cursors,
    fates,
    memo_rules,
    releases,
    steps,
    turn_reports,
    turns,
    verdicts,
)
from reef.store.transactions import writing


@dataclass(frozen=True, slots=True)
class StepRow:
    """A stored training job."""

    id: str
    scenario: str
    version: int
    parent: int
    turns: tuple[str, ...]
    status: str
    attempts: int
    carried: Mapping[str, Any]


class LearnStore:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
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

    def waiting(self, fate: Fate, limit: int = 1000) -> list[Row[Any]]:
        """(id, scenario) of turns of a fate, in log order."""
        query = select(turns.c.id, turns.c.scenario).where(turns.c.fate == fate.value)
        with self._engine.connect() as c:
            return list(c.execute(query.order_by(turns.c.seq).limit(limit)))

    def turn(self, id: str) -> Row[Any] | None:
        with self._engine.connect() as c:
            return c.execute(select(turns).where(turns.c.id == id)).first()

    def binding_in(self, c: Connection, turn: str) -> int | None:
        """The number of a turn's newest binding, as the open transaction sees it."""
        return c.execute(select(func.max(bindings.c.seq)).where(bindings.c.turn == turn)).scalar()

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

    def memo(self, scenario: str) -> tuple[Rule, ...]:
        """The rules of a scenario that hold, oldest first."""
        with self._engine.connect() as c:
            return tuple(_rule(row) for row in c.execute(_standing(scenario)))

    def memos(self) -> dict[str, tuple[str, ...]]:
        """The text of the rules that hold, oldest first, of each scenario that has any."""
        columns = memo_rules.c.scenario, memo_rules.c.text
        query = select(*columns).where(memo_rules.c.dropped.is_(None)).order_by(memo_rules.c.time, memo_rules.c.seq)
        found: dict[str, list[str]] = {}
        with self._engine.connect() as c:
            for scenario, said in c.execute(query):
                found.setdefault(scenario, []).append(said)
        return {scenario: tuple(rules) for scenario, rules in found.items()}

    def memo_mark(self) -> tuple[Any, ...]:
        """A value that changes whenever a rule of any scenario does."""
        c = memo_rules.c
        query = select(func.count(), func.max(c.seq), func.max(c.time), func.max(c.dropped)).select_from(memo_rules)
        with self._engine.connect() as connection:
            return tuple(connection.execute(query).one())

    def memo_history(self, scenario: str) -> list[Row[Any]]:
        """Every rule a scenario ever had, oldest first; `dropped` and `why` say what became of it."""
        with self._engine.connect() as c:
            query = select(memo_rules).where(memo_rules.c.scenario == scenario).order_by(memo_rules.c.seq)
            return list(c.execute(query))

    def running_steps(self) -> list[StepRow]:
        with self._engine.connect() as c:
            return [_step(r) for r in c.execute(select(steps).where(steps.c.status == "running"))]

    def ended_steps(self, ids: Sequence[str]) -> list[str]:
        """Those of the steps that have ended, and those nobody knows."""
        with self._engine.connect() as c:
            query = select(steps.c.id).where(steps.c.id.in_(ids), steps.c.status == "running")
            running = set(c.execute(query).scalars())
        return [id for id in ids if id not in running]

    def last_carried(self, scenario: str) -> Mapping[str, Any]:
        """What the recipe carried out of the newest step that ended well."""
        with self._engine.connect() as c:
            query = (
                select(steps.c.carried)
                .where(steps.c.scenario == scenario, steps.c.status.in_(("released", "rejected")))
                .order_by(steps.c.version.desc())
                .limit(1)
            )
            return c.execute(query).scalar() or {}

    def since(self, turn: str) -> float | None:
        """When a turn's present fate began."""
        with self._engine.connect() as c:
            return c.execute(select(func.max(fates.c.time)).where(fates.c.turn == turn)).scalar()

    def outcomes(self, scenario: str) -> list[str]:
        """How a scenario's ended steps went, oldest first: released, rejected, failed, rolled_back."""
        with self._engine.connect() as c:
            query = select(steps.c.status).where(steps.c.scenario == scenario, steps.c.ended.is_not(None))
            return list(c.execute(query.order_by(steps.c.version)).scalars())

    def newest_version(self, scenario: str) -> int:
        """The highest version any step of a scenario has claimed."""
        with self._engine.connect() as c:
            return c.execute(select(func.max(steps.c.version)).where(steps.c.scenario == scenario)).scalar() or 0

    def release(self, scenario: str, version: int) -> Row[Any] | None:
        with self._engine.connect() as c:
            query = select(releases).where(releases.c.scenario == scenario, releases.c.version == version)
            return c.execute(query).first()

    def last_good(self, scenario: str, version: int) -> int:
        """The nearest ancestor of a version that was not taken back; 0 is the untrained policy."""
        while version:
            row = self.release(scenario, version)
            version = row.parent if row else 0
            row = self.release(scenario, version) if version else None
            if row is None or row.status == "released":
                return version
        return 0

    def unpublished(self) -> list[Row[Any]]:
        with self._engine.connect() as c:
            query = select(releases).where(releases.c.status == "released", releases.c.published.is_(None))
            return list(c.execute(query.order_by(releases.c.version)))

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
        """The newest binding of each turn, where it still waits."""
        newest = select(func.max(bindings.c.seq)).group_by(bindings.c.turn)
        with self._engine.connect() as c:
            query = select(bindings).where(bindings.c.firm.is_(False), bindings.c.seq.in_(newest))
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
        was = c.execute(query).scalar()
        if was is None or was == value:
            return False
        reason = f"trained as {was:+d}, now {value:+d} by {judge}; it is not trained again"
        row = {"turn": turn, "fate": Fate.TRAINED.value, "rule": "contradicted", "reason": reason, "version": None}
        c.execute(insert(fates).values(**row, time=time.time()))
        return True

    def set_memo(self, c: Connection, scenario: str, rules: Sequence[Rule], why: str) -> None:
        """Make `rules` a scenario's memo: new ones are added, known ones (by text) renewed, the others dropped."""
        now = time.time()
        held = {row.text: row for row in c.execute(_standing(scenario))}
        wanted = {rule.text: rule for rule in rules}
        for text, row in held.items():
            of = memo_rules.c.seq == row.seq
            rule = wanted.get(text)
            if rule is None:
                c.execute(update(memo_rules).where(of).values(dropped=now, why=why))
            elif (rule.seen, rule.time) != (row.seen, row.time):
                c.execute(update(memo_rules).where(of).values(seen=rule.seen, time=rule.time, turn=rule.turn))
        for text, rule in wanted.items():
            if text not in held:
                values = {"turn": rule.turn, "time": rule.time or now, "seen": rule.seen}
                c.execute(insert(memo_rules).values(scenario=scenario, text=text, **values))

    def add_report(self, c: Connection, turn: str, report: Report, seq: int) -> None:
        values = {"score": report.score, "feedback": report.feedback, "seq": seq}
        c.execute(insert(turn_reports).values(report=report.id, turn=turn, **values))

    def add_step(self, c: Connection, step: StepRow) -> None:
        """Store a step and claim its turns. Raises StoreError if one of them is claimed by another step
        or no longer waits for a batch."""
        free = select(turns.c.id).where(turns.c.id.in_(step.turns), turns.c.fate == Fate.JUDGED.value)
        taken = select(claims.c.turn).where(claims.c.turn.in_(step.turns))
        if len(c.execute(free).all()) != len(set(step.turns)) or c.execute(taken).first():
            raise StoreError(f"step {step.id}: not all of its turns wait for a batch any more")
        c.execute(insert(claims), [{"turn": turn, "step": step.id} for turn in step.turns])
        c.execute(
            insert(steps).values(
                id=step.id,
                scenario=step.scenario,
                version=step.version,
                parent=step.parent,
                turns=list(step.turns),
                status="running",
                attempts=1,
                carried=dict(step.carried),
                reason="",
                created=time.time(),
            )
        )

    def retry_step(self, c: Connection, step: str) -> None:
        c.execute(update(steps).where(steps.c.id == step).values(attempts=steps.c.attempts + 1))

    def end_step(self, c: Connection, step: str, status: str, reason: str = "") -> None:
        """Settle a running step; turns of one that trained nothing may be trained by another. Raises
        StoreError if it has ended already."""
        running = update(steps).where(steps.c.id == step, steps.c.status == "running")
        if c.execute(running.values(status=status, reason=reason, ended=time.time())).rowcount != 1:
            raise StoreError(f"step {step} has ended already")
        if status != "released":
            c.execute(delete(claims).where(claims.c.step == step))

    def add_release(self, c: Connection, values: Mapping[str, Any]) -> None:
        c.execute(insert(releases).values(**values, time=time.time()))

    def hold(self, c: Connection, scenario: str, version: int) -> None:
        """A good release that is not served by itself, since somebody chose another version meanwhile."""
        c.execute(
            update(releases).where(releases.c.scenario == scenario, releases.c.version == version).values(status="held")
        )

    def take_back(self, c: Connection, scenario: str, version: int, checks: list[dict[str, Any]], reason: str) -> None:
        """A release that served and failed its canaries: what they found joins its gate."""
        here = (releases.c.scenario == scenario) & (releases.c.version == version)
        gate = dict(c.execute(select(releases.c.gate).where(here)).scalar() or {})
        gate |= {"passed": False, "reason": reason, "checks": [*gate.get("checks", ()), *checks]}
        c.execute(update(releases).where(here).values(status="rolled_back", gate=gate))
        c.execute(
            update(steps)
            .where(steps.c.scenario == scenario, steps.c.version == version)
            .values(status="rolled_back", reason=reason)
        )

    def published(self, c: Connection, scenario: str, version: int) -> None:
        c.execute(
            update(releases)
            .where(releases.c.scenario == scenario, releases.c.version == version)
            .values(published=time.time())
        )


def _standing(scenario: str) -> Select[Any]:
    of = select(memo_rules).where(memo_rules.c.scenario == scenario, memo_rules.c.dropped.is_(None))
    return of.order_by(memo_rules.c.time, memo_rules.c.seq)


def _rule(row: Row[Any]) -> Rule:
    return Rule(row.text, row.turn, row.time, row.seen)


def _step(row: Row[Any]) -> StepRow:
    return StepRow(
        row.id, row.scenario, row.version, row.parent, tuple(row.turns), row.status, row.attempts, row.carried
    )
