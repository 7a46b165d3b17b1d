"""Turning verdict logits into probabilities one can act on, and measuring them.

Pure functions of logits and probabilities [N, 3] in the order of `VERDICTS` and of class indices [N]; they know no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn

from recipes.openclawrl.judge.head import Head, target_logits
from recipes.openclawrl.judge.prepared import Prepared
from recipes.openclawrl.judge.votes import VERDICTS
from recipes.openclawrl.judge.words import Reaction

NEUTRAL = VERDICTS.index(0)
COVERAGES = (1.0, 0.9, 0.75, 0.5, 0.25)
THRESHOLDS = [0.34 + 0.02 * i for i in range(33)]
MOST_REVERSED = 0.15
"""share of the charges that may say the reverse of the label: what they train pulls the wrong way"""


def calibrate(head: Head, states: Tensor, wording: Tensor, verdicts: Tensor) -> Head:
    """Set bias, temperature, the wording's weight and the threshold by rows that nothing in `head` was trained on:
    `states` and `wording` [N, 3] are the logits that hidden states and wording alone gave them.

    The first three minimise the log loss; the threshold is the lowest at which no more than `MOST_REVERSED` of
    what is charged is the reverse of the label.
    """
    shift = torch.zeros(len(VERDICTS), requires_grad=True)
    heat = torch.zeros((), requires_grad=True)
    weight = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([shift, heat, weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        prior = 0.01 * (shift.square().sum() + heat.square() + weight.square())
        value = fn.cross_entropy((states + shift) / heat.exp() + weight * wording, verdicts) + prior
        value.backward()
        return value

    optimiser.step(loss)
    rows, bias = head.linear["verdict"]
    head = replace(
        head,
        linear={**head.linear, "verdict": (rows, bias + shift.detach())},
        temperature=heat.exp().item(),
        wording_weight=weight.item(),
    )
    probabilities = head.mixed(states + shift.detach(), wording)
    best, guess = probabilities.max(-1)

    def reversed(threshold: float) -> float:
        charged = (guess != NEUTRAL) & (best >= threshold)
        return ((guess - verdicts).abs() == 2)[charged].float().mean().item() if charged.any() else 0.0

    return replace(head, threshold=next((t for t in THRESHOLDS if reversed(t) <= MOST_REVERSED), THRESHOLDS[-1]))


def calibrate_target(head: Head, place: Tensor, rows: Sequence[Prepared]) -> Head:
    """Weigh place against words by rows the head was not trained on, `place` [N, 3] its logits for them.

    Six numbers are fitted: what a message's words weigh, and scale and offset of what it says of a reply's place.
    """
    asked = [(i, row) for i, row in enumerate(rows) if row.target is not None]
    if not asked:
        return head
    cue = head.cue.clone().requires_grad_()
    scale = torch.ones((), requires_grad=True)
    shift = torch.zeros(place.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([cue, scale, shift], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = 0.002 * (cue - head.cue).square().sum() + 0.1 * (scale - 1).square() + 0.02 * shift.square().sum()
        for i, row in asked:
            logits = target_logits(scale * place[i] + shift, cue, row.replies, row.cues)
            value = value + fn.cross_entropy(logits[None], torch.tensor([row.target])) / len(asked)
        value.backward()
        return value

    optimiser.step(loss)
    weight, bias = head.linear["place"]
    by = scale.detach()
    linear = {**head.linear, "place": (weight * by, bias * by + shift.detach())}
    return replace(head, linear=linear, cue=cue.detach())


def measure(head: Head, probabilities: Tensor, verdicts: Tensor) -> dict[str, Any]:
    """Accuracy over three classes, accept against reject, how often a verdict is the opposite of the label,
    and accuracy on the share of rows that the judge is surest of."""
    guess = decided(probabilities, head.threshold)
    clear = verdicts != NEUTRAL
    sided = (probabilities[clear][:, 2] > probabilities[clear][:, 0]) == (verdicts[clear] == 2)
    plain = probabilities.argmax(-1) == verdicts
    surest = plain[probabilities.max(-1).values.argsort(descending=True)].float()
    return {
        "rows": len(verdicts),
        "accuracy": round((guess == verdicts).float().mean().item(), 4),
        "plain": round(plain.float().mean().item(), 4),
        "accept_or_reject": round(sided.float().mean().item(), 4),
        "reversed": round(((guess - verdicts).abs() == 2).float().mean().item(), 4),
        "log_loss": round(fn.nll_loss(probabilities.clamp_min(1e-9).log(), verdicts).item(), 4),
        "by_coverage": {str(c): round(surest[: max(1, round(c * len(surest)))].mean().item(), 4) for c in COVERAGES},
    }


def decided(probabilities: Tensor, threshold: float) -> Tensor:
    """The class of each row; one of the outer two less probable than `threshold` becomes the neutral one."""
    best, guess = probabilities.max(dim=-1)
    return torch.where((best < threshold) & (guess != NEUTRAL), torch.full_like(guess, NEUTRAL), guess)


def mix_words(
    head: Head, place: Tensor, kind: Tensor, rows: Sequence[Prepared], said: Sequence[Reaction], earlier: float = 2.5
) -> Head:
    """Weigh hidden states, words and kind against each other by rows that none of them was trained on.

    `place` and `kind` are the heads' logits of these rows, `said` their words. Four numbers are fitted. A row that
    means an earlier reply counts `earlier` times, as in the fit of the words: otherwise the prior of the corpus
    would speak for the newest reply in every doubt.
    """
    asked = [i for i, row in enumerate(rows) if row.target is not None]
    if not asked:
        return head
    parts: list[tuple[Tensor, int, float]] = []
    for i in asked:
        row = rows[i]
        assert row.target is not None
        back = torch.ones(len(row.replies))
        back[-1] = 0.0
        states = target_logits(place[i], head.cue, row.replies, row.cues)
        terms = torch.stack([states, head.words.logits(said[i]), back * head.goes_back(kind[i]), back])
        parts.append((terms, row.target, earlier if row.target < len(row.replies) - 1 else 1.0))
    start = torch.tensor([0.5, 0.5, 0.1, 0.3])
    mix = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([mix], max_iter=60, line_search_fn="strong_wolfe")
    total = sum(weight for _, _, weight in parts)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = 0.01 * (mix - start).square().sum()
        for terms, target, weight in parts:
            value = value + weight / total * fn.cross_entropy((mix @ terms)[None], torch.tensor([target]))
        value.backward()
        return value

    optimiser.step(loss)
    a, b, c, d = (round(value, 4) for value in mix.tolist())
    return replace(head, mix=(a, b, c, d))


def targets_hit(
    head: Head, place: Tensor, kind: Tensor, rows: Sequence[Prepared], said: Sequence[Reaction]
) -> dict[str, Any]:
    """How often the reply meant is found, over rows with several replies, and over those that mean an earlier one."""
    hits: list[tuple[bool, bool]] = []
    for i, row in enumerate(rows):
        if row.target is not None:
            best = int(head.target(place[i], kind[i], row.cues, said[i]).argmax())
            hits.append((row.target != len(row.replies) - 1, best == row.target))
    found = [hit for earlier, hit in hits if earlier]
    return {
        "rows": len(hits),
        "right": round(sum(hit for _, hit in hits) / max(len(hits), 1), 4),
        "earlier_rows": len(found),
        "earlier_right": round(sum(found) / max(len(found), 1), 4),
    }
