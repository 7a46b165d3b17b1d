"""What goes wrong between client and engine: each ends as one record, and the client is told the truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reef.wire.exchange import Delivered, Exchange
from tests.scripted_engine import ids
from tests.stack import Stack, stack
from tests.test_learner import adapter_files

HTTP = httpx.Client(timeout=60, verify=False)  # one for all: each would load the system's certificates
ASK: list[Any] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK, "stream": True},
    "responses": {"input": "hello", "stream": True},
    "messages": {"messages": ASK, "max_tokens": 100, "stream": True},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("faults"), server__keepalive_s="0.2", engine__retries="2") as s:
        yield s


@pytest.fixture
def running(shared: Stack) -> Stack:
    fresh = type(shared.script)()
    for name in ("reply", "status", "break_after", "pause_s", "exact", "failures", "retry_after", "pieces", "finish"):
        setattr(shared.script, name, getattr(fresh, name))
    shared.script.before_headers_s, shared.script.error_event, shared.script.cancelled = 0.0, None, 0
    shared.script.requests.clear()
    return shared


def new_record(running: Stack, before: int, within_s: float = 10.0) -> Exchange:
    """The one exchange recorded since there were `before`."""
    deadline = time.time() + within_s
    while running.log.count() == before and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    exchanges = running.log.tail(0, 10_000)[before:]
    assert len(exchanges) == 1
    return exchanges[0]


@pytest.mark.parametrize("route", BODIES)
def test_a_client_that_leaves_mid_stream_cancels_the_engine_and_keeps_its_prefix(running: Stack, route: str) -> None:
    before = running.log.count()
    running.script.pause_s = 0.02
    running.script.reply = lambda _body: "x" * 500
    with HTTP.stream("POST", f"{running.url}/v1/{route}", json=BODIES[route]) as response:
        seen = ""
        for line in response.iter_lines():
            if line.startswith("data: ") and '"x"' in line:
                seen += "x"
            if len(seen) == 5:
                break
    exchange = new_record(running, before)
    assert (exchange.status, exchange.delivered) == (499, Delivered.PARTIAL)
    assert exchange.sampled is not None and 5 <= len(exchange.sampled.token_ids) < 500
    assert 5 <= json.dumps(exchange.response).count("x") < 500
    assert running.script.cancelled == 1


@pytest.mark.parametrize("route", BODIES)
def test_a_client_may_leave_as_soon_as_it_has_its_tool_call(running: Stack, route: str) -> None:
    before = running.log.count()
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    running.script.pause_s = 0.02
    running.script.pieces = [
        ({"role": "assistant", "tool_calls": [call]}, "call"),
        *([({"content": "more"}, "more")] * 200),
    ]
    with HTTP.stream("POST", f"{running.url}/v1/{route}", json=BODIES[route]) as response:
        for line in response.iter_lines():
            if '{\\"a\\": 1}' in line:
                break
    exchange = new_record(running, before)
    assert (exchange.status, exchange.delivered) == (499, Delivered.PARTIAL)
    assert '"f"' in json.dumps(exchange.response)
    assert running.script.cancelled == 1
    assert exchange.sampled is not None and exchange.sampled.token_ids[:4] == tuple(ids("call"))


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_byte_is_recorded(running: Stack, route: str, stream: bool) -> None:
    before = running.log.count()
    running.script.before_headers_s = 30
    with pytest.raises(httpx.TimeoutException):
        HTTP.post(f"{running.url}/v1/{route}", json={**BODIES[route], "stream": stream}, timeout=0.15)
    exchange = new_record(running, before)
    assert (exchange.status, exchange.delivered, exchange.sampled) == (499, Delivered.NONE, None)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("how", ["break", "error event"])
def test_an_engine_that_dies_mid_stream_is_no_clean_end(running: Stack, route: str, how: str) -> None:
    before = running.log.count()
    if how == "break":
        running.script.break_after = 5
    else:
        running.script.error_event = "out of memory"
    lines = list(HTTP.post(f"{running.url}/v1/{route}", json=BODIES[route]).text.splitlines())
    text = "\n".join(lines)
    for clean_end in ("[DONE]", "response.completed", "message_stop"):
        assert clean_end not in text
    last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
    told = last.get("response", last)
    assert told["error"]["message"]
    exchange = new_record(running, before)
    assert exchange.delivered is Delivered.PARTIAL and exchange.error
    assert exchange.sampled is not None and len(exchange.sampled.token_ids) >= 5


@pytest.mark.parametrize("route", BODIES)
def test_an_engine_that_dies_while_nothing_can_be_recorded_is_still_told_in_the_stream(
    tmp_path: Path, route: str
) -> None:
    with stack(tmp_path) as s:
        with contextlib.closing(sqlite3.connect(s.dir / "log.db")) as log:
            log.execute("CREATE TRIGGER none BEFORE INSERT ON exchanges BEGIN SELECT RAISE(ABORT, 'refused'); END")
        s.script.break_after = 5
        lines = HTTP.post(f"{s.url}/v1/{route}", json=BODIES[route]).text.splitlines()
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
        assert "could not be written" in last.get("response", last)["error"]["message"]
        s.script.break_after = 0
        response = HTTP.post(f"{s.url}/v1/{route}", json=BODIES[route])
        assert (response.status_code, "could not be written" in response.text) == (503, True)
        assert s.log.count() == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failures", [[503], [429, 500]])
def test_a_failing_engine_is_asked_again_before_the_first_byte(
    running: Stack, stream: bool, failures: list[int]
) -> None:
    before = running.log.count()
    running.script.failures = failures
    tried = len(failures) + 1
    response = HTTP.post(f"{running.url}/v1/chat/completions", json={"messages": ASK, "stream": stream})
    assert response.status_code == 200
    assert len(running.script.requests) == tried
    exchange = new_record(running, before)
    assert (exchange.status, exchange.error) == (200, None)
    assert exchange.sampled is not None and list(exchange.sampled.token_ids) == ids("reply to hello")


def test_an_engine_that_keeps_failing_says_when_to_come_back(running: Stack) -> None:
    before = running.log.count()
    running.script.status, running.script.retry_after = 429, "0"
    response = HTTP.post(f"{running.url}/v1/messages", json={"messages": ASK, "max_tokens": 5})
    assert (response.status_code, response.headers["retry-after"]) == (429, "0")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert len(running.script.requests) == 3
    assert new_record(running, before).id == response.headers["x-reef-agent-record-id"]


def test_nothing_is_asked_again_once_the_client_has_something(running: Stack) -> None:
    running.script.break_after = 1
    HTTP.post(f"{running.url}/v1/chat/completions", json={"messages": ASK, "stream": True})
    assert len(running.script.requests) == 1


def test_an_engine_that_breaks_off_before_its_first_event_is_an_error_with_a_status(tmp_path: Path) -> None:
    with stack(tmp_path, engine__retries="0") as s:
        s.script.break_after = 0
        for route, body in BODIES.items():
            response = HTTP.post(f"{s.url}/v1/{route}", json=body)
            assert response.status_code == 502 and response.json()["error"]["message"]
            (exchange,) = s.log.tail(0)[-1:]
            assert exchange.id == response.headers["x-reef-agent-record-id"]
            assert (exchange.status, exchange.response) == (502, None)


def test_a_bad_request_is_not_asked_again(running: Stack) -> None:
    running.script.status = 400
    response = HTTP.post(f"{running.url}/v1/chat/completions", json={"messages": ASK})
    assert (response.status_code, len(running.script.requests)) == (400, 1)


@pytest.mark.parametrize(
    ("route", "alive"),
    [
        ("chat/completions", ": keep-alive"),
        ("responses", '"type":"response.in_progress"'),
        ("messages", 'data: {"type":"ping"}'),
    ],
)
@pytest.mark.parametrize("headers_first", [False, True])
def test_a_waiting_client_is_kept_alive(running: Stack, route: str, alive: str, headers_first: bool) -> None:
    before = running.log.count()
    running.script.reply = lambda _body: "ok"
    if headers_first:
        running.script.pause_s = 0.7
    else:
        running.script.before_headers_s = 0.9
    text = HTTP.post(f"{running.url}/v1/{route}", json=BODIES[route]).text
    assert text[: text.index('"o"')].count(alive) >= 2
    assert new_record(running, before).delivered is Delivered.FULL


def test_an_error_after_keep_alives_is_told_in_the_stream(running: Stack) -> None:
    before = running.log.count()
    running.script.before_headers_s, running.script.status = 0.5, 400
    response = HTTP.post(f"{running.url}/v1/messages", json=BODIES["messages"])
    assert response.status_code == 200
    assert "event: error" in response.text and "scripted failure" in response.text
    assert new_record(running, before).status == 400


def test_silence_and_length_are_bounded(tmp_path: Path) -> None:
    with stack(
        tmp_path, server__first_byte_timeout_s="0.3", server__total_timeout_s="1.2", engine__retries="0"
    ) as running:
        url = f"{running.url}/v1/chat/completions"
        running.script.before_headers_s = 5
        response = HTTP.post(url, json={"messages": ASK, "stream": True})
        assert (response.status_code, "silent" in response.text) == (504, True)
        assert HTTP.post(url, json={"messages": ASK}).status_code == 504
        running.script.before_headers_s, running.script.pause_s = 0, 0.1
        running.script.reply = lambda _body: "x" * 100
        text = HTTP.post(url, json={"messages": ASK, "stream": True}).text
        assert "too long" in text and "[DONE]" not in text
        assert [e.status for e in running.log.tail(0)] == [504, 504, 504]


def test_an_engine_that_is_gone_leaves_a_record(tmp_path: Path) -> None:
    with stack(tmp_path, engine__url="http://127.0.0.1:9", engine__retries="0") as broken:
        for stream in (False, True):
            response = HTTP.post(f"{broken.url}/v1/chat/completions", json={"messages": ASK, "stream": stream})
            assert response.status_code == 502
        assert [e.status for e in broken.log.tail(0)] == [502, 502]


def test_an_engine_that_restarts_under_many_requests_loads_its_adapter_for_all_of_them(tmp_path: Path) -> None:
    with stack(tmp_path, engine__retries="0") as s:
        folder = s.dir / "releases" / "default" / "v000001"
        folder.mkdir(parents=True)
        hash = adapter_files(folder)
        told = {"scenario": "default", "version": 1, "parent": 0, "turns": [], "content_hash": hash, "metrics": {}}
        (folder / "release.json").write_text(json.dumps({**told, "gate": {}, "status": "candidate"}))
        HTTP.post(f"{s.url}/reef/releases/1/serve").raise_for_status()
        s.script.before_headers_s = 0.5

        async def ask_at_once() -> list[int]:
            async with httpx.AsyncClient(timeout=60) as client:
                url = f"{s.url}/v1/chat/completions"
                asked = [asyncio.create_task(client.post(url, json={"messages": ASK})) for _ in range(10)]
                while len(s.script.requests) < 10:
                    await asyncio.sleep(0.01)
                s.script.loaded.clear()
                s.script.failures = [404] * 10  # to each of them, also once the first has loaded it again
                return [(await one).status_code for one in asked]

        assert asyncio.run(ask_at_once()) == [200] * 10


def test_a_stream_that_is_no_answer_is_an_error_and_a_record(running: Stack) -> None:
    before = running.log.count()
    running.script.pieces = [({"role": "assistant", "tool_calls": 5}, "x")]
    text = HTTP.post(f"{running.url}/v1/responses", json=BODIES["responses"]).text
    assert "response.failed" in text and "not readable" in text
    assert new_record(running, before).status == 502


def test_a_swap_during_a_stream_leaves_the_stream_alone(running: Stack, tmp_path: Path) -> None:
    before = running.log.count()
    running.script.pause_s = 0.02
    running.script.reply = lambda _body: "x" * 40
    text = []

    def read() -> None:
        answer = running.client().chat.completions.create(model="m", messages=ASK, stream=True)
        text.extend(c.choices[0].delta.content or "" for c in answer)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    assert HTTP.post(f"{running.url}/reef/releases/0/serve").status_code == 200
    reader.join(20)
    assert "".join(text) == "x" * 40
    exchange = new_record(running, before)
    assert exchange.sampled is not None and exchange.sampled.version == 0


def test_no_record_is_lost_or_doubled_when_clients_leave_at_every_moment(running: Stack) -> None:
    before = running.log.count()
    running.script.pause_s = 0.02
    url = f"{running.url}/v1/chat/completions"

    async def ask(client: httpx.AsyncClient, wait_s: float) -> None:
        body = {"messages": ASK, "stream": True}
        try:
            async with asyncio.timeout(wait_s), client.stream("POST", url, json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
        except (TimeoutError, httpx.HTTPError):
            pass

    async def storm() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(ask(client, 0.05 * n) for n in range(40)))

    asyncio.run(storm())
    deadline = time.time() + 10
    while time.time() < deadline and running.log.count() < before + len(running.script.requests):
        time.sleep(0.05)
    time.sleep(0.3)
    records = running.log.tail(0, 10_000)[before:]
    assert len(records) >= len(running.script.requests) > 0
    assert len({r.id for r in records}) == len(records)
    assert {r.delivered for r in records} <= set(Delivered)
    HTTP.post(f"{running.url}/v1/chat/completions", json={"messages": ASK}).raise_for_status()
