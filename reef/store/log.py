"""Reading the record log: exchanges, reports, served versions, erasures.

Invariant it relies on: rows are appended with `seq` in commit order and without gaps, so a reader that
asks for `seq > n` skips nothing and the highest `seq` is the count. Knows nothing of sessions, fates or
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, Row, Table, func, select

from reef.store.schema import erasures, exchanges, gaps, reports, serving
from reef.store.writer import LogWriter, exchange_row
from reef.wire.exchange import Api, Delivered, Exchange, Sampled

__all__ = ["Erasure", "LogReader", "LogWriter", "StoredReport", "exchange_row"]


@dataclass(frozen=True, slots=True)
class StoredReport:
    seq: int
    id: str
    references: tuple[str, ...]
    score: float | None
    feedback: str | None


@dataclass(frozen=True, slots=True)
class Erasure:
    """Receipts whose words and tokens were removed from the log."""

    seq: int
    turns: tuple[str, ...]
    why: str


class LogReader:
    """Read access, from any process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tail(self, after: int, limit: int = 256, *, tokens: bool = True) -> list[Exchange]:
        """Exchanges with `seq > after`, in commit order; erased ones are opted out and hold no words.
        Without `tokens` they come without `sampled`, which is most of the cost of reading one."""
        query = select(exchanges) if tokens else select(*(c for c in exchanges.c if c.name != "sampled"))
        query = query.where(exchanges.c.seq > after).order_by(exchanges.c.seq).limit(limit)
        with self._engine.connect() as connection:
            return [_exchange(row) for row in connection.execute(query)]

    def get(self, id: str) -> Exchange | None:
        with self._engine.connect() as connection:
            row = connection.execute(select(exchanges).where(exchanges.c.id == id)).first()
            return _exchange(row) if row else None

    def everything(self) -> Iterator[Exchange]:
        """All exchanges that still have their words, in commit order."""
        at = 0
        while True:
            query = select(exchanges).where(exchanges.c.seq > at, exchanges.c.erased.is_(None))
            with self._engine.connect() as connection:
                rows = connection.execute(query.order_by(exchanges.c.seq).limit(256)).all()
            if not rows:
                return
            yield from map(_exchange, rows)
            at = rows[-1].seq

    def newest_seq(self) -> int:
        with self._engine.connect() as connection:
            return connection.execute(select(func.max(exchanges.c.seq))).scalar() or 0

    def count(self) -> int:
        """How many exchanges were ever recorded."""
        return self._last(exchanges)

    def _last(self, table: Table) -> int:
        with self._engine.connect() as connection:
            return connection.execute(select(func.max(table.c.seq))).scalar() or 0

    def reports(self, after: int, limit: int = 256) -> list[StoredReport]:
        query = select(reports).where(reports.c.seq > after).order_by(reports.c.seq).limit(limit)
        with self._engine.connect() as connection:
            return [
                StoredReport(r.seq, r.id, tuple(r._mapping["references"]), r.score, r.feedback)
                for r in connection.execute(query)
            ]

    def erasures(self, after: int, limit: int = 64) -> list[Erasure]:
        query = select(erasures).where(erasures.c.seq > after).order_by(erasures.c.seq).limit(limit)
        with self._engine.connect() as connection:
            return [Erasure(r.seq, tuple(r.turns), r.why) for r in connection.execute(query)]

    def gaps(self, limit: int = 100) -> list[dict[str, Any]]:
        """The newest times during which nothing could be recorded, newest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(gaps).order_by(gaps.c.seq.desc()).limit(limit))
            return [dict(r._mapping) for r in rows]

    def served(self) -> dict[str, int]:
        """The version each scenario is served at, as last recorded; absent means 0."""
        newest = select(func.max(serving.c.seq)).group_by(serving.c.scenario)
        with self._engine.connect() as connection:
            rows = connection.execute(select(serving.c.scenario, serving.c.version).where(serving.c.seq.in_(newest)))
            return {row.scenario: row.version for row in rows}


def _exchange(row: Row[Any]) -> Exchange:
    return Exchange(
        id=row.id,
        time=row.time,
        started=row.started,
        api=Api(row.api),
        scenario=row.scenario,
        client=row.client,
        headers=row.headers,
        request=row.request,
        response=row.response,
        status=row.status,
        delivered=Delivered(row.delivered),
        sampled=Sampled.from_json(row.sampled) if "sampled" in row._fields and row.sampled else None,
        error=row.error,
        memo=tuple(row.memo or ()),
        seq=row.seq,
    )
