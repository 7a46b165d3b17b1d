"""The record log: append, tail and look up exchanges, reports and served versions.

Owns the `log` database. Invariant: rows are only ever appended, and `seq` is the commit order, since
one thread writes and every batch is one transaction; a reader that asks for `seq > n` skips nothing.
Knows nothing of sessions, fates or training.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, Row, Table, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from reef.errors import StoreError
from reef.store.schema import exchanges, reports, serving
from reef.wire.exchange import Api, Delivered, Exchange, Sampled

BATCH = 256


@dataclass(frozen=True, slots=True)
class StoredReport:
    seq: int
    id: str
    references: tuple[str, ...]
    score: float | None
    feedback: str | None


class LogWriter:
    """The one writer: a thread that commits whatever waits in its bounded queue as one transaction."""

    def __init__(self, engine: Engine, *, capacity: int = 1024) -> None:
        self._engine = engine
        self._queue: queue.Queue[tuple[Table, Mapping[str, Any], Future[None]] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    async def exchange(self, exchange: Exchange) -> None:
        """Append an exchange; returns once it is durable. Raises StoreError."""
        await self._put(exchanges, exchange_row(exchange))

    async def report(self, id: str, references: Sequence[str], score: float | None, feedback: str | None) -> bool:
        """Append a report; False if one with this id is there already (nothing is changed then)."""
        row = {"id": id, "time": time.time(), "references": list(references), "score": score, "feedback": feedback}
        if await asyncio.to_thread(self._known_report, id):
            return False
        await self._put(reports, row)
        return True

    async def serving(self, scenario: str, version: int, by: str) -> None:
        """Append a change of the served version."""
        await self._put(serving, {"scenario": scenario, "version": version, "time": time.time(), "by": by})

    def close(self) -> None:
        """Commit what waits, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _known_report(self, id: str) -> bool:
        with self._engine.connect() as connection:
            return connection.execute(select(reports.c.seq).where(reports.c.id == id)).first() is not None

    async def _put(self, table: Table, row: Mapping[str, Any]) -> None:
        done: Future[None] = Future()
        item = (table, row, done)
        try:
            self._queue.put_nowait(item)
        except queue.Full:  # back-pressure: the caller waits, the event loop does not
            await asyncio.to_thread(self._queue.put, item)
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            stop = False
            while len(batch) < BATCH:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    stop = True
                    break
                batch.append(item)
            self._commit(batch)
            if stop:
                return

    def _commit(self, batch: Sequence[tuple[Table, Mapping[str, Any], Future[None]]]) -> None:
        try:
            with self._engine.begin() as connection:
                for table, row, _ in batch:
                    connection.execute(insert(table), row)
        except (SQLAlchemyError, ValueError, TypeError) as error:
            if len(batch) > 1:  # one bad row must not take its neighbours along
                for item in batch:
                    self._commit([item])
                return
            batch[0][2].set_exception(StoreError(f"the record could not be written: {error}"))
            return
        for _, _, done in batch:
            done.set_result(None)


class LogReader:
    """Read access, from any process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tail(self, after: int, limit: int = 256) -> list[Exchange]:
        """Exchanges with `seq > after`, in commit order."""
        query = select(exchanges).where(exchanges.c.seq > after).order_by(exchanges.c.seq).limit(limit)
        with self._engine.connect() as connection:
            return [_exchange(row) for row in connection.execute(query)]

    def get(self, id: str) -> Exchange | None:
        with self._engine.connect() as connection:
            row = connection.execute(select(exchanges).where(exchanges.c.id == id)).first()
            return _exchange(row) if row else None

    def count(self) -> int:
        with self._engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(exchanges)).scalar_one()

    def reports(self, after: int, limit: int = 256) -> list[StoredReport]:
        query = select(reports).where(reports.c.seq > after).order_by(reports.c.seq).limit(limit)
        with self._engine.connect() as connection:
            return [
                StoredReport(r.seq, r.id, tuple(r._mapping["references"]), r.score, r.feedback)
                for r in connection.execute(query)
            ]

    def served(self) -> dict[str, int]:
        """The version each scenario is served at, as last recorded; absent means 0."""
        newest = select(func.max(serving.c.seq)).group_by(serving.c.scenario)
        with self._engine.connect() as connection:
            rows = connection.execute(select(serving.c.scenario, serving.c.version).where(serving.c.seq.in_(newest)))
            return {row.scenario: row.version for row in rows}


def exchange_row(exchange: Exchange) -> dict[str, Any]:
    """The exchange as a row of `exchanges`, without seq."""
    return {
        "id": exchange.id,
        "time": exchange.time,
        "started": exchange.started,
        "api": exchange.api.value,
        "scenario": exchange.scenario,
        "client": exchange.client,
        "headers": dict(exchange.headers),
        "request": dict(exchange.request),
        "response": dict(exchange.response) if exchange.response is not None else None,
        "status": exchange.status,
        "delivered": exchange.delivered.value,
        "sampled": exchange.sampled.to_json() if exchange.sampled else None,
        "version": exchange.sampled.version if exchange.sampled else None,
        "error": exchange.error,
    }


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
        sampled=Sampled.from_json(row.sampled) if row.sampled else None,
        error=row.error,
        seq=row.seq,
    )
