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
    """What else a refusal says."""

    reject: str | None = None
    keep: str | None = None
    hint: str | None = None


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
        """Two passes over a batch: the messages, then the clauses of those that refuse, on the same contexts."""
        from recipes.openclawrl.judge.head import Context, score

        started = time.monotonic()
        loaded = self._load()
        readings = [loaded.reader.read(asked.history, asked.next) for asked in batch]
        context = Context.of(loaded.body, loaded.head, readings)
        scored = score(loaded.body, loaded.head, readings, [(a.history, a.next) for a in batch], context)
        parts = {
            i: clauses(asked.next["content"])
            for i, (asked, scores) in enumerate(zip(batch, scored, strict=True))
            if asked.next["role"] == "user" and loaded.head.decide(scores.verdict)[0] == -1
        }
        said = [(i, {"role": "user", "content": part}) for i, some in parts.items() if len(some) > 1 for part in some]
        told: dict[int, list[tuple[float, ...]]] = {i: [] for i in parts}
        tokens = [reading.tokens for reading in readings]
        for at in range(0, len(said), BATCH):
            chosen = said[at : at + BATCH]
            rows = [i for i, _ in chosen]
            again = [loaded.reader.instead(readings[i], part) for i, part in chosen]
            found = score(
                loaded.body, loaded.head, again, [(batch[i].history, part) for i, part in chosen], context.rows(rows)
            )
            for i, reading, scores in zip(rows, again, found, strict=True):
                told[i].append(scores.verdict)
                tokens[i] += len(reading.suffix)
        share = (time.monotonic() - started) / len(batch)
        details = [_detail(a, scored[i], parts.get(i, []), told.get(i, [])) for i, a in enumerate(batch)]
        return [self._verdict(readings[i], scored[i], details[i], tokens[i], share) for i in range(len(batch))]

    def _verdict(self, reading: Reading, scores: Scores, detail: _Detail, tokens: int, seconds: float) -> Verdict:
        """One verdict; `seconds` is its share of the batch's time."""
        head = self._load().head
        verdict, confidence = head.decide(scores.verdict)
        newest = reading.replies[-1]
        best = max(range(len(reading.replies)), key=lambda i: scores.target[i])
        target = reading.replies[best]
        undo = scores.kind["undo_to_earlier"] > scores.kind["earlier_target"]
        kind = _kind(scores)
        return Verdict(
            verdict=verdict,
            target=target if verdict else None,
            charges=charges(verdict, target, newest, undo) if head.sure(confidence) else (),
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
            seconds=round(seconds, 4),
            tokens=tokens,
        )

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


def _detail(asked: _Asked, scores: Scores, parts: Sequence[str], told: Sequence[Sequence[float]]) -> _Detail:
    """What a refusal refuses and keeps, and the hint: how to write instead of a refused form, else the
    instruction in the user's own words. `told` are the verdict's probabilities of each part, if there are several."""
    if not parts:
        return _Detail()
    reject, keep, refusing = None, None, [1.0] * len(parts)
    if told:
        refusing = [p[VERDICTS.index(-1)] for p in told]
        reject, keep = phrases(parts, refusing, [p[VERDICTS.index(1)] for p in told])
    hint = instruction(parts, refusing)
    if _kind(scores) == "reject_format":
        reply = next(m["content"] for m in reversed(asked.history) if m["role"] == "assistant")
        hint = plainer(reply) or hint
    return _Detail(reject, keep, hint)


def _kind(scores: Scores) -> str:
    return max(scores.kind, key=lambda k: scores.kind[k])


def _named(row: Sequence[float]) -> dict[str, float]:
    return {name: round(p, 4) for name, p in zip(("-1", "0", "1"), row, strict=True)}
