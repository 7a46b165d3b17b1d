"""One homework session: a plain OpenAI client, one problem, up to eight replies.

Invariant: what goes over the wire is what any agent would send, a growing list of messages and
sampling settings, without a header or tag of ours; the first message is the problem and nothing
else. The rule's verdicts stay in the returned record. A failed request ends the session and is
counted; it never raises. This module knows no other session and no service.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from . import reactions
from .problems import Problem
from .rule import Check, check


@dataclass(frozen=True, slots=True)
class Settings:
    """How the student talks; the same for every session of a run."""

    model: str = "default"
    tau: float = 0.7
    """sampling temperature; top_p stays 1 and no penalty is sent, so that every reply can be trained on"""
    max_tokens: int = 64
    closing_tokens: int = 8
    """limit for the answer to the thank-you"""
    turns: int = 8
    """replies to the problem before the student gives up"""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply and what the rule says of it; the student's own knowledge, never sent."""

    text: str
    check: Check
    receipt: str | None
    """response header `x-reef-agent-record-id`; None from a server that gives none"""
    version: int | None
    """response header `x-reef-version`"""
    truncated: bool
    """the token limit cut it off"""


@dataclass(frozen=True, slots=True)
class Session:
    """What the student remembers of one session: one line of sessions.jsonl."""

    index: int
    """from 0"""
    problem: str
    """name of the problem"""
    text: str
    """the first message"""
    replies: tuple[Reply, ...]
    """the replies to the problem and to each complaint, the thank-you's answer left out"""
    exchanges: int
    """answered requests, the thank-you included"""
    failed_requests: int
    seconds: float

    @property
    def first_reply_passes(self) -> bool:
        return bool(self.replies) and self.replies[0].check.passes

    @property
    def turns(self) -> int:
        return len(self.replies)

    @property
    def accepted(self) -> bool:
        """The last reply met the preference."""
        return bool(self.replies) and self.replies[-1].check.passes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "first_reply_passes": self.first_reply_passes, "turns": self.turns}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Session:
        replies = tuple(
            Reply(**{**row, "check": Check(**{**row["check"], "violations": tuple(row["check"]["violations"])})})
            for row in data["replies"]
        )
        known = {f.name: data[f.name] for f in fields(Session)}
        return Session(**{**known, "replies": replies})


@dataclass(slots=True)
class Conversation:
    """The messages so far, and one request at a time."""

    client: AsyncOpenAI
    settings: Settings
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    failed: int = 0
    answered: int = 0

    async def say(self, text: str, seed: int, limit: int) -> Answer | None:
        """Send the whole transcript plus `text`; None when no answer came (counted in `failed`)."""
        self.messages.append({"role": "user", "content": text})
        answer = await ask(self.client, self.settings, self.messages, seed, limit)
        if answer is None:
            self.failed += 1
            return None
        self.answered += 1
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    receipt: str | None
    version: int | None
    truncated: bool

    def judged(self, problem: Problem, strict: bool) -> Reply:
        return Reply(self.text, check(self.text, problem, strict), self.receipt, self.version, self.truncated)


async def ask(
    client: AsyncOpenAI, settings: Settings, messages: list[ChatCompletionMessageParam], seed: int, limit: int
) -> Answer | None:
    """One chat completion; None when the request failed for good (the SDK retries by itself)."""
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=settings.model, messages=messages, temperature=settings.tau, max_tokens=limit, seed=seed
        )
        choice = raw.parse().choices[0]
    except (openai.APIError, IndexError):
        return None
    version = raw.headers.get("x-reef-version", "")
    return Answer(
        text=choice.message.content or "",
        receipt=raw.headers.get("x-reef-agent-record-id"),
        version=int(version) if version.isdigit() else None,
        truncated=choice.finish_reason == "length",
    )


def request_seed(seed: int, session: int, turn: int) -> int:
    """The sampling seed of one request: distinct per (run, session, turn), below 2**31."""
    return zlib.crc32(f"{seed}/{session}/{turn}".encode()) & 0x7FFFFFFF


async def hold(
    client: AsyncOpenAI,
    settings: Settings,
    problem: Problem,
    seed: int,
    index: int,
    clock: Callable[[], float],
    on_reply: Callable[[int, Reply], None] = lambda turn, reply: None,
) -> Session:
    """Hold session `index`: the problem, then a complaint for each failing reply, at most
    `settings.turns` replies; a passing reply is thanked for, a student out of patience just leaves."""
    talk = Conversation(client, settings)
    replies: list[Reply] = []
    began = clock()
    message = problem.text
    for turn in range(settings.turns):
        answer = await talk.say(message, request_seed(seed, index, turn), settings.max_tokens)
        if answer is None:
            break
        reply = answer.judged(problem, settings.strict)
        replies.append(reply)
        on_reply(turn, reply)
        if reply.check.passes:
            closing = reactions.thanks(seed, index)
            await talk.say(closing, request_seed(seed, index, turn + 1), settings.closing_tokens)
            break
        message = reactions.complaint(reply.check, turn, seed, index, turn)
    return Session(index, problem.name, problem.text, tuple(replies), talk.answered, talk.failed, clock() - began)
