"""What one judged turn contributes to a step: a `Sample`, and a `Batch` of them.

Invariant: `response_ids`, `logprobs` and `mask` have the same length T, and the ids are the
engine's own. A sample holds plain numbers only, so that it can be written to disk, moved to another
machine and trained there; it knows no model, no tokenizer and no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt for the teacher: the policy's prompt plus something only hindsight knows."""

    kind: str
    """hint, memo, demonstration or synthetic"""
    prompt_ids: tuple[int, ...]
    text: str
    """what was added, for people to read"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One judged turn, ready to train on."""

    turn: str
    """receipt of the exchange whose reply is trained"""
    version: int
    """weight version that sampled it"""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """behaviour log-probs mu_t, [T]"""
    topk_ids: tuple[tuple[int, ...], ...]
    """the engine's top-K ids at each position, [T][K]"""
    mask: tuple[int, ...]
    """1 where the token was sampled by the policy and is trained, [T]"""
    tau: float
    """sampling temperature; student, old policy, teacher and base are all divided by it"""
    reward: int
    """+1, -1, or 0 for no RL term"""
    weight: float = 1.0
    """scale of the RL term (tool-result turns weigh less)"""
    advantage: float | None = None
    """set when the batch is formed, from the rewards in the order they arrived"""
    contexts: tuple[Context, ...] = ()
    ends_thinking: int | None = None
    """the id that ends a thinking model's reasoning"""
    opening: bool = True
    """the first reply of its conversation: no correction came before it"""
    rehearsed: bool = False
    """an accepted reply, trained as the answer to the request it met: it counts as none of the step's turns"""

    def __post_init__(self) -> None:
        t = len(self.response_ids)
        if not (len(self.logprobs) == len(self.mask) == t):
            raise ValueError(f"sample {self.turn}: {t} ids, {len(self.logprobs)} log-probs, {len(self.mask)} mask")

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Sample:
        return Sample(
            turn=data["turn"],
            version=data["version"],
            prompt_ids=tuple(data["prompt_ids"]),
            response_ids=tuple(data["response_ids"]),
            logprobs=tuple(data["logprobs"]),
            topk_ids=tuple(tuple(row) for row in data["topk_ids"]),
            mask=tuple(data["mask"]),
            tau=data["tau"],
            reward=data["reward"],
            weight=data["weight"],
            advantage=data["advantage"],
            contexts=tuple(Context(c["kind"], tuple(c["prompt_ids"]), c["text"]) for c in data["contexts"]),
            ends_thinking=data.get("ends_thinking"),
            opening=data.get("opening", True),
            rehearsed=data.get("rehearsed", False),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step, or a micro-batch of them.

    `n_eff` counts the samples of the *whole* step that have a non-empty mask and an active term; a
    micro-batch keeps it, so that splitting a batch changes no gradient. `fixed` keeps what a recipe
    computes once per step (old log-probs, teacher log-probs), shared by all micro-batches and epochs.
    """

    samples: Sequence[Sample]
    n_eff: int
    fixed: dict[str, Any] = field(default_factory=dict)

    def micro(self, size: int = 1) -> list[Batch]:
        """Split into micro-batches of at most `size` samples."""
        return [replace(self, samples=self.samples[i : i + size]) for i in range(0, len(self.samples), size)]
