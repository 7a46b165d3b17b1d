"""Streams whose bytes arrive chopped anywhere, or end too early: each is one exact record.

Hypothesis chooses the text, the cuts and what is lost. Knows the three dialects that stream chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from reef.wire.exchange import Delivered
from tests.chopper import Chopper
from tests.fuzz_cases import EVERY_CHECK
from tests.fuzzing import LIMIT_S, RECEIPT
from tests.scripted_engine import Script, ids, scripted_app
from tests.stack import Stack, stack

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass
class Chopped:
    """A gateway before an engine that is cut."""

    reef: Stack
    chopper: Chopper
    http: httpx.Client
    requests: int = 0
    broken_off: int = 0
    """of these"""


@contextmanager
def chopping(tmp: Path) -> Iterator[Chopped]:
    made: list[Chopper] = []

    def engine(script: Script) -> ASGIApp:
        made.append(Chopper(scripted_app(script)))
        return made[0]

    with stack(tmp, engine=engine, engine__retries="1") as reef, httpx.Client(timeout=LIMIT_S) as http:
        reef.script.keep = 0
        yield Chopped(reef, made[0], http)


def chop(chopped: Chopped, path: str, examples: int, start: int) -> None:
    """Send so many streams. Raises AssertionError, with the smallest example, at the first that is wrong."""

    @seed(start)
    @settings(
        max_examples=examples,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=EVERY_CHECK,
    )
    @given(
        text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
        cuts=st.lists(st.integers(0, 20_000), max_size=40),
        lost=st.just(0) | st.integers(1, 3000),
    )
    def run(text: str, cuts: list[int], lost: int) -> None:
        _check(chopped, path, text, cuts, lost)

    run()


def _check(chopped: Chopped, path: str, text: str, cuts: list[int], lost: int) -> None:
    reef = chopped.reef
    reef.script.reply = lambda _body: text
    chopped.chopper.choose = lambda: (cuts, lost)
    before = reef.log.count()
    heard, failed, receipt = _ask(chopped, path)
    chopped.requests += 1
    chopped.broken_off += failed
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


def _ask(chopped: Chopped, path: str) -> tuple[str, bool, str]:
    """(text, said that it failed, receipt) of a streamed answer."""
    asked: dict[str, Any] = {"model": "m", "stream": True}
    words = [{"role": "user", "content": "hello"}]
    asked |= {"input": words} if path == "/v1/responses" else {"messages": words}
    if path == "/v1/messages":
        asked["max_tokens"] = 100
    text, failed, event = "", False, {}
    with chopped.http.stream("POST", chopped.reef.url + path, json=asked) as response:
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
