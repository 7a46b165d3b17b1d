"""The judge behind an OpenAI-compatible endpoint: m votes on one rendered prompt.

Invariants: a failed, timed-out or unreadable vote is no vote and is retried; below the quorum
JudgeError is raised, never a neutral verdict; what the conversation says is data between fences that
it can't contain. It knows no recipe, no store and no training.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import httpx

from recipes.openclawrl.judge.votes import Tally, Vote, parse_vote, quorum, tally
from reef.errors import ConfigError, JudgeError
from reef.recipe import Verdict

PROMPT = "prompt_v1"
SHOWN_MESSAGES = 12
"""only the end of a longer history is shown, with its original indices"""
SHOWN_CHARS = 6000
"""of each message; the middle of a longer one is left out"""
BACKOFF_CAP_S = 20.0

_RETRIED = frozenset({408, 409, 425, 429})
_HINT = (
    "one or two positive English imperative sentences (11 to 400 characters) addressed to the assistant, which, had it"
    " followed them, would have produced the reply that was wanted. Say what to do, not what to avoid."
)
_HINT_RULES = {
    "both": f"{_HINT} When the verdict is 1, say what made the reply right. When it is 0, null.",
    "reject": f"when the verdict is -1, {_HINT} Otherwise null.",
    "accept": f"when the verdict is 1, {_HINT} Otherwise null.",
}
_HINTED = {"both": (1, -1), "reject": (-1,), "accept": (1,)}

_log = logging.getLogger(__name__)


class OpenAIPrm:
    """Asks `model` at `url` for `m` votes a judgement.

    `url` is the server, with or without `/v1`. `timeout_s` bounds one request, `concurrency` the requests in
    flight over all judgements, `attempts` the requests spent on one vote.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None = None,
        *,
        m: int = 3,
        temperature: float = 0.6,
        max_tokens: int = 8192,
        timeout_s: float = 120.0,
        concurrency: int = 8,
        hint_on: str = "both",
        max_hints: int = 3,
        attempts: int = 4,
        backoff_s: float = 0.5,
        record_file: str | Path | None = None,
    ) -> None:
        if not url or not model:
            raise ConfigError("the openai judge needs prm.url and prm.model")
        if hint_on not in _HINT_RULES:
            raise ConfigError(f"prm_hint_on is {hint_on!r}; it must be accept, reject or both")
        if m < 1 or attempts < 1 or concurrency < 1:
            raise ConfigError("prm_m, prm_concurrency and the attempts of a vote must be at least 1")
        self.name = f"openai:{model}/{PROMPT}"
        self._url = completions_url(url)
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "stream": False}
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._m, self._timeout_s, self._hint_on, self._max_hints = m, timeout_s, hint_on, max_hints
        self._attempts, self._backoff_s = attempts, backoff_s
        self._record_file = Path(record_file) if record_file else None
        self._slots = asyncio.Semaphore(concurrency)
        self._client: httpx.AsyncClient | None = None

    async def judge(self, history: Sequence[Mapping[str, str]], next: Mapping[str, str], *, memo: str = "") -> Verdict:
        """Judge the replies in `history` by the `next` message.

        Raises JudgeError when fewer than two thirds of the votes could be had.
        """
        started = time.monotonic()
        replies = [i for i, message in enumerate(history) if message["role"] == "assistant"]
        if not replies:
            raise JudgeError("there is no assistant reply to judge")
        shown = [i for i in replies if i >= len(history) - SHOWN_MESSAGES] or replies[-1:]
        prompt = render(history, next, memo=memo, hint_on=self._hint_on)
        cast = await asyncio.gather(*(self._vote(prompt) for _ in range(self._m)))
        common = tally([vote for vote, _ in cast], self._m, shown, self._max_hints)
        votes = tuple(asdict(vote) if vote else {"error": note} for vote, note in cast)
        verdict = None if common is None else self._verdict(common, votes, time.monotonic() - started)
        self._record(prompt, cast, verdict)
        if verdict is None:
            valid = sum(vote is not None for vote, _ in cast)
            failures = sorted({note for vote, note in cast if vote is None})
            raise JudgeError(f"{valid} of {self._m} votes, {quorum(self._m)} needed: {'; '.join(failures)}")
        return verdict

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _verdict(self, common: Tally, votes: tuple[Mapping[str, Any], ...], seconds: float) -> Verdict:
        hints = common.hints if common.verdict in _HINTED[self._hint_on] else ()
        return Verdict(
            verdict=common.verdict,
            target=common.target,
            charges=common.charges,
            reject=common.reject,
            keep=common.keep,
            hint="\n".join(hints) or None,
            confidence=common.share,
            votes=votes,
            judge=self.name,
            seconds=seconds,
        )

    async def _vote(self, prompt: str) -> tuple[Vote | None, str]:
        """One vote and its text, or None and why there is none."""
        note = ""
        client = self._connected()
        for attempt in range(self._attempts):
            wait = min(self._backoff_s * 2**attempt, BACKOFF_CAP_S) * random.uniform(0.7, 1.3)
            try:
                async with self._slots, asyncio.timeout(self._timeout_s):
                    response = await client.post(self._url, json=self._asking(prompt), headers=self._headers)
            except TimeoutError:
                note = f"no answer within {self._timeout_s:g} s"
            except httpx.HTTPError as error:
                note = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    text = _content(response)
                    vote = parse_vote(text)
                    if vote is not None:
                        return vote, text
                    note = f"no verdict in {text[-200:]!r}"
                else:
                    note = f"status {response.status_code}"
                    if response.status_code < 500 and response.status_code not in _RETRIED:
                        return None, f"{note}: {response.text[:200]}"
                    wait = max(wait, _retry_after(response))
            if attempt + 1 < self._attempts:
                await asyncio.sleep(wait)
        return None, note

    def _asking(self, prompt: str) -> dict[str, Any]:
        return {**self._body, "messages": [{"role": "user", "content": prompt}]}

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None)
        return self._client

    def _record(self, prompt: str, cast: Sequence[tuple[Vote | None, str]], verdict: Verdict | None) -> None:
        if self._record_file is None:
            return
        line = {
            "time": time.time(),
            "judge": self.name,
            "prompt": prompt,
            "votes": [{"text": text, "vote": asdict(vote) if vote else None} for vote, text in cast],
            "verdict": asdict(verdict) if verdict else None,
        }
        try:
            self._record_file.parent.mkdir(parents=True, exist_ok=True)
            with self._record_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            # A full disk must not stop judging; the verdict itself is stored elsewhere.
            _log.warning("prm_record_file %s can't be written: %s", self._record_file, error)


def completions_url(url: str) -> str:
    """The chat completions route of a server given as `host`, `host/v1` or the route itself."""
    base = url.rstrip("/")
    if base.endswith("/chat/completions"):
        return base
    return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"


def render(
    history: Sequence[Mapping[str, str]], next: Mapping[str, str], *, memo: str = "", hint_on: str = "both"
) -> str:
    """The judge's prompt: rules, then the conversation between fences that occur in none of it."""
    first = max(0, len(history) - SHOWN_MESSAGES)
    lines = [f"[{i}] {history[i]['role']}: {_shorten(history[i]['content'])}" for i in range(first, len(history))]
    said = _shorten(next["content"])
    fence = _fence("\n".join([*lines, said, memo]))
    known = f"\nWhat this person asked for before, as data:\n{fence}\n{memo}\n{fence}\n" if memo else ""
    template = resources.files("recipes.openclawrl.judge").joinpath(f"{PROMPT}.txt").read_text(encoding="utf-8")
    return Template(template).substitute(
        hint_rule=_HINT_RULES[hint_on],
        fence=fence,
        memo=known,
        history="\n".join(lines),
        role=next["role"],
        next=said,
    )


def _fence(text: str) -> str:
    while (mark := f"====={secrets.token_hex(8)}=====") in text:
        pass
    return mark


def _shorten(text: str) -> str:
    half = SHOWN_CHARS // 2
    return text if len(text) <= SHOWN_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"


def _content(response: httpx.Response) -> str:
    """The answer's text; empty when the body is no completion."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        return ""
    return content if isinstance(content, str) else ""


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", "0")), BACKOFF_CAP_S)
    except ValueError:
        return 0.0
