"""The loss terms against hand-checked values, over a vocabulary of 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipes.openclawrl.advantage import acceptance, baseline_advantages
from recipes.openclawrl.objective import (
    OPENCLAW,
    REEF,
    Anchor,
    Objective,
    anchor,
    clipped,
    distance,
    full_jsd,
    full_kl,
    jsd_tail,
    k3,
    opd_mask,
    openclaw_topk,
    ppo_term,
    rkl_tail,
    sample_loss,
    support,
    tail_bins,
    thinking_at_stake,
)
from recipes.openclawrl.recipe import CALMEST, Config, OpenClawRL
from reef.train.sample import Context, Sample

STUDENT = torch.tensor([[3, 2, 1, 0.5, 0, -0.5, -1, -2]])
TEACHER = torch.tensor([[1, 3, 1, 0.5, 1.5, -0.5, -1, -2]])
TOP4 = STUDENT.topk(4, -1).indices
Term = Callable[[Tensor, Tensor], Tensor]


def logp(z: Tensor, tau: float = 1.0) -> Tensor:
    return (z / tau).log_softmax(-1)


def topk_distil(p: Tensor, q: Tensor) -> Tensor:
    cur = p.gather(-1, TOP4)
    return openclaw_topk(cur, cur.detach(), q.gather(-1, TOP4))


TERMS: dict[str, Term] = {
    "kl": full_kl,
    "tail kl": lambda p, q: rkl_tail(tail_bins(p, TOP4), tail_bins(q, TOP4)),
    "jsd": full_jsd,
    "jsd tail": lambda p, q: jsd_tail(tail_bins(p, TOP4), tail_bins(q, TOP4)),
    "openclaw": topk_distil,
}


def value_and_gradient(term: Term, z: Tensor, teacher: Tensor, tau: float = 1.0) -> tuple[float, list[float]]:
    z = z.clone().requires_grad_()
    value = term(logp(z, tau), logp(teacher, tau)).sum()
    (gradient,) = torch.autograd.grad(value, z)
    return value.item(), gradient[0].tolist()


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("kl", 0.885727, [0.63811, -0.41816, -0.07377, -0.04474, -0.07132, -0.01646, -0.00998, -0.00367]),
        ("tail kl", 0.869341, [0.64780, -0.41460, -0.07246, -0.04395, -0.05536, -0.03358, -0.02037, -0.00749]),
        ("jsd", 0.175868, [0.11938, -0.08756, -0.00706, -0.00428, -0.01761, -0.00157, -0.00096, -0.00035]),
        ("openclaw", None, [0.39780, -0.31777, -0.03458, -0.02097, -0.01160, -0.00704, -0.00427, -0.00157]),
    ],
)
def test_golden_values_and_gradients(name: str, value: float | None, gradient: Sequence[float]) -> None:
    found, slope = value_and_gradient(TERMS[name], STUDENT, TEACHER)
    if value is not None:
        assert found == pytest.approx(value, abs=1e-6)
    assert slope == pytest.approx(gradient, abs=1.1e-5)


def test_objective_reports_four_times_the_jsd() -> None:
    fixed = anchor(logp(STUDENT), torch.tensor([0]), logp(TEACHER), None, Objective(distil="jsd_full"))
    assert distance(logp(STUDENT), fixed, Objective()).item() == pytest.approx(0.703470, abs=1e-3)


def test_a_support_of_all_but_one_is_the_full_distance() -> None:
    ids = STUDENT.topk(7, -1).indices
    p, q = tail_bins(logp(STUDENT), ids), tail_bins(logp(TEACHER), ids)
    assert full_kl(p, q).item() == pytest.approx(0.885727, abs=1e-6)
    assert jsd_tail(p, q).item() == pytest.approx(0.703470, abs=1e-5)


def test_union_support_counts_each_id_once() -> None:
    ids, used = support(logp(STUDENT), logp(TEACHER), 4)
    kept = ids[used].tolist()
    assert sorted(kept) == [0, 1, 2, 3, 4]
    bins = tail_bins(logp(STUDENT), ids, used).exp()
    assert bins.sum().item() == pytest.approx(1, abs=1e-6)
    alone = tail_bins(logp(STUDENT), torch.tensor([kept]))
    assert full_kl(tail_bins(logp(STUDENT), ids, used), tail_bins(logp(TEACHER), ids, used)).item() == pytest.approx(
        full_kl(alone, tail_bins(logp(TEACHER), torch.tensor([kept]))).item(), abs=1e-6
    )


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("tau", [1.0, 0.6])
def test_an_equal_teacher_teaches_nothing(name: str, tau: float) -> None:
    z = torch.tensor([[2.0, 1, 0, -1, -1.5, -2, 0.5, 0.2]])
    _, gradient = value_and_gradient(TERMS[name], z, z, tau)
    assert gradient == pytest.approx([0] * 8, abs=1e-6)


def test_mixed_temperatures_do_teach() -> None:
    z = torch.tensor([2.0, 1, 0, -1])
    assert (logp(z) - logp(z, 0.6)).mul(logp(z, 0.6).exp()).sum().item() == pytest.approx(-0.0803, abs=5e-5)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_sum_to_zero_and_a_small_step_helps(name: str) -> None:
    _, gradient = value_and_gradient(TERMS[name], STUDENT, TEACHER)
    assert sum(gradient) == pytest.approx(0, abs=1e-6)
    moved = STUDENT - 0.05 * torch.tensor([gradient])
    assert full_kl(logp(moved), logp(TEACHER)).item() < full_kl(logp(STUDENT), logp(TEACHER)).item()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=16, max_size=16))
def test_distances_are_bounded_and_never_negative(z: list[float]) -> None:
    p, q = logp(torch.tensor([z[:8]])), logp(torch.tensor([z[8:]]))
    ids, used = support(p, q, 3)
    a, b = tail_bins(p, ids, used), tail_bins(q, ids, used)
    assert -1e-5 <= jsd_tail(a, b).item() <= 4 * math.log(2) + 1e-5
    assert -1e-5 <= full_jsd(p, q).item() <= math.log(2) + 1e-5
    assert rkl_tail(a, b).item() <= 5


@pytest.mark.parametrize(
    ("advantage", "rho", "slope"),
    [
        (1.0, 0.5, -1.0), (1.0, 1.27, -1.0), (1.0, 1.29, 0.0),
        (-1.0, 0.79, 0.0), (-1.0, 0.81, 1.0), (-1.0, 2.9, 1.0), (-1.0, 3.1, 0.0),
    ],
)  # fmt: skip
def test_clip_table(advantage: float, rho: float, slope: float) -> None:
    ratio = torch.tensor([rho], requires_grad=True)
    zero = torch.zeros(1)
    ppo_term(ratio.log(), zero, zero, advantage).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.item() == pytest.approx(slope, abs=1e-6)


def test_first_epoch_clips_nothing() -> None:
    same = logp(STUDENT)[0]
    assert not clipped(same, same, 1.0).any() and not clipped(same, same, -1.0).any()


def test_kappa_is_truncated_and_has_no_gradient() -> None:
    old, mu = torch.tensor([0.0, -1.0]), torch.tensor([-5.0, -0.5])
    value = old.clone().requires_grad_()
    term = ppo_term(value, old, mu, 1.0)
    assert term.tolist() == pytest.approx([-2.0, -math.exp(-0.5)])
    (gradient,) = torch.autograd.grad(term.sum(), value)
    assert gradient.tolist() == pytest.approx([-2.0, -math.exp(-0.5)])


def test_baseline_before_the_negative_scale() -> None:
    rewards = [-1, -1, -1, 1, -1, 1, 1, 1]
    expected = [-1, -0.8, -0.64, 1.488, -0.8096, 1.3523, 1.0819, 0.8655]
    advantages, mean = baseline_advantages(rewards, negative_scale=1.0)
    assert advantages == pytest.approx(expected, abs=5e-5)
    scaled, same = baseline_advantages(rewards)
    assert scaled == pytest.approx([a * 0.25 if a < 0 else a for a in expected], abs=5e-5)
    assert same == mean


def test_acceptance_is_a_running_share_of_what_was_judged() -> None:
    assert acceptance([1, 1, -1, 0, None], 0.0) == pytest.approx(((0.2 * 0.8) + 0.2) * 0.8)
    assert acceptance([], 0.4) == 0.4 and 0.99 < acceptance([1] * 40, 0.0) < 1


def test_baseline_is_carried_and_neutral_rewards_leave_it() -> None:
    whole, mean = baseline_advantages([1, 0, None, -1, 1])
    first, middle = baseline_advantages([1, 0])
    second, end = baseline_advantages([None, -1, 1], start=middle)
    assert first + second == whole and end == mean
    assert whole[1:3] == [0.0, 0.0]
    assert baseline_advantages([1], start=-3.0)[0] == [2.0]


def test_k3_values() -> None:
    a, b = torch.tensor(0.5).log(), torch.tensor(0.25).log()
    assert k3(a, b).item() == pytest.approx(0.193147, abs=1e-6)
    assert k3(b, a).item() == pytest.approx(0.306853, abs=1e-6)
    assert k3(a, a).item() == 0


def test_preset_reef_distils_the_first_tokens_too() -> None:
    """They decide about a list or a heading; the published preset leaves two of them out."""
    assert (REEF.drop_first, OPENCLAW.drop_first) == (0, 2)
    mask = torch.ones(4)
    assert opd_mask(mask, REEF.drop_first).tolist() == [1, 1, 1, 1]


def test_opd_mask_drops_the_first_trained_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 1])
    assert opd_mask(mask).tolist() == [0, 0, 0, 1, 0, 1]
    ends = torch.tensor([False, False, False, True, False, False])
    assert opd_mask(mask, 2, ends).tolist() == [0, 0, 0, 0, 0, 1]


# --- the sum of the terms -------------------------------------------------------------------------


def one_sample(objective: Objective, seed: int = 0, extra: int = 0) -> tuple[float, Tensor, dict[str, float]]:
    """Loss and gradient over the logits of a random sample of five trained tokens and `extra` masked ones."""
    torch.manual_seed(seed)
    z, teacher, tokens = torch.randn(5, 40), torch.randn(5, 40), torch.randint(40, (5,))
    pad = torch.zeros(extra, 40)
    z, teacher = torch.cat([z, pad]).requires_grad_(), torch.cat([teacher, pad])
    tokens = torch.cat([tokens, torch.zeros(extra, dtype=torch.long)])
    mask = torch.tensor([1] * 5 + [0] * extra)
    old = logp(z.detach(), 0.7)
    fixed = anchor(old, tokens, logp(teacher, 0.7), old.gather(-1, tokens[:, None])[:, 0] - 0.1, objective)
    mu = fixed.old - 0.05
    loss, terms = sample_loss(z, tokens, mask, mu, 0.7, fixed, 1.0, objective)
    (gradient,) = torch.autograd.grad(loss, z)
    return loss.item(), gradient, terms


@pytest.mark.parametrize("objective", [REEF, OPENCLAW, Objective(distil="jsd_tail"), Objective(distil="rkl_tail")])
def test_masked_tokens_change_nothing(objective: Objective) -> None:
    loss, gradient, terms = one_sample(objective)
    padded, wide, _ = one_sample(objective, extra=3)
    assert padded == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(wide[:5], gradient, atol=1e-7) and wide[5:].abs().max() == 0
    assert gradient.abs().max() > 0
    assert terms["clip_fraction"] == 0
    assert terms["kappa"] == pytest.approx(math.exp(0.05), abs=1e-5)
    assert ("k3" in terms) == (objective.beta_kl > 0)


def test_terms_add_up_and_switch_off() -> None:
    loss, _, terms = one_sample(REEF)
    assert loss == pytest.approx(terms["rl"] + terms["opd"] + terms["k3"], abs=1e-6)
    _, _, without = one_sample(Objective(w_opd=0.0, beta_kl=0.0))
    assert without["opd"] == 0
    half, _, _ = one_sample(Objective(w_rl=0.5, w_opd=0.0, beta_kl=0.0))
    assert half == pytest.approx(0.5 * terms["rl"], abs=1e-6)


def test_a_sample_without_trained_tokens_has_no_gradient() -> None:
    z = torch.randn(3, 8, requires_grad=True)
    nothing = torch.zeros(3)
    loss, terms = sample_loss(
        z, torch.zeros(3, dtype=torch.long), nothing.long(), nothing, 1.0, Anchor(nothing), 1.0, REEF
    )
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.item() == 0 and gradient.abs().max() == 0 and terms == {}


def test_presets_are_what_they_say() -> None:
    assert (OPENCLAW.distil, OPENCLAW.support_k, OPENCLAW.advantage) == ("openclaw_topk", 4, "raw")
    assert OPENCLAW.beta_kl == OPENCLAW.beta_replay == 0
    assert (REEF.distil, REEF.advantage, REEF.routing, REEF.w_rl) == ("jsd_full", "baseline", "always", 1.0)


def test_a_rehearsed_reply_has_a_likelihood_term_and_no_rl() -> None:
    tokens, mask = torch.tensor([1, 2, 3]), torch.ones(3)
    logits = torch.randn(3, 8, requires_grad=True)
    old = (logits.detach() / 0.7).log_softmax(-1)
    fixed = anchor(old, tokens, None, None, REEF)
    total, terms = sample_loss(logits, tokens, mask, torch.zeros(3), 0.7, fixed, 0.0, REEF, rehearsed=True)
    assert set(terms) == {"logp", "rehearsal"}
    assert float(total.detach()) == pytest.approx(-REEF.w_rehearse * terms["logp"], rel=1e-5)
    total.backward()
    grad = logits.grad
    assert grad is not None and bool((grad.gather(-1, tokens.unsqueeze(-1)) < 0).all())


def test_nothing_is_distilled_where_the_end_of_thinking_is_at_stake() -> None:
    torch.manual_seed(0)
    tokens, mask = torch.tensor([1, 5, 3, 2, 4]), torch.ones(5)
    logits = torch.randn(5, 8)
    logits[3, 5] = 9.0  # likely there, though not sampled
    at_stake = thinking_at_stake(logits.log_softmax(-1), tokens, 5, 1)
    assert at_stake.tolist() == [False, True, False, True, False]
    assert opd_mask(mask, 2, at_stake).tolist() == [0, 0, 1, 0, 1]


def test_steps_calm_down_by_first_replies_only() -> None:
    """Corrections within a session say nothing of how the next one will begin."""
    context = (Context("demonstration", (1,), ""),)
    base = Sample("t", 1, (1,), (2,), (-1.0,), (), (1,), 0.7, 1, contexts=context)
    later = replace(base, reward=-1, opening=False)
    recipe = OpenClawRL(Config())
    _, state = recipe.form([base, later, later, base], {})
    assert state["content"] == pytest.approx(0.36) and state["lr_scale"] == pytest.approx(0.64)
    _, alone = recipe.form([replace(later, contexts=())], state)
    assert alone["content"] == state["content"] and alone["lr_scale"] == CALMEST
