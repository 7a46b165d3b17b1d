"""The memo's rules in the learn database: those that hold, and what became of the others.

Invariant: a rule is never deleted, it is dropped with a time and a reason. Knows no verdict and no prompt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, Row, Select, func, insert, select, update

from reef.recipe import Rule
from reef.store.schema import memo_rules


class MemoStore:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def of(self, scenario: str) -> tuple[Rule, ...]:
        """The rules of a scenario that hold, oldest first."""
        with self._engine.connect() as c:
            return tuple(_rule(row) for row in c.execute(_standing(scenario)))

    def all(self) -> dict[str, tuple[str, ...]]:
        """The text of the rules that hold, oldest first, of each scenario that has any."""
        columns = memo_rules.c.scenario, memo_rules.c.text
        query = select(*columns).where(memo_rules.c.dropped.is_(None)).order_by(memo_rules.c.time, memo_rules.c.seq)
        found: dict[str, list[str]] = {}
        with self._engine.connect() as c:
            for scenario, said in c.execute(query):
                found.setdefault(scenario, []).append(said)
        return {scenario: tuple(rules) for scenario, rules in found.items()}

    def mark(self) -> tuple[Any, ...]:
        """A value that changes whenever a rule of any scenario does."""
        c = memo_rules.c
        query = select(func.count(), func.max(c.seq), func.max(c.time), func.max(c.dropped)).select_from(memo_rules)
        with self._engine.connect() as connection:
            return tuple(connection.execute(query).one())

    def history(self, scenario: str) -> list[Row[Any]]:
        """Every rule a scenario ever had, oldest first; `dropped` and `why` say what became of it."""
        with self._engine.connect() as c:
            query = select(memo_rules).where(memo_rules.c.scenario == scenario).order_by(memo_rules.c.seq)
            return list(c.execute(query))

    def set(self, c: Connection, scenario: str, rules: Sequence[Rule], why: str) -> None:
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


def _standing(scenario: str) -> Select[Any]:
    of = select(memo_rules).where(memo_rules.c.scenario == scenario, memo_rules.c.dropped.is_(None))
    return of.order_by(memo_rules.c.time, memo_rules.c.seq)


def _rule(row: Row[Any]) -> Rule:
    return Rule(row.text, row.turn, row.time, row.seen)
