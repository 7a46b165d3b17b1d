"""From a judged turn to a training sample.

Invariant: the ids are the engine's; the teacher's contexts are rendered only after the original
messages have been found to render to the served ids. What can't be trained exactly is refused with a
reason. Knows no model and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.openclawrl.sessions import demonstrations
from recipes.openclawrl.teacher import candidate_contexts, check_render
from reef.recipe import JudgedTurn, Refusal, Tokenizer, Turn, Verdict
from reef.train.sample import Sample
from reef.wire.exchange import Sampled

TOOL_WEIGHT = 0.25
"""of the RL term where a tool's result was the reaction; such turns are not distilled"""

TEACHER_ROOM = 2


def make_sample(
    turn: Turn,
    verdict: Verdict,
    past: Sequence[JudgedTurn],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    max_contexts: int,
    use_hints: bool,
    train_truncated: bool,
) -> Sample | Refusal:
    """The sample of a charged reply, or why there is none.

    `max_tokens` bounds prompt plus reply; the teacher's longer prompt has twice that room.
    """
    sampled = turn.sampled
    if sampled is None:
        return Refusal("missing_logprobs", "no token ids were recorded")
    if turn.finish_reason == "length" and not train_truncated:
        return Refusal("truncated", "the reply was cut off by its token limit")
    if len(sampled.prompt_ids) + len(sampled.token_ids) > max_tokens:
        length = len(sampled.prompt_ids) + len(sampled.token_ids)
        return Refusal("too_long", f"{length} tokens, recipe.max_turn_tokens is {max_tokens}")
    tool_turn = turn.next is not None and turn.next.role == "tool"
    contexts = ()
    if not tool_turn:
        messages = [{"role": m.role, "content": m.content} for m in turn.messages]
        problem = check_render(tokenizer, messages, sampled.prompt_ids)
        if problem is not None and not turn.tools:
            return Refusal("missing_logprobs", f"the teacher's prompt can't be rendered: {problem}")
        if problem is None:
            hints = [verdict.hint] if verdict.hint and use_hints else []
            contexts = candidate_contexts(
                tokenizer,
                messages,
                turn.reply.content,
                demonstrations=demonstrations(turn, past, max_contexts),
                hints=hints,
                limit=max_contexts,
                max_tokens=TEACHER_ROOM * max_tokens,
            )
    return Sample(
        turn=turn.id,
        version=sampled.version,
        prompt_ids=sampled.prompt_ids,
        response_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        topk_ids=tuple(tuple(i for i, _ in row) for row in sampled.topk),
        mask=response_mask(sampled),
        tau=sampled.sampling.tau,
        reward=verdict.verdict,
        weight=TOOL_WEIGHT if tool_turn else 1.0,
        contexts=contexts,
    )


def response_mask(sampled: Sampled) -> tuple[int, ...]:
    """1 on every token the policy sampled, end-of-text included; prompt and template tokens are not
    part of the response, so nothing in it is masked out."""
    return (1,) * len(sampled.token_ids)
