"""The gate: what a candidate must show before it may be served.

Checks here are on the weights, on the distance to the base over a few fixed replies, and on replies this
user has accepted; those on sampled replies are in `checks.py`. It knows no recipe, and it decides nothing:
the caller marks the release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from reef.recipe import Scorer, Tokenizer
from reef.train.checks import Check, at_least, at_most
from reef.train.sample import Sample

Replay = tuple[tuple[int, ...], tuple[int, ...]]
"""prompt ids and reply ids"""

PROBES: tuple[tuple[str, str], ...] = (
    (
        "What is the capital of France?",
        "The capital of France is Paris. It lies on the river Seine and has about two million inhabitants.",
    ),
    (
        "Write one sentence about the sea.",
        "The sea was calm that morning, and the small boats left the harbour one after another.",
    ),
    (
        "Why do leaves change colour in autumn?",
        "In autumn trees stop making chlorophyll, the green pigment, so the yellow and red ones become visible.",
    ),
)
"""(request, fixed reply) pairs on which the distance to the base is measured"""

REPLAYS: tuple[tuple[str, str], ...] = (
    ("How do I keep bread fresh?", "Keep bread in a paper bag or a bread box at room temperature, not in the fridge."),
    ("Translate 'good morning' into Spanish.", "In Spanish, 'good morning' is 'buenos días'."),
    ("What does a compiler do?", "A compiler turns source code into instructions that a machine can execute."),
    (
        "Tell me a fact about penguins.",
        "Penguins can't fly, but they swim very well and can stay under water for minutes.",
    ),
)
"""generic pairs a recipe may hold the policy near the base on; never the ones it is measured on"""


# --- checks on a candidate's weights --------------------------------------------------------------


def finite_losses(losses: Iterable[float]) -> Check:
    """How many epochs had a loss or gradient norm that is no finite number."""
    return at_most("non_finite_losses", sum(not math.isfinite(x) for x in losses), 0)


def finite_weights(tensors: Mapping[str, Tensor]) -> Check:
    """How many trained tensors hold a NaN or infinity."""
    return at_most("non_finite_tensors", sum(not bool(t.isfinite().all()) for t in tensors.values()), 0)


def changed_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Check:
    """How many trained tensors differ from the parent's: at least one."""
    return at_least("changed_tensors", sum(not torch.equal(before[n], after[n]) for n in after), 1)


# --- distance to the base -------------------------------------------------------------------------


def replays(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]] = PROBES) -> list[Replay]:
    """The pairs as ids, rendered with the policy's chat template."""
    return [
        (tuple(tokenizer.render([{"role": "user", "content": request}])), tuple(tokenizer.encode(reply)))
        for request, reply in pairs
    ]


@torch.no_grad()
def base_logprobs(reference: Scorer, probes: Sequence[Replay]) -> list[Tensor]:
    """Log-probs of the frozen base on the probes, [T, V] each; they never change, so keep them."""
    return [reference.logits(*probe).log_softmax(-1) for probe in probes]


@torch.no_grad()
def kl_to_base(policy: Scorer, probes: Sequence[Replay], base: Sequence[Tensor], limit: float) -> Check:
    """KL(policy || base) over the whole vocabulary, mean over all probe tokens, temperature 1."""
    total, tokens = 0.0, 0
    for probe, q in zip(probes, base, strict=True):
        p = policy.logits(*probe).log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
        tokens += len(probe[1])
    return at_most("kl_to_base", total / max(tokens, 1), limit)


@torch.no_grad()
def mean_logprob(policy: Scorer, samples: Sequence[Sample]) -> float:
    """Log-prob per token of the samples' replies, nat, at the temperature they were sampled with."""
    total, tokens = 0.0, 0
    for sample in samples:
        logp = (policy.logits(sample.prompt_ids, sample.response_ids) / sample.tau).log_softmax(-1)
        taken = logp.gather(-1, torch.tensor(sample.response_ids, device=logp.device).unsqueeze(-1))
        total += float(taken.sum())
        tokens += len(sample.response_ids)
    return total / max(tokens, 1)


def held_out(before: float, after: float, limit: float) -> Check:
    """How much more likely the candidate finds accepted replies than its parent does, nat per token."""
    return at_least("held_out_gain", after - before, -limit)
