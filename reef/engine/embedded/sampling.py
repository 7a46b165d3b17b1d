"""From logits to a token, with the log-probabilities of the distribution it was drawn from.

Temperature divides the logits, then top-k and top-p cut, then the rest is renormalised; that is the
distribution sampled from and reported. At temperature 0 the most likely token is taken and the
log-probabilities are those of temperature 1. This module knows no rows and no text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """How one request is sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off"""
    seed: int | None = None
    top: int = 0
    """how many alternatives are reported with each token"""


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-probability), most likely first; never one that could not be drawn"""


def generator(seed: int | None) -> torch.Generator:
    """A request's own source of chance, so that its neighbours can't change its draws."""
    source = torch.Generator()
    if seed is None:
        source.seed()
    else:
        source.manual_seed(seed % 2**63)
    return source


@torch.inference_mode()
def draw(logits: Tensor, settings: Settings, source: torch.Generator | None) -> Drawn:
    """Draw from float32 logits [V]; without `source` from torch's own."""
    greedy = settings.temperature == 0
    logprobs = _distribution(logits if greedy else logits / settings.temperature, settings, cut=not greedy)
    token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=source))
    top: tuple[tuple[int, float], ...] = ()
    if settings.top:
        values, ids = logprobs.topk(min(settings.top, len(logprobs)))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        top = tuple(pair for pair in pairs if pair[1] != float("-inf"))
    return Drawn(token, float(logprobs[token]), top)


def _distribution(logits: Tensor, settings: Settings, *, cut: bool) -> Tensor:
    if cut and 0 < settings.top_k < len(logits):
        kept, ids = logits.topk(settings.top_k)
        logits = torch.full_like(logits, float("-inf")).scatter_(0, ids, kept)
    if cut and settings.top_p < 1:
        ordered, ids = logits.sort(descending=True)
        before = ordered.softmax(0).cumsum(0).roll(1)
        before[0] = 0.0
        logits = logits.scatter(0, ids[before >= settings.top_p], float("-inf"))
    return logits.log_softmax(0)
