"""The teacher: the frozen base model that also sees what only hindsight knows, and the step's loss.

A candidate context is rendered with the policy's own chat template and the reply's ids are copied
behind it, so that positions align exactly. Invariant: a context never contains the reply it is to
judge. This module knows the messages and the scorers it is given; no database, judge or server. It
imports torch only to compute, so that contexts can be rendered in a process without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reef.recipe import Loss, Scorer, Tokenizer
from reef.train.sample import Batch, Context, Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from recipes.openclawrl.objective import Anchor, Objective

HEADING = "How the answer should be:"
"""stands between the user's request and what hindsight adds to it"""

Chat = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An earlier request of this user and a reply to it that was accepted."""

    request: str
    reply: str
    synthetic: bool = False
    """sampled from the base with the hint in its prompt, nothing being accepted yet"""


# --- contexts -----------------------------------------------------------------------------------


def check_render(tokenizer: Tokenizer, messages: Chat, prompt_ids: Sequence[int]) -> str | None:
    """Why the messages do not render to the ids the engine served; None when they do."""
    ours, served = tokenizer.render(messages), list(prompt_ids)
    if ours == served:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, served, strict=False)) if a != b), min(len(ours), len(served)))
    return (
        f"messages render to {len(ours)} tokens, the engine served {len(served)}; they part at {at}: "
        f"{tokenizer.decode(ours[at : at + 5])!r} against {tokenizer.decode(served[at : at + 5])!r}"
    )


def hint_context(tokenizer: Tokenizer, messages: Chat, hint: str, memo: Sequence[str] = ()) -> Context | None:
    """The hint, after the memo's rules if there are any, under a heading at the end of the last user
    message; None when no user speaks."""
    lines = [*memo, *([hint] if hint else [])]
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last is None or not lines:
        return None
    text = "\n".join(lines)
    changed = [dict(m) for m in messages]
    changed[last]["content"] = f"{changed[last]['content']}\n\n{HEADING}\n{text}"
    return Context("memo" if memo else "hint", tuple(tokenizer.render(changed)), text)


def demonstration_context(tokenizer: Tokenizer, messages: Chat, *shown: Demonstration) -> Context:
    """The demonstrations as solved exchanges in front of the conversation, after any system text."""
    start = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    solved = [
        said
        for one in shown
        for said in ({"role": "user", "content": one.request}, {"role": "assistant", "content": one.reply})
    ]
    prompt = tokenizer.render([*messages[:start], *solved, *messages[start:]])
    kind = "synthetic" if any(one.synthetic for one in shown) else "demonstration"
    return Context(kind, tuple(prompt), "\n\n".join(f"{one.request}\n---\n{one.reply}" for one in shown))


def demonstration_contexts(
    tokenizer: Tokenizer, messages: Chat, shown: Sequence[Demonstration], *, together: int, room: int
) -> list[Context]:
    """Contexts of `together` demonstrations each, fewer where `room` tokens hold no more.

    The best of a context stands next to the conversation; those that did not fit begin the next one.
    """
    found: list[Context] = []
    left = list(shown)
    while left:
        count = min(together, len(left))
        while len((context := demonstration_context(tokenizer, messages, *reversed(left[:count]))).prompt_ids) > room:
            count -= 1
            if not count:
                break
        if count:
            found.append(context)
        left = left[max(count, 1) :]
    return found


def candidate_contexts(
    tokenizer: Tokenizer,
    messages: Chat,
    reply: str,
    *,
    demonstrations: Sequence[Demonstration] = (),
    together: int = 1,
    hints: Sequence[str] = (),
    memo: Sequence[str] = (),
    limit: int = 3,
    max_tokens: int = 2048,
) -> tuple[Context, ...]:
    """At most `limit` contexts, strongest kind first: accepted demonstrations (`together` in each), hints
    with the memo, hints alone, synthetic demonstrations.

    `reply` is the attempt to be trained: whatever repeats it is left out, as are contexts that with
    the reply would exceed `max_tokens`.
    """
    attempt = reply.strip()
    room = max_tokens - len(tokenizer.encode(reply))
    shown = [d for d in demonstrations if d.reply.strip() != attempt]
    told = [h for h in hints if not attempt or attempt not in h]
    accepted = [d for d in shown if not d.synthetic]
    found = demonstration_contexts(tokenizer, messages, accepted, together=together, room=room)
    if memo:
        found += [c for h in told or [""] if (c := hint_context(tokenizer, messages, h, memo))]
    found += [c for h in told if (c := hint_context(tokenizer, messages, h))]
    if not accepted:
        found += demonstration_contexts(tokenizer, messages, shown, together=together, room=room)
    return tuple([c for c in found if len(c.prompt_ids) <= room][:limit])


def choose_context(
    old: Tensor, mask: Tensor, contexts: Sequence[Context], score: Callable[[Context], Tensor], k: int = 16
) -> tuple[int, Tensor]:
    """The sequence-optimal context and its log-probs: the one whose top-k sets share most ids with the
    policy's over the trained positions; ties go to the shortest prompt.

    `old` and what `score` returns are log-probs [T, V]. With one context nothing is compared.
    Raises ValueError without contexts.
    """
    if not contexts:
        raise ValueError("no context to choose from")
    if len(contexts) == 1:
        return 0, score(contexts[0])
    k = min(k, old.shape[-1])
    ours = old.topk(k, -1).indices
    best: tuple[tuple[float, int], int, Tensor] | None = None
    for index, context in enumerate(contexts):
        logp = score(context)
        theirs = logp.topk(k, -1).indices
        shared = (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).sum(-1)
        rank = float((shared * mask).sum()), -len(context.prompt_ids)
        if best is None or rank > best[0]:
            best = rank, index, logp
    assert best is not None
    return best[1], best[2]


# --- the step's loss ----------------------------------------------------------------------------


def distils(sample: Sample, objective: Objective) -> bool:
    """The routing's decision: whether this sample has a distillation term."""
    if not (sample.contexts and objective.w_opd):
        return False
    if objective.routing == "always" or sample.reward <= 0:
        return True
    return any(c.kind == "demonstration" for c in sample.contexts)


def advantage(sample: Sample) -> float:
    """The formed advantage, or the bare reward of a batch that was never formed."""
    return float(sample.reward) if sample.advantage is None else sample.advantage


def active(sample: Sample, objective: Objective) -> bool:
    """Whether a sample has a trained token and a term: `Batch.n_eff` counts these."""
    reinforced = bool(objective.w_rl and sample.weight and advantage(sample))
    return any(sample.mask) and (reinforced or distils(sample, objective) or rehearses(sample, objective))


def rehearses(sample: Sample, objective: Objective) -> bool:
    """Whether the sample has a likelihood term."""
    return sample.rehearsed and objective.w_rehearse > 0


def loss(batch: Batch, policy: Scorer, reference: Scorer, objective: Objective) -> Loss:
    """The micro-batch's share of the step's loss (METHOD of the recipe: RL + distillation + anchors).

    In the first epoch, before anything is stepped, the policy's own log-probs are the old ones, so
    they and the teacher's are kept in `batch.fixed`; later epochs read them. Every term is divided by
    the step's `n_eff`: shares of micro-batches add up. `batch.fixed["replay"]`, if the trainer put
    (prompt ids, response ids) there, is the generic prompt of the `beta_replay` term.
    """
    import torch

    from recipes.openclawrl.objective import sample_loss

    shares: list[Tensor] = []
    terms: dict[str, float] = {}
    samples = [s for s in batch.samples if active(s, objective)]
    scale = 1.0 / max(batch.n_eff, 1)
    for sample in samples:
        logits = policy.logits(sample.prompt_ids, sample.response_ids)
        tokens, mask, mu = _tensors(sample, logits.device)
        fixed = batch.fixed.get(sample.turn)
        if fixed is None:
            fixed = batch.fixed[sample.turn] = _fix(sample, logits.detach(), tokens, mask, reference, objective)
        value, means = sample_loss(
            logits, tokens, mask, mu, sample.tau, fixed, advantage(sample), objective,
            rl_weight=sample.weight, distilled=distils(sample, objective), rehearsed=sample.rehearsed,
        )  # fmt: skip
        shares.append(value * scale)
        for name, mean in means.items():
            terms[name] = terms.get(name, 0.0) + mean * scale
    replay = batch.fixed.get("replay")
    if samples and replay and objective.beta_replay:
        home = batch.fixed.setdefault("replay home", samples[0].turn)
        if any(s.turn == home for s in samples):
            share = objective.beta_replay * _replay_kl(batch, replay, policy, reference)
            shares.append(share)
            terms["replay"] = float(share.detach())
    total = torch.stack(shares).sum() if shares else torch.zeros(())
    return Loss(total, terms)


def _tensors(sample: Sample, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    return (
        torch.tensor(sample.response_ids, device=device),
        torch.tensor(sample.mask, device=device),
        torch.tensor(sample.logprobs, device=device),
    )


def _fix(
    sample: Sample, logits: Tensor, tokens: Tensor, mask: Tensor, reference: Scorer, objective: Objective
) -> Anchor:
    import torch

    from recipes.openclawrl.objective import anchor, pick, thinking_at_stake

    def score(prompt_ids: Sequence[int]) -> Tensor:
        return (reference.logits(prompt_ids, sample.response_ids) / sample.tau).log_softmax(-1)

    with torch.no_grad():
        old = (logits / sample.tau).log_softmax(-1)
        teacher = base = None
        if distils(sample, objective):
            _, teacher = choose_context(old, mask, sample.contexts, lambda c: score(c.prompt_ids), objective.support_k)
        if objective.beta_kl:
            base = pick(score(sample.prompt_ids), tokens)
        fixed = anchor(old, tokens, teacher, base, objective)
        if sample.ends_thinking is None or teacher is None:
            return fixed
        at_stake = thinking_at_stake(old, tokens, sample.ends_thinking, objective.support_k)
        return replace(fixed, thinking_ends=at_stake)


def _replay_kl(batch: Batch, replay: tuple[Sequence[int], Sequence[int]], policy: Scorer, reference: Scorer) -> Tensor:
    """KL(policy || base), mean over the replayed reply, whole vocabulary, temperature 1."""
    import torch

    if "replay base" not in batch.fixed:
        with torch.no_grad():
            batch.fixed["replay base"] = reference.logits(*replay).log_softmax(-1).half()
    logp = policy.logits(*replay).log_softmax(-1)
    return (logp.exp() * (logp - batch.fixed["replay base"].float())).sum(-1).mean()
