"""What holds of the matcher whatever the traffic looks like."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from reef.sessions.index import Index, Node
from reef.sessions.matcher import Decision, Matcher, scope_of
from reef.sessions.reader import transcript
from reef.sessions.replay import replay
from reef.wire.exchange import Api, Delivered, Exchange

quick = settings(max_examples=40, deadline=None)
SYSTEM = {"role": "system", "content": "You are helpful."}
WORDS = st.text("abcdefghij klmnoprstuvwäé漢", min_size=1, max_size=40).filter(lambda t: t.strip() != "")
TURN = st.fixed_dictionaries(
    {"said": WORDS, "answer": WORDS, "calls": st.integers(0, 2), "retry": st.sampled_from(["", "failed", "again"])}
)
TALK = st.lists(TURN, min_size=1, max_size=6)
CLIENTS = st.sampled_from(["plain", "parts", "clock", "stripped", "reserialised", "reasoning", "window", "wrapped"])
STREAM = st.tuples(st.lists(st.tuples(CLIENTS, TALK), min_size=1, max_size=4), st.randoms(use_true_random=False))


def record(id: str, at: float, messages: Sequence[Any], reply: dict[str, Any] | None, status: int = 200) -> Exchange:
    response = {"choices": [{"message": reply}]} if reply else None
    request = {"messages": list(messages), "tools": [{"type": "function", "function": {"name": "look"}}]}
    fixed = {"api": Api.CHAT, "scenario": "default", "client": "c", "headers": {}, "sampled": None}
    delivered = Delivered.FULL
    return Exchange(id, at, at - 1, request=request, response=response, status=status, delivered=delivered, **fixed)


def wire(client: str, history: Sequence[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The history as a kind of client would send it."""
    last = len(history) - 1
    out = [SYSTEM, *history]
    if client == "parts":
        out = [{**m, "content": [{"type": "text", "text": m["content"]}]} if m["role"] == "user" else m for m in out]
    elif client == "clock":
        out[0] = {"role": "system", "content": f"You are helpful. It is 12:{n:02d}."}
    elif client == "stripped":
        out = [{**m, "content": m["content"].strip()} for m in out]
    elif client == "reserialised":
        out = [_reserialised(m) for m in out]
    elif client == "reasoning":
        out = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in out]
    elif client == "window":
        out = [SYSTEM, *history[-5:]]
    elif client == "wrapped" and history[last]["role"] == "user":
        context = f"<environment_context>file {n}.py</environment_context>\n\n"
        out = [*out[:-1], {"role": "user", "content": f"{context}{history[last]['content']}"}]
    return out


def _reserialised(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [{**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]))} for c in calls]
    return {**message, "tool_calls": [{**c, "function": f} for c, f in zip(calls, functions, strict=True)]}


def conversation(label: str, client: str, turns: Sequence[dict[str, Any]]) -> tuple[list[Exchange], dict[str, Any]]:
    """Its exchanges, and for each the exchange whose reply it reacts to; every text is its own."""
    history: list[dict[str, Any]] = []
    out: list[Exchange] = []
    parents: dict[str, str | None] = {}
    parent: str | None = None

    def ask(reply: dict[str, Any] | None, status: int = 200) -> str:
        id = f"{label}.{len(out)}"
        out.append(record(id, 10.0 * len(out), wire(client, history, len(out)), reply, status))
        parents[id] = parent
        return id

    for n, turn in enumerate(turns):
        history.append({"role": "user", "content": f"{label} asks {n}: {turn['said']}"})
        if turn["retry"] == "failed":
            ask(None, 500)
        for k in range(turn["calls"]):
            arguments = json.dumps({"z": f"{label}/{n}/{k}", "a": k}, separators=(", ", " : "))
            call = {"id": f"call_{n}_{k}", "type": "function", "function": {"name": "look", "arguments": arguments}}
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            parent = ask(reply)
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"{label} result {n} {k}"}
            history += [reply, result]
        thought = f"<think>{label} thinks {n}</think>\n" if client == "reasoning" else ""
        reply = {"role": "assistant", "content": f"{thought}\n{label} answers {n}: {turn['answer']}  "}
        if turn["retry"] == "again" and parent is not None:
            ask({"role": "assistant", "content": f"{label} first answers {n}"})
        parent = ask(reply)
        history.append(reply)
    return out, parents


def mixed(talks: Sequence[Sequence[Exchange]], draw: random.Random) -> list[Exchange]:
    queues = [list(talk) for talk in talks]
    out = []
    while any(queues):
        out.append(draw.choice([q for q in queues if q]).pop(0))
    return out


def streams(drawn: Any) -> tuple[list[list[Exchange]], list[Exchange], dict[str, Any]]:
    kinds, draw = drawn
    made = [conversation(f"{client}{n}", client, turns) for n, (client, turns) in enumerate(kinds)]
    talks = [talk for talk, _ in made]
    return talks, mixed(talks, draw), {id: p for _, parents in made for id, p in parents.items()}


def decide(exchanges: Sequence[Exchange], index: Index | None = None) -> list[Decision]:
    matcher = Matcher(index)
    return [matcher.observe(e) for e in exchanges]


@given(STREAM)
@quick
def test_every_reaction_finds_its_reply_in_any_mixture_of_clients(drawn: Any) -> None:
    _, stream, parents = streams(drawn)
    assert {line["id"]: line["binds"] for line in replay(stream)} == parents


@given(STREAM)
@quick
def test_the_arrival_of_other_conversations_changes_nothing(drawn: Any) -> None:
    talks, stream, _ = streams(drawn)
    alone = {d.id: d for talk in talks for d in decide(talk)}
    assert {d.id: d for d in decide(stream)} == alone


@given(STREAM)
@quick
def test_the_same_log_gives_the_same_decisions(drawn: Any) -> None:
    _, stream, _ = streams(drawn)
    assert decide(stream) == decide(stream)


@given(STREAM)
@quick
def test_no_reply_is_judged_twice_and_no_request_binds_itself_or_the_future(drawn: Any) -> None:
    _, stream, _ = streams(drawn)
    assert_sound(decide(stream))


def assert_sound(decisions: Sequence[Decision]) -> None:
    """Of all bindings that were made and not taken back, no two are of one reply; each is of an earlier one."""
    reaction: dict[str, str] = {}
    seen: set[str] = set()
    for decision in decisions:
        for revision in decision.revisions:
            if not revision.rebound:
                continue
            reaction = {reply: child for reply, child in reaction.items() if child != revision.id}
            if revision.binds:
                assert revision.binds in seen
                assert reaction.setdefault(revision.binds, revision.id) == revision.id
        if decision.binds and not decision.repeats:
            assert decision.binds in seen
            assert reaction.setdefault(decision.binds, decision.id) == decision.id
        seen.add(decision.id)


# conversations of few words, where many look alike


ALIKE = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.sampled_from("xy")), min_size=2, max_size=14)


def alike(steps: Sequence[tuple[int, str, str]]) -> list[Exchange]:
    """Four people with hardly any words: each step one says something and is answered."""
    histories: dict[int, list[dict[str, str]]] = {}
    out = []
    for n, (who, said, answer) in enumerate(steps):
        history = histories.setdefault(who, [])
        history.append({"role": "user", "content": said})
        out.append(record(f"{who}.{n}", 10.0 * n, history, {"role": "assistant", "content": answer}))
        history.append({"role": "assistant", "content": answer})
    return out


@given(ALIKE)
@quick
def test_conversations_of_few_words_are_sound_and_repeatable(steps: Any) -> None:
    stream = alike(steps)
    decisions = decide(stream)
    assert_sound(decisions)
    assert decisions == decide(stream)


@given(ALIKE)
@quick
def test_a_conversation_is_never_taken_for_one_with_other_words(steps: Any) -> None:
    stream = alike(steps)
    asked = {e.id: [(m["role"], m["content"]) for m in e.request["messages"]] for e in stream}
    answered = {e.id: e.response["choices"][0]["message"]["content"] for e in stream if e.response}
    for decision in decide(stream):
        if decision.binds:
            whole = [*asked[decision.binds], ("assistant", answered[decision.binds])]
            assert asked[decision.id][: len(whole)] == whole


# histories that were read before


class Forgetful(Index):
    """An index that recognises no history, so that every request is read whole."""

    def sent(self, messages: int) -> Node | None:
        return None


@given(STREAM)
@quick
def test_a_history_left_unread_changes_no_decision(drawn: Any) -> None:
    _, stream, _ = streams(drawn)
    assert decide(stream) == decide(stream, Forgetful())


@given(ALIKE)
@quick
def test_a_history_left_unread_changes_no_decision_where_many_look_alike(steps: Any) -> None:
    stream = alike(steps)
    assert decide(stream) == decide(stream, Forgetful())


def test_of_a_long_history_only_the_end_is_read() -> None:
    turns = [{"said": "word", "answer": "word", "calls": calls, "retry": ""} for calls in (0, 4, 0, 2, 0, 0)]
    stream, _ = conversation("a", "plain", turns)
    index = Index()
    read = []
    matcher = Matcher(index)
    for exchange in stream:
        read.append(len(transcript(exchange, index, scope_of("c", "default")).atoms))
        matcher.observe(exchange)
    assert len(stream[-1].request["messages"]) == 24
    assert read[-2:] == [7, 3], "the reply with what it answers, and what is new"


def test_a_message_in_another_place_is_another_history() -> None:
    said = [{"role": "user", "content": "go on 9 assistant"}, {"role": "assistant", "content": "I go on, far and wide"}]
    merged = [{"role": "user", "content": "go on 9 assistantassistant 21 I go on, far and wide"}]
    index = Index()
    decide([record("a", 1.0, said[:1], said[1]), record("b", 2.0, merged, said[1])], index)
    nodes = [index.get("a"), index.get("b")]
    assert len({node.sent for node in nodes if node}) == 2


def test_what_holds_in_one_process_only_is_not_stored() -> None:
    index = Index()
    decide([record("a", 1.0, [{"role": "user", "content": "go on"}], {"role": "assistant", "content": "I do"})], index)
    node = index.get("a")
    assert node and node.sent is not None
    row = node.to_json()
    assert "sent" not in row
    assert Node.from_json(row) == Node.from_json({**row, "sent": "00ff"}) == replace(node, sent=None), "an older row"


# memory


class Shelf:
    """An archive in a dict: nodes as their JSON, ids by key in the order of their seq."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.ids: dict[bytes, dict[str, int]] = {}

    def save(self, index: Index) -> None:
        for node in index.touched.values():
            self.nodes[node.id] = json.dumps(node.to_json())
            for key in node.keys:
                self.ids.setdefault(key, {})[node.id] = node.seq
        index.touched.clear()

    def load(self, id: str) -> Node | None:
        return Node.from_json(json.loads(self.nodes[id])) if id in self.nodes else None

    def find(self, keys: Sequence[bytes]) -> Sequence[str]:
        found = {id: seq for key in keys for id, seq in self.ids.get(key, {}).items()}
        newest = sorted(found, key=lambda id: found[id])
        return newest[-8:] if len(keys) == 1 else newest


def with_little_memory(stream: Sequence[Exchange], capacity: int, batch: int) -> list[Decision]:
    shelf = Shelf()
    index = Index(shelf, capacity=capacity)
    matcher = Matcher(index)
    out = []
    for n, exchange in enumerate(stream, 1):
        out.append(matcher.observe(exchange))
        if n % batch == 0:
            shelf.save(index)
            index.trim()
            assert len(index) <= capacity
    return out


@given(STREAM, st.integers(1, 6), st.integers(1, 4))
@quick
def test_little_memory_and_an_archive_decide_as_endless_memory(drawn: Any, capacity: int, batch: int) -> None:
    _, stream, _ = streams(drawn)
    assert with_little_memory(stream, capacity, batch) == decide(stream)


@given(ALIKE, st.integers(1, 4))
@quick
def test_little_memory_decides_the_same_where_many_look_alike(steps: Any, capacity: int) -> None:
    stream = alike(steps)
    assert with_little_memory(stream, capacity, 1) == decide(stream)


def test_many_exchanges_under_one_key_are_found_newest_first_with_little_memory() -> None:
    stream = list(itertools.chain.from_iterable(conversation(f"w{n}", "window", _SAME)[0] for n in range(12)))
    shuffled = mixed([stream[n::3] for n in range(3)], random.Random(1))
    assert with_little_memory(shuffled, 5, 1) == decide(shuffled)


_SAME = [{"said": "ok", "answer": "yes", "calls": 1, "retry": ""}] * 4
