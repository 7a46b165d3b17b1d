"""`policy.serve_memo`: the memo in served prompts, over a real socket, and what the record says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from reef.cli.app import build
from reef.gateway.memo import REFRESH_S, ServedMemo
from reef.learner.turns import Turns
from reef.recipe import Rule
from reef.sessions.fate import Fate
from reef.store.database import open_database
from reef.store.log import LogReader
from reef.store.migrations import LEARN, LOG, migrate
from reef.store.rows import append_exchanges, exchange_row
from reef.wire.exchange import Message
from reef.wire.memo import HEADING, told, with_memo
from reef.wire.reading import messages_of
from tests.records import record
from tests.stack import Stack, stack

RULES = ("Be brief.", "Sign as Jo.")
SAID = f"{HEADING}\n- Be brief.\n- Sign as Jo."
USER = {"role": "user", "content": "hi"}


def remember(s: Stack, *rules: str, scenario: str = "default") -> None:
    with s.learn.begin() as c:
        s.learn.memo.set(c, scenario, [Rule(rule, None, n + 1.0) for n, rule in enumerate(rules)], "test")


def until(met: Callable[[], bool]) -> None:
    last = time.monotonic() + 5 * REFRESH_S
    while not met():
        assert time.monotonic() < last
        time.sleep(0.05)


def serving_memo(tmp: Path) -> Any:
    """A gateway that starts on a store which has RULES already."""
    learn = open_database(f"sqlite:///{tmp}/data/learn.db", LEARN)
    from reef.store.memo import MemoStore

    store = MemoStore(learn)
    with learn.begin() as c:
        store.set(c, "default", [Rule(rule, None, n + 1.0) for n, rule in enumerate(RULES)], "test")
    return stack(tmp, policy__serve_memo="true")


def post(s: Stack, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer = httpx.post(f"{s.url}{path}", json={"model": "any", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "system", "content": "You help."}, USER]},
    "/v1/messages": {"system": "You help.", "messages": [USER], "max_tokens": 9},
    "/v1/responses": {"instructions": "You help.", "input": "hi"},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_the_rules_end_the_system_text_and_the_record_lists_them(tmp_path: Path, path: str, stream: bool) -> None:
    with serving_memo(tmp_path) as s:
        answer = post(s, path, {**ASKED[path], "stream": stream})
        sent = s.script.requests[-1]["messages"]
        assert [m["content"] for m in sent] == [f"You help.\n\n{SAID}", "hi"]
        assert answer.headers["x-reef-memo"] == "2"
        until(lambda: s.log.count() == 1)
        exchange = s.log.get(answer.headers["x-reef-agent-record-id"])
        assert exchange is not None
        assert exchange.memo == RULES
        assert exchange.request == {"model": "any", **ASKED[path], "stream": stream}
        assert [m.content for m in told(messages_of(exchange), exchange.memo)] == [m["content"] for m in sent]


def test_prompts_are_served_without_the_memo_unless_asked_for(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        remember(s, *RULES)
        answer = post(s, "/v1/chat/completions", {"messages": [USER]})
        assert s.script.requests[-1]["messages"] == [USER]
        assert "x-reef-memo" not in answer.headers
        exchange = s.log.get(answer.headers["x-reef-agent-record-id"])
        assert exchange is not None
        assert exchange.memo == ()


def test_text_completions_and_other_scenarios_get_no_rules(tmp_path: Path) -> None:
    with serving_memo(tmp_path) as s:
        answer = post(s, "/v1/completions", {"prompt": "hi"})
        assert "x-reef-memo" not in answer.headers
        answer = post(s, "/v1/chat/completions", {"messages": [USER]}, **{"x-reef-scenario": "other"})
        assert s.script.requests[-1]["messages"] == [USER]
        assert "x-reef-memo" not in answer.headers


def test_a_changed_memo_is_served_soon_and_a_lost_store_leaves_the_last_rules(tmp_path: Path) -> None:
    def rules(s: Stack) -> list[str]:
        post(s, "/v1/chat/completions", {"messages": [USER]})
        first = s.script.requests[-1]["messages"][0]
        return first["content"].splitlines()[1:] if first["role"] == "system" else []

    with serving_memo(tmp_path) as s:
        remember(s, "Use metric units.")
        until(lambda: rules(s) == ["- Use metric units."])
        with s.learn.engine.begin() as c:
            c.execute(text("ALTER TABLE memo_rules RENAME TO hidden"))
        time.sleep(1.5 * REFRESH_S)
        assert rules(s) == ["- Use metric units."]
        with s.learn.engine.begin() as c:
            c.execute(text("ALTER TABLE hidden RENAME TO memo_rules"))
        remember(s)
        until(lambda: rules(s) == [])


def test_a_turn_with_the_memo_is_matched_by_the_clients_own_words_and_marked_for_whoever_looks(tmp_path: Path) -> None:
    with serving_memo(tmp_path) as s:
        reply, receipt = s.ask([USER])
        s.ask([USER, {"role": "assistant", "content": reply}, {"role": "user", "content": "thanks"}])
        s.observer().step()
        assert s.learn.fate(receipt) is Fate.QUEUED
        turn = Turns(s.log, s.learn).build(receipt)
        assert turn is not None
        assert turn.messages == (Message("system", SAID), Message("user", "hi"))
        view = s.views.turn(receipt)
        assert view["memo"] == list(RULES)
        assert [m["content"] for m in view["messages"]] == ["hi"]
        shown = CliRunner().invoke(build(), ["turns", receipt, "--store", str(s.dir)], catch_exceptions=False)
        assert "served with the memo's rule: Sign as Jo." in shown.output


def test_tokens_are_counted_with_the_memo_that_will_be_served(tmp_path: Path) -> None:
    asked = {"messages": [USER], "max_tokens": 9}
    with serving_memo(tmp_path) as s:
        with_rules = post(s, "/v1/messages/count_tokens", asked).json()["input_tokens"]
        plain = post(s, "/v1/messages/count_tokens", asked, **{"x-reef-scenario": "other"}).json()["input_tokens"]
        assert with_rules > plain


def test_a_system_text_of_parts_and_a_developers_get_the_rules_too() -> None:
    parts = [{"type": "text", "text": "You help."}]
    sent = with_memo({"messages": [{"role": "developer", "content": parts}, USER]}, RULES)["messages"]
    assert sent == [{"role": "developer", "content": [*parts, {"type": "text", "text": SAID}]}, USER]
    assert with_memo({"messages": [{"role": "system", "content": ""}]}, RULES)["messages"][0]["content"] == SAID


def test_a_log_from_before_the_mark_is_migrated_and_erasing_removes_it(tmp_path: Path) -> None:
    from reef.store.forget import erase_in_log

    engine = open_database(f"sqlite:///{tmp_path}/log.db", LOG)
    with engine.begin() as c:
        c.execute(text("ALTER TABLE exchanges DROP COLUMN memo"))
        c.execute(text("UPDATE reef_schema SET version = 2"))
    migrate(engine, LOG)
    made = record("hello", memo=RULES)
    with engine.begin() as c:
        append_exchanges(c, [exchange_row(made)])
    kept = LogReader(engine).get(made.id)
    assert kept is not None
    assert kept.memo == RULES
    with engine.begin() as c:
        erase_in_log(c, [made.id], "forgotten")
    kept = LogReader(engine).get(made.id)
    assert kept is not None
    assert kept.memo == ()


def test_without_a_store_there_are_no_rules() -> None:
    from reef.gateway.dialects import ROUTES

    asked = {"messages": [USER]}
    assert ServedMemo().put(ROUTES["/v1/chat/completions"], "default", asked) == (asked, ())
