"""The judge that needs no endpoint: the policy's frozen base model with a trained adapter and head.

Invariants: nothing is loaded before the first judgement; the model runs in one worker thread, never in
the event loop; judgements that wait together share a forward pass. It knows no network and no training.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.openclawrl.judge.attribution import charges
from recipes.openclawrl.judge.phrases import clauses, instruction, phrases
from recipes.openclawrl.judge.style import plainer
from recipes.openclawrl.judge.votes import VERDICTS
from reef.errors import JudgeError, ModelError
from reef.recipe import Verdict

if TYPE_CHECKING:
    from recipes.openclawrl.judge.body import Body
    from recipes.openclawrl.judge.head import Head, Scores
    from recipes.openclawrl.judge.prompt import Reader, Reading

BATCH = 16
"""judgements that share a forward pass, at most"""
LASTING = frozenset({"reject_format", "reject_length", "reject_tone"})
"""kinds of refusal that are about how replies should be, not about this task: their hint is a rule for the memo"""
TAKEN = 4 * BATCH
"""judgements taken from the queue at once, to batch those of similar length"""


@dataclass(frozen=True, slots=True)
class _Asked:
    history: Sequence[Mapping[str, str]]
    next: Mapping[str, str]
    answer: Future[Verdict]


@dataclass(frozen=True, slots=True)
class _Detail:
    """What else a refusal says, and the tokens read to find out."""

    reject: str | None = None
    keep: str | None = None
    hint: str | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Loaded:
    body: Body
    head: Head
    reader: Reader


class EmbeddedPrm:
    """Judges with the base model in `model_dir` on `threads` CPU threads.

    `weights` is the folder of the trained part, the shipped one if None. Raises ModelError when `model_dir`
    is no folder; a model of another kind is found out, as ModelError too, on the first judgement.
    """

    def __init__(self, model_dir: str | Path, threads: int = 1, weights: Path | None = None) -> None:
        if not Path(model_dir).is_dir():
            raise ModelError(f"the embedded judge needs the base model's folder, {model_dir} is none")
        self.name = "embedded"
        self._model_dir, self._threads, self._weights = Path(model_dir), threads, weights
        self._waiting: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._loaded: _Loaded | None = None

    async def judge(self, history: Sequence[Mapping[str, str]], next: Mapping[str, str], *, memo: str = "") -> Verdict:
        """Judge the replies in `history` by the `next` message; `memo` is not read.

        Raises JudgeError when there is no reply to judge, ModelError when the model can't be used.
        """
        if not any(message["role"] == "assistant" for message in history):
            raise JudgeError("there is no assistant reply to judge")
        asked = _Asked(history, next, Future())
        self._waiting.put(asked)
        self._worker.submit(self._drain)
        return await asyncio.wrap_future(asked.answer)

    async def aclose(self) -> None:
        """Let the running judgement end and free the model."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._loaded = None

    def _drain(self) -> None:
        """Answer what waits; runs in the worker thread."""
        taken: list[_Asked] = []
        while len(taken) < TAKEN and not self._waiting.empty():
            asked = self._waiting.get()
            if asked.answer.set_running_or_notify_cancel():
                taken.append(asked)
        taken.sort(key=lambda asked: sum(len(m["content"]) for m in asked.history[-2:]))
        for at in range(0, len(taken), BATCH):
            batch = taken[at : at + BATCH]
            try:
                verdicts = self._verdicts(batch)
            except Exception as error:  # the worker's boundary: whoever awaits gets it
                for asked in batch:
                    asked.answer.set_exception(error)
                continue
            for asked, verdict in zip(batch, verdicts, strict=True):
                asked.answer.set_result(verdict)

    def _verdicts(self, batch: Sequence[_Asked]) -> list[Verdict]:
        started = time.monotonic()
        scored = self._scores([(a.history, a.next) for a in batch])
        share = (time.monotonic() - started) / len(batch)
        return [self._verdict(asked, *found, share) for asked, found in zip(batch, scored, strict=True)]

    def _verdict(self, asked: _Asked, reading: Reading, scores: Scores, seconds: float) -> Verdict:
        """One verdict; `seconds` is its share of the batch's time."""
        started = time.monotonic()
        verdict, confidence = self._load().head.decide(scores.verdict)
        newest = reading.replies[-1]
        best = max(range(len(reading.replies)), key=lambda i: scores.target[i])
        target = reading.replies[best]
        undo = scores.kind["undo_to_earlier"] > scores.kind["earlier_target"]
        kind = max(scores.kind, key=lambda k: scores.kind[k])
        detail = self._detail(asked, kind) if verdict == -1 else _Detail()
        return Verdict(
            verdict=verdict,
            target=target if verdict else None,
            charges=charges(verdict, target, newest, undo),
            reject=detail.reject,
            keep=detail.keep,
            hint=detail.hint,
            rule=detail.hint if kind in LASTING else None,
            confidence=round(confidence, 4),
            votes=(
                {
                    "verdict": verdict,
                    "probabilities": _named(scores.verdict),
                    "kind": kind,
                    "target": round(scores.target[best], 4),
                },
            ),
            judge=self.name,
            seconds=round(seconds + time.monotonic() - started, 4),
            tokens=reading.tokens + detail.tokens,
        )

    def _detail(self, asked: _Asked, kind: str) -> _Detail:
        """What a refusal refuses and keeps, and the hint: how to write instead of a refused form, else the
        instruction in the user's own words."""
        if asked.next["role"] != "user":
            return _Detail()
        parts = clauses(asked.next["content"])
        tokens, reject, keep, refusing = 0, None, None, [1.0] * len(parts)
        if len(parts) > 1:
            scored = self._scores([(asked.history, {"role": "user", "content": part}) for part in parts])
            tokens = sum(reading.tokens for reading, _ in scored)
            refusing = [s.verdict[VERDICTS.index(-1)] for _, s in scored]
            reject, keep = phrases(parts, refusing, [s.verdict[VERDICTS.index(1)] for _, s in scored])
        hint = instruction(parts, refusing)
        if kind == "reject_format":
            reply = next(m["content"] for m in reversed(asked.history) if m["role"] == "assistant")
            hint = plainer(reply) or hint
        return _Detail(reject, keep, hint, tokens)

    def _scores(
        self, asked: Sequence[tuple[Sequence[Mapping[str, str]], Mapping[str, str]]]
    ) -> list[tuple[Reading, Scores]]:
        from recipes.openclawrl.judge.head import score

        loaded = self._load()
        readings = [loaded.reader.read(history, said) for history, said in asked]
        return list(zip(readings, score(loaded.body, loaded.head, readings, asked), strict=True))

    def _load(self) -> _Loaded:
        if self._loaded is None:
            import torch

            from recipes.openclawrl.judge.body import Body
            from recipes.openclawrl.judge.head import SHIPPED, Head
            from recipes.openclawrl.judge.prompt import Reader

            torch.set_num_threads(self._threads)
            weights = self._weights or SHIPPED
            body = Body(self._model_dir, Head.depth_of(weights))
            head = Head.load(weights, body)
            self.name = f"embedded:{head.card['name']}"
            self._loaded = _Loaded(body, head, Reader(body.tokenizer))
        return self._loaded


def _named(row: Sequence[float]) -> dict[str, float]:
    return {name: round(p, 4) for name, p in zip(("-1", "0", "1"), row, strict=True)}
