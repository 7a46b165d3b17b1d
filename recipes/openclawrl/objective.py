"""The loss of one sample: pure functions of tensors, and the switches that combine them.

Invariant: every function takes log-probabilities that were already divided by the sampling
temperature, differentiates only through the student, and returns one value per position [T].
T counts response positions, V the vocabulary, S a support of token ids. It knows no model, no
tokenizer, no batch and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NOTHING = -1e4
"""log-probability of a support slot that is not in use: its probability and its gradient are 0"""
SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised. The defaults are what learns fastest on a small model on a CPU."""

    distil: Literal["jsd_full", "jsd_tail", "rkl_tail", "openclaw_topk"] = "jsd_full"
    """distance between student and teacher; `jsd_*` are four times the divergence"""
    support_k: int = 16
    """ids kept from each distribution by the `tail` and `topk` distances, and compared by the choice
    of context"""
    advantage: Literal["raw", "baseline"] = "baseline"
    routing: Literal["always", "routed"] = "always"
    """routed: accepted replies are distilled only from an accepted demonstration"""
    w_rl: float = 1.0
    w_opd: float = 1.0
    w_rehearse: float = 1.0
    """weight of the likelihood of rehearsed replies"""
    beta_kl: float = 0.01
    """weight of the k3 estimate of the distance to the base on the reply itself"""
    beta_replay: float = 0.1
    """weight of the full KL to the base on one generic prompt per step"""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    kappa_max: float = 2.0
    """bound of the weight that corrects for older behaviour weights"""
    opd_clip: float = 1.0
    """bound of teacher minus student in `openclaw_topk`, nats"""
    rkl_clamp: float = 5.0
    drop_first: int = 0
    """leading tokens that are not distilled. The first ones decide about a list or a heading: a reply that began
    with "1." is led on by a teacher that reads it, so what is left out there is never unlearned"""


REEF = Objective()
OPENCLAW = Objective(
    distil="openclaw_topk",
    support_k=4,
    advantage="raw",
    routing="always",
    w_rehearse=0.0,
    beta_kl=0.0,
    beta_replay=0.0,
    drop_first=2,
)
"""the published recipe (OpenClaw-RL v2), for comparison"""
PRESETS = {"reef": REEF, "openclaw": OPENCLAW}


# --- distances between distributions --------------------------------------------------------------


def full_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs over the same V entries: [T, V] x [T, V] -> [T], nats."""
    return (p.exp() * (p - q)).sum(-1)


def full_jsd(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence, [T], at most ln 2."""
    a, b = p.exp(), q.exp()
    m = ((a + b) / 2).clamp(min=SMALLEST).log()
    return (b * (q - m) + a * (p - m)).sum(-1) / 2


def support(old: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The union of both top-k sets: ids [T, 2k] and, as duplicates occur, which are in use."""
    a, b = old.topk(k, -1).indices, teacher.topk(k, -1).indices
    fresh = ~(b.unsqueeze(-1) == a.unsqueeze(-2)).any(-1)
    return torch.cat([a, b], -1), torch.cat([torch.ones_like(a, dtype=torch.bool), fresh], -1)


def tail_bins(logp: Tensor, ids: Tensor, used: Tensor | None = None) -> Tensor:
    """Log-probs of the support's ids and of everything else as one bin: [T, V] -> [T, S + 1]."""
    kept = logp.gather(-1, ids)
    if used is not None:
        kept = kept.masked_fill(~used, NOTHING)
    inside = kept.logsumexp(-1, keepdim=True).clamp(max=-1e-6)
    return torch.cat([kept, torch.log(-torch.expm1(inside))], -1)


def jsd_tail(p: Tensor, q: Tensor) -> Tensor:
    """Four times the JSD of two binned distributions [T, S + 1]: [T], at most 4 ln 2."""
    return 4 * full_jsd(p, q)


def rkl_tail(p: Tensor, q: Tensor, clamp: float = 5.0) -> Tensor:
    """KL(p || q) of two binned distributions, clamped."""
    return full_kl(p, q).clamp(max=clamp)


def openclaw_topk(
    cur: Tensor, old: Tensor, teacher: Tensor, clip: float = 1.0, low: float = 0.2, high: float = 0.28
) -> Tensor:
    """The published top-K distillation (OpenClaw-RL v2), on log-probs [T, K] at pi_old's top K."""
    gain = (teacher - old).clamp(-clip, clip) * old.softmax(-1)
    rho = (cur - old).exp()
    return torch.maximum(-gain * rho, -gain * rho.clamp(1 - low, 1 + high)).sum(-1)


def k3(logp: Tensor, base: Tensor) -> Tensor:
    """Non-negative estimate of KL(policy || base) from log-probs of sampled tokens, [T]."""
    gap = base - logp
    return gap.exp() - 1 - gap


# --- reinforcement ------------------------------------------------------------------------------


def ppo_term(
    logp: Tensor,
    old: Tensor,
    mu: Tensor,
    advantage: float,
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 3.0,
    kappa_max: float = 2.0,
) -> Tensor:
    """Clipped policy-gradient term per token, [T] (asymmetric clip, dual clip for A < 0).

    `old` are log-probs before the step, `mu` those of the weights that sampled; their ratio, bounded
    (truncated importance sampling), corrects for the versions in between.
    """
    rho = (logp - old).exp()
    kappa = (old - mu).exp().clamp(max=kappa_max).detach()
    term = torch.maximum(-rho * advantage, -rho.clamp(1 - low, 1 + high) * advantage)
    if advantage < 0:
        term = term.clamp(max=-dual * advantage)
    return kappa * term


def clipped(logp: Tensor, old: Tensor, advantage: float, low: float = 0.2, high: float = 0.28) -> Tensor:
    """Which tokens have left the trust region in the direction the reward pushes, bool [T]."""
    rho = (logp - old).exp()
    return rho > 1 + high if advantage > 0 else rho < 1 - low


def opd_mask(mask: Tensor, drop: int = 2, thinking_ends: Tensor | None = None) -> Tensor:
    """The trained positions without the first `drop` and, for models that think aloud, without those
    where the end of thinking is at stake (bool [T]). The end of text stays."""
    kept = mask * (mask.cumsum(-1) > drop)
    return kept if thinking_ends is None else kept * ~thinking_ends


# --- one sample ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Anchor:
    """What stays fixed while a sample is trained, all without gradient."""

    old: Tensor
    """log-probs of the reply before the step, [T]"""
    base: Tensor | None = None
    """log-probs of the reply under the frozen base, [T]"""
    teacher: Tensor | None = None
    """teacher log-probs: [T, V] for `jsd_full`, [T, S + 1] binned, or [T, K] for `openclaw_topk`"""
    ids: Tensor | None = None
    """the support, [T, S]; None for the whole vocabulary"""
    used: Tensor | None = None
    old_support: Tensor | None = None
    """log-probs before the step on the support, [T, K] (`openclaw_topk`)"""
    thinking_ends: Tensor | None = None
    """where the end of thinking is at stake, bool [T]; nothing is distilled there"""


def anchor(old: Tensor, tokens: Tensor, teacher: Tensor | None, base: Tensor | None, objective: Objective) -> Anchor:
    """Reduce log-probs [T, V] before the step to what `sample_loss` reads again in every epoch.

    The full-vocabulary teacher is kept in half precision (2 bytes times T times V).
    """
    taken = pick(old, tokens)
    if teacher is None:
        return Anchor(taken, base)
    k = min(objective.support_k, old.shape[-1])
    match objective.distil:
        case "jsd_full":
            return Anchor(taken, base, teacher.clamp(min=-6e4).half())
        case "openclaw_topk":
            ids = old.topk(k, -1).indices
            return Anchor(taken, base, teacher.gather(-1, ids), ids, None, old.gather(-1, ids))
        case _:
            ids, used = support(old, teacher, k)
            return Anchor(taken, base, tail_bins(teacher, ids, used), ids, used)


def thinking_at_stake(old: Tensor, tokens: Tensor, ends: int, k: int) -> Tensor:
    """Where `ends` was sampled or is among the policy's k most likely ids, bool [T]."""
    return (tokens == ends) | (old.topk(min(k, old.shape[-1]), -1).indices == ends).any(-1)


def pick(logp: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs of the given tokens: [T, V], [T] -> [T]."""
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def distance(logp: Tensor, fixed: Anchor, objective: Objective) -> Tensor:
    """The chosen distillation term per position, [T]."""
    if fixed.teacher is None:
        raise ValueError("no teacher to distil from")
    teacher = fixed.teacher.float()
    if fixed.ids is None:
        return 4 * full_jsd(logp, teacher)
    if fixed.old_support is not None:
        cur = logp.gather(-1, fixed.ids)
        return openclaw_topk(
            cur, fixed.old_support, teacher, objective.opd_clip, objective.clip_low, objective.clip_high
        )
    binned = tail_bins(logp, fixed.ids, fixed.used)
    return (
        rkl_tail(binned, teacher, objective.rkl_clamp) if objective.distil == "rkl_tail" else jsd_tail(binned, teacher)
    )


def sample_loss(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    mu: Tensor,
    tau: float,
    fixed: Anchor,
    advantage: float,
    objective: Objective,
    *,
    rl_weight: float = 1.0,
    distilled: bool = True,
    rehearsed: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The mean over a reply's trained tokens of RL, distillation and anchor terms, and each of them.

    `logits` [T, V] are the policy's, undivided and with gradient; `tokens`, `mask`, `mu` are [T].
    An advantage of 0 has no RL term; `distilled` is the routing's decision for this sample.
    """
    count = mask.sum()
    if count == 0:
        return logits.sum() * 0.0, {}
    logp = (logits / tau).log_softmax(-1)
    taken = pick(logp, tokens)
    terms = {"logp": taken}
    if advantage:
        limits = objective.clip_low, objective.clip_high
        rl = ppo_term(taken, fixed.old, mu, advantage, *limits, objective.dual_clip, objective.kappa_max)
        terms["rl"] = objective.w_rl * rl_weight * rl
        terms["clip_fraction"] = clipped(taken, fixed.old, advantage, *limits).float()
        terms["kappa"] = (fixed.old - mu).exp().clamp(max=objective.kappa_max)
    if rehearsed and objective.w_rehearse:
        terms["rehearsal"] = -objective.w_rehearse * taken
    if distilled and fixed.teacher is not None:
        kept = opd_mask(mask, objective.drop_first, fixed.thinking_ends)
        terms["opd"] = objective.w_opd * kept * distance(logp, fixed, objective)
    if fixed.base is not None and objective.beta_kl:
        terms["k3"] = objective.beta_kl * k3(taken, fixed.base)
    means = {name: (mask * term).sum() / count for name, term in terms.items()}
    total = sum((means[name] for name in ("rl", "opd", "rehearsal", "k3") if name in means), logits.sum() * 0.0)
    return total, {name: float(mean.detach()) for name, mean in means.items()}
