"""The contract between the service and a learning method.

Reef owns matching, cursors, steps, gates and swaps. A recipe owns three decisions: what a reaction
says about a reply (`judge`), what a judged turn becomes (`sample`), and what is minimised (`loss`).
It is found by entry point (group `reef.recipes`) or by dotted name `package.module:Class`.

A recipe sees turns and past turns; it never sees a database, a server or another recipe.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel

from reef.errors import RecipeError
from reef.train.sample import Batch, Sample
from reef.wire.exchange import Message, Sampled

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class NextState:
    """What came after a reply."""

    role: str
    """user, tool or harness"""
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Explicit feedback from `POST /reef/report`; outweighs any judge."""

    id: str
    score: float | None
    feedback: str | None


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply of the policy and everything a recipe may know about it."""

    id: str
    scenario: str
    session: str
    messages: tuple[Message, ...]
    """the conversation as the policy read it, system text included, with any rules of the memo that were served"""
    reply: Message
    next: NextState | None
    sampled: Sampled | None
    finish_reason: str | None = None
    """why the reply ended: stop, length, tool_calls"""
    tools: bool = False
    """the request offered tools"""
    earlier: tuple[str, ...] = ()
    """receipts of the session's earlier replies, oldest first"""
    refused: int = 0
    """how many of these, counted from the newest, were refused one after the other: the reply answers what they
    failed to"""
    reports: tuple[Report, ...] = ()
    memo: tuple[str, ...] = ()
    """the scenario's rules as they stand now, newest last"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A lasting preference of a scenario."""

    text: str
    turn: str | None = None
    """whose verdict it came from; None when a person wrote it"""
    time: float = 0.0
    seen: int = 1
    """verdicts that said so"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reaction says. Indices count the messages of the judged history."""

    verdict: int
    """+1 accepted, -1 rejected, 0 neither"""
    target: int | None
    """index in the history of the reply that is meant"""
    charges: tuple[tuple[int, int], ...] = ()
    """(index, verdict) for each reply that is charged"""
    reject: str | None = None
    keep: str | None = None
    hint: str | None = None
    rule: str | None = None
    """a preference that holds beyond this task, for the memo"""
    confidence: float | None = None
    votes: tuple[Mapping[str, Any], ...] = ()
    judge: str = ""
    """name and version of the judge"""
    seconds: float = 0.0
    tokens: int = 0
    """read and written by the judge for this verdict, failed votes included"""


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    turn: Turn
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a judged turn can't be trained; `fate` names the fate it ends in."""

    fate: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Samples made of accepted turns that a step takes beside its own."""

    trained: tuple[Sample, ...] = ()
    """trained once more; they count as no turn of the step"""
    held_out: tuple[Sample, ...] = ()
    """never trained so: the gate asks whether the candidate still finds them likely"""


class Tokenizer(Protocol):
    """Renders messages with the policy's own chat template."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Scorer(Protocol):
    """A model that scores given tokens."""

    def logits(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> torch.Tensor:
        """Logits predicting each response token, float32 [T, V], not divided by any temperature."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar to back-propagate, and its terms for the log."""

    total: torch.Tensor
    terms: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Recipe(Protocol):
    """A learning method. Constructed as `Recipe(config: Config, tools: RecipeTools)`."""

    name: str
    config: Any

    async def judge(self, turn: Turn) -> Verdict | None:
        """Say what `turn.next` means for the turn's replies; None while nothing can be said.

        Raises JudgeError when no valid verdict could be had; the turn is then asked again later.
        """
        ...

    def sample(self, turn: Turn, verdict: Verdict, past: Sequence[JudgedTurn]) -> Sample | Refusal:
        """Turn a charged reply into a sample. `past` holds the scenario's earlier judged turns,
        oldest first."""
        ...

    def form(self, samples: Sequence[Sample], carried: Mapping[str, Any]) -> tuple[list[Sample], dict[str, Any]]:
        """Finish a batch in arrival order (advantages); `carried` is what the last step returned.

        A key `lr_scale` in what is handed on scales this step's learning rate.
        """
        ...

    def rehearse(self, past: Sequence[JudgedTurn], version: int, step: Collection[str]) -> Rehearsal:
        """What step `version` repeats from the scenario's accepted turns, and what it is examined on: none of the
        turns in `step`, which it trains itself."""
        ...

    def active(self, sample: Sample) -> bool:
        """Whether the sample has a trained token and a term: `Batch.n_eff` counts these."""
        ...

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss:
        """The micro-batch's share of the step's loss. `reference` is the frozen base."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """What a recipe has too when it keeps a memo for each scenario."""

    def remember(self, rules: Sequence[Rule], turn: Turn, verdict: Verdict) -> Sequence[Rule]:
        """The memo after this verdict, oldest first; `rules` unchanged when it adds nothing."""
        ...


@dataclass(frozen=True, slots=True)
class RecipeTools:
    """What the service lends a recipe. Everything is made on first use, so that a process pays
    only for what it calls."""

    tokenizer: Tokenizer
    model_dir: str
    prm: Any
    """the `prm` section of serve.yaml: where the judge is"""
    generate: Callable[[Sequence[Mapping[str, str]], int], Awaitable[list[str]]] | None = None
    """so many replies of the untrained policy to these messages; None where no engine runs"""
    folder: Path | None = None
    """where a recipe may keep files of its own, beside the databases"""


def load(name: str) -> type[Any]:
    """Find a recipe class by entry-point name or `package.module:Class`.

    The class has a `Config` (pydantic, its keys are the `recipe` section of serve.yaml).
    Raises RecipeError.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise RecipeError(f"recipe {name!r} can't be loaded: {error}") from error
    else:
        known = {e.name: e for e in entry_points(group="reef.recipes")}
        if name not in known:
            raise RecipeError(f"no recipe {name!r}; installed: {', '.join(sorted(known)) or 'none'}")
        found = known[name].load()
    config = getattr(found, "Config", None)
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        raise RecipeError(f"recipe {name!r} has no pydantic Config")
    return found
