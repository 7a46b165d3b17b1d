"""Matching by tag and by transcript prefix; properties that hold for any traffic."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from reef.sessions.digest import join
from reef.sessions.fate import Fate
from reef.sessions.matcher import Decision, Matcher
from reef.sessions.replay import replay
from reef.sessions.transcript import atoms_of
from reef.wire.exchange import Api, Delivered, Exchange, Message
from reef.wire.traffic import read_traffic

_ids = itertools.count()


def exchange(messages: list[dict[str, Any]], reply: str | None = "ok", **changes: Any) -> Exchange:
    headers = changes.pop("headers", {})
    response = {"choices": [{"message": {"role": "assistant", "content": reply}}]} if reply is not None else None
    made = Exchange(
        id=f"e{next(_ids):06d}",
        time=1.0,
        started=0.5,
        api=Api.CHAT,
        scenario="default",
        client=None,
        headers=headers,
        request={"messages": messages},
        response=response,
        status=200,
        delivered=Delivered.FULL,
        sampled=None,
    )
    return replace(made, **changes)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_resent_history_binds_its_last_reply() -> None:
    matcher = Matcher()
    first = exchange([user("a")], "A")
    second = exchange([{"role": "system", "content": "now 12:01"}, user("a"), assistant(" A \n"), user("b")], "B")
    matcher.observe(first)
    decision = matcher.observe(second)
    assert (decision.binds, decision.method, decision.session) == (first.id, "prefix", first.id)
    assert decision.next_state is not None and decision.next_state.text == "b"


def test_parallel_tool_results_are_one_next_state_and_a_user_message_weighs_most() -> None:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}} for i in "xy"]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    first = exchange([user("a")])
    first = replace(first, response={"choices": [{"message": asked}]})
    rewritten = [{**c, "function": {"name": "f", "arguments": '{"a":2,"b":1}'}} for c in calls]
    results = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in "xy"]
    history = [user("a"), {"role": "assistant", "content": "", "tool_calls": rewritten}, *results]
    matcher = Matcher()
    matcher.observe(first)
    decision = matcher.observe(exchange(history))
    assert decision.binds == first.id
    assert decision.next_state is not None
    assert (decision.next_state.role, decision.next_state.text) == ("tool", "result x\n\nresult y")
    matcher = Matcher()
    matcher.observe(first)
    decision = matcher.observe(exchange([*history, user("stop")]))
    assert decision.next_state is not None and decision.next_state.text == "stop"


def test_arrival_order_decides_under_a_tag_only_where_the_transcript_cannot() -> None:
    tag = {"x-reef-tag-session": "s1"}
    matcher = Matcher()
    first = exchange([user("a")], "A", headers=tag)
    second = exchange([user("b")], "B", headers=tag)
    assert matcher.observe(first).binds is None
    decision = matcher.observe(second)
    assert (decision.binds, decision.method, decision.session) == (first.id, "tag", "tag:s1")
    decision = matcher.observe(exchange([user("b"), assistant("B"), user("c")], "C", headers=tag))
    assert (decision.binds, decision.method) == (second.id, "prefix")


def test_identical_openers_of_two_people_stay_apart_and_are_quarantined() -> None:
    matcher = Matcher()
    one, two = exchange([user("hi")], "hello"), exchange([user("hi")], "hello")
    assert matcher.observe(one).session != matcher.observe(two).session
    decision = matcher.observe(exchange([user("hi"), assistant("hello"), user("bye")]))
    assert decision.binds is None
    assert {r.id: r.fate for r in decision.revisions} == {one.id: Fate.AMBIGUOUS, two.id: Fate.AMBIGUOUS}
    matcher = Matcher()
    one, two = replace(one, client="ann"), replace(two, client="bob")
    matcher.observe(one)
    matcher.observe(two)
    decision = matcher.observe(exchange([user("hi"), assistant("hello"), user("bye")], client="bob"))
    assert decision.binds == two.id


def test_a_regenerated_reply_credits_the_one_that_is_continued() -> None:
    matcher = Matcher()
    first = exchange([user("a")], "A")
    history = [user("a"), assistant("A"), user("b")]
    one, two = exchange(history, "B1"), exchange(history, "B2")
    assert matcher.observe(first).binds is None
    assert matcher.observe(one).binds == first.id
    again = matcher.observe(two)
    assert (again.binds, again.method, again.repeats) == (first.id, "regenerate", True)  # not judged twice
    following = matcher.observe(exchange([*history, assistant("B2"), user("c")]))
    assert following.binds == two.id
    assert [(r.id, r.fate) for r in following.revisions] == [(one.id, Fate.RETRY_SUPERSEDED)]


def test_an_edited_message_is_a_branch_and_no_verdict() -> None:
    matcher = Matcher()
    first = exchange([user("a")], "A")
    matcher.observe(first)
    matcher.observe(exchange([user("a"), assistant("A"), user("b")], "B"))
    decision = matcher.observe(exchange([user("a"), assistant("A"), user("edited")], "B2"))
    assert (decision.binds, decision.method, decision.session) == (None, "branch", first.id)


def calling(name: str, **arguments: str) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def served(messages: list[dict[str, Any]], reply: dict[str, Any], **changes: Any) -> Exchange:
    return exchange(messages, response={"choices": [{"message": reply}]}, **changes)


def test_words_the_agent_put_into_a_tool_call_can_be_asked_again() -> None:
    asks, call = "who won the 2024 tour de france", calling("search", query="who won the 2024 tour de france")
    result = {"role": "tool", "tool_call_id": "c1", "content": "Pogacar"}
    matcher = Matcher()
    matcher.observe(served([user(asks)], call))
    matcher.observe(exchange([user(asks), call, result], "Tadej Pogacar."))
    again = exchange([user(asks)], "Pogacar did.")
    assert matcher.observe(again).turn_type == "main"
    decision = matcher.observe(exchange([user(asks), assistant("Pogacar did."), user("and in 2023?")], "Vingegaard."))
    assert (decision.turn_type, decision.binds) == ("main", again.id)


def test_an_opener_that_holds_the_beginning_of_a_written_file_is_a_turn() -> None:
    text = "import os, sys, json and then some more lines of it"
    matcher = Matcher()
    matcher.observe(served([user("write a.py")], calling("write", content=text)))
    pasted = exchange([user(f"what is wrong with this? {text}")], "Nothing is.")
    assert matcher.observe(pasted).turn_type == "main"


def test_a_supposed_sub_agent_to_whom_a_user_talks_on_is_a_turn() -> None:
    text = "import os, sys, json and then some more lines of it"
    matcher = Matcher()
    matcher.observe(served([user("write a.py")], calling("write", content=text)))
    pasted = exchange([user(text)], "What about this file?")
    assert matcher.observe(pasted).turn_type == "side"
    following = [user(text), assistant("What about this file?"), user("is it right?")]
    decision = matcher.observe(exchange(following, "It is."))
    assert (decision.turn_type, decision.binds) == ("main", pasted.id)


def test_stateless_calls_of_one_harness_session_do_not_react_to_each_other() -> None:
    check = {"role": "system", "content": "Your task is to process Bash commands that an agent wants to run."}
    session = {"x-claude-code-session-id": "5f0c"}
    matcher = Matcher()
    matcher.observe(exchange([check, user("Command: git status")], "git status", headers=session))
    decision = matcher.observe(exchange([check, user("Command: npm test")], "npm test", headers=session))
    assert (decision.binds, decision.session) == (None, "x-claude-code-session-id:5f0c")


def test_a_prompt_to_provide_a_title_is_a_side_call() -> None:
    asks = "Provide a concise, 5-word-or-less title for the conversation"
    decision = Matcher().observe(exchange([user(asks)], "Git status"))
    assert decision.turn_type == "side"


def test_words_beside_the_note_of_an_interruption_are_the_users() -> None:
    first = exchange([user("run the tests")], "I run unittest.")
    blocks = [{"type": "text", "text": t} for t in ("[Request interrupted by user]", "no, use pytest")]
    history = [user("run the tests"), assistant("I run unittest."), {"role": "user", "content": blocks}]
    matcher = Matcher()
    matcher.observe(first)
    decision = matcher.observe(exchange(history, "I run pytest."))
    assert decision.binds == first.id
    assert decision.next_state is not None
    assert (decision.next_state.role, decision.next_state.text) == ("user", "no, use pytest")


def said(message: Message) -> bytes:
    return join(a.digest for a in atoms_of([message]))


def test_what_clients_rewrite_does_not_change_a_digest_and_the_rest_does() -> None:
    call = (("f", '{"b": 1, "a": [2]}'),)
    assert said(Message("assistant", "a  b\n", call)) == said(Message("assistant", "a b", (("f", '{"a":[2],"b":1}'),)))
    assert said(Message("user", "a")) != said(Message("assistant", "a"))
    assert said(Message("user", "a b")) != said(Message("user", "ab"))


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda t: t.strip() != "")
talks = st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


def traffic(label: str, turns: list[tuple[str, str]]) -> list[Exchange]:
    """A conversation with distinct texts that resends its history."""
    history: list[dict[str, Any]] = []
    out = []
    for n, (said, answered) in enumerate(turns):
        history = [*history, user(f"{label} {n} {said}")]
        out.append(exchange(history, f"{label} {n} {answered}"))
        history = [*history, assistant(f"{label} {n} {answered}")]
    return out


def decide(exchanges: list[Exchange]) -> dict[str, Decision]:
    matcher = Matcher()
    return {e.id: matcher.observe(e) for e in exchanges}


@given(talks)
@settings(max_examples=60, deadline=None)
def test_a_growing_history_always_binds(turns: list[tuple[str, str]]) -> None:
    exchanges = traffic("t", turns)
    decisions = decide(exchanges)
    assert [decisions[e.id].binds for e in exchanges] == [None, *(e.id for e in exchanges[:-1])]


@given(st.lists(talks, min_size=2, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_unrelated_sessions_may_interleave_in_any_order(all_turns: list[Any], random: Any) -> None:
    queues = [traffic(f"session{i}", turns) for i, turns in enumerate(all_turns)]
    apart = {id: d for q in queues for id, d in decide(q).items()}
    mixed: list[Exchange] = []
    while any(queues):
        mixed.append(random.choice([q for q in queues if q]).pop(0))
    together = decide(mixed)
    assert together == apart
    bound = [d.binds for d in together.values() if d.binds]
    assert len(bound) == len(set(bound))
    assert all(d.binds != d.id for d in together.values())


def test_match_prints_the_documented_fields(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    line = {"id": "1", "time": 1, "api": "chat", "client": None, "headers": {}, "status": 200}
    request = {"messages": [user("a")]}
    response = {"choices": [{"message": {"role": "assistant", "content": "A"}}]}
    following = {"messages": [user("a"), assistant("A"), user("b")]}
    rows = [
        {**line, "request": request, "response": response},
        {**line, "id": "2", "request": following, "response": response},
    ]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    first, second = replay(read_traffic(file))
    assert list(first) == [
        "id", "session", "fate", "turn_type", "binds", "next_state", "next_state_role", "method", "score", "reason",
    ]  # fmt: skip
    assert (first["fate"], second["fate"], second["binds"], second["next_state"]) == (
        "queued",
        "no_next_state",
        "1",
        "b",
    )
