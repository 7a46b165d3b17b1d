"""The gateway over real sockets: what the client sees, what is recorded, what goes wrong politely."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from reef.wire.exchange import Delivered
from tests.scripted_engine import BASE, ids, logprob
from tests.stack import Stack, stack

ASK: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as s:
        yield s


def test_a_whole_answer_is_recorded_exactly_and_stripped(running: Stack) -> None:
    raw = running.client().chat.completions.with_raw_response.create(
        model="gpt-4o",
        messages=ASK,
        temperature=0.5,
    )
    body = json.loads(raw.text)
    assert body["choices"][0]["message"]["content"] == "reply to hello"
    assert body["model"] == "gpt-4o"
    assert "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in body
    assert raw.headers["x-reef-version"] == "0"
    exchange = running.log.get(raw.headers["x-reef-agent-record-id"])
    assert exchange is not None and exchange.sampled is not None
    assert list(exchange.sampled.token_ids) == ids("reply to hello")
    assert list(exchange.sampled.logprobs) == [logprob(t) for t in ids("reply to hello")]
    assert list(exchange.sampled.prompt_ids) == ids("hello")
    assert exchange.sampled.topk[0][1] == (ord("r") + 1, logprob(ord("r")) - 1)
    assert (exchange.sampled.sampling.tau, exchange.sampled.version) == (0.5, 0)
    assert running.script.requests[0]["model"] == BASE


def test_a_stream_is_token_by_token_and_recorded_like_a_whole_answer(running: Stack) -> None:
    stream = running.client().chat.completions.create(model="m", messages=ASK, stream=True)
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == "reply to hello"
    assert len(chunks) == len(text) + 1
    assert all(c.choices[0].logprobs is None and not hasattr(c.choices[0], "token_ids") for c in chunks)
    (exchange,) = running.log.tail(0)
    assert exchange.sampled is not None
    assert list(exchange.sampled.token_ids) == ids(text)
    assert exchange.response is not None
    assert exchange.response["choices"][0]["message"]["content"] == text
    assert exchange.delivered is Delivered.FULL


def test_a_record_is_durable_before_the_final_event(running: Stack) -> None:
    url = f"{running.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={"messages": ASK, "stream": True}) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                assert running.log.get(response.headers["x-reef-agent-record-id"]) is not None
                return
    pytest.fail("no final event")


def test_logprobs_the_client_asked_for_are_given_with_real_tokens(running: Stack) -> None:
    answer = running.client().chat.completions.create(
        model="m",
        messages=ASK,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [e.token for e in content] == list("reply to hello")
    assert len(content[0].top_logprobs) == 2


def test_a_client_that_leaves_mid_stream_cancels_the_engine_and_leaves_its_prefix(running: Stack) -> None:
    running.script.pause_s = 0.02
    running.script.reply = lambda _body: "x" * 500
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json={"messages": ASK, "stream": True}) as response:
        for n, _ in enumerate(response.iter_lines()):
            if n > 6:
                break
    deadline = time.time() + 5
    while not running.log.tail(0) and time.time() < deadline:
        time.sleep(0.02)
    (exchange,) = running.log.tail(0)
    assert (exchange.status, exchange.delivered) == (499, Delivered.PARTIAL)
    assert exchange.sampled is not None and 0 < len(exchange.sampled.token_ids) < 500
    while not running.script.cancelled and time.time() < deadline:
        time.sleep(0.02)  # the engine sees the closed connection when it writes its next token
    assert running.script.cancelled == 1
    running.observer().step()
    assert running.fates() == {"client_aborted": 1}


def test_a_client_that_leaves_before_the_answer_is_recorded(running: Stack) -> None:
    running.script.pause_s = 5
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.url}/v1/chat/completions", json={"messages": ASK}, timeout=0.3)
    deadline = time.time() + 5
    while not running.log.tail(0) and time.time() < deadline:
        time.sleep(0.02)
    running.observer().step()
    assert running.fates() == {"client_aborted": 1}


def test_an_engine_that_breaks_off_ends_in_an_error_event_and_one_record(running: Stack) -> None:
    running.script.break_after = 3
    with pytest.raises(openai.APIError):
        list(running.client().chat.completions.create(model="m", messages=ASK, stream=True))
    running.observer().step()
    assert running.fates() == {"upstream_error": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_error_keeps_its_status_and_is_recorded(running: Stack, stream: bool) -> None:
    running.script.status = 429
    with pytest.raises(openai.RateLimitError, match="scripted failure"):
        running.client().chat.completions.create(model="m", messages=ASK, stream=stream)
    running.observer().step()
    assert running.fates() == {"upstream_error": 1}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"not json", None),
        (b"[1, 2]", None),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": NaN}', None),
        (b'{"a":' * 300 + b"1" + b"}" * 300, None),
        (b"[" * 100_000, None),
    ],
)
def test_bad_bodies_get_a_400_in_the_dialect_and_the_server_lives(
    running: Stack, body: bytes, field: str | None
) -> None:
    response = httpx.post(f"{running.url}/v1/chat/completions", content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert running.ask(ASK)[0] == "reply to hello"


def test_a_body_over_the_limit_gets_a_413(tmp_path: Path) -> None:
    with stack(tmp_path, server__max_body_mb="0.001") as running:
        body = {"messages": [{"role": "user", "content": "x" * 5000}]}
        response = httpx.post(f"{running.url}/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_strict_models_refuse_unknown_names(tmp_path: Path) -> None:
    with stack(tmp_path, server__models="strict") as running:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            running.client().chat.completions.create(model="gpt-9", messages=ASK)
        for name in running.client().models.list():
            running.client().chat.completions.create(model=name.id, messages=ASK)


def test_keys_are_required_once_there_are_any_and_admin_is_a_role(tmp_path: Path) -> None:
    keys = "[{key: aaa, name: agent}, {key: bbb, name: boss, role: admin}]"
    with stack(tmp_path, server__keys=keys) as running:
        url = f"{running.url}/v1/chat/completions"
        assert httpx.post(url, json={"messages": ASK}).status_code == 401
        assert httpx.post(url, json={"messages": ASK}, headers={"x-api-key": "nope"}).status_code == 401
        assert httpx.post(url, json={"messages": ASK}, headers={"authorization": "Bearer aaa"}).status_code == 200
        (exchange,) = running.log.tail(0)
        assert exchange.client == "agent"
        assert "authorization" not in exchange.headers
        serve = f"{running.url}/reef/releases/0/serve"
        assert httpx.post(serve, headers={"x-api-key": "aaa"}).status_code == 403
        assert httpx.post(serve, headers={"x-api-key": "bbb"}).status_code == 200


def test_unknown_routes_answer_in_the_dialect(running: Stack) -> None:
    response = httpx.get(f"{running.url}/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_an_engine_that_is_gone_is_a_502_and_a_record(running: Stack, tmp_path: Path) -> None:
    with stack(tmp_path / "gone", engine__url="http://127.0.0.1:9") as broken:
        response = httpx.post(f"{broken.url}/v1/chat/completions", json={"messages": ASK})
        assert response.status_code == 502
        assert httpx.get(f"{broken.url}/readyz").status_code == 503
        assert httpx.get(f"{broken.url}/healthz").status_code == 200


def test_training_temperature_can_be_imposed(tmp_path: Path) -> None:
    with stack(tmp_path, policy__sampling="train", policy__temperature="0.9") as running:
        running.client().chat.completions.create(model="m", messages=ASK, temperature=0, top_p=0.5)
        assert (running.script.requests[0]["temperature"], running.script.requests[0]["top_p"]) == (0.9, 1.0)
