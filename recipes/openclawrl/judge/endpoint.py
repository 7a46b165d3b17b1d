"""The judge behind an endpoint that runs a language model: m votes on one rendered prompt.

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
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from string import Template

import httpx

from recipes.openclawrl.judge.routes import ANSWER_BYTES, Answer, Kind, Unanswered, decode, route
from recipes.openclawrl.judge.votes import Tally, Vote, parse_vote, quorum, tally
from reef.errors import ConfigError, JudgeError
from reef.recipe import Verdict

PROMPT = "prompt_v2"
SHOWN_MESSAGES = 12
"""only the end of a longer history is shown, with its original indices"""
SHARES = {"next": 0.4, "reply": 0.25, "memo": 0.05}
"""of the prompt's token budget, at most; the earlier messages have the rest, the newest first"""
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
_UNHELD = frozenset({400, 404, 415, 422, 501})
"""statuses that say a server can't hold an answer to a schema: it is asked without one from then on"""
_HINTED = {"both": (1, -1), "reject": (-1,), "accept": (1,)}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cast:
    """One vote, or why there is none, and what the attempts at it cost."""

    vote: Vote | None
    text: str
    """of the model; without a vote the reason"""
    tokens: int


class OpenAIPrm:
    """Asks `model` at `url` for `m` votes a judgement.

    `backend` names the route: `openai` for chat completions, `vllm` and `sglang` for raw generation within
    `template`. `timeout_s` bounds one request, `concurrency` the requests in flight over all judgements,
    `attempts` the requests spent on one vote, `prompt_tokens` (estimated) what is shown of the conversation.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None = None,
        *,
        backend: Kind = "openai",
        template: str | None = None,
        structured: bool = True,
        m: int = 3,
        temperature: float = 0.6,
        max_tokens: int = 8192,
        prompt_tokens: int = 6000,
        timeout_s: float = 120.0,
        concurrency: int = 8,
        hint_on: str = "both",
        max_hints: int = 3,
        attempts: int = 4,
        backoff_s: float = 0.5,
        record_file: str | Path | None = None,
    ) -> None:
        if not url or not (model or backend == "sglang"):
            raise ConfigError(f"the {backend} judge needs prm.url and prm.model")
        if hint_on not in _HINT_RULES:
            raise ConfigError(f"prm_hint_on is {hint_on!r}; it must be accept, reject or both")
        if m < 1 or attempts < 1 or concurrency < 1:
            raise ConfigError("prm_m, prm_concurrency and the attempts of a vote must be at least 1")
        self.name = f"{backend}:{model}/{PROMPT}"
        self._route = route(backend, url, model, temperature=temperature, max_tokens=max_tokens, template=template)
        self._structured = structured
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._m, self._timeout_s, self._hint_on, self._max_hints = m, timeout_s, hint_on, max_hints
        self._attempts, self._backoff_s, self._prompt_tokens = attempts, backoff_s, prompt_tokens
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
        prompt = render(history, next, memo=memo, hint_on=self._hint_on, tokens=self._prompt_tokens)
        cast = await asyncio.gather(*(self._vote(prompt) for _ in range(self._m)))
        common = tally([c.vote for c in cast], self._m, shown, self._max_hints)
        verdict = None if common is None else self._verdict(common, cast, time.monotonic() - started)
        self._record(prompt, cast, verdict)
        if verdict is None:
            valid = sum(c.vote is not None for c in cast)
            failures = sorted({c.text for c in cast if c.vote is None})
            raise JudgeError(f"{valid} of {self._m} votes, {quorum(self._m)} needed: {'; '.join(failures)}")
        return verdict

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _verdict(self, common: Tally, cast: Sequence[_Cast], seconds: float) -> Verdict:
        hints = common.hints if common.verdict in _HINTED[self._hint_on] else ()
        return Verdict(
            verdict=common.verdict,
            target=common.target,
            charges=common.charges,
            reject=common.reject,
            keep=common.keep,
            hint="\n".join(hints) or None,
            rule=common.rule,
            confidence=common.share,
            votes=tuple(asdict(c.vote) if c.vote else {"error": c.text} for c in cast),
            judge=self.name,
            seconds=seconds,
            tokens=sum(c.tokens for c in cast),
        )

    async def _vote(self, prompt: str) -> _Cast:
        """One vote, after as many attempts as it takes and are allowed."""
        note, tokens, attempt = "", 0, 0
        plain = unable = False
        while attempt < self._attempts:
            wait = min(self._backoff_s * 2**attempt, BACKOFF_CAP_S) * random.uniform(0.7, 1.3)
            held = self._structured and not plain
            try:
                async with self._slots, asyncio.timeout(self._timeout_s):
                    response = await self._ask(prompt, held)
                answer = self._answer(response)
            except TimeoutError:
                note = f"no answer within {self._timeout_s:g} s"
            except httpx.HTTPError as error:
                note = f"{type(error).__name__}: {error}"
            except Unanswered as error:
                note = str(error)
            except _Refused as error:
                note = str(error)
                if held and (error.status in _UNHELD or error.status == 500):
                    # The prompt asks for JSON anyway. A 500 may be passing: it counts for this vote alone.
                    plain, unable = True, error.status != 500
                    continue
                if error.status < 500 and error.status not in _RETRIED:
                    return _Cast(None, note, tokens)
                wait = max(wait, error.retry_after)
            else:
                if unable:  # the prompt was no trouble, so the schema was
                    self._structured = False
                tokens += answer.tokens
                vote = parse_vote(answer.text)
                if vote is not None:
                    return _Cast(vote, answer.text, tokens)
                note = f"no verdict in {answer.text[-200:]!r}"
            attempt += 1
            if attempt < self._attempts:
                await asyncio.sleep(wait)
        return _Cast(None, note, tokens)

    async def _ask(self, prompt: str, held: bool) -> tuple[httpx.Response, bytes]:
        """The response and its body, which ends at `ANSWER_BYTES`."""
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None)
        body = bytearray()
        async with self._client.stream(
            "POST", self._route.url, json=self._route.ask(prompt, held), headers=self._headers
        ) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > ANSWER_BYTES:
                    raise Unanswered(f"the answer is longer than {ANSWER_BYTES >> 20} MiB")
        return response, bytes(body)

    def _answer(self, found: tuple[httpx.Response, bytes]) -> Answer:
        response, body = found
        if response.status_code != 200:
            text = body[:200].decode("utf-8", "replace")
            raise _Refused(response.status_code, f"status {response.status_code}: {text}", _retry_after(response))
        return self._route.read(decode(body, response.charset_encoding))

    def _record(self, prompt: str, cast: Sequence[_Cast], verdict: Verdict | None) -> None:
        if self._record_file is None:
            return
        line = {
            "time": time.time(),
            "judge": self.name,
            "prompt": prompt,
            "votes": [{"text": c.text, "vote": asdict(c.vote) if c.vote else None} for c in cast],
            "verdict": asdict(verdict) if verdict else None,
        }
        try:
            self._record_file.parent.mkdir(parents=True, exist_ok=True)
            with self._record_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            # A full disk must not stop judging; the verdict itself is stored elsewhere.
            _log.warning("prm_record_file %s can't be written: %s", self._record_file, error)


class _Refused(JudgeError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def render(
    history: Sequence[Mapping[str, str]],
    next: Mapping[str, str],
    *,
    memo: str = "",
    hint_on: str = "both",
    tokens: int = 6000,
) -> str:
    """The judge's prompt: rules, then the conversation between fences that occur in none of it.

    Of a conversation of more than about `tokens` the middle of long messages and the oldest messages are
    left out.
    """
    lines = _lines(history, tokens)
    said = shorten(next["content"], int(SHARES["next"] * tokens))
    memo = shorten(memo, int(SHARES["memo"] * tokens))
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


def estimate(text: str) -> int:
    """Tokens of a text, roughly: four ASCII characters or one other make one."""
    ascii_only = sum(c.isascii() for c in text)
    return ascii_only // 4 + len(text) - ascii_only


def shorten(text: str, tokens: int) -> str:
    """Head and tail of a text of more than about `tokens`."""
    size = estimate(text)
    if size <= tokens:
        return text
    half = max(1, int(len(text) * tokens / size / 2))
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _lines(history: Sequence[Mapping[str, str]], tokens: int) -> list[str]:
    """The history's end with its indices, the newest message with a share of its own."""
    left = int((1 - sum(SHARES.values())) * tokens)
    lines: list[str] = []
    for i in range(len(history) - 1, max(-1, len(history) - SHOWN_MESSAGES - 1), -1):
        room = int(SHARES["reply"] * tokens) if i == len(history) - 1 else min(left, tokens // 8)
        if room < 8:
            break
        text = shorten(history[i]["content"], room)
        left -= 0 if i == len(history) - 1 else estimate(text)
        lines.append(f"[{i}] {history[i]['role']}: {text}")
    return lines[::-1]


def _fence(text: str) -> str:
    while (mark := f"====={secrets.token_hex(8)}=====") in text:
        pass
    return mark


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", "0")), BACKOFF_CAP_S)
    except ValueError:
        return 0.0
