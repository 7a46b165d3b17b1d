"""Requests nobody would write and streams chopped anywhere: no 5xx, no hang, and no record too few or too
many.

`REEF_FUZZ_EXAMPLES=1200 pytest tests/test_fuzz.py` sends about 20,000 requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef.gateway.dialects import ROUTES
from reef.gateway.openapi import OPERATIONS
from reef.wire.exchange import Delivered
from tests.scripted_engine import Script, ids, scripted_app
from tests.stack import Stack, stack

EXAMPLES = int(os.environ.get("REEF_FUZZ_EXAMPLES", "5"))
RECEIPT = "x-reef-agent-record-id"
TIMEOUT_S = 20
RELAXED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
    database=None,
    derandomize=True,
)


@dataclass
class Chopper:
    """An engine whose event streams arrive in pieces of any size and may stop early."""

    app: ASGIApp
    cuts: list[int] = field(default_factory=list)
    lost: int = 0
    """bytes at the end that never come"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = bytearray()
        streaming = False

        async def forward(message: Message) -> None:
            nonlocal streaming
            if message["type"] == "http.response.start":
                streaming = any(b"event-stream" in value for _, value in message["headers"])
            if not streaming or message["type"] != "http.response.body":
                return await send(message)
            stream.extend(message.get("body", b""))
            if not message.get("more_body"):
                for piece in self.pieces(_as_utf8(bytes(stream))):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app(scope, receive, forward)

    def pieces(self, stream: bytes) -> list[bytes]:
        stream = stream[: max(0, len(stream) - self.lost)]
        at = sorted({cut % (len(stream) + 1) for cut in self.cuts} | {0, len(stream)})
        return [stream[a:b] for a, b in pairwise(at)]


def _as_utf8(stream: bytes) -> bytes:
    """The same events with their characters as bytes, not as escapes."""
    lines = stream.decode().split("\n")
    for n, line in enumerate(lines):
        if line.startswith("data: {"):
            lines[n] = "data: " + json.dumps(json.loads(line[6:]), ensure_ascii=False)
    return "\n".join(lines).encode()


@dataclass
class Fuzzed:
    reef: Stack
    receipts: list[str] = field(default_factory=list)
    requests: int = 0


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    with stack(tmp_path_factory.mktemp("fuzz")) as reef:
        reef.script.reply = lambda _body: "fine"
        yield Fuzzed(reef)


@pytest.mark.parametrize("path", OPERATIONS)
def test_no_request_fails_the_gateway_or_goes_unrecorded(path: str, fuzzed: Fuzzed) -> None:
    api: Any = schemathesis.openapi.from_url(f"{fuzzed.reef.url}/openapi.json")
    for operation in api[path].values():
        for mode in GenerationMode:
            if mode is GenerationMode.POSITIVE or OPERATIONS[path].body is not None:
                send_and_check(operation.as_strategy(generation_mode=mode), fuzzed)


def send_and_check(cases: Any, fuzzed: Fuzzed) -> None:
    @RELAXED
    @given(case=cases)
    def run(case: Any) -> None:
        response = case.call(timeout=TIMEOUT_S)
        fuzzed.requests += 1
        assert response.status_code < 500, response.text
        receipt = (response.headers.get(RECEIPT) or [None])[0]
        if response.status_code >= 400:
            assert response.headers["content-type"][0].startswith("application/json")
            assert "error" in response.json()
        if case.operation.path in ROUTES:
            assert (receipt is not None) == (response.status_code == 200)
        if receipt is not None:
            fuzzed.receipts.append(receipt)
            exchange = fuzzed.reef.log.get(receipt)
            assert exchange is not None and exchange.status == response.status_code

    run()


def test_the_funnel_adds_up_after_all_of_it(fuzzed: Fuzzed) -> None:
    if not fuzzed.requests:
        pytest.skip("nothing was sent")
    assert fuzzed.receipts and len(set(fuzzed.receipts)) == len(fuzzed.receipts)
    assert fuzzed.reef.log.count() == len(fuzzed.receipts)
    observer = fuzzed.reef.observer()
    while observer.step():
        pass
    funnel = fuzzed.reef.views.funnel()
    assert sum(funnel["fates"].values()) == funnel["exchanges"] == len(fuzzed.receipts)


def test_every_served_route_is_in_the_document(fuzzed: Fuzzed) -> None:
    paths = httpx.get(f"{fuzzed.reef.url}/openapi.json").json()["paths"]
    assert set(paths) == set(OPERATIONS) and set(ROUTES) < set(paths)
    assert "requestBody" in paths["/v1/responses"]["post"]


@dataclass
class Chopped:
    reef: Stack
    chopper: Chopper


@pytest.fixture(scope="module")
def chopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chopped]:
    made: list[Chopper] = []

    def engine(script: Script) -> ASGIApp:
        made.append(Chopper(scripted_app(script)))
        return made[0]

    with stack(tmp_path_factory.mktemp("chopped"), engine=engine) as reef:
        yield Chopped(reef, made[0])


def ask(reef: Stack, path: str) -> tuple[str, bool, str]:
    """(text, said that it failed, receipt) of a streamed answer."""
    asked: dict[str, Any] = {"model": "m", "stream": True}
    words = [{"role": "user", "content": "hello"}]
    asked |= {"input": words} if path == "/v1/responses" else {"messages": words}
    if path == "/v1/messages":
        asked["max_tokens"] = 100
    text, failed, event = "", False, {}
    with httpx.stream("POST", reef.url + path, json=asked, timeout=TIMEOUT_S) as response:
        if response.status_code != 200:
            return "", True, response.headers[RECEIPT]
        body = response.read().decode()  # strict: half a character would fail here
        for line in body.split("\n"):
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            failed = failed or "error" in event or event.get("type") in ("response.failed", "error")
            for choice in event.get("choices", []):
                text += choice["delta"].get("content") or ""
            if event.get("type") == "response.output_text.delta":
                text += event["delta"]
            if event.get("type") == "content_block_delta":
                text += event["delta"].get("text", "")
        return text, failed and event.get("type") != "response.completed", response.headers[RECEIPT]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@settings(RELAXED, max_examples=4 * EXAMPLES)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 20_000), max_size=40),
    lost=st.just(0) | st.integers(1, 3000),
)
def test_a_stream_chopped_anywhere_is_one_exact_record(
    chopped: Chopped, path: str, text: str, cuts: list[int], lost: int
) -> None:
    reef = chopped.reef
    reef.script.reply = lambda _body: text
    chopped.chopper.cuts, chopped.chopper.lost = cuts, lost
    before = reef.log.count()
    heard, failed, receipt = ask(reef, path)
    assert reef.log.count() == before + 1
    exchange = reef.log.get(receipt)
    assert exchange is not None
    if not failed:
        assert heard == text
        assert exchange.delivered is Delivered.FULL and exchange.status == 200
        assert exchange.sampled is not None and list(exchange.sampled.token_ids) == ids(text)
    else:
        assert lost > 0 and text.startswith(heard)
        assert exchange.status == 502 and exchange.error
