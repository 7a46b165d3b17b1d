"""Known ids: which header, if any, names the conversation of a request.

A tag names a group of requests, not a chain: transcripts are still matched inside it. The rule that
fired is part of the answer, so that it can be recorded. Knows no index.
"""

from __future__ import annotations

from dataclasses import dataclass

from reef.wire.exchange import Exchange

TAG = "x-reef-tag-session"


@dataclass(frozen=True, slots=True)
class KnownId:
    rule: str
    value: str


def known_id(exchange: Exchange) -> KnownId | None:
    """The conversation a request says it belongs to."""
    tag = exchange.headers.get(TAG)
    return KnownId("tag", tag) if tag else None


def marked_side(exchange: Exchange, side_models: tuple[str, ...] = ()) -> str | None:
    """Why a request is a side call by its own marking or by configuration; None if it isn't."""
    kind = exchange.headers.get("x-reef-tag-turn-type", "").lower()
    if kind == "side":
        return "x-reef-tag-turn-type: side"
    if kind != "main" and exchange.request.get("model") in side_models:
        return "its model is one of sessions.side_models"
    return None
