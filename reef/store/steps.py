"""The steps and releases of the learn database.

Invariant: a step names its turns before it runs, and a turn is claimed by one step at most; a step ends once.
Methods that write take the connection of a transaction that the caller opens, so that a step, its turns and
its release commit together. Knows no verdict and no weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, func, insert, select, update

from reef.errors import StoreError
from reef.sessions.fate import Fate
from reef.store.schema import claims, releases, steps, turns


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
    created: float = 0.0
    """when it was stored; 0 until it is"""


class StepStore:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # reading

    def running(self) -> list[StepRow]:
        with self._engine.connect() as c:
            return [_step(r) for r in c.execute(select(steps).where(steps.c.status == "running"))]

    def ended(self, ids: Sequence[str]) -> list[str]:
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

    def add(self, c: Connection, step: StepRow) -> None:
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

    def retry(self, c: Connection, step: str) -> None:
        c.execute(update(steps).where(steps.c.id == step).values(attempts=steps.c.attempts + 1))

    def end(self, c: Connection, step: str, status: str, reason: str = "") -> None:
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


def _step(row: Row[Any]) -> StepRow:
    about = (row.id, row.scenario, row.version, row.parent, tuple(row.turns), row.status, row.attempts, row.carried)
    return StepRow(*about, row.created)
