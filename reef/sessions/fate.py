"""Fates: how every exchange ends, or what it waits for.

Invariant: an exchange has exactly one fate at a time, the latest row of its history; `trained` is
final. The funnel is a count over fates, so nothing can disappear.
"""

from __future__ import annotations

from enum import StrEnum

from reef.wire.exchange import Delivered, Exchange


class Fate(StrEnum):
    TRAINED = "trained"
    # waiting
    OPEN = "open"
    """newest turn of a live session"""
    QUEUED = "queued"
    """has a next state, waits for the judge"""
    JUDGED = "judged"
    """has a verdict, waits for a batch"""
    # not a turn
    SIDE_TASK = "side_task"
    RETRY_SUPERSEDED = "retry_superseded"
    PASSTHROUGH = "passthrough"
    # lost
    NO_NEXT_STATE = "no_next_state"
    AMBIGUOUS = "ambiguous"
    CLIENT_ABORTED = "client_aborted"
    UPSTREAM_ERROR = "upstream_error"
    TRUNCATED = "truncated"
    MISSING_LOGPROBS = "missing_logprobs"
    UNSUPPORTED_SAMPLING = "unsupported_sampling"
    NEUTRAL = "neutral"
    STALE = "stale"
    TOO_LONG = "too_long"
    OPTED_OUT = "opted_out"
    GATE_REJECTED = "gate_rejected"


WAITING = frozenset({Fate.OPEN, Fate.QUEUED, Fate.JUDGED})
NOT_A_TURN = frozenset({Fate.SIDE_TASK, Fate.RETRY_SUPERSEDED, Fate.PASSTHROUGH})
REACHED_JUDGE = frozenset(
    {Fate.TRAINED, Fate.JUDGED, Fate.NEUTRAL, Fate.STALE, Fate.GATE_REJECTED, Fate.TOO_LONG, Fate.TRUNCATED}
)
"""Fates only a judged turn can have."""
FINISHED = frozenset(Fate) - WAITING - NOT_A_TURN - {Fate.OPTED_OUT}
"""Fates of turns that could have been trained and wait for nothing more."""
REOPENS = frozenset({Fate.OPEN, Fate.NO_NEXT_STATE})
"""Fates a late reaction turns into `queued`."""


def arrival_fate(exchange: Exchange, *, side: bool, empty: bool = False) -> tuple[Fate, str, str]:
    """(fate, rule, reason) of an exchange before anything came after it."""
    if exchange.train_opt_out:
        return Fate.OPTED_OUT, "header", "x-reef-train: off"
    if exchange.status >= 400 or exchange.response is None:
        if exchange.delivered is Delivered.FULL or exchange.error:
            return Fate.UPSTREAM_ERROR, "status", exchange.error or f"answered with status {exchange.status}"
        return Fate.CLIENT_ABORTED, "delivery", "the client left before an answer"
    if exchange.delivered is not Delivered.FULL:
        if exchange.error:
            return Fate.UPSTREAM_ERROR, "delivery", exchange.error
        return Fate.CLIENT_ABORTED, "delivery", "the client left before the end of the answer"
    if empty:
        return Fate.PASSTHROUGH, "reply", "no text and no tool call was produced"
    if side:
        return Fate.SIDE_TASK, "turn_type", "marked or recognised as a side call"
    return Fate.OPEN, "arrival", "newest turn of its session"


def trainable(exchange: Exchange) -> tuple[Fate, str] | None:
    """Why a finished turn can't be trained, whatever the judge would say; None if it can."""
    if exchange.sampled is None or not exchange.sampled.token_ids:
        return Fate.MISSING_LOGPROBS, "the engine returned no token ids with log-probs"
    sampling = exchange.sampled.sampling
    if not sampling.trainable:
        shown = f"temperature {sampling.tau}, top_p {sampling.top_p}, top_k {sampling.top_k}"
        extra = ", penalties or guided decoding" if sampling.penalties else ""
        return Fate.UNSUPPORTED_SAMPLING, f"{shown}{extra}: the importance ratio would not be 1"
    return None
