"""Replies from the embedded engine's own forward pass, many at once, without its server and threads.

Invariant: a reply is a function of prompt, weights, seed and the number of its neighbours; ids and
log-probs are those the engine would have recorded. It knows no session and no rule.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reef.engine.embedded import sampling
from reef.engine.embedded.adapter import Adapter
from reef.engine.embedded.policy import load_policy
from reef.engine.embedded.prefix import CHUNK


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled reply."""

    ids: tuple[int, ...]
    """the end-of-text token included, where there is one"""
    logprobs: tuple[float, ...]
    ended: bool
    """by itself, before the limit"""


class Sampler:
    def __init__(self, model: Path) -> None:
        self._policy = load_policy(model, "float32")
        self._adapters: dict[Path, Adapter] = {}
        self.seconds = 0.0
        """processor time spent so far"""

    @torch.inference_mode()
    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], folder: Path | None, *, tau: float, limit: int
    ) -> list[Drawn]:
        """One reply to each prompt under the adapter in `folder` (None: the base)."""
        started = time.process_time()
        policy, adapter = self._policy, self._adapter(folder)
        settings = sampling.Settings(temperature=tau)
        sources = [sampling.generator(seed) for seed in seeds]
        rows = [policy.row(len(prompt) + limit, adapter) for prompt in prompts]
        ids: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        running = list(range(len(prompts)))

        def take(i: int, logits: torch.Tensor) -> None:
            drawn = sampling.draw(logits, settings, sources[i])
            ids[i].append(drawn.token)
            logprobs[i].append(drawn.logprob)

        for i, prompt in enumerate(prompts):
            logits = None
            for at in range(0, len(prompt), CHUNK):
                logits = policy.prefill(rows[i], prompt[at : at + CHUNK], last=at + CHUNK >= len(prompt))
            assert logits is not None
            take(i, logits)
        while running := [i for i in running if ids[i][-1] not in policy.eos and len(ids[i]) < limit]:
            step = policy.decode([rows[i] for i in running], [ids[i][-1] for i in running])
            for i, logits in zip(running, step, strict=True):
                take(i, logits)
        self.seconds += time.process_time() - started
        return [
            Drawn(tuple(tokens), tuple(values), tokens[-1] in policy.eos)
            for tokens, values in zip(ids, logprobs, strict=True)
        ]

    def _adapter(self, folder: Path | None) -> Adapter | None:
        if folder is None:
            return None
        if folder not in self._adapters:
            self._adapters.clear()  # one version is served at a time
            self._adapters[folder] = self._policy.adapter(folder.name, folder)
        return self._adapters[folder]
