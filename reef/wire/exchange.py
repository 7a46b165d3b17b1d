"""What passed over the wire once: an `Exchange`, whatever dialect it was spoken in.

Invariant: an exchange is written once and never changed; all that is learned about it later
(session, fate, verdict) lives elsewhere. This module knows no dialect, no database and no session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Api(StrEnum):
    """The dialect of a route."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COMPLETIONS = "completions"


class Delivered(StrEnum):
    """How much of the answer reached the client."""

    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"


class Message(NamedTuple):
    """One message of a conversation, reduced to what matching and judging read."""

    role: str
    """system, user, assistant or tool"""
    content: str
    """its text; parts joined by newlines"""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments JSON) of each call an assistant message makes"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings an answer was sampled under, as the engine applied them."""

    tau: float
    top_p: float = 1.0
    top_k: int = 0
    penalties: bool = False
    """any repetition, presence or frequency penalty, logit bias or guided decoding"""

    @property
    def trainable(self) -> bool:
        """True when the importance ratio is exactly 1 before the first step (METHOD 1)."""
        return self.tau > 0 and self.top_p >= 1 and self.top_k <= 0 and not self.penalties


@dataclass(frozen=True, slots=True)
class Sampled:
    """The engine's own account of an answer. Never re-tokenised, never padded."""

    prompt_ids: Sequence[int]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log-probability of each token under the distribution it was sampled from"""
    topk: Sequence[Sequence[Sequence[float]]]
    """for each token the K most likely (id, log-prob), most likely first"""
    version: int
    """weight version that produced every token; 0 is the untrained policy"""
    sampling: Sampling

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it, its lists perhaps tuples."""
        return {
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "topk": self.topk,
            "version": self.version,
            "tau": self.sampling.tau,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "penalties": self.sampling.penalties,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Sampled:
        return Sampled(
            prompt_ids=tuple(data["prompt_ids"]),
            token_ids=tuple(data["token_ids"]),
            logprobs=tuple(data["logprobs"]),
            topk=tuple(tuple((int(i), float(p)) for i, p in row) for row in data["topk"]),
            version=int(data["version"]),
            sampling=Sampling(
                tau=float(data["tau"]),
                top_p=float(data.get("top_p", 1.0)),
                top_k=int(data.get("top_k", 0)),
                penalties=bool(data.get("penalties", False)),
            ),
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer, as recorded."""

    id: str
    """the receipt: a ULID, sorts by start time"""
    time: float
    """when the answer ended, seconds since the epoch"""
    started: float
    api: Api
    scenario: str
    """which policy learns from it"""
    client: str | None
    """name or hash of the credential: the scope of matching"""
    headers: Mapping[str, str]
    """request headers, lower-case, secrets dropped"""
    request: Mapping[str, Any]
    response: Mapping[str, Any] | None
    """the answer as the client saw it (streams reassembled); None when there was none"""
    status: int
    delivered: Delivered
    sampled: Sampled | None
    error: str | None = None
    memo: tuple[str, ...] = ()
    """rules of the scenario's memo that Reef put into the prompt (`policy.serve_memo`); `request` is without them"""
    seq: int = field(default=0, compare=False)
    """commit order in the log; 0 until stored"""

    @property
    def train_opt_out(self) -> bool:
        return self.headers.get("x-reef-train", "").lower() == "off"


def conversation(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages in the judge's turn-file form, system text left out."""
    return [{"role": m.role, "content": m.content} for m in messages if m.role != "system"]
