"""A gateway on a real socket in front of a scripted engine, with real SQLite files, and a learner that
a test steps by hand. Guarantees that nothing but the engine and the judge is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI
from starlette.types import ASGIApp

from reef.config import SessionsConfig, load_config
from reef.gateway.__main__ import gateway_app
from reef.learner.judging import Judging
from reef.learner.observer import Observer
from reef.learner.turns import Turns
from reef.observe.views import Views
from reef.recipe import Recipe
from reef.store.database import open_database
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.store.migrations import LEARN, LOG
from tests.scripted_engine import Script, scripted_app
from tests.sockets import serving


@dataclass
class Stack:
    url: str
    dir: Path
    script: Script
    log: LogReader
    learn: LearnStore
    views: Views
    script_url: str
    """the scripted engine's own address"""
    settings: dict[str, Any] = field(default_factory=dict)

    def client(self, **headers: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0, default_headers=headers)

    def ask(self, messages: list[dict[str, str]], **headers: str) -> tuple[str, str]:
        """(reply, receipt) of one plain chat request."""
        raw = self.client(**headers).chat.completions.with_raw_response.create(
            model="any",
            messages=messages,  # type: ignore[arg-type]
            temperature=1.0,
        )
        return raw.parse().choices[0].message.content or "", raw.headers["x-reef-agent-record-id"]

    def observer(self, ttl: float = 900.0) -> Observer:
        return Observer(self.log, self.learn, SessionsConfig(), session_ttl_s=ttl)

    def judge_all(self, recipe: Recipe) -> None:
        """Judge what is queued, to the end."""

        async def run() -> None:
            judging = Judging(self.learn, Turns(self.log, self.learn), recipe, concurrency=4)
            while judging.step():
                await asyncio.sleep(0.01)

        asyncio.run(run())

    def fates(self) -> dict[str, int]:
        return self.views.funnel()["fates"]


@contextmanager
def stack(tmp: Path, *, engine: Callable[[Script], ASGIApp] = scripted_app, **settings: str) -> Iterator[Stack]:
    """`settings` are dotted config keys with underscores doubled: server__models="strict"."""
    script = Script()
    with serving(engine(script)) as engine_url:
        pairs = [(name.replace("__", "."), value) for name, value in settings.items()]
        base = [("store.dir", str(tmp / "data")), ("engine.kind", "vllm"), ("engine.url", engine_url)]
        config = load_config(None, [*base, *pairs], {})
        with serving(gateway_app(config)) as url:
            log = open_database(config.store.log_url, LOG)
            learn = open_database(config.store.learn_url, LEARN)
            yield Stack(url, config.store.dir, script, LogReader(log), LearnStore(learn), Views(log, learn), engine_url)
