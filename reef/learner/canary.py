"""Watching what is served: a release that harms its users is taken back.

Asks the engine the canaries' requests under the version being served, and looks at what that version
has lately answered; a failing check has the gateway serve the parent again. Invariant: a version is
judged by the same limits as at the gate, only one that the learner itself published is taken back, and
the base never is. Knows no weights and no recipe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from reef.engine.base import EngineClient
from reef.errors import UpstreamError
from reef.releases.chain import adapter_name
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.train.checks import (
    CANARIES,
    CANARY_TOKENS,
    Check,
    GateLimits,
    Verdict,
    at_most,
    length_ratio,
    may_not_end,
    mean_repeated,
)

log = logging.getLogger("reef.canary")
LIVE_REPLIES = 12
"""newest replies of a served version that are looked at; fewer say nothing"""
LOOK_BACK = 128
"""newest exchanges of all scenarios they are looked for in"""


@dataclass(slots=True)
class Canaries:
    """The watch over one gateway's scenarios."""

    log: LogReader
    learn: LearnStore
    engine: EngineClient
    gateway: str
    limits: GateLimits
    every_s: float
    _base: list[list[int]] | None = None
    _looked: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    """by scenario: the version looked at, when its canaries were due last, and the log's end then"""

    async def step(self, http: httpx.AsyncClient) -> int:
        """Look at each scenario whose time has come or that was much used; returns how many went back.

        A new version has just answered the canaries at the gate, so it is asked first after `every_s`.
        """
        back, now, end = 0, time.monotonic(), self.log.newest_seq()
        for scenario, version in self.log.served().items():
            last, at, seq = self._looked.get(scenario, (0, 0.0, 0))
            if last != version:
                self._looked[scenario] = last, at, seq = version, now, end
            due, used = now - at >= self.every_s, end - seq >= LIVE_REPLIES
            if not version or not (due or used):
                continue
            release = self.learn.steps.release(scenario, version)
            if release is None or release.published is None or release.status != "released":
                continue
            self._looked[scenario] = version, now if due else at, end
            checks = self.live(scenario, version, release.parent)
            try:
                checks += await self.ask(scenario, version) if due else []
            except UpstreamError as error:
                log.warning("the canaries of %s could not be asked: %s", scenario, error)
            verdict = Verdict(tuple(checks))
            if not verdict.passed:
                back += await self._take_back(http, scenario, version, verdict)
        return back

    async def ask(self, scenario: str, version: int) -> list[Check]:
        """Check the canaries' replies under a version. Raises UpstreamError when the engine does not answer."""
        if self._base is None:
            self._base = await self._ask(await self.engine.base_model())
        said = await self._ask(adapter_name(scenario, version))
        repeated = self.limits.repeated_4grams + mean_repeated(self._base)
        missing = may_not_end(self.limits, unfinished(self._base), len(said))
        return [
            at_most("canary_repeated_4grams", mean_repeated(said), repeated),
            at_most("canary_missing_eos", unfinished(said), missing),
        ]

    def live(self, scenario: str, version: int, parent: int) -> list[Check]:
        """Checks on what users have got: repetition, and length against the parent's replies."""
        newest = self.log.newest_seq()
        lately: dict[int, list[tuple[int, ...]]] = {version: [], parent: []}
        at = max(0, newest - LOOK_BACK)
        while rows := self.log.tail(at, newest - at):
            at = rows[-1].seq
            for exchange in rows:
                sampled = exchange.sampled
                if exchange.scenario == scenario and sampled is not None and sampled.version in lately:
                    lately[sampled.version].append(sampled.token_ids)
        now, before = (lately[v][-LIVE_REPLIES:] for v in (version, parent))
        if len(now) < LIVE_REPLIES:
            return []
        # a user may want short replies: only growing is a sign of harm
        found = [at_most("live_repeated_4grams", mean_repeated(now), 2 * self.limits.repeated_4grams)]
        if len(before) == LIVE_REPLIES and sum(map(len, now)) > sum(map(len, before)):
            ratio = length_ratio([len(r) for r in now], [len(r) for r in before])
            found.append(at_most("live_length_ratio", ratio, self.limits.length_ratio))
        return found

    async def _ask(self, model: str) -> list[list[int]]:
        """The greedy replies to the canaries, as token ids; one that ended has a final -1."""
        replies = []
        for request in CANARIES:
            answer: dict[str, Any] = await self.engine.post(
                "/v1/chat/completions",
                {
                    "model": model,
                    "messages": [{"role": "user", "content": request}],
                    "temperature": 0,
                    "max_tokens": CANARY_TOKENS,
                    "return_token_ids": True,
                },
            )
            choice = answer["choices"][0]
            ended = [ENDED] if choice.get("finish_reason") == "stop" else []
            replies.append([*(choice.get("token_ids") or ()), *ended])
        return replies

    async def _take_back(self, http: httpx.AsyncClient, scenario: str, version: int, verdict: Verdict) -> int:
        parent = self.learn.steps.last_good(scenario, version)
        url = f"{self.gateway}/reef/releases/{parent}/serve"
        try:
            response = await http.post(url, headers={"x-reef-scenario": scenario, "x-reef-by": "canary"})
            response.raise_for_status()
        except httpx.HTTPError as error:
            self._looked.pop(scenario, None)
            log.warning("version %d of %s should go back to %d, not yet: %s", version, scenario, parent, error)
            return 0
        with self.learn.begin() as c:
            self.learn.steps.take_back(
                c, scenario, version, [asdict(check) for check in verdict.checks], verdict.reason
            )
        log.warning("version %d of %s is taken back, %d serves again: %s", version, scenario, parent, verdict.reason)
        return 1


ENDED = -1
"""stands for the end of text where the engine does not show it"""


def unfinished(replies: Sequence[Sequence[int]]) -> float:
    """The share of canary replies that ran into their limit."""
    return sum(not reply or reply[-1] != ENDED for reply in replies) / max(1, len(replies))
