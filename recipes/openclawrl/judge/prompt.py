"""What the embedded judge reads: request, reply and next message, up to where the model would answer.

Owns the layout (`VERSION` changes with it, since trained weights belong to one layout) and the cuts
that keep it short. Message text is encoded without special tokens, so it can't close its own turn.
It knows no model weights and no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

VERSION = "e3"
REQUEST_TOKENS, REPLY_TOKENS, NEXT_TOKENS = (40, 80, 64)
SHOWN_REPLIES = 4
"""of the history's end, among which the one that is meant is looked for"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Token ids of one reaction, in two parts."""

    context: tuple[int, ...]
    """request and reply"""
    suffix: tuple[int, ...]
    """next message, and the opening of the answer it would get"""
    replies: tuple[int, ...]
    """indices in the history of the replies that may be meant, newest last"""

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.suffix)


class Reader:
    """Lays out readings with one tokenizer (a `transformers` one)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._open = {role: self._markup(f"<|im_start|>{role}\n") for role in ("user", "assistant", "tool")}
        self._close = self._markup("<|im_end|>\n")

    def read(self, history: Sequence[Mapping[str, str]], next: Mapping[str, str]) -> Reading:
        """Lay out the last reply, what it answered, and what came next.

        Raises ValueError when the history holds no reply.
        """
        replies = shown(history)
        if not replies:
            raise ValueError("the history holds no assistant reply")
        request = self._part("user", asked_before(history, replies[-1]), REQUEST_TOKENS)
        reply = self._part("assistant", history[replies[-1]]["content"], REPLY_TOKENS)
        return Reading((*request, *reply), self._said(next), replies)

    def instead(self, reading: Reading, next: Mapping[str, str]) -> Reading:
        """The same request and reply with another next message."""
        return replace(reading, suffix=self._said(next))

    def _said(self, next: Mapping[str, str]) -> tuple[int, ...]:
        said = self._part("user" if next["role"] == "user" else "tool", next["content"], NEXT_TOKENS)
        return (*said, *self._open["assistant"])

    def _markup(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _part(self, role: str, text: str, limit: int) -> list[int]:
        body = self._tokenizer.encode(text.strip() or "...", add_special_tokens=False, split_special_tokens=True)
        return [*self._open[role], *cut(body, limit), *self._close]


def shown(history: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Indices of the replies that may be meant, newest last."""
    return tuple(i for i, m in enumerate(history) if m["role"] == "assistant")[-SHOWN_REPLIES:]


def asked_before(history: Sequence[Mapping[str, str]], at: int) -> str:
    """The last user message before index `at`, or an empty text."""
    return next((m["content"] for m in reversed(history[:at]) if m["role"] == "user"), "")


def cut(ids: Sequence[int], limit: int) -> list[int]:
    """At most `limit` ids: two thirds from the start, one third from the end."""
    if len(ids) <= limit:
        return list(ids)
    tail = limit // 3
    return [*ids[: limit - tail], *ids[len(ids) - tail :]]
