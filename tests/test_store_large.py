"""Records of many megabytes, on SQLite and on PostgreSQL: whole or not in the log, nobody waits for one, and
what is erased is gone from all of its pieces."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text

from reef.errors import StoreError
from reef.store import log as log_module
from reef.store import writer as writer_module
from reef.store.database import open_database
from reef.store.forget import FORGOTTEN, erase_in_log
from reef.store.log import LogReader, LogWriter
from reef.store.migrations import LOG
from reef.store.pieces import LEFTOVER_S, Piece, joined, put, remove_leftovers
from reef.store.schema import exchanges, pieces
from reef.store.transactions import writing
from reef.wire.exchange import Exchange
from tests.records import record, sampled

ROOT = Path(__file__).parent.parent
Urls = tuple[str, str]


def large(megabytes: float = 3.0, **changes: Any) -> Exchange:
    return record("é\x00\ud83d \U0001f30a words " * int(megabytes * 50_000), **changes)


def count_pieces(engine: Engine) -> int:
    with engine.connect() as c:
        return c.execute(select(func.count()).select_from(pieces)).scalar_one()


@pytest.mark.parametrize("announced", [False, True])
def test_a_large_record_comes_back_as_it_was(urls: Urls, announced: bool) -> None:
    engine = open_database(urls[0], LOG)
    written = large(sampled=sampled(6000), headers={"a": "b"}, memo=("rule",))
    writer = LogWriter(engine)
    asyncio.run(writer.exchange(written, large=announced))
    writer.close()
    reader = LogReader(engine)
    assert count_pieces(engine) > 6
    assert reader.get(written.id) == written
    assert reader.tail(0) == [written] == list(reader.everything())
    (plain,) = reader.tail(0, tokens=False)
    assert plain.sampled is None and plain.request == written.request
    with engine.connect() as c:
        assert c.execute(select(exchanges.c.size)).scalar_one() > 6_000_000
    engine.dispose()


def test_no_record_waits_for_a_large_one(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    order: list[str] = []

    async def write(exchange: Exchange) -> None:
        await writer.exchange(exchange)
        order.append(exchange.id)

    async def run() -> tuple[Exchange, list[Exchange]]:
        first, small = large(8), []
        waiting = asyncio.create_task(write(first))
        while count_pieces(engine) < 2:
            await asyncio.sleep(0.001)
        for n in range(3):
            small.append(record(str(n)))
            await write(small[-1])
        await waiting
        return first, small

    first, small = asyncio.run(run())
    writer.close()
    assert order == [*(e.id for e in small), first.id]
    assert [e.id for e in LogReader(engine).tail(0, tokens=False)] == order
    engine.dispose()


def test_a_large_record_whose_writer_is_killed_half_way_is_not_in_the_log_and_is_removed(urls: Urls) -> None:
    code = f"""
import asyncio, os, signal
from reef.store import writer
from reef.store.database import open_database
from reef.store.migrations import LOG
from tests.test_store_large import large
written = []
def put(c, piece, put=writer.put):
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(put(c, piece))
writer.put = put
asyncio.run(writer.LogWriter(open_database({urls[0]!r}, LOG)).exchange(large()))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env).returncode == -signal.SIGKILL
    engine = open_database(urls[0], LOG)
    assert LogReader(engine).count() == 0 and count_pieces(engine) == 3
    whole = large()
    writer = LogWriter(engine)
    asyncio.run(writer.exchange(whole))
    assert asyncio.run(writer.change(lambda c: remove_leftovers(c, time.time() - LEFTOVER_S))) == 0
    assert asyncio.run(writer.change(lambda c: remove_leftovers(c, time.time() + 1))) == 3
    writer.close()
    assert LogReader(engine).get(whole.id) == whole
    engine.dispose()


def test_a_record_whose_pieces_were_taken_for_leftovers_is_refused(urls: Urls, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_late(c: Connection, piece: Piece) -> None:
        put(c, piece)
        if piece.n == 2:
            remove_leftovers(c, time.time() + 1)

    monkeypatch.setattr(writer_module, "put", put_late)
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    with pytest.raises(StoreError, match="pieces"):
        asyncio.run(writer.exchange(large()))
    asyncio.run(writer.exchange(record("the next one")))
    writer.close()
    assert LogReader(engine).count() == 1 and count_pieces(engine) == 0
    engine.dispose()


def test_an_erased_large_record_leaves_no_piece(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    gone, kept = large(), large()
    writer = LogWriter(engine)
    for exchange in (gone, kept):
        asyncio.run(writer.exchange(exchange))
    before = count_pieces(engine)
    asyncio.run(writer.change(lambda c: erase_in_log(c, [gone.id], FORGOTTEN)))
    writer.close()
    reader = LogReader(engine)
    assert 0 < count_pieces(engine) == before / 2
    stored = reader.get(gone.id)
    assert stored is not None and (stored.request, stored.response, stored.sampled) == ({}, None, None)
    assert list(reader.everything()) == [kept]
    engine.dispose()


def test_a_record_erased_while_it_is_read_is_read_as_erased(
    postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_database(postgres.database(), LOG)
    writer = LogWriter(engine)
    exchange = large()
    asyncio.run(writer.exchange(exchange))
    writer.close()

    def erased_first(c: Connection, row: Any) -> Any:
        with writing(engine, lock="reef log") as other:
            erase_in_log(other, [exchange.id], FORGOTTEN)
        return joined(c, row)

    monkeypatch.setattr(log_module, "joined", erased_first)
    stored = LogReader(engine).get(exchange.id)
    assert stored is not None and stored.request == {} and stored.train_opt_out
    engine.dispose()


def test_a_large_record_that_finds_no_room_leaves_nothing_and_is_counted(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    with engine.connect() as c:
        c.exec_driver_sql("PRAGMA max_page_count=300")
    writer = LogWriter(engine)
    with pytest.raises(StoreError, match="full"):
        asyncio.run(writer.exchange(large()))
    deadline = time.monotonic() + 20
    while writer.trouble and time.monotonic() < deadline:
        time.sleep(0.05)
    asyncio.run(writer.exchange(record("small")))
    writer.close()
    assert LogReader(engine).count() == 1 and count_pieces(engine) == 0
    (gap,) = LogReader(engine).gaps()
    assert gap["exchanges"] == 1 and "full" in gap["reason"]


def test_a_client_that_leaves_takes_no_large_record_along(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    exchange = large()

    async def run() -> None:
        task = asyncio.create_task(writer.exchange(exchange, large=True))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while LogReader(engine).count() == 0:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))
    writer.close()
    assert LogReader(engine).get(exchange.id) == exchange
    engine.dispose()


def test_a_log_from_before_there_were_pieces_is_brought_up_to_date(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = open_database(url, LOG)
    writer = LogWriter(engine)
    old = record("old")
    asyncio.run(writer.exchange(old))
    writer.close()
    engine.dispose()
    plain = create_engine(url)
    with plain.begin() as c:
        c.execute(text("drop table pieces"))
        c.execute(text("alter table exchanges drop column pieces"))
        c.execute(text("update reef_schema set version = 3"))
    plain.dispose()
    engine = open_database(url, LOG)
    writer = LogWriter(engine)
    new = large()
    asyncio.run(writer.exchange(new))
    writer.close()
    assert LogReader(engine).tail(0) == [old, new]
    engine.dispose()


def test_leftovers_are_found_without_reading_every_receipt(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cursor, sql, values, *_: asked.append((sql, values)))
    with writing(engine) as c:
        remove_leftovers(c, time.time())
        sql, values = next((sql, values) for sql, values in asked if "DELETE FROM pieces" in sql)
        explain = "EXPLAIN" if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
        plan = str(c.exec_driver_sql(f"{explain} {sql}", values).all())
    assert ("Anti Join" in plan) if engine.dialect.name == "postgresql" else ("CORRELATED" in plan)
    engine.dispose()
