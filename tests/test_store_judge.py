"""A judge that is down, slow, wrong or talks nonsense for a while: nothing becomes neutral by its failure,
and all is judged once it is back. The real judge client, against a real socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from recipes.openclawrl.judge.endpoint import OpenAIPrm
from reef.errors import JudgeError
from reef.learner.judging import Judging
from reef.learner.turns import Turns
from reef.recipe import Turn, Verdict
from reef.service import claim_port
from reef.sessions.fate import Fate
from reef.wire.exchange import conversation
from tests.reports_recipe import Config
from tests.rule_recipe import RuleJudge
from tests.sockets import serving
from tests.stack import Stack, stack

GOOD = json.dumps({"verdict": 1, "target": 1, "charges": [{"index": 1, "verdict": 1}], "hint": None})


class Endpoint:
    """An OpenAI-style server whose answer a test changes."""

    def __init__(self) -> None:
        self.mode = "good"
        self.asked = 0
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, _request: Request) -> Response:
        self.asked += 1
        if self.mode == "error":
            return Response("overloaded", 500)
        if self.mode == "slow":
            await asyncio.sleep(4)
        words = {"nonsense": "As a fish, I can't say.", "wrong": '{"verdict": 7, "target": "x"}'}
        content = words.get(self.mode, GOOD)
        if self.mode == "garbage":
            return Response("<html>bad gateway</html>")
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": content}}]})


class Asks(RuleJudge):
    """Judges by an endpoint."""

    def __init__(self, url: str) -> None:
        super().__init__(Config())
        self.prm = OpenAIPrm(url, "judge", attempts=1, backoff_s=0.01, timeout_s=1.5)

    async def judge(self, turn: Turn) -> Verdict:
        assert turn.next is not None
        history = conversation([*turn.messages, turn.reply])
        return await self.prm.judge(history, {"role": turn.next.role, "content": turn.next.text})


def queue(s: Stack, n: int) -> list[str]:
    """n turns that wait for the judge."""
    receipts = []
    for k in range(n):
        reply, receipt = s.ask([{"role": "user", "content": f"q{k}"}])
        history = [{"role": "user", "content": f"q{k}"}, {"role": "assistant", "content": reply}]
        s.ask([*history, {"role": "user", "content": "thanks"}])
        receipts.append(receipt)
    s.observer().step()
    return receipts


async def work(judging: Judging, until: Callable[[], bool], at_most_s: float = 120.0) -> None:
    deadline = time.monotonic() + at_most_s
    while time.monotonic() < deadline and not until():
        judging.step()
        await asyncio.sleep(0.02)


def test_no_failure_of_the_judge_is_a_verdict_and_all_are_judged_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef.learner.judging.PAUSE_S", (3600.0,))  # a turn that has to wait out its pause fails
    monkeypatch.setattr("reef.learner.judging.OUTAGE_PAUSE_S", 0.1)
    judge = Endpoint()
    with stack(tmp_path) as s, serving(judge.app) as url:
        receipts = queue(s, 12)
        recipe = Asks(url)
        nowhere = OpenAIPrm(f"http://127.0.0.1:{claim_port('127.0.0.1', 0)}", "judge", attempts=1, timeout_s=0.5)

        async def run() -> None:
            judging = Judging(s.learn, Turns(s.log, s.learn), recipe, concurrency=8)
            there, recipe.prm = recipe.prm, nowhere
            await work(judging, lambda: judging._in_a_row >= 10)
            assert s.fates()["queued"] == 12, "down"
            recipe.prm = there
            for mode in ("error", "nonsense", "wrong", "garbage", "slow"):
                judge.mode = mode
                seen = judging._in_a_row
                await work(judging, lambda seen=seen: judging._in_a_row >= seen + 2)
                assert judging._in_a_row >= seen + 2, f"nobody asked whether the judge is back from {mode}"
                assert s.fates()["queued"] == 12, mode
            judge.mode = "good"
            await work(judging, lambda: not s.learn.with_fate(Fate.QUEUED))
            await judging.close()
            await there.aclose()
            await nowhere.aclose()

        asyncio.run(run())
        assert [s.learn.fate(r) for r in receipts] == [Fate.JUDGED] * 12
        history = s.views.turn(receipts[0])["fates"]
        assert [f["fate"] for f in history if f["fate"] == "neutral"] == []


def test_a_turn_the_judge_can_never_answer_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef.learner.judging.OUTAGE_PAUSE_S", 0.05)
    with stack(tmp_path) as s:
        receipts = queue(s, 10)

        class Poisoned(RuleJudge):
            down = True

            async def judge(self, turn: Turn) -> Verdict | None:
                if self.down or turn.id == receipts[0]:
                    raise JudgeError("no verdict")
                return await super().judge(turn)

        recipe = Poisoned(Config())

        async def run() -> None:
            judging = Judging(s.learn, Turns(s.log, s.learn), recipe, concurrency=10)
            await work(judging, lambda: judging._in_a_row >= 12)
            recipe.down = False
            await work(judging, lambda: s.fates().get("judged", 0) == 9)
            await judging.close()

        asyncio.run(run())
        assert [s.learn.fate(r) for r in receipts] == [Fate.QUEUED, *[Fate.JUDGED] * 9]


def test_a_verdict_on_a_reaction_that_was_replaced_meanwhile_is_not_stored(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        (receipt,) = queue(s, 1)

        class Late(RuleJudge):
            seen = 0

            async def judge(self, turn: Turn) -> Verdict | None:
                self.seen += 1
                if self.seen == 1:
                    with s.learn.begin() as c:
                        s.learn.bind(c, turn.id, "revised", "user", "no, wrong", time.time())
                return await super().judge(turn)

        recipe = Late(Config())
        s.judge_all(recipe)
        row = s.learn.verdict_on(receipt)
        assert recipe.seen == 2
        assert row is not None and row.verdict == -1
