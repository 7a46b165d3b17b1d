"""Main turn or side call: titles, summaries, memory notes, heartbeats, sub-agents.

Rules in order, the first that fires decides and is named in the reason. A request is a side call by what
it says of itself, by what it asks for, or by its structure beside the conversation it comes from; never
merely because it offers no tools. A judgement that rests on structure alone is only a suspicion: the
request's binding then waits until the conversation shows whether it lives on. Pure; reads no index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reef.sessions.evidence import Found
from reef.sessions.harness import instruction
from reef.sessions.index import Node
from reef.sessions.ladder import subagent_of
from reef.sessions.transcript import USER, Transcript
from reef.wire.exchange import Exchange

TURN_TYPE = "x-reef-tag-turn-type"
SHORT_SYSTEM = 4000
"""characters up to which a system text is taken as the instruction of one task"""


@dataclass(frozen=True, slots=True)
class Side:
    kind: str
    """title, summary, memory ..., or side where nothing more is known"""
    reason: str
    final: bool = False
    """not a turn even if somebody goes on from its reply"""


@dataclass(frozen=True, slots=True)
class Suspect:
    reason: str


SUBAGENT = "sub-agent"


def turn_type(
    exchange: Exchange, t: Transcript, found: Found, twins: Sequence[Node], side_models: Sequence[str] = ()
) -> Side | Suspect | None:
    """Why a request is, or may be, a side call; None for a main turn.

    `twins` are exchanges that other requests opened with the same words of the user.
    """
    marked = exchange.headers.get(TURN_TYPE, "").lower()
    if marked in ("main", "side"):
        return Side("side", f"{TURN_TYPE}: side", final=True) if marked == "side" else None
    if exchange.request.get("model") in side_models:
        return Side("side", "its model is one of sessions.side_models", final=True)
    by_header = subagent_of(exchange)
    if by_header:
        return Side(SUBAGENT, by_header, final=True)
    if found.task is not None:
        return Side(SUBAGENT, found.reason, final=found.whole)
    parent = found.parent
    aside = parent if parent is not None and parent.side is not None else None
    if aside and (aside.final_side or not any(a.kind == USER for a in t.tail)):
        return Side(aside.kind, f"goes on from the side call {aside.id}", final=aside.final_side)
    asks = _asks(t, found, twins)
    if asks:
        return asks
    if t.groups:
        return _changed(t, parent)
    if parent is None:
        return _quotes(t, found.quoted) or _twin(t, twins)
    return None


def _asks(t: Transcript, found: Found, twins: Sequence[Node]) -> Side | None:
    """What the newest message or the system text asks for."""
    newest = t.newest
    task = instruction(t.atoms[newest].text) if newest is not None else None
    if task and task.about:
        return Side(task.kind, f"asks for a {task.kind} in its newest message")
    if t.tools:
        return None
    if task and (found.quoted or t.schema):
        return Side(task.kind, f"asks for a {task.kind} and quotes a conversation")
    parent = found.parent
    if t.groups and (parent is None or parent.shape == t.shape):
        return None
    own = instruction(t.system) if 0 < len(t.system) <= SHORT_SYSTEM else None
    if own and own.kind == "commit message" and not t.groups:
        return Side(own.kind, "its system text asks for a commit message")
    if own and (own.about or found.quoted or t.schema or any(n.shape != t.shape for n in twins)):
        return Side(own.kind, f"its system text asks for a {own.kind}")
    return None


def _changed(t: Transcript, parent: Node | None) -> Suspect | None:
    """A request unlike the one it goes on from may be the harness's own."""
    if parent is None or parent.shape == t.shape or not parent.tools or t.tools:
        return None
    return Suspect("no tools where its conversation has them")


def _quotes(t: Transcript, quoted: Sequence[Node]) -> Side | None:
    """A first request that carries somebody else's conversation."""
    told = [n for n in quoted if n.side is None]
    if not told:
        return None
    if all(n.shape != t.shape for n in told):
        return Side("side", f"another kind of request that quotes the conversation of {told[-1].id}")
    return None


def _twin(t: Transcript, twins: Sequence[Node]) -> Side | None:
    tooled = [n for n in twins if n.opener and n.tools and n.shape != t.shape]
    if tooled and not t.tools:
        return Side("side", f"asks the opening words of {tooled[-1].id} without its tools")
    return None
