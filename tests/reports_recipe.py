"""A second recipe, to keep the boundary honest: it learns from explicit reports only and has no judge.

Plain REINFORCE on the score. Nothing in `reef` knows that it exists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from reef.recipe import JudgedTurn, Loss, RecipeTools, Refusal, Rehearsal, Scorer, Turn, Verdict
from reef.train.sample import Batch, Sample


class Config(BaseModel):
    batch_size: int = 2
    max_staleness: int = 4
    session_ttl_s: float = 900.0


class ReportsOnly:
    name = "reports-only"
    Config = Config

    def __init__(self, config: Config, tools: RecipeTools | None = None) -> None:
        self.config = config

    async def judge(self, turn: Turn) -> Verdict | None:
        scores = [r.score for r in turn.reports if r.score]
        if not scores:
            return None
        index = sum(m.role != "system" for m in turn.messages)
        value = 1 if scores[-1] > 0 else -1
        return Verdict(value, index, ((index, value),), judge="report")

    def sample(self, turn: Turn, verdict: Verdict, past: Sequence[JudgedTurn]) -> Sample | Refusal:
        s = turn.sampled
        assert s is not None
        mask = (1,) * len(s.token_ids)
        return Sample(
            turn.id, s.version, tuple(s.prompt_ids), s.token_ids, s.logprobs, (), mask, s.sampling.tau, verdict.verdict
        )

    def form(self, samples: Sequence[Sample], carried: Mapping[str, Any]) -> tuple[list[Sample], dict[str, Any]]:
        formed = [replace(s, advantage=float(s.reward)) for s in samples]
        return formed, {"steps": carried.get("steps", 0) + 1}

    def rehearse(self, past: Sequence[JudgedTurn], version: int, step: Collection[str]) -> Rehearsal:
        return Rehearsal()

    def active(self, sample: Sample) -> bool:
        return any(sample.mask) and bool(sample.advantage)

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss:
        import torch

        total = torch.zeros(())
        for sample in batch.samples:
            logp = (policy.logits(sample.prompt_ids, sample.response_ids) / sample.tau).log_softmax(-1)
            taken = logp.gather(-1, torch.tensor(sample.response_ids).unsqueeze(-1)).mean()
            total = total - (sample.advantage or 0.0) * taken / batch.n_eff
        return Loss(total, {"rl": float(total.detach())})
