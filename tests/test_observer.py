"""The observer on real SQLite files, fed by hand: what waits survives failures, backlogs and restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from reef.learner.judging import Judging
from reef.learner.turns import Turns
from reef.recipe import Report, Turn, Verdict
from reef.sessions.fate import Fate
from reef.store.forget import erase_in_learn
from reef.store.rows import append_exchanges, exchange_row
from reef.store.schema import exchanges
from reef.wire.exchange import Exchange
from tests.records import record, sampled
from tests.reports_recipe import Config
from tests.rule_recipe import RuleJudge
from tests.test_recordings import Service

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
TITLE = "Say in one line what was talked about so far. " * 60


def asked(*said: str, tools: bool = True, at: float, **changes: Any) -> Exchange:
    """A request that sends back all that was said so far; every second message is a reply."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": words} for n, words in enumerate(said)]
    request = {"model": "m", "messages": messages, **({"tools": TOOLS} if tools else {})}
    return record(said[-1], request=request, time=at, started=at, sampled=sampled(3), **changes)


def write(service: Service, rows: Sequence[Exchange]) -> None:
    with service.log_engine.begin() as c:
        append_exchanges(c, [exchange_row(row) for row in rows])


def waits_for(service: Service, at: float) -> tuple[Exchange, Exchange]:
    """A reply and the request without tools that may be a reaction to it."""
    first = asked("2+2?", at=at)
    maybe = asked("2+2?", "re: 2+2?", "and in words?", tools=False, at=at + 1)
    write(service, [first, maybe])
    service.observer.step()
    assert [row.child for row in service.learn.tentative()] == [maybe.id]
    return first, maybe


def refuse(service: Service) -> None:
    """Have the database fail as soon as a turn is queued."""
    when = "BEFORE INSERT ON fates WHEN NEW.fate = 'queued'"
    with service.learn.engine.begin() as c:
        c.execute(text(f"CREATE TRIGGER full {when} BEGIN SELECT RAISE(ABORT, 'disk full'); END"))


def allow(service: Service) -> None:
    with service.learn.engine.begin() as c:
        c.execute(text("DROP TRIGGER full"))


def test_a_waiting_reaction_outlives_a_full_disk_as_it_is_handed_on(tmp_path: Path) -> None:
    service = Service(tmp_path)
    at = time.time()
    first, maybe = waits_for(service, at)
    refuse(service)
    with pytest.raises(Exception, match="disk full"):
        service.observer.expire(at + 100)
    allow(service)
    service.observer.expire(at + 100)
    assert service.learn.fate(first.id) is Fate.QUEUED
    assert service.bindings()[first.id] == (maybe.id, "and in words?")


def test_a_waiting_reaction_outlives_a_full_disk_as_its_conversation_goes_on(tmp_path: Path) -> None:
    service = Service(tmp_path)
    at = time.time()
    first, maybe = waits_for(service, at)
    on = ("2+2?", "re: 2+2?", "and in words?", "re: and in words?", "thanks")
    write(service, [asked(*on, tools=False, at=at + 2)])
    refuse(service)
    with pytest.raises(Exception, match="disk full"):
        service.observer.step()
    allow(service)
    service.observer.step()
    assert service.learn.fate(first.id) is Fate.QUEUED
    assert service.bindings()[first.id] == (maybe.id, "and in words?")


def aside(at: float) -> list[Exchange]:
    """A reply, a side call about it, and the conversation that goes on without that call."""
    said = ("2+2?", "re: 2+2?")
    return [
        asked(said[0], at=at),
        asked(*said, TITLE, tools=False, at=at + 1),
        asked(*said, "in words", at=at + 2),
        asked(*said, "in words", "re: in words", "thanks", at=at + 3),
    ]


def test_a_backlog_is_read_to_its_end_before_a_waiting_reaction_is_handed_on(tmp_path: Path) -> None:
    service = Service(tmp_path)
    old = time.time() - 5000
    first, title, *rest = aside(old)
    others = [record(f"question {n}", time=old, started=old) for n in range(254)]
    write(service, [*others, first, title, *rest])
    while service.observer.step():
        service.observer.expire()
    assert service.bindings()[first.id] == (rest[0].id, "in words")
    assert service.turn_types()[title.id] == "side"


def test_a_reaction_that_was_taken_back_does_not_wait_again_after_a_restart(tmp_path: Path) -> None:
    service = Service(tmp_path)
    at = time.time()
    first, title, *_ = rows = aside(at)
    write(service, rows[:2])
    service.observer.step()
    assert [row.child for row in service.learn.tentative()] == [title.id]
    with service.learn.begin() as c:  # as where what goes on says nothing that could be bound instead
        service.learn.revise_turn(c, title.id, turn_type="side", binds=None)
    service.start().expire(at + 100)
    assert service.learn.fate(first.id) is Fate.OPEN
    assert service.learn.tentative() == []


def test_a_report_on_a_reply_whose_reaction_waits_is_judged_once(tmp_path: Path) -> None:
    service = Service(tmp_path)
    first, _ = waits_for(service, time.time())
    with service.learn.begin() as c:
        service.learn.add_report(c, first.id, Report("r1", 1.0, None), 1)
        service.learn.set_fate(c, first.id, Fate.QUEUED, "report", "explicit report r1")

    class Counts(RuleJudge):
        seen = 0

        async def judge(self, turn: Turn) -> Verdict | None:
            self.seen += 1
            return await super().judge(turn)

    recipe = Counts(Config())

    async def run() -> None:
        judging = Judging(service.learn, Turns(service.log, service.learn), recipe, concurrency=1)
        for _ in range(20):
            judging.step()
            await asyncio.sleep(0.02)
        await judging.close()

    asyncio.run(run())
    assert recipe.seen == 1
    assert service.learn.fate(first.id) is Fate.JUDGED


def test_a_batch_of_large_records_is_cut_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef.store.log.TAIL_BYTES", 200_000)
    service = Service(tmp_path)
    sizes = (40_000, 40_000, 40_000, 200_000, 10, 10)
    write(service, [record("x" * size) for size in sizes])
    read = []
    at = 0
    while rows := service.log.tail(at):
        at = rows[-1].seq
        read.append([row.seq for row in rows])
    assert read == [[1, 2], [3], [4], [5, 6]]
    assert [row.seq for row in service.log.tail(0, 1)] == [1]
    with service.log_engine.connect() as c:
        assert len(c.execute(select(exchanges.c.seq)).all()) == sum(map(len, read))


def test_a_forgotten_reaction_that_still_waits_is_not_written_again(tmp_path: Path) -> None:
    service = Service(tmp_path)
    at = time.time()
    first, maybe = waits_for(service, at)
    with service.learn.begin() as c:
        erase_in_learn(c, [maybe.id], "asked to")
    service.observer.forget([maybe.id])
    service.observer.expire(at + 100)
    assert all(words != "and in words?" for _, words in service.bindings().values())
    assert service.learn.fate(first.id) is not Fate.QUEUED
