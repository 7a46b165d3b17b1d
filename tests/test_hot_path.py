"""What the gateway does the fast way says the same as what it would do the plain way."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.store.checkpoints import EVERY_BYTES, Checkpoints
from reef.store.columns import Json, to_json
from reef.store.database import open_database
from reef.store.log import LogReader, LogWriter
from reef.store.migrations import LOG
from reef.wire.answer import READ_AT_BYTES, Answer
from reef.wire.exchange import Sampling
from reef.wire.sse import Splitter
from reef.wire.tokenids import _PIECE, WrittenIds, named_ids, take_prompt_ids
from tests.records import record
from tests.stack import stack

KEY = '"prompt_token_ids":['
TEXTS = st.text(max_size=20) | st.sampled_from([KEY, f"{KEY}1,2]", "token_id:7", "]", '\\"'])


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 200_000), max_size=6), before=TEXTS, after=TEXTS, twice=st.booleans())
def test_prompt_ids_left_as_written_are_those_the_parser_reads(
    ids: list[int], before: str, after: str, twice: bool
) -> None:
    choice = {"text": after, **({"prompt_token_ids": ids} if twice else {})}
    content = orjson.dumps({before: before, "prompt_token_ids": ids, "choices": [choice]})
    answer = Answer({})
    shown = answer.whole(answer.load(content))
    assert list(answer.prompt_ids) == ids and len(answer.prompt_ids) == len(ids)
    plain = orjson.loads(content)
    plain.pop("prompt_token_ids")
    plain["choices"][0].pop("prompt_token_ids", None)
    assert shown == plain


@pytest.mark.parametrize("ids", ["", "1,,2", "1,", ",1", "1.5", "-1", "1, 2", "[1],2", '"1"', "1,null"])
def test_a_list_that_is_not_plainly_of_ids_is_left_to_the_parser(ids: str) -> None:
    content = f"{{{KEY}{ids}]}}".encode()
    assert take_prompt_ids(content) == (content, None)


@pytest.mark.parametrize("at", [_PIECE - 2, _PIECE - 1, _PIECE, 2 * _PIECE - 1])
def test_two_commas_in_a_long_list_of_ids_are_found_wherever_they_stand(at: int) -> None:
    ids = "1," * (at // 2) + ("1" if at % 2 else "12") + ",,1" + ",1" * _PIECE
    assert take_prompt_ids(f"{{{KEY}1,{ids}]}}".encode())[1] is None
    good = take_prompt_ids(f"{{{KEY}1,{ids.replace(',,', ',')}]}}".encode())[1]
    assert good and len(good) > _PIECE


@given(st.lists(st.integers(0, 10**6).map(lambda n: f"token_id:{n}") | TEXTS, max_size=8))
def test_ids_read_together_are_those_read_one_by_one(tokens: list[str]) -> None:
    assert named_ids(tokens) == [named_ids([token])[0] for token in tokens]


@given(st.lists(TEXTS.map(lambda text: orjson.dumps(text)), max_size=5), st.lists(st.integers(0, 300), max_size=8))
def test_events_are_the_same_however_their_bytes_are_cut(events: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"event: x\r\ndata: %b\r\n\r\n" % event for event in events)
    at = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    splitter = Splitter()
    assert [e for a, b in pairwise(at) for e in splitter.feed(stream[a:b])] == events


@pytest.mark.parametrize(
    "value",
    [
        {"half": "\ud800", "text": "ü\x00\x1a"},
        {"long": 10**40, "small": -(2**64)},
        [1e308, -0.0, 5e-324, None, True],
        {1: "a key that is no text"},
    ],
)
def test_json_for_the_log_comes_back_as_it_was(value: Any) -> None:
    column = Json()
    stored = column.process_bind_param(value, None)  # type: ignore[arg-type]
    assert stored is not None and "\x00" not in stored
    assert column.process_result_value(stored.encode().decode(), None) == json.loads(json.dumps(value))  # type: ignore[arg-type]


def test_a_number_that_is_not_finite_is_stored_by_its_name() -> None:
    given_ids = WrittenIds(b"[1,2]")
    assert json.loads(to_json([None, float("inf"), given_ids])) == [None, "inf", [1, 2]]
    assert json.loads(to_json(["\ud800", given_ids])) == ["\ud800", [1, 2]]


def test_a_caller_that_is_cancelled_leaves_its_exchange_to_the_writer(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    writer = LogWriter(engine, capacity=2)

    async def run() -> None:
        tasks = [asyncio.ensure_future(writer.exchange(record(str(n)))) for n in range(40)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = time.monotonic() + 20
        while LogReader(engine).count() < 40 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    writer.close()
    assert LogReader(engine).count() == 40


def test_large_records_of_callers_that_were_cancelled_are_in_the_log_a_closed_writer_leaves(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    writer = LogWriter(engine)

    async def run() -> None:
        tasks = [asyncio.ensure_future(writer.exchange(record("x" * 2**21), large=True)) for _ in range(4)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await writer.drain()
        writer.close()

    asyncio.run(run())
    assert LogReader(engine).count() == 4


def test_the_write_ahead_log_is_copied_beside_the_writer_and_stays_short(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    writer = LogWriter(engine)
    wal = tmp_path / "log.db-wal"

    async def write(records: int) -> None:
        for n in range(records):
            await writer.exchange(record("x" * 200_000 + str(n)))

    asyncio.run(write(EVERY_BYTES // 200_000 + 2))
    deadline = time.monotonic() + 20
    while (tmp_path / "log.db").stat().st_size < EVERY_BYTES // 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "log.db").stat().st_size > EVERY_BYTES // 2
    asyncio.run(write(450))
    assert wal.stat().st_size < 80 << 20 < 450 * 200_000
    writer.close()
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"


def test_a_disk_too_slow_for_the_checkpoints_holds_the_writer_and_not_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log came to 122 MB while one checkpoint went on: the writer helped only after it."""
    copied = Checkpoints._checkpoint

    def slowly(self: Checkpoints) -> int:
        if threading.current_thread().name == "log-checkpoints":
            time.sleep(3.0)
        return copied(self)

    monkeypatch.setattr(Checkpoints, "_checkpoint", slowly)
    engine = open_database(f"sqlite:///{tmp_path / 'log.db'}", LOG)
    writer = LogWriter(engine)

    async def write(records: int) -> None:
        for n in range(records):
            await writer.exchange(record("x" * 200_000 + str(n)))

    asyncio.run(write(700))
    assert (tmp_path / "log.db-wal").stat().st_size < 100 << 20 < 700 * 200_000
    writer.close()


def test_a_large_body_arrives_whole_at_the_engine_and_in_the_log(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        s.script.reply = lambda _body: "ok"
        said = "words é " * 500_000
        for stream in (False, True):
            body = {"model": "m", "messages": [{"role": "user", "content": said}], "stream": stream}
            answer = httpx.post(f"{s.url}/v1/chat/completions", json=body, timeout=120)
            exchange = s.log.get(answer.raise_for_status().headers["x-reef-agent-record-id"])
            assert s.script.requests.pop()["messages"][0]["content"] == said
            assert exchange is not None and exchange.request == body
            assert exchange.sampled is not None and list(exchange.sampled.prompt_ids) == [ord(c) for c in said]


def test_an_answer_is_gone_with_its_request_without_the_collector(tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
        "completions": {"prompt": "hello"},
        "messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
        "responses": {"input": "hello", "store": False},
    }
    with stack(tmp_path) as s:
        gc.collect()
        gc.disable()
        try:
            for route, body in asked.items():
                for stream in (False, True):
                    httpx.post(f"{s.url}/v1/{route}", json={"model": "m", "stream": stream, **body}).raise_for_status()
            deadline = time.monotonic() + 5
            while (left := [o for o in gc.get_objects() if isinstance(o, Answer)]) and time.monotonic() < deadline:
                left.clear()
                time.sleep(0.05)
        finally:
            gc.enable()
    assert not left


def test_a_fault_of_reef_itself_is_an_error_in_the_dialect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("reef.gateway.inference.scenario_of", fault)
    with stack(tmp_path) as s:
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{s.url}/v1/messages", json=body)
        assert (answer.status_code, answer.json()["type"]) == (500, "error")


TOP = st.tuples(st.integers(0, 10**6), st.floats(-1e4, 0), st.none() | st.lists(st.integers(0, 255), max_size=4))
TOKEN = st.tuples(TOP, st.lists(TOP, max_size=4))


def entry(top: tuple[int, float, Any], name: str = "token_id:%d") -> dict[str, Any]:
    return {"token": name.replace("%d", str(top[0])), "logprob": top[1], "bytes": top[2]}


def events(tokens: list[Any], name: str) -> list[bytes]:
    """An answer, each token as one event."""
    out = []
    for n, (top, tops) in enumerate(tokens):
        content = [{**entry(top, name), "top_logprobs": [entry(t, name) for t in tops]}]
        end = "stop" if n == len(tokens) - 1 else None
        choice = {"index": 0, "delta": {"content": "x"}, "token_ids": [top[0]], "logprobs": {"content": content}}
        out.append(orjson.dumps({"id": "c", "prompt_token_ids": [1], "choices": [{**choice, "finish_reason": end}]}))
    return out


@given(
    st.lists(TOKEN, min_size=1, max_size=5),
    st.sampled_from(["token_id:%d", "x", 'a"]}]}]},%d', '"logprobs":{"content":[', "token_id:-%d", "token_id:0%d", ""]),
    st.integers(0, 9),
)
def test_log_probs_read_at_the_end_are_those_read_event_by_event(tokens: list[Any], odd: str, at: int) -> None:
    given_events = events(tokens, "token_id:%d")
    if at < len(tokens):  # one event has tokens by another name
        given_events[at] = events(tokens, odd)[at]
    plain, fast = Answer({}), Answer({})
    shown = [(plain.chunk(orjson.loads(event)), fast.chunk(fast.load(event))) for event in given_events]
    for slow_one, fast_one in shown:
        assert slow_one == fast_one
    sampled, known = fast.sampled(0, Sampling(1.0)), plain.sampled(0, Sampling(1.0))
    assert sampled is not None and known is not None
    assert to_json(sampled.to_json()) == to_json(known.to_json())
    assert all(type(p) is float for row in sampled.topk for _, p in row)
    whole = Answer({})
    content = orjson.dumps({"choices": [{"logprobs": {"content": []}}]})
    assert whole.whole(whole.load(content)) == {"choices": [{"logprobs": None}]}


@pytest.mark.parametrize(
    "broken",
    [b'"logprob":"x"', b'"logprob":null', b'"logprob":-', b'"logprob":[1]', b'"logprob":1,', b'"log":1'],
)
def test_log_probs_that_are_none_are_an_unreadable_answer(broken: bytes) -> None:
    answer = Answer({})
    (event,) = events([((5, -1.0, None), [(5, -1.0, None)])], "token_id:%d")
    with pytest.raises((ValueError, KeyError, TypeError)):
        answer.chunk(answer.load(event.replace(b'"logprob":-1.0', broken)))


def test_log_probs_of_a_long_stream_are_read_on_the_way() -> None:
    answer = Answer({})
    tokens = [((n, -1.0, None), [(k, -float(k), None) for k in range(16)]) for n in range(1000)]
    most = 0
    for event in events(tokens, "token_id:%d"):
        answer.chunk(answer.load(event))
        most = max(most, answer._unread_bytes)
    assert most < READ_AT_BYTES + 2000 and answer._unread_bytes == 0
    assert len(answer.logprobs) == len(answer.topk) == 1000
