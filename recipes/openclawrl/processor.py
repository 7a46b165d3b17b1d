"""From a judged turn to a training sample.

Invariant: the ids are the engine's; the teacher's contexts are rendered only after the original
messages have been found to render to the served ids. What can't be trained exactly is refused with a
reason. Knows no model and no loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from zlib import crc32

from recipes.openclawrl.judge.style import contrast
from recipes.openclawrl.sessions import asked, demonstrations, lacks, opens
from recipes.openclawrl.teacher import Demonstration, candidate_contexts, check_render
from reef.recipe import JudgedTurn, Refusal, Rehearsal, Tokenizer, Turn, Verdict
from reef.train.sample import Sample
from reef.wire.exchange import Sampled

TOOL_WEIGHT = 0.25
"""of the RL term where a tool's result was the reaction; such turns are not distilled"""

THINKING_END = "</think>"

HELD_OUT_EVERY = 4
HELD_OUT = 2
"""accepted replies a candidate is examined on, the newest of those never rehearsed"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of a turn is trained, and how much of what its teacher is shown."""

    tokens: int
    """of prompt plus reply"""
    contexts: int
    """candidates for the teacher"""
    together: int
    """accepted replies in one context"""
    choose_best: bool = True
    """of accepted replies, those that show best what is wanted; else the newest"""

    @property
    def shown(self) -> int:
        """Accepted replies in all contexts."""
        return self.contexts * self.together

    @property
    def room(self) -> int:
        """Tokens of the teacher's prompt, which is longer, plus reply."""
        return 2 * self.tokens


def make_sample(
    turn: Turn,
    verdict: Verdict,
    past: Sequence[JudgedTurn],
    tokenizer: Tokenizer,
    *,
    sizes: Sizes,
    use_hints: bool,
    train_truncated: bool,
    synthetic: Sequence[Demonstration] = (),
) -> Sample | Refusal:
    """The sample of a charged reply, or why there is none."""
    sampled = turn.sampled
    if sampled is None:
        return Refusal("missing_logprobs", "no token ids were recorded")
    if turn.finish_reason == "length" and not train_truncated:
        return Refusal("truncated", "the reply was cut off by its token limit")
    if len(sampled.prompt_ids) + len(sampled.token_ids) > sizes.tokens:
        length = len(sampled.prompt_ids) + len(sampled.token_ids)
        return Refusal("too_long", f"{length} tokens, recipe.max_turn_tokens is {sizes.tokens}")
    tool_turn = turn.next is not None and turn.next.role == "tool"
    contexts = ()
    if not tool_turn:
        messages = [{"role": m.role, "content": m.content} for m in turn.messages]
        problem = check_render(tokenizer, messages, sampled.prompt_ids)
        if problem is not None and not turn.tools:
            return Refusal("missing_logprobs", f"the teacher's prompt can't be rendered: {problem}")
        if problem is None:
            hints = hints_of(turn, verdict, past) if use_hints else []
            contexts = candidate_contexts(
                tokenizer,
                messages,
                turn.reply.content,
                demonstrations=[*demonstrations(turn, past, sizes.shown, best=sizes.choose_best), *synthetic],
                together=sizes.together,
                hints=hints,
                memo=turn.memo if use_hints else (),
                limit=sizes.contexts,
                max_tokens=sizes.room,
            )
    return Sample(
        turn=turn.id,
        version=sampled.version,
        prompt_ids=tuple(sampled.prompt_ids),
        response_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        topk_ids=tuple(tuple(int(i) for i, _ in row) for row in sampled.topk),
        mask=response_mask(sampled),
        tau=sampled.sampling.tau,
        reward=verdict.verdict,
        weight=TOOL_WEIGHT if tool_turn else 1.0,
        contexts=contexts,
        ends_thinking=thinking_end(tokenizer),
        opening=opens(turn),
    )


def rehearsal(
    past: Sequence[JudgedTurn],
    version: int,
    tokenizer: Tokenizer,
    *,
    count: int,
    sizes: Sizes,
    train_truncated: bool = False,
    step: Collection[str] = (),
) -> Rehearsal:
    """`count` of the accepted replies, another lot for each version, and those kept for the gate.

    One in `HELD_OUT_EVERY` is never rehearsed, by its receipt, so that it stays so for good; the gate gets none of
    the turns in `step`, which the step trains. With `sizes.choose_best`
    those that lack least are taken, and others only if they are too few.
    """
    accepted = {j.turn.reply.content.strip(): j for j in past if j.verdict.verdict > 0}
    made = [
        (judged.turn, sample)
        for judged in accepted.values()
        if (sample := make_rehearsal(judged, past, tokenizer, sizes, train_truncated))
    ]
    lots = [made]
    if sizes.choose_best:
        lots = [[(t, s) for t, s in made if lacks(t) == what] for what in sorted({lacks(t) for t, _ in made})]
    kept = [
        s for lot in lots for t, s in reversed(lot) if crc32(t.id.encode()) % HELD_OUT_EVERY == 0 and t.id not in step
    ]
    chosen: list[Sample] = []
    for lot in lots:
        open = [s for t, s in lot if crc32(t.id.encode()) % HELD_OUT_EVERY]
        left = min(count - len(chosen), len(open))
        chosen += [open[(version * count + i) % len(open)] for i in range(left)]
    return Rehearsal(tuple(chosen), tuple(kept[:HELD_OUT]))


def make_rehearsal(
    judged: JudgedTurn,
    past: Sequence[JudgedTurn],
    tokenizer: Tokenizer,
    sizes: Sizes,
    train_truncated: bool = False,
) -> Sample | None:
    """An accepted reply as the answer to the request it finally met (`asked`), or None if it can't be that.

    A reply that was accepted after corrections is what should have come at once: its ids are the engine's,
    its prompt is the request's. It has no RL term, since nothing sampled it there. What `make_sample` refuses is
    not trained this way either.
    """
    turn, sampled = judged.turn, judged.turn.sampled
    if sampled is None or turn.tools or (turn.next is not None and turn.next.role == "tool"):
        return None
    if turn.finish_reason == "length" and not train_truncated:
        return None
    messages = [{"role": m.role, "content": m.content} for m in asked(turn)]
    prompt = tuple(tokenizer.render(messages)) if messages else ()
    if not prompt or len(prompt) + len(sampled.token_ids) > sizes.tokens:
        return None
    if check_render(tokenizer, [{"role": m.role, "content": m.content} for m in turn.messages], sampled.prompt_ids):
        return None
    contexts = candidate_contexts(
        tokenizer,
        messages,
        turn.reply.content,
        demonstrations=demonstrations(turn, past, sizes.shown, best=sizes.choose_best),
        together=sizes.together,
        limit=sizes.contexts,
        max_tokens=sizes.room,
    )
    return Sample(
        turn=f"{turn.id} again",
        version=sampled.version,
        prompt_ids=prompt,
        response_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        topk_ids=(),
        mask=response_mask(sampled),
        tau=sampled.sampling.tau,
        reward=0,
        advantage=0.0,
        contexts=contexts,
        ends_thinking=thinking_end(tokenizer),
        rehearsed=True,
    )


def thinking_end(tokenizer: Tokenizer) -> int | None:
    """The id that ends a thinking model's reasoning; None for a model that has none."""
    ids = tokenizer.encode(THINKING_END)
    return ids[0] if len(ids) == 1 else None


def hints_of(turn: Turn, verdict: Verdict, past: Sequence[JudgedTurn]) -> list[str]:
    """The verdict's hints, one a line; for a refusal without one, what accepted replies of this user had and this
    reply and had not."""
    if verdict.hint:
        return verdict.hint.splitlines()
    if verdict.verdict >= 0:
        return []
    accepted = [j.turn.reply.content for j in past if j.verdict.verdict > 0 and j.turn.id != turn.id]
    found = contrast([turn.reply.content], accepted)
    return [found] if found else []


def response_mask(sampled: Sampled) -> tuple[int, ...]:
    """1 on every token the policy sampled, end-of-text included; prompt and template tokens are not
    part of the response, so nothing in it is masked out."""
    return (1,) * len(sampled.token_ids)
