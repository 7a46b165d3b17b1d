"""The gate: what a candidate must show before it may be served.

Each check compares one number with one limit. Invariant: a value that is not finite never passes.
Checks on weights and on a few generic replies cost one short forward pass and run on every step;
checks on sampled replies are pure functions for whoever has samples. It knows no recipe, and it
decides nothing: the caller marks the release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from reef.recipe import Scorer, Tokenizer

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


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What a candidate may not exceed."""

    kl_to_base: float = 0.1
    """nat per token, mean over the probes' replies"""
    length_ratio: float = 2.0
    """mean reply length over that of the current version, or its inverse"""
    repeated_4grams: float = 0.2
    missing_eos: float = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. `value` is None when it was not a finite number."""

    name: str
    value: float | None
    limit: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks of a candidate."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.checks)

    @property
    def reason(self) -> str:
        """What failed, for people; empty when nothing did."""
        failed = [c for c in self.checks if not c.passed]
        return "; ".join(
            f"{c.name} {'not finite' if c.value is None else f'{c.value:.4g}'}, limit {c.limit:g}" for c in failed
        )

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "reason": self.reason, "checks": [asdict(c) for c in self.checks]}


def at_most(name: str, value: float, limit: float) -> Check:
    """A check that passes up to and including its limit."""
    finite = math.isfinite(value)
    return Check(name, value if finite else None, limit, finite and value <= limit)


def at_least(name: str, value: float, limit: float) -> Check:
    """A check that passes from its limit on."""
    finite = math.isfinite(value)
    return Check(name, value if finite else None, limit, finite and value >= limit)


# --- checks on a candidate's weights --------------------------------------------------------------


def finite_losses(losses: Iterable[float]) -> Check:
    """How many epochs had a loss or gradient norm that is no finite number."""
    return at_most("non_finite_losses", sum(not math.isfinite(x) for x in losses), 0)


def finite_weights(tensors: Mapping[str, Tensor]) -> Check:
    """How many adapter tensors hold a NaN or infinity."""
    return at_most("non_finite_tensors", sum(not bool(t.isfinite().all()) for t in tensors.values()), 0)


def changed_tensors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Check:
    """How many adapter tensors differ from the parent's: at least one."""
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


# --- checks on sampled replies --------------------------------------------------------------------


def length_ratio(candidate: Sequence[int], current: Sequence[int]) -> float:
    """Mean length against mean length, the larger over the smaller; lengths in tokens."""
    if not candidate or not current:
        return 1.0
    a, b = max(sum(candidate) / len(candidate), 1.0), max(sum(current) / len(current), 1.0)
    return max(a / b, b / a)


def repeated_ngrams(ids: Sequence[int], n: int = 4) -> float:
    """The share of a reply's n-grams that occurred before in it; 0 for replies shorter than n."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def missing_eos(replies: Sequence[Sequence[int]], eos: Iterable[int]) -> float:
    """The share of replies that do not end with an end-of-text token."""
    ends = set(eos)
    return sum(not reply or reply[-1] not in ends for reply in replies) / len(replies) if replies else 0.0


def reply_checks(
    candidate: Sequence[Sequence[int]], current: Sequence[Sequence[int]], eos: Iterable[int], limits: GateLimits
) -> list[Check]:
    """Checks on replies sampled for the same prompts by candidate and current version."""
    repeated = [repeated_ngrams(reply) for reply in candidate]
    return [
        at_most(
            "length_ratio", length_ratio([len(r) for r in candidate], [len(r) for r in current]), limits.length_ratio
        ),
        at_most("repeated_4grams", sum(repeated) / len(repeated) if repeated else 0.0, limits.repeated_4grams),
        at_most("missing_eos", missing_eos(candidate, eos), limits.missing_eos),
    ]
