"""Reading the record log: exchanges, reports, served versions, erasures.

Invariant it relies on: rows are appended with `seq` in commit order and without gaps, so a reader that
asks for `seq > n` skips nothing and the highest `seq` is the count. Knows nothing of sessions, fates or
training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, func, select

from reef.errors import StoreError
from reef.store.pieces import joined
from reef.store.rows import exchange_row
from reef.store.schema import erasures, exchanges, gaps, reports, serving
from reef.store.writer import LogWriter
from reef.wire.exchange import Api, Delivered, Exchange, Sampled

__all__ = ["Erasure", "LogReader", "LogWriter", "StoredReport", "exchange_row"]

TAIL_BYTES = 32 << 20
"""JSON of the exchanges that are read at once; one that is larger is read alone"""


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
        """Exchanges with `seq > after`, in commit order; erased ones are opted out and hold no words. At most
        `limit`, and fewer where that many are large; none only where there is none. Without `tokens` they come
        without `sampled`, which is most of the cost of reading one."""
        sizes = select(exchanges.c.seq, exchanges.c.size).where(exchanges.c.seq > after).order_by(exchanges.c.seq)
        query = select(exchanges) if tokens else select(*(c for c in exchanges.c if c.name != "sampled"))
        with self._engine.connect() as connection:
            last, room = after, TAIL_BYTES
            for seq, size in connection.execute(sizes.limit(limit)):
                room -= size
                if room < 0 and last > after:
                    break
                last = seq
            if last == after:
                return []
            query = query.where(exchanges.c.seq > after, exchanges.c.seq <= last).order_by(exchanges.c.seq)
            return [_exchange(_values(connection, row)) for row in connection.execute(query).all()]

    def get(self, id: str) -> Exchange | None:
        with self._engine.connect() as connection:
            row = connection.execute(select(exchanges).where(exchanges.c.id == id)).first()
            return _exchange(_values(connection, row)) if row else None

    def erased(self, ids: Sequence[str]) -> set[str]:
        """Those of the exchanges whose words and tokens were removed."""
        found: set[str] = set()
        with self._engine.connect() as connection:
            for start in range(0, len(ids), 500):
                mine = exchanges.c.id.in_(ids[start : start + 500])
                query = select(exchanges.c.id).where(mine, exchanges.c.erased.is_not(None))
                found |= set(connection.execute(query).scalars())
        return found

    def everything(self) -> Iterator[Exchange]:
        """All exchanges that still have their words, in commit order."""
        at = 0
        while True:
            query = select(exchanges).where(exchanges.c.seq > at, exchanges.c.erased.is_(None))
            with self._engine.connect() as connection:
                rows = connection.execute(query.order_by(exchanges.c.seq).limit(256)).all()
                found = [_values(connection, row) for row in rows]
            if not rows:
                return
            yield from (_exchange(values) for values in found if values["erased"] is None)
            at = rows[-1].seq

    def newest_seq(self) -> int:
        with self._engine.connect() as connection:
            return connection.execute(select(func.max(exchanges.c.seq))).scalar() or 0

    def count(self) -> int:
        """How many exchanges were ever recorded."""
        return self.newest_seq()

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


def _values(connection: Connection, row: Row[Any]) -> Mapping[str, Any]:
    """A row's columns, put together again where they are in pieces."""
    values = dict(row._mapping)
    if not row.pieces:
        return values
    large = joined(connection, row)
    if large is not None:
        return {**values, **large}
    again = connection.execute(select(exchanges).where(exchanges.c.id == row.id)).one()
    if again.pieces:  # else it was erased after its row was read
        raise StoreError(f"pieces of the record {row.id} are missing")
    return dict(again._mapping)


def _exchange(values: Mapping[str, Any]) -> Exchange:
    sampled = values.get("sampled")
    return Exchange(
        id=values["id"],
        time=values["time"],
        started=values["started"],
        api=Api(values["api"]),
        scenario=values["scenario"],
        client=values["client"],
        headers=values["headers"],
        request=values["request"],
        response=values["response"],
        status=values["status"],
        delivered=Delivered(values["delivered"]),
        sampled=Sampled.from_json(sampled) if sampled else None,
        error=values["error"],
        memo=tuple(values["memo"] or ()),
        seq=values["seq"],
    )
