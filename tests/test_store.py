"""The record log and the learn database, each test on SQLite and on PostgreSQL: durable when it says so,
in commit order, nothing dropped, nothing claimed twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text

from reef.errors import StoreError
from reef.sessions.fate import Fate
from reef.sessions.matcher import Matcher
from reef.store.columns import key
from reef.store.database import open_database
from reef.store.learn import LearnStore
from reef.store.lock import acquire_database
from reef.store.log import LogReader, LogWriter
from reef.store.migrations import LEARN, LOG
from reef.store.schema import claims, turns
from reef.store.steps import StepRow
from reef.wire.exchange import Sampled, Sampling
from reef.wire.traffic import read_traffic, traffic_line
from tests.postgres import Server
from tests.test_matcher import exchange, user

ROOT = Path(__file__).parent.parent
Urls = tuple[str, str]


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_exchange_comes_back_as_it_was_written(urls: Urls, tmp_path: Path) -> None:
    engine = open_database(urls[0], LOG)
    sampled = Sampled((1, 2), (3,), (-0.25,), (((3, -0.25), (4, -2.0)),), 7, Sampling(0.7, 0.9, 5, True))
    words = "héllo \U0001f30a \x00 \ud83d"  # NUL and half a surrogate pair
    written = exchange([user(words)], sampled=sampled, headers={"a": "b"}, error=words)
    writer = LogWriter(engine)
    asyncio.run(writer.exchange(written))
    writer.close()
    reader = LogReader(engine)
    assert reader.get(written.id) == written
    assert reader.tail(0)[0].seq == 1
    file = tmp_path / "t.jsonl"
    file.write_text(traffic_line(written) + "\n")
    assert next(iter(read_traffic(file))) == written
    engine.dispose()


def test_a_number_that_is_not_finite_loses_no_record(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    odd = exchange([user("x")])
    odd = replace(odd, request={**odd.request, "temperature": float("inf")})
    writer = LogWriter(engine)
    asyncio.run(writer.exchange(odd))
    writer.close()
    (stored,) = LogReader(engine).tail(0)
    assert stored.request["temperature"] == "inf"
    engine.dispose()


def test_many_writers_lose_nothing_and_seq_has_no_gap(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine, capacity=8)  # fuller than full: callers wait, nothing is dropped

    async def run() -> None:
        await asyncio.gather(*(writer.exchange(exchange([user(str(n))])) for n in range(500)))

    asyncio.run(run())
    writer.close()
    rows = LogReader(engine).tail(0, 1000)
    assert [r.seq for r in rows] == list(range(1, 501))
    assert len({r.id for r in rows}) == 500
    engine.dispose()


def test_one_bad_row_fails_alone(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    good, twin = exchange([user("a")]), exchange([user("b")])

    async def run() -> Sequence[bool | BaseException]:
        tasks = (writer.exchange(good), writer.exchange(good), writer.exchange(twin))
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    writer.close()
    assert [isinstance(r, StoreError) for r in results] == [False, True, False]
    assert [r.seq for r in LogReader(engine).tail(0)] == [1, 2]
    engine.dispose()


def test_a_client_that_leaves_while_its_record_is_written_stops_no_other(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)

    async def run() -> None:
        leaving = [asyncio.create_task(writer.exchange(exchange([user(str(n))]))) for n in range(20)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.wait_for(writer.exchange(exchange([user("stays")])), 20)

    asyncio.run(run())
    writer.close()
    assert LogReader(engine).count() == 21
    engine.dispose()


def test_a_record_survives_kill_9_of_its_writer(urls: Urls) -> None:
    code = f"""
import asyncio, os, signal
from reef.store.database import open_database
from reef.store.log import LogWriter
from reef.store.migrations import LOG
from tests.records import record
writer = LogWriter(open_database({urls[0]!r}, LOG))
asyncio.run(writer.exchange(record("kept")))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert python(code).wait() == -signal.SIGKILL
    assert LogReader(open_database(urls[0], LOG)).count() == 1


def test_a_reader_skips_no_row_of_several_writing_processes(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    code = f"""
import asyncio
from reef.store.database import open_database
from reef.store.log import LogWriter
from reef.store.migrations import LOG
from tests.records import record
writer = LogWriter(open_database({urls[0]!r}, LOG))
async def one(n):
    e = record(str(n))
    await writer.exchange(e)
    print(e.id)
async def run():
    for n in range(0, 150, 5):
        await asyncio.gather(*(one(n + k) for k in range(5)))
asyncio.run(run())
writer.close()
"""
    writers = [python(code) for _ in range(2)]
    reader, at, seen = LogReader(engine), 0, []
    while True:
        alive = any(w.poll() is None for w in writers)
        rows = reader.tail(at)
        seen += [row.id for row in rows]
        at = rows[-1].seq if rows else at
        if not alive and not rows:
            break
    written = [line for w in writers for line in (w.communicate()[0]).split()]
    assert len(written) == 300
    assert sorted(seen) == sorted(written)
    assert at == 300
    engine.dispose()


def test_processes_that_open_a_new_store_at_once_all_succeed(urls: Urls) -> None:
    code = f"""
from reef.store.database import open_database
from reef.store.migrations import LEARN, LOG
open_database({urls[0]!r}, LOG); open_database({urls[1]!r}, LEARN)
"""
    assert [p.wait() for p in [python(code) for _ in range(3)]] == [0, 0, 0]


def test_a_report_sent_twice_at_once_is_recorded_once(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    long = "r" * 5000  # longer than an index of PostgreSQL takes

    async def run() -> list[bool]:
        return await asyncio.gather(*(writer.report(long, ["x"], 1.0, None) for _ in range(3)))

    assert sorted(asyncio.run(run())) == [False, False, True]
    writer.close()
    (report,) = LogReader(engine).reports(0)
    assert report.id == key(long) != long
    engine.dispose()


def test_the_served_version_is_the_last_one_recorded(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    for scenario, version in (("a", 1), ("b", 5), ("a", 2), ("a", 0)):
        asyncio.run(writer.serving(scenario, version, "test"))
    writer.close()
    assert LogReader(engine).served() == {"a": 0, "b": 5}
    engine.dispose()


def test_a_store_of_a_newer_reef_is_refused(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    with engine.begin() as c:
        c.execute(text("update reef_schema set version = 99"))
    with pytest.raises(StoreError, match="newer"):
        open_database(urls[0], LOG)
    engine.dispose()


def test_a_store_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    old = create_engine(f"sqlite:///{tmp_path / 'learn.db'}")
    LEARN.steps[0](old.connect())
    with old.begin() as c:
        for statement in ("drop table claims", "drop index verdicts_charged", "drop index bindings_child"):
            c.execute(text(statement))
        c.execute(text("create table reef_schema (version integer not null)"))
        c.execute(text("insert into reef_schema values (1)"))
        step = "insert into steps values ('s', 'default', 1, 0, '[\"a\", \"b\"]', 'released', 1, '{}', '', 0, 0)"
        c.execute(text(step))
    engine = open_database(f"sqlite:///{tmp_path / 'learn.db'}", LEARN)
    with engine.connect() as c:
        assert c.execute(select(claims.c.turn, claims.c.step)).all() == [("a", "s"), ("b", "s")]
    engine.dispose()


def test_power_durability_syncs_every_commit(tmp_path: Path) -> None:
    for durability, level in (("process", 1), ("power", 2)):
        engine = open_database(f"sqlite:///{tmp_path / durability}.db", LOG, durability=durability)  # type: ignore[arg-type]
        with engine.connect() as c:
            assert c.execute(text("pragma synchronous")).scalar() == level
            assert c.execute(text("pragma journal_mode")).scalar() == "wal"


def test_power_durability_refuses_a_server_that_does_not_sync(postgres: Server) -> None:
    with pytest.raises(StoreError, match="fsync = off"):
        open_database(postgres.database(), LOG, durability="power")


def test_a_database_that_is_not_one_of_the_two_is_refused() -> None:
    with pytest.raises(StoreError, match="SQLite or PostgreSQL"):
        open_database("mysql://x/y", LOG)


def test_a_lost_connection_loses_and_doubles_nothing(postgres: Server) -> None:
    url = postgres.database()
    engine, admin = open_database(f"{url}?application_name=cut me", LOG), open_database(url, LEARN)
    writer = LogWriter(engine)
    stop = threading.Event()
    reader = LogReader(admin)

    def cut() -> None:
        others = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
        for n in range(1, 11):
            while reader.count() < 20 * n and not stop.is_set():
                time.sleep(0.002)
            with admin.connect() as c:
                c.execute(text(f"{others} and pid <> pg_backend_pid() and application_name = 'cut me'"))

    async def run() -> None:
        for n in range(60):
            await asyncio.gather(*(writer.exchange(exchange([user(f"{n} {k}")])) for k in range(5)))

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        asyncio.run(run())
    finally:
        stop.set()
        cutting.join()
    writer.close()
    assert writer.trouble is None
    assert [row.seq for row in LogReader(engine).tail(0, 1000)] == list(range(1, 301))
    engine.dispose()
    admin.dispose()


def judged(learn: LearnStore, *ids: str) -> None:
    """Turns that wait for a batch."""
    matcher = Matcher()
    with learn.begin() as c:
        for n, id in enumerate(ids, 1):
            decision = matcher.observe(replace(exchange([user(id)]), id=id))
            learn.add_turn(c, decision, seq=n, time=time.time(), scenario="default", version=0)
            learn.set_fate(c, id, Fate.JUDGED, "test", "")


def step(id: str, version: int, *turns: str) -> StepRow:
    return StepRow(id, "default", version, 0, turns, "running", 1, {})


def test_a_turn_is_claimed_by_one_step_only(urls: Urls) -> None:
    engine = open_database(urls[1], LEARN)
    learn = LearnStore(engine)
    judged(learn, "a", "b", "c")
    with learn.begin() as c:
        learn.steps.add(c, step("one", 1, "a", "b"))
    with pytest.raises(StoreError, match="wait for a batch"), learn.begin() as c:
        learn.steps.add(c, step("two", 2, "b", "c"))
    with learn.begin() as c:
        learn.steps.end(c, "one", "rejected")
    with learn.begin() as c:
        learn.steps.add(c, step("two", 2, "b", "c"))  # a rejected step has trained nothing
    with pytest.raises(StoreError, match="ended already"), learn.begin() as c:
        learn.steps.end(c, "one", "released")
    engine.dispose()


def test_a_turn_whose_fate_changed_is_not_taken_into_a_step(urls: Urls) -> None:
    engine = open_database(urls[1], LEARN)
    learn = LearnStore(engine)
    judged(learn, "a", "b")
    with learn.begin() as c:
        learn.set_fate(c, "a", Fate.OPTED_OUT, "forgotten", "")
    with pytest.raises(StoreError), learn.begin() as c:
        learn.steps.add(c, step("one", 1, "a", "b"))
    assert learn.steps.running() == []
    engine.dispose()


def test_a_tag_of_any_length_and_content_is_no_trouble(urls: Urls) -> None:
    engine = open_database(urls[1], LEARN)
    learn = LearnStore(engine)
    for n, tag in enumerate(("t" * 8000, "nul \x00", "half \ud83d"), 1):
        tagged = replace(exchange([user("x")]), id=f"id{n}", headers={"x-reef-tag-session": tag})
        with learn.begin() as c:
            learn.add_turn(c, Matcher().observe(tagged), seq=n, time=0.0, scenario="default", version=None)
    with engine.connect() as c:
        assert len(set(c.execute(select(turns.c.session)).scalars())) == 3
    engine.dispose()


def test_a_second_learner_is_refused_with_the_holders_name(urls: Urls, tmp_path: Path) -> None:
    engine, other = open_database(urls[1], LEARN), open_database(urls[1], LEARN)
    held = acquire_database(engine, "learner", tmp_path)
    with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
        acquire_database(other, "learner", tmp_path)
    held.close()
    acquire_database(other, "learner", tmp_path, wait_s=5).close()
    engine.dispose()
    other.dispose()


def test_a_reading_transaction_stops_no_writer(urls: Urls) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    asyncio.run(writer.exchange(exchange([user("before")])))
    with engine.connect() as c:
        assert len(c.execute(text("select id from exchanges")).all()) == 1  # its snapshot stays open
        started = time.monotonic()
        asyncio.run(writer.exchange(exchange([user("meanwhile")])))
        assert time.monotonic() - started < 5
    writer.close()
    assert LogReader(engine).count() == 2
    engine.dispose()


def test_exporting_and_importing_gives_the_same_log(urls: Urls, tmp_path: Path) -> None:
    engine = open_database(urls[0], LOG)
    writer = LogWriter(engine)
    sampled = Sampled((1,), (2,), (-0.5,), (((2, -0.5),),), 3, Sampling(1.0))
    for n in range(300):  # more than one page
        asyncio.run(writer.exchange(exchange([user(f"{n} \ud83d")], sampled=sampled)))
    writer.close()
    lines = [traffic_line(e) for e in LogReader(engine).everything()]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(lines))
    assert list(read_traffic(file)) == LogReader(engine).tail(0, 1000)
    assert json.loads(lines[0])["sampled"]["version"] == 3
    engine.dispose()
