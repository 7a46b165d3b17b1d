"""Appending to the record log: one thread that commits whatever waits in a bounded queue.

Invariant: a caller is told of success only after its row is committed, and `seq` is the commit order
without gaps, since it is assigned under the database's write lock. No transaction is long: large records are
written in pieces, with the records of others between them. When the disk refuses, the writer says
so (`admit`), probes once a second and records the gap itself once it can. Knows nothing of sessions,
fates or training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, Engine, Table, select
from sqlalchemy.exc import SQLAlchemyError

from reef.errors import StoreError
from reef.store.checkpoints import Checkpoints
from reef.store.columns import key
from reef.store.pieces import check_whole, put, remove_unfinished, split
from reef.store.queued import Change, Entry, Gap, InPieces, Work, small_records, tell, waiting
from reef.store.rows import append, append_exchanges, append_plainly, exchange_row
from reef.store.schema import exchanges, gaps, reports, serving
from reef.store.transactions import Trouble, trouble, writing, writing_plainly
from reef.wire.exchange import Exchange

log = logging.getLogger("reef.log")
BATCH = 256
BATCH_BYTES = 4 << 20
RECONNECT_S = 20.0
"""how long records wait for a database that went away"""
PROBE_S = 1.0
ROOM_S = 0.002
"""how often a caller looks for room in a full queue"""
WhenFull = Literal["refuse", "serve"]


class LogWriter:
    """The one writer of a gateway process."""

    def __init__(
        self,
        engine: Engine,
        *,
        capacity: int = 1024,
        when_full: WhenFull = "refuse",
        redact: Callable[[Exchange], Exchange] | None = None,
        redact_text: Callable[[str], str] | None = None,
    ) -> None:
        self._engine = engine
        self._plain = engine.dialect.name == "sqlite"
        self._when_full = when_full
        self._redact = redact
        self._redact_text = redact_text
        self._gap: Gap | None = None
        self._checkpoints = Checkpoints(engine)
        self._written = 0
        """bytes of exchanges since the checkpoints were told"""
        self._large: deque[InPieces] = deque()
        self._later: set[asyncio.Task[None]] = set()
        """of callers whose item is not in the queue yet"""
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Entry | Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def admit(self) -> None:
        """Raises StoreError while an answer could not be recorded and must be, by configuration."""
        gap = self._gap
        if gap is not None and self._when_full == "refuse":
            gap.refused += 1
            raise StoreError(f"new requests are refused, since they can't be recorded: {gap.reason}")

    @property
    def trouble(self) -> str | None:
        """Why nothing can be recorded now, if so."""
        gap = self._gap
        return gap.reason if gap else None

    async def exchange(self, exchange: Exchange, *, large: bool = False) -> bool:
        """Append an exchange; returns once it is durable. False when there is no room and the
        configuration lets the answer pass unrecorded. A caller that is cancelled meanwhile takes nothing
        along: the exchange is appended all the same. One that is `large`, in megabytes, is made into a row
        by a thread that no other record waits for. Raises StoreError."""

        def row() -> dict[str, Any]:
            return exchange_row(self._redact(exchange) if self._redact else exchange)

        item = Entry(exchanges, row, waiting())
        try:
            await self._put(item, large=large)
        except StoreError:
            if self._gap is None or self._when_full == "refuse":
                raise
            return False
        return True

    async def report(self, id: str, references: Sequence[str], score: float | None, feedback: str | None) -> bool:
        """Append a report; False if one with this id is there already (nothing is changed then)."""
        if feedback and self._redact_text:
            feedback = self._redact_text(feedback)
        row = {"id": key(id), "time": time.time(), "references": list(references)}

        def change(connection: Connection) -> bool:
            if connection.execute(select(reports.c.seq).where(reports.c.id == row["id"])).first():
                return False
            append(connection, reports, [{**row, "score": score, "feedback": feedback}])
            return True

        return await self.change(change)

    async def serving(self, scenario: str, version: int, by: str) -> None:
        """Append a change of the served version."""
        row = {"scenario": scenario, "version": version, "time": time.time(), "by": by}
        await self._put(Entry(serving, lambda: row, waiting()))

    async def change(self, run: Change) -> Any:
        """Run `run` in a transaction of the writer and return its result once committed. It may run
        twice if the database goes away meanwhile. Raises StoreError."""
        return await self._put(Work(run, waiting()))

    async def drain(self) -> None:
        """Returns once all that was given so far is in the queue, where `close` finds it."""
        while self._later:
            await asyncio.gather(*self._later, return_exceptions=True)

    def close(self) -> None:
        """Commit what waits, then stop."""
        self._queue.put(None)
        self._thread.join()
        self._checkpoints.close()

    async def _put(self, item: Entry | Work, *, large: bool = False) -> Any:
        if self._queue.qsize() < self._capacity and not large:
            self._queue.put(item)
        else:  # the caller waits, the event loop does not
            task = asyncio.ensure_future(self._put_later(item))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
            await asyncio.shield(task)
        return await item.caller

    async def _put_later(self, item: Entry | Work) -> None:
        """Once its row is made, and there is room."""
        if isinstance(item, Entry):
            with contextlib.suppress(Exception):  # the writer tries again, and tells the caller
                await asyncio.to_thread(item.size)
        while self._queue.qsize() >= self._capacity:
            await asyncio.sleep(ROOM_S)
        self._queue.put(item)

    # the writer's thread

    def _run(self) -> None:
        stop = False
        while not stop or self._large:
            batch: list[Entry | Work] = []
            if not stop:
                batch, stop = self._next()
            try:
                for some in self._portions(batch):
                    tell(list(zip([item.caller for item in some], self._commit(some), strict=True)))
                if self._large:
                    self._go_on(self._large[0])
            except Exception as error:  # whatever it is, callers must hear of it and the thread must live
                log.exception("the record log failed")
                lost = [*batch, *(large.row for large in self._large)]
                self._large.clear()
                tell([(item.caller, StoreError(f"the record could not be written: {error!r}")) for item in lost])
            self._checkpoints.wrote(self._written)
            self._written = 0

    def _next(self) -> tuple[list[Entry | Work], bool]:
        """What waits, up to a batch, and whether to stop after it. Waits for something to come unless there is a
        large record to go on with."""
        batch: list[Entry | Work] = []
        try:
            if not self._large:
                item = self._queue.get(timeout=PROBE_S if self._gap else None)
                if item is None:
                    return batch, True
                batch.append(item)
            while len(batch) < BATCH:
                item = self._queue.get_nowait()
                if item is None:
                    return batch, True
                batch.append(item)
        except queue.Empty:
            if not batch and not self._large:
                self._probe()
        return batch, False

    def _portions(self, batch: Sequence[Entry | Work]) -> Iterator[list[Entry | Work]]:
        """The batch as transactions of some megabytes at most, large records set aside."""
        portion: list[Entry | Work] = []
        size = 0
        for item in batch:
            if isinstance(item, Entry) and item.table is exchanges:
                with contextlib.suppress(Exception):  # it fails again when it is written, and its caller hears of it
                    size += item.size()
                    assert item.row is not None
                    item.row, pieces = split(item.row)
                    if pieces:
                        size -= item.size()
                        self._large.append(InPieces(item, deque(pieces)))
                        continue
            portion.append(item)
            if size > BATCH_BYTES:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion

    def _go_on(self, large: InPieces) -> None:
        """Write the next piece of a large record, or its row."""
        if large.pieces:
            piece = large.pieces[0]
            (outcome,) = self._commit([Work(lambda c: put(c, piece), large.row.caller)])
            if not isinstance(outcome, Exception):
                large.pieces.popleft()
                self._written += len(piece.text)
                return
            if self._gap is not None:
                self._gap.failed += 1
        else:
            (outcome,) = self._commit([large.row])
        self._large.popleft()
        if isinstance(outcome, Exception) and large.row.row is not None:  # what is there of it is of no use
            id = large.row.row["id"]
            self._commit([Work(lambda c: remove_unfinished(c, id), large.row.caller)])
        tell([(large.row.caller, outcome)])

    def _commit(self, batch: Sequence[Entry | Work]) -> list[Any]:
        """The result of each, or the StoreError its caller is to hear of."""
        deadline = time.monotonic() + (RECONNECT_S if self._gap is None else 0.0)
        again = False
        while True:
            try:
                results = self._write(batch, again=again)
            except (SQLAlchemyError, sqlite3.Error, ValueError, TypeError, StoreError) as error:
                kind = trouble(error)
                if kind is Trouble.LOST and time.monotonic() < deadline:
                    again = True
                    time.sleep(0.2)
                    continue
                return self._failed(batch, error, kind)
            if self._gap is not None:
                self._probe()
            return results

    def _failed(self, batch: Sequence[Entry | Work], error: Exception, kind: Trouble) -> list[Any]:
        if kind is not Trouble.OTHER and self._gap is None:
            self._gap = Gap(f"{kind.value}: {getattr(error, 'orig', error)}")
            log.error("nothing can be recorded: %s", self._gap.reason)
        if len(batch) > 1 and kind is not Trouble.LOST:  # one bad row must not take its neighbours along
            return [outcome for item in batch for outcome in self._commit([item])]
        if self._gap is not None:
            self._gap.failed += sum(isinstance(item, Entry) and item.table is exchanges for item in batch)
        return [StoreError(f"the record could not be written: {error}") for _ in batch]

    def _write(self, batch: Sequence[Entry | Work], *, again: bool) -> list[Any]:
        """One transaction. With `again` the last attempt may have committed unseen: ids that are there
        already are left alone."""
        if self._plain and (records := small_records(batch)):
            with writing_plainly(self._engine) as plain:
                append_plainly(plain, records)
            self._written += sum(row["size"] for row in records)
            return [None] * len(batch)
        results: list[Any] = [None] * len(batch)
        with writing(self._engine, lock="reef log") as connection:
            rows: list[tuple[Table, Mapping[str, Any]]] = []
            for n, item in enumerate(batch):
                if isinstance(item, Entry):
                    row = item.row or item.make()
                    if item.table is exchanges and row["pieces"]:
                        check_whole(connection, row)
                    else:
                        self._written += row.get("size", 0)
                    rows.append((item.table, row))
                else:
                    self._append(connection, rows, again)
                    rows = []
                    results[n] = item.run(connection)
            self._append(connection, rows, again)
        return results

    def _append(self, connection: Connection, rows: Sequence[tuple[Table, Mapping[str, Any]]], again: bool) -> None:
        for table in dict.fromkeys(table for table, _ in rows):
            mine = [row for other, row in rows if other is table]
            if again and table is exchanges:
                ids = [row["id"] for row in mine]
                there = set(connection.execute(select(table.c.id).where(table.c.id.in_(ids))).scalars())
                mine = [row for row in mine if row["id"] not in there]
            if table is exchanges:
                append_exchanges(connection, mine)
            else:
                append(connection, table, mine)

    def _probe(self) -> None:
        """Try to record the gap itself; that it works shows that there is room again."""
        gap = self._gap
        if gap is None:
            return
        row = {
            "started": gap.started,
            "ended": time.time(),
            "exchanges": gap.refused + gap.failed,
            "reason": gap.reason,
        }
        try:
            with writing(self._engine, lock="reef log") as connection:
                append(connection, gaps, [row])
        except SQLAlchemyError:
            return
        self._gap = None
        log.warning("recording works again after %.0f s", row["ended"] - gap.started)
