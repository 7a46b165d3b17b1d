"""A whole traffic file through the matcher: with all of it in view, or as the live service decides.

With the file in view every later revision counts. Online, a firm binding is handed on at once and a
tentative one when the conversation goes on from it or after `tentative_s` of the records' own time; what
has been handed on stays. Knows no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from reef.recipe import NextState
from reef.sessions.fate import REOPENS, Fate
from reef.sessions.matcher import Decision, Matcher, Revision
from reef.wire.exchange import Exchange


@dataclass(slots=True)
class _Line:
    """What is known of a request by now."""

    decision: Decision
    fate: Fate
    turn_type: str
    binds: str | None
    state: NextState | None
    reason: str
    due: float | None = None
    """when a tentative binding is handed on"""
    handed: bool = False


class Replay:
    def __init__(self, matcher: Matcher, *, online: bool = False, tentative_s: float = 60.0) -> None:
        self._matcher = matcher
        self._online = online
        self._tentative_s = tentative_s
        self._lines: dict[str, _Line] = {}
        self._waiting: dict[str, _Line] = {}
        self._taken: dict[str, str] = {}
        """which request has reacted to a reply"""

    def feed(self, exchange: Exchange) -> None:
        """The next exchange, in completion order."""
        self._hand_on(exchange.time)
        decision = self._matcher.observe(exchange)
        line = _Line(decision, decision.fate, decision.turn_type, decision.binds, decision.next_state, decision.reason)
        self._lines[exchange.id] = line
        for revision in decision.revisions:
            self._revise(revision)
        if decision.binds and not decision.repeats:
            if decision.firm:
                self._hand(line)
            else:
                line.due = exchange.time + self._tentative_s
                self._waiting[exchange.id] = line

    def lines(self) -> Iterator[dict[str, Any]]:
        """One line per request, as things stand at the end."""
        self._hand_on(float("inf"))
        for id, line in self._lines.items():
            fate = Fate.NO_NEXT_STATE if line.fate is Fate.OPEN else line.fate
            shown = line.binds if line.handed or line.decision.repeats or not self._online else None
            yield {
                "id": id,
                "session": line.decision.session,
                "fate": fate.value,
                "turn_type": line.turn_type,
                "binds": shown,
                "next_state": line.state.text if shown and line.state else None,
                "next_state_role": line.state.role if shown and line.state else None,
                "method": line.decision.method,
                "score": line.decision.score,
                "reason": line.reason,
            }

    def _hand_on(self, now: float) -> None:
        for id in [id for id, line in self._waiting.items() if line.due is not None and line.due <= now]:
            self._hand(self._waiting.pop(id))

    def _hand(self, line: _Line) -> None:
        """The reaction goes to the judge."""
        self._waiting.pop(line.decision.id, None)
        line.handed = True
        reply = self._lines.get(line.binds) if line.binds else None
        if reply is not None:
            self._taken[reply.decision.id] = line.decision.id
            if reply.fate in REOPENS:
                reply.fate = Fate.QUEUED

    def _revise(self, revision: Revision) -> None:
        line = self._lines.get(revision.id)
        if line is None:
            return
        if revision.turn_type:
            line.turn_type = revision.turn_type
        if revision.fate is not None and (line.fate in REOPENS or line.fate is Fate.SIDE_TASK):
            line.fate = revision.fate
        if revision.rebound:
            self._rebind(line, revision)
        elif revision.firm and revision.id in self._waiting:
            self._hand(line)

    def _rebind(self, line: _Line, revision: Revision) -> None:
        if self._online and (line.handed or (revision.binds and revision.binds in self._taken)):
            return
        self._waiting.pop(line.decision.id, None)
        if line.binds and self._taken.get(line.binds) == line.decision.id:
            del self._taken[line.binds]
        line.binds, line.state, line.reason = revision.binds, revision.next_state, revision.reason
        if revision.binds:
            self._hand(line)
        else:
            line.handed = False


def replay(traffic: Iterable[Exchange], *, online: bool = False, tentative_s: float = 60.0) -> Iterator[dict[str, Any]]:
    """One line per request of a traffic file."""
    run = Replay(Matcher(), online=online, tentative_s=tentative_s)
    for exchange in traffic:
        run.feed(exchange)
    yield from run.lines()
