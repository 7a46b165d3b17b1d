"""What the store does when there is no room, and what it lets go: full disks, age, size, old releases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from sqlalchemy import Engine, event, select, text, update

from reef.errors import StoreError
from reef.learner.erasing import Erasing
from reef.releases.chain import FILES, content_hash
from reef.sessions.fate import Fate
from reef.sessions.matcher import Matcher
from reef.store.database import open_database
from reef.store.learn import LearnStore
from reef.store.log import LogReader, LogWriter
from reef.store.migrations import LEARN, LOG
from reef.store.retention import Limits, Pruning, Retention
from reef.store.schema import exchanges, releases
from reef.store.steps import StepRow
from reef.train.jobs import Job, work
from tests.records import record, sampled
from tests.scripted_engine import Script, scripted_app
from tests.sockets import serving
from tests.stack import stack

Urls = tuple[str, str]


def limit_pages(engine: Engine, pages: int) -> None:
    """Let the SQLite file grow no further: the same error as a full disk, for anybody."""

    @event.listens_for(engine, "connect")
    def _limit(connection: object, _record: object) -> None:
        connection.execute(f"pragma max_page_count={pages}")  # type: ignore[attr-defined]

    engine.dispose()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mounted)]).returncode != 0:
        pytest.skip("can't mount a tmpfs here")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


def test_a_full_database_refuses_and_records_the_gap_once_there_is_room(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    limit_pages(engine, 40)
    writer = LogWriter(engine)
    kept = 0

    async def until_full() -> None:
        nonlocal kept
        while kept < 100:
            await writer.exchange(record("x" * 20_000))
            kept += 1

    with pytest.raises(StoreError, match="full"):
        asyncio.run(until_full())
    assert 0 < kept < 40
    with pytest.raises(StoreError, match="refused"):
        writer.admit()
    assert LogReader(engine).count() == kept
    limit_pages(engine, 10_000)
    deadline = time.monotonic() + 20
    while writer.trouble and time.monotonic() < deadline:
        time.sleep(0.05)
    writer.admit()
    asyncio.run(writer.exchange(record("again")))
    writer.close()
    (gap,) = LogReader(engine).gaps()
    assert gap["exchanges"] == 2  # one that could not be recorded, one that was refused
    assert "full" in gap["reason"]


def test_a_full_database_lets_answers_pass_unrecorded_where_that_is_configured(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    limit_pages(engine, 40)
    writer = LogWriter(engine, when_full="serve")
    recorded = [asyncio.run(writer.exchange(record("x" * 20_000))) for _ in range(50)]
    writer.admit()
    assert recorded[0] and not recorded[-1]
    assert LogReader(engine).count() == sum(recorded)
    limit_pages(engine, 10_000)
    while writer.trouble:
        time.sleep(0.05)
    writer.close()
    assert sum(gap["exchanges"] for gap in LogReader(engine).gaps()) == recorded.count(False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_is_a_503_and_passes(small_disk: Path, stream: bool) -> None:
    def big_answer() -> None:
        answer = client.chat.completions.create(model="m", messages=big, stream=stream)  # type: ignore[call-overload]
        if stream:
            list(answer)

    with stack(small_disk) as s:
        s.script.reply = lambda body: "ok"
        ask = [{"role": "user", "content": "hello"}]
        s.ask(ask)
        ballast = fill(small_disk)
        client = s.client()
        big = [{"role": "user", "content": "x" * 100_000}]
        with pytest.raises(openai.APIError, match="record"):  # it must not look complete
            big_answer()
        before = len(s.script.requests)
        with pytest.raises(openai.InternalServerError, match="refused") as refused:
            client.chat.completions.create(model="m", messages=big)  # type: ignore[arg-type]
        assert refused.value.status_code == 503
        assert len(s.script.requests) == before  # the engine was not asked
        assert httpx.get(f"{s.url}/reef/status").json()["recording"]["ok"] is False
        ballast.unlink()
        deadline = time.monotonic() + 20
        while not httpx.get(f"{s.url}/reef/status").json()["recording"]["ok"] and time.monotonic() < deadline:
            time.sleep(0.1)
        s.ask(ask)
        assert s.log.count() == 2


class NoRoom:
    """A trainer whose disk is full for its first two tries."""

    def __init__(self, releases: Path) -> None:
        self.releases = releases
        self.tries = 0

    def run(self, job: Job) -> dict[str, str]:
        self.tries += 1
        if self.tries < 3:
            raise OSError(28, "No space left on device")
        return {"release": job.scenario}


def test_a_step_waits_while_its_release_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef.train.jobs.PAUSES_S", (0.05,))
    folder = tmp_path / "steps" / "s1"
    folder.mkdir(parents=True)
    job = {"step": "s1", "scenario": "default", "version": 1, "parent": 0, "turns": ["a"], "samples": []}
    (folder / "job.json").write_text(json.dumps(job))
    trainer = NoRoom(tmp_path / "releases")
    work(trainer, tmp_path / "steps", alive=lambda: not (folder / "result.json").exists())
    assert trainer.tries == 3
    assert json.loads((folder / "result.json").read_text()) == {"release": "default"}


class Kept:
    """A log of n turns with a text each, and what was derived from them."""

    def __init__(self, urls: Urls, n: int, fate: Fate = Fate.NEUTRAL) -> None:
        self.log, self.learn_engine = open_database(urls[0], LOG), open_database(urls[1], LEARN)
        self.learn, self.reader = LearnStore(self.learn_engine), LogReader(self.log)
        self.writer = LogWriter(self.log)
        matcher = Matcher()
        self.ids = []
        for k in range(n):
            asyncio.run(self.writer.exchange(record(f"text {k}", time=1000.0 + k, sampled=sampled(4))))
            exchange = self.reader.tail(k)[0]
            self.ids.append(exchange.id)
            with self.learn.begin() as c:
                self.learn.add_turn(
                    c, matcher.observe(exchange), seq=exchange.seq, time=1.0, scenario="default", version=0
                )
                self.learn.set_fate(c, exchange.id, fate, "test", "")

    def retain(self, limits: Limits, now: float = 0.0) -> int:
        return asyncio.run(Retention(self.log, self.learn_engine, self.writer, limits).apply(now))

    def close(self) -> None:
        self.writer.close()
        self.log.dispose()
        self.learn_engine.dispose()

    def with_words(self) -> list[str]:
        return [e.id for e in self.reader.everything()]


def test_words_older_than_the_limit_go_but_their_rows_stay(urls: Urls) -> None:
    kept = Kept(urls, 10)
    assert kept.retain(Limits(days=1), now=86400 + 1004.5) == 5
    assert kept.with_words() == kept.ids[5:]
    assert kept.reader.count() == 10
    old = kept.reader.get(kept.ids[0])
    assert old is not None and (old.request, old.response, old.sampled) == ({}, None, None)
    assert kept.retain(Limits(days=1), now=86400 + 1004.5) == 0
    kept.close()


def test_the_oldest_words_go_until_the_size_fits(urls: Urls) -> None:
    kept = Kept(urls, 10)
    whole = Retention(kept.log, kept.learn_engine, kept.writer, Limits()).size()
    assert kept.retain(Limits(bytes=whole * 3 // 4)) in (2, 3)
    assert Retention(kept.log, kept.learn_engine, kept.writer, Limits()).size() <= whole * 3 // 4
    assert kept.with_words() == kept.ids[-len(kept.with_words()) :]
    kept.close()


def test_a_turn_that_waits_keeps_its_words_however_old(urls: Urls) -> None:
    kept = Kept(urls, 4, Fate.JUDGED)
    with kept.learn.begin() as c:
        kept.learn.set_fate(c, kept.ids[0], Fate.NEUTRAL, "test", "")
        kept.learn.steps.add(c, StepRow("s", "default", 1, 0, (kept.ids[1],), "running", 1, {}))
        kept.learn.set_fate(c, kept.ids[1], Fate.NEUTRAL, "test", "")  # whatever its fate: it is being trained
    assert kept.retain(Limits(days=1), now=10**9) == 1
    assert kept.with_words() == kept.ids[1:]
    kept.close()


def test_the_learner_follows_what_was_removed(urls: Urls, tmp_path: Path) -> None:
    kept = Kept(urls, 3)
    with kept.learn.begin() as c:
        kept.learn.bind(c, kept.ids[0], kept.ids[1], "user", "the reaction", 1.0)
    kept.retain(Limits(days=1), now=10**9)
    assert Erasing(kept.reader, kept.learn, kept.learn_engine, tmp_path).step() == 1
    binding = kept.learn.binding(kept.ids[0])
    assert binding is not None and binding.next_state == ""
    assert Erasing(kept.reader, kept.learn, kept.learn_engine, tmp_path).step() == 0  # its cursor is durable
    kept.close()


def test_old_releases_go_but_those_in_use(urls: Urls, tmp_path: Path) -> None:
    log, engine = open_database(urls[0], LOG), open_database(urls[1], LEARN)
    writer, learn = LogWriter(log), LearnStore(engine)
    for version in range(1, 11):
        folder = tmp_path / "default" / f"v{version:06d}"
        folder.mkdir(parents=True)
        with learn.begin() as c:
            values = {"scenario": "default", "version": version, "parent": version - 1, "path": str(folder)}
            values |= {"hash": "", "turns": [], "metrics": {}, "gate": {}, "status": "released"}
            learn.steps.add_release(c, {**values, "step": str(version)})
            if version != 4:
                learn.steps.published(c, "default", version)
    with learn.begin() as c:
        c.execute(update(releases).where(releases.c.version == 3).values(status="held"))
        learn.set_fate(c, "t", Fate.JUDGED, "test", "")
    asyncio.run(writer.serving("default", 2, "operator"))
    writer.close()
    gone = Pruning(tmp_path, engine, LogReader(log), keep=3).apply()
    assert gone == [f"default@{v}" for v in (1, 3, 5, 6, 7)]
    assert sorted(f.name for f in (tmp_path / "default").iterdir()) == [f"v{v:06d}" for v in (2, 4, 8, 9, 10)]
    with engine.connect() as c:
        assert c.execute(select(releases.c.status).where(releases.c.version == 1)).scalar() == "pruned"
    assert Pruning(tmp_path, engine, LogReader(log), keep=3).apply() == []
    log.dispose()
    engine.dispose()


def test_rejected_candidates_and_half_pruned_folders_take_no_rollback_target_along(tmp_path: Path) -> None:
    log, engine = (open_database(f"sqlite:///{tmp_path / name}", of) for name, of in (("l.db", LOG), ("d.db", LEARN)))
    learn, good = LearnStore(engine), (1, 2, 3, 4)
    for version in range(1, 10):
        folder = tmp_path / "default" / f"v{version:06d}"
        folder.mkdir(parents=True)
        values = {"scenario": "default", "version": version, "parent": version - 1, "turns": [], "metrics": {}}
        status = "candidate" if version in good else "rejected"
        (folder / "release.json").write_text(json.dumps({**values, "gate": {}, "content_hash": "0", "status": status}))
        values |= {"gate": {}, "hash": "", "path": str(folder), "step": str(version), "published": 1.0}
        status = "pruned" if version == 1 else "released" if version in good else "rejected"  # killed as 1 was removed
        with learn.begin() as c:
            learn.steps.add_release(c, {**values, "status": status})
    assert Pruning(tmp_path, engine, LogReader(log), keep=3).apply() == ["default@1", "default@5", "default@6"]
    assert sorted(f.name for f in (tmp_path / "default").iterdir()) == [f"v{v:06d}" for v in (2, 3, 4, 7, 8, 9)]
    log.dispose()
    engine.dispose()


def test_fifty_clients_and_a_dashboard_on_sqlite_lose_nothing(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        observer = s.observer()

        async def client(n: int, http: httpx.AsyncClient) -> list[str]:
            out = []
            for k in range(4):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{n} {k}"}]}
                answer = await http.post(f"{s.url}/v1/chat/completions", json=body)
                answer.raise_for_status()
                out.append(answer.headers["x-reef-agent-record-id"])
            return out

        looks = 0

        async def dashboard(done: asyncio.Event) -> None:
            nonlocal looks
            while not done.is_set():
                await asyncio.to_thread(observer.step)  # the learner writes meanwhile
                await asyncio.to_thread(lambda: (s.views.status(), s.views.sessions(), s.views.releases()))
                looks += 1

        async def run() -> list[str]:
            done = asyncio.Event()
            looking = asyncio.create_task(dashboard(done))
            async with httpx.AsyncClient(timeout=120) as http:
                answered = await asyncio.gather(*(client(n, http) for n in range(50)))
            done.set()
            await looking
            return [id for ids in answered for id in ids]

        answered = asyncio.run(run())
        with open_database(f"sqlite:///{s.dir / 'log.db'}", LOG).connect() as c:
            recorded = set(c.execute(select(exchanges.c.id)).scalars())
            assert c.execute(text("pragma integrity_check")).scalar() == "ok"
        assert set(answered) == recorded
        assert len(answered) == 200
        assert looks > 1


def test_fifty_writers_with_connections_of_their_own_wait_for_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    open_database(url, LOG)
    writers = [LogWriter(open_database(url, LOG)) for _ in range(50)]

    async def one(writer: LogWriter, n: int) -> None:
        for k in range(4):
            await writer.exchange(record(f"{n} {k}"))

    async def run() -> None:
        await asyncio.gather(*(one(writer, n) for n, writer in enumerate(writers)))

    asyncio.run(run())
    for writer in writers:
        writer.close()
    assert [e.seq for e in LogReader(open_database(url, LOG)).tail(0, 1000)] == list(range(1, 201))


def test_a_stack_on_a_shared_log_follows_a_switch_made_by_another_gateway(urls: Urls, tmp_path: Path) -> None:
    if urls[0].startswith("sqlite"):
        pytest.skip("several gateways share a PostgreSQL log")
    from reef.config import load_config
    from reef.gateway.__main__ import gateway_app

    with serving(scripted_app(Script())) as engine:
        pairs = [("store.dir", str(tmp_path)), ("engine.kind", "vllm"), ("engine.url", engine)]
        config = load_config(None, [*pairs, ("store.log", urls[0]), ("store.learn", urls[1])], {})
        folder = tmp_path / "releases" / "default" / "v000001"
        folder.mkdir(parents=True)
        for name in FILES["lora"]:
            (folder / name).write_text("{}")
        about = {"scenario": "default", "version": 1, "parent": 0, "turns": [], "content_hash": content_hash(folder)}
        (folder / "release.json").write_text(json.dumps({**about, "metrics": {}, "gate": {}, "status": "candidate"}))
        with serving(gateway_app(config)) as one, serving(gateway_app(config)) as two:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert httpx.post(f"{two}/v1/chat/completions", json=body).headers["x-reef-version"] == "0"
            httpx.post(f"{one}/reef/releases/1/serve").raise_for_status()
            deadline = time.monotonic() + 20
            version = "0"
            while version == "0" and time.monotonic() < deadline:
                version = httpx.post(f"{two}/v1/chat/completions", json=body).headers["x-reef-version"]
            assert version == "1"
        log = open_database(urls[0], LOG)
        rows = LogReader(log).tail(0, 10_000)
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        log.dispose()
