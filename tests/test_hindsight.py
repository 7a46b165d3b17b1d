"""Cold start: synthetic demonstrations are kept only if they meet the wish, are logged, and give way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from recipes.openclawrl.hindsight import Hindsight, endpoint_meets
from recipes.openclawrl.teacher import HEADING, Demonstration, candidate_contexts
from reef.model import ModelTokenizer
from reef.recipe import NextState, Turn, Verdict
from reef.wire.exchange import Message
from tests.sockets import serving

REJECTED = Verdict(-1, 1, ((1, -1),), hint="Write plain sentences.")


def a_turn(session: str, request: str = "2+2?") -> Turn:
    asked = (Message("user", request),)
    return Turn(
        f"{session}-0", "ann", session, asked, Message("assistant", "1. four"), NextState("user", "no list"), None
    )


class Base:
    """The untrained policy: says what it is told to, and remembers what it was asked."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.asked = replies, []

    async def __call__(self, messages: Sequence[Mapping[str, str]], n: int) -> list[str]:
        self.asked.append(messages[-1]["content"])
        return list(self.replies[:n])


async def no_list(request: str, reply: str, wish: str) -> bool:
    return not reply.startswith("1.")


def test_only_what_meets_the_wish_is_kept_logged_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "hindsight.jsonl"
    base = Base("1. four", "It is four, as two and two make four.", "Two and two make four.")
    found = Hindsight(file, base, no_list)
    asyncio.run(found.consider(a_turn("s1"), REJECTED))
    asyncio.run(found.consider(a_turn("s1"), REJECTED))  # one try a session
    assert base.asked == [f"2+2?\n\n{HEADING}\nWrite plain sentences."]
    shown = Demonstration("2+2?", "Two and two make four.", synthetic=True)
    assert found.of("ann") == Hindsight(file, base, no_list).of("ann") == [shown]
    assert found.of("ben") == []
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["synthetic"] is True and row["wish"] == "Write plain sentences."


def test_accepted_turns_and_turns_without_a_hint_ask_for_nothing(tmp_path: Path) -> None:
    base = Base("four")
    found = Hindsight(tmp_path / "h.jsonl", base, no_list)
    asyncio.run(found.consider(a_turn("s1"), Verdict(1, 1, ((1, 1),), hint="Go on like that.")))
    asyncio.run(found.consider(a_turn("s1"), Verdict(-1, 1, ((1, -1),))))
    assert base.asked == [] and not (tmp_path / "h.jsonl").exists()


def test_once_something_is_accepted_nothing_more_is_sampled(tmp_path: Path) -> None:
    base = Base("Four it is.")
    found = Hindsight(tmp_path / "h.jsonl", base, no_list)
    asyncio.run(found.consider(a_turn("s1"), Verdict(1, 1, ((1, 1),))))
    asyncio.run(found.consider(a_turn("s2"), REJECTED))
    assert base.asked == []


def test_a_restart_knows_the_wishes_and_the_sessions_tried(tmp_path: Path) -> None:
    base = Base("Four it is.")
    asyncio.run(Hindsight(tmp_path / "h.jsonl", base, no_list).consider(a_turn("s1"), REJECTED))
    again = Hindsight(tmp_path / "h.jsonl", base, no_list)
    asyncio.run(again.consider(a_turn("s1"), REJECTED))
    assert len(base.asked) == 1
    asyncio.run(again.consider(a_turn("s2"), Verdict(-1, 1, ((1, -1),), hint="Be brief, please.")))
    assert base.asked[-1].endswith("Write plain sentences.\nBe brief, please.")


def test_an_engine_that_is_down_keeps_no_verdict_back(tmp_path: Path) -> None:
    async def down(messages: Sequence[Mapping[str, str]], n: int) -> list[str]:
        raise OSError("no engine")

    found = Hindsight(tmp_path / "h.jsonl", down, no_list)
    asyncio.run(found.consider(a_turn("s1"), REJECTED))
    assert found.of("ann") == []


def test_an_accepted_reply_displaces_synthetic_ones(tiny_model_dir: Path) -> None:
    tokenizer = ModelTokenizer(tiny_model_dir)
    asked = [{"role": "user", "content": "3+3?"}]
    synthetic, accepted = Demonstration("2+2?", "Four.", synthetic=True), Demonstration("1+1?", "Two.")
    kinds = [c.kind for c in candidate_contexts(tokenizer, asked, "Six", demonstrations=[synthetic])]
    assert kinds == ["synthetic"]
    kinds = [c.kind for c in candidate_contexts(tokenizer, asked, "Six", demonstrations=[accepted, synthetic])]
    assert kinds == ["demonstration"]


def test_the_endpoint_is_asked_and_only_a_clear_yes_counts() -> None:
    async def judge(request: Request) -> JSONResponse:
        said = (await request.json())["messages"][0]["content"]
        assert "REQUEST" in said and "2+2?" in said
        text = "\\boxed{1}" if "plain" in said.split("<<<ANSWER")[1] else "hard to say"
        return JSONResponse({"choices": [{"message": {"content": text}}]})

    with serving(Starlette(routes=[Route("/v1/chat/completions", judge, methods=["POST"])])) as url:
        meets = endpoint_meets(f"{url}/v1", "judge", None, 10.0)
        found = [asyncio.run(meets("2+2?", reply, "be plain")) for reply in ("a plain four", "4")]
    assert found == [True, False]
