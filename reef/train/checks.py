"""Checks: one number against one limit each, and those that need nothing but token ids.

Invariant: a value that is not finite never passes. Used by the trainer on a candidate and by the learner
on what is being served, so it imports no torch. It knows no weights and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CANARIES: tuple[str, ...] = (
    "What is the capital of Italy?",
    "Name three animals that live in the sea.",
    "What do people use a hammer for?",
    "How many days are in a week?",
    "Say hello to my neighbour.",
    "Which is bigger, a horse or a mouse?",
)
"""requests with a short answer, asked of every candidate and, while it serves, of every release; so many that one
greedy reply that loops refuses nothing, and two do"""
CANARY_TOKENS = 32


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What a candidate may not exceed."""

    kl_to_base: float = 0.1
    """nat per token, mean over the probes' replies"""
    length_ratio: float = 2.0
    """mean reply length over that of the current version, or its inverse"""
    repeated_4grams: float = 0.2
    missing_eos: float = 0.05
    """share of replies to the canaries that don't end, beyond what the base itself leaves unfinished; at least
    one reply"""
    held_out_drop: float = 0.1
    """nat per token that accepted, never rehearsed replies may become less likely in one step"""


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


def mean_repeated(replies: Sequence[Sequence[int]]) -> float:
    """The mean of `repeated_ngrams`; 0 without replies."""
    return sum(repeated_ngrams(reply) for reply in replies) / len(replies) if replies else 0.0


def missing_eos(replies: Sequence[Sequence[int]], eos: Iterable[int]) -> float:
    """The share of replies that do not end with an end-of-text token."""
    ends = set(eos)
    return sum(not reply or reply[-1] not in ends for reply in replies) / len(replies) if replies else 0.0


def may_not_end(limits: GateLimits, base: float, replies: int) -> float:
    """The share of replies that may not end, where the base leaves the share `base` unfinished. It is one reply
    at least: of a few replies no share is known more exactly, and a user may like longer answers."""
    return base + max(limits.missing_eos, 1 / max(replies, 1)) + 1e-9  # 4/6 + 1/6 is less than 5/6


def reply_checks(
    candidate: Sequence[Sequence[int]],
    current: Sequence[Sequence[int]],
    eos: Iterable[int],
    limits: GateLimits,
    base: Sequence[Sequence[int]] = (),
) -> list[Check]:
    """Checks on replies for the same prompts by candidate and current version. What the base's replies
    repeat or leave unfinished themselves is allowed on top of the limits."""
    unfinished = may_not_end(limits, missing_eos(base, eos), len(candidate))
    return [
        at_most(
            "length_ratio", length_ratio([len(r) for r in candidate], [len(r) for r in current]), limits.length_ratio
        ),
        at_most("repeated_4grams", mean_repeated(candidate), limits.repeated_4grams + mean_repeated(base)),
        at_most("missing_eos", missing_eos(candidate, eos), unfinished),
    ]
