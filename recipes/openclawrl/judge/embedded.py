"""The judge that needs no endpoint: the policy's frozen base model with a trained adapter and head.

Invariants: nothing is loaded before the first judgement; the model runs in one worker thread, never in
the event loop; judgements that wait together share a forward pass. It judges the last reply and knows no
network and no training.
"""

from __future__ import annotations

import asyncio
import queue
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.openclawrl.judge.votes import HINT_CHARS
from reef.errors import JudgeError, ModelError
from reef.recipe import Verdict

if TYPE_CHECKING:
    from recipes.openclawrl.judge.body import Body
    from recipes.openclawrl.judge.head import Head
    from recipes.openclawrl.judge.prompt import Reader

BATCH = 16
"""judgements that share a forward pass, at most"""
WHOLE_HINT_CHARS = 160
"""a shorter message is its own hint; of a longer one the sentences that ask are kept"""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")


@dataclass(frozen=True, slots=True)
class _Asked:
    history: Sequence[Mapping[str, str]]
    next: Mapping[str, str]
    started: float
    answer: Future[Verdict]


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
        """Judge the last reply in `history` by the `next` message; `memo` is not read.

        Raises JudgeError when there is no reply to judge, ModelError when the model can't be used.
        """
        if not any(message["role"] == "assistant" for message in history):
            raise JudgeError("there is no assistant reply to judge")
        asked = _Asked(history, next, time.monotonic(), Future())
        self._waiting.put(asked)
        self._worker.submit(self._drain)
        return await asyncio.wrap_future(asked.answer)

    async def aclose(self) -> None:
        """Let the running judgement end and free the model."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._loaded = None

    def _drain(self) -> None:
        """Answer what waits, one batch; runs in the worker thread."""
        batch: list[_Asked] = []
        while len(batch) < BATCH and not self._waiting.empty():
            asked = self._waiting.get()
            if asked.answer.set_running_or_notify_cancel():
                batch.append(asked)
        if not batch:
            return
        try:
            verdicts = self._verdicts(batch)
        except Exception as error:  # the worker's boundary: whoever awaits gets it
            for asked in batch:
                asked.answer.set_exception(error)
            return
        for asked, verdict in zip(batch, verdicts, strict=True):
            asked.answer.set_result(verdict)

    def _verdicts(self, batch: Sequence[_Asked]) -> list[Verdict]:
        loaded = self._load()
        scores = self._scores([(a.history, a.next) for a in batch])
        verdicts: list[Verdict] = []
        for asked, row in zip(batch, scores, strict=True):
            verdict, confidence = loaded.head.decide(row)
            last = max(i for i, m in enumerate(asked.history) if m["role"] == "assistant")
            target = last if verdict else None
            verdicts.append(
                Verdict(
                    verdict=verdict,
                    target=target,
                    charges=() if target is None else ((target, verdict),),
                    hint=self._hint(asked) if verdict == -1 else None,
                    confidence=round(confidence, 4),
                    votes=({"verdict": verdict, "probabilities": _named(row)},),
                    judge=self.name,
                    seconds=time.monotonic() - asked.started,
                )
            )
        return verdicts

    def _hint(self, asked: _Asked) -> str | None:
        """What the user asked for in their own words: the message, or its sentences that reject the reply."""
        least, most = HINT_CHARS
        if asked.next["role"] != "user":
            return None
        text = " ".join(asked.next["content"].split())
        if len(text) > WHOLE_HINT_CHARS:
            parts = [part.strip() for part in _SENTENCE.split(asked.next["content"]) if part.strip()][:BATCH]
            rejecting = [
                row[0] for row in self._scores([(asked.history, {"role": "user", "content": p}) for p in parts])
            ]
            wanted = max(0.5, 0.8 * max(rejecting)) if max(rejecting) >= 0.5 else max(rejecting)
            text = " ".join(p for p, score in zip(parts, rejecting, strict=True) if score >= wanted)
        text = text[:most]
        return text if len(text) > least else None

    def _scores(self, asked: Sequence[tuple[Sequence[Mapping[str, str]], Mapping[str, str]]]) -> list[list[float]]:
        from recipes.openclawrl.judge.head import score

        loaded = self._load()
        return score(loaded.body, loaded.head, [loaded.reader.read(history, next) for history, next in asked])

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
