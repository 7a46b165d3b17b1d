"""The record log on a real SQLite file: durable when it says so, in commit order, nothing dropped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import text

from reef.errors import StoreError
from reef.store.database import open_database
from reef.store.log import LogReader, LogWriter
from reef.store.migrations import LOG
from reef.wire.exchange import Sampled, Sampling
from reef.wire.traffic import read_traffic, traffic_line
from tests.test_matcher import exchange, user


def url(tmp: Path) -> str:
    return f"sqlite:///{tmp / 'log.db'}"


def test_an_exchange_comes_back_as_it_was_written(tmp_path: Path) -> None:
    engine = open_database(url(tmp_path), LOG)
    sampled = Sampled((1, 2), (3,), (-0.25,), (((3, -0.25), (4, -2.0)),), 7, Sampling(0.7, 0.9, 5, True))
    written = exchange([user("héllo \U0001f30a\x00")], sampled=sampled, headers={"a": "b"}, error="e")
    writer = LogWriter(engine)
    asyncio.run(writer.exchange(written))
    writer.close()
    reader = LogReader(engine)
    assert reader.get(written.id) == written
    assert reader.tail(0)[0].seq == 1
    file = tmp_path / "t.jsonl"
    file.write_text(traffic_line(written) + "\n")
    assert next(iter(read_traffic(file))) == written


def test_many_writers_lose_nothing_and_seq_has_no_gap(tmp_path: Path) -> None:
    engine = open_database(url(tmp_path), LOG)
    writer = LogWriter(engine, capacity=8)  # fuller than full: callers wait, nothing is dropped

    async def run() -> None:
        await asyncio.gather(*(writer.exchange(exchange([user(str(n))])) for n in range(500)))

    asyncio.run(run())
    writer.close()
    rows = LogReader(engine).tail(0, 1000)
    assert [r.seq for r in rows] == list(range(1, 501))
    assert len({r.id for r in rows}) == 500


def test_one_bad_row_fails_alone(tmp_path: Path) -> None:
    engine = open_database(url(tmp_path), LOG)
    writer = LogWriter(engine)
    good, twin = exchange([user("a")]), exchange([user("b")])

    async def run() -> Sequence[BaseException | None]:
        return await asyncio.gather(
            writer.exchange(good), writer.exchange(good), writer.exchange(twin), return_exceptions=True
        )

    results = asyncio.run(run())
    writer.close()
    assert [isinstance(r, StoreError) for r in results] == [False, True, False]
    assert LogReader(engine).count() == 2


def test_a_record_survives_kill_9_of_its_writer(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, signal
from reef.store.database import open_database
from reef.store.log import LogWriter
from reef.store.migrations import LOG
from tests.test_matcher import exchange, user
writer = LogWriter(open_database({url(tmp_path)!r}, LOG))
asyncio.run(writer.exchange(exchange([user("kept")])))
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == -signal.SIGKILL
    assert LogReader(open_database(url(tmp_path), LOG)).count() == 1


def test_the_served_version_is_the_last_one_recorded(tmp_path: Path) -> None:
    engine = open_database(url(tmp_path), LOG)
    writer = LogWriter(engine)
    for scenario, version in (("a", 1), ("b", 5), ("a", 2), ("a", 0)):
        asyncio.run(writer.serving(scenario, version, "test"))
    writer.close()
    assert LogReader(engine).served() == {"a": 0, "b": 5}


def test_a_store_of_a_newer_reef_is_refused(tmp_path: Path) -> None:
    engine = open_database(url(tmp_path), LOG)
    with engine.begin() as c:
        c.execute(text("update reef_schema set version = 99"))
    with pytest.raises(StoreError, match="newer"):
        open_database(url(tmp_path), LOG)


def test_power_durability_syncs_every_commit(tmp_path: Path) -> None:
    for durability, level in (("process", 1), ("power", 2)):
        engine = open_database(f"sqlite:///{tmp_path / durability}.db", LOG, durability=durability)  # type: ignore[arg-type]
        with engine.connect() as c:
            assert c.execute(text("pragma synchronous")).scalar() == level
            assert c.execute(text("pragma journal_mode")).scalar() == "wal"
