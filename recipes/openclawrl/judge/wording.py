"""What the wording alone says of the verdict: a linear model over the message's words and letters.

It reads the request's words, too, and no reply, so near-identical messages that only the conversation tells apart are
one to it; but it needs no language to be known by the base, whose own languages are few. Owns its features (trained
weights belong to them: `VERSION`) and its fit. No language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as fn

from recipes.openclawrl.judge.grams import Bags, buckets, letters, mean_of, sequences, words_of
from recipes.openclawrl.judge.prompt import asked_before, shown
from recipes.openclawrl.judge.votes import VERDICTS

VERSION = "g1"
BUCKETS = 1 << 18
"""of features; different ones may share a bucket"""
SAID_CHARS, ASKED_CHARS = 1500, 600
"""read of message and request, from their beginnings"""
Said = tuple[str, str, str]
"""a reaction's wording: the request, the next message, its role"""


@dataclass(frozen=True, slots=True)
class Wording:
    """The fitted model."""

    table: Tensor
    """[BUCKETS, 3], what a feature says for each of `VERDICTS`"""
    prior: Tensor
    """[3]"""

    @staticmethod
    def none() -> Wording:
        """A model that says nothing."""
        return Wording(torch.zeros(BUCKETS, len(VERDICTS)), torch.zeros(len(VERDICTS)))

    def logits(self, said: Sequence[Said]) -> Tensor:
        """[N, 3] in the order of `VERDICTS`."""
        return torch.stack([self.prior + mean_of(self.table, features(*one)) for one in said])


def fit_wording(said: Sequence[Said], verdicts: Tensor, *, decay: float = 4e-6, rounds: int = 120) -> Wording:
    """Fit to `verdicts` [N], indices in `VERDICTS`."""
    bags = Bags.of([features(*one) for one in said])
    table = torch.zeros(BUCKETS, len(VERDICTS), requires_grad=True)
    prior = torch.zeros(len(VERDICTS), requires_grad=True)
    optimiser = torch.optim.LBFGS([table, prior], max_iter=rounds, history_size=6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = fn.cross_entropy(bags.means(table) + prior, verdicts) + decay * table.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return Wording(table.detach(), prior.detach())


def wording_of(history: Sequence[Mapping[str, str]], next: Mapping[str, str]) -> Said:
    """What this model reads of a reaction to the last reply in `history`."""
    return asked_before(history, shown(history)[-1]), next["content"], next["role"]


def features(request: str, text: str, role: str) -> list[int]:
    """Buckets of a reaction's features."""
    text = text[:SAID_CHARS]
    found = {"w" + sequence for sequence in sequences(text, 3)}
    found |= {"c" + some for some in letters(text)}
    found |= {"q" + word for word in words_of(request[:ASKED_CHARS])}
    return buckets([*found, "role " + role, f"length {len(text).bit_length()}"], BUCKETS)
