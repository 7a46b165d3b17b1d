"""From rewards to advantages, in the order the verdicts arrived. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence


def baseline_advantages(
    rewards: Sequence[int | None], ema: float = 0.2, start: float = 0.0, negative_scale: float = 0.25, clip: float = 2.0
) -> tuple[list[float], float]:
    """Rewards in arrival order minus a running mean: the advantages, and the mean to carry on.

    The mean is updated after use. A reward of 0 or None has no RL term: advantage 0, mean unchanged.
    """
    mean, advantages = start, []
    for reward in rewards:
        if not reward:
            advantages.append(0.0)
            continue
        gain = reward - mean
        gain *= negative_scale if gain < 0 else 1.0
        advantages.append(max(-clip, min(clip, gain)))
        mean += ema * (reward - mean)
    return advantages, mean


def batch_advantages(rewards: Sequence[int | None], kind: str, start: float) -> tuple[list[float], float]:
    """Advantages of a batch under `kind` raw or baseline, and the baseline after it."""
    if kind == "raw":
        return [float(r or 0) for r in rewards], start
    return baseline_advantages(rewards, start=start)


def acceptance(rewards: Sequence[int | None], start: float, ema: float = 0.2) -> float:
    """Running share of accepted replies, in arrival order; a reward of 0 or None leaves it."""
    share = start
    for reward in rewards:
        if reward:
            share += ema * ((reward > 0) - share)
    return share
