"""Tool calls as engines stream them, made whole and put in order.

Engines differ: an `index` may be missing, null or the same for all calls, ids may come once or with
every piece, parallel calls may be interleaved. `ToolCalls` finds out which call a piece belongs to;
`InOrder` lets the calls out one after another, for dialects that know one open call at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(slots=True)
class ToolCall:
    """A call as far as it is known."""

    index: int
    id: str
    """empty until an id came"""
    name: str = ""
    arguments: str = ""

    @property
    def complete(self) -> bool:
        """Its arguments are whole: nothing but white space could follow."""
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True


class ToolCalls:
    """Collects an answer's calls from their pieces."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        """in the order they began"""

    def add(self, deltas: Iterable[Any]) -> None:
        """Take in the `tool_calls` of one stream delta (or of a whole message)."""
        for delta in deltas:
            if isinstance(delta, dict):
                self._piece(delta)

    def _piece(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        call = self._of(delta.get("index"), str(delta.get("id") or ""), name)
        call.id = call.id or str(delta.get("id") or "")
        if name and name != call.name:
            call.name += name
        if arguments:
            call.arguments += arguments if isinstance(arguments, str) else json.dumps(arguments)

    def _of(self, index: Any, id: str, name: str) -> ToolCall:
        """The call a piece belongs to; a new one if it begins one."""
        if id:
            same = [c for c in self.calls if c.id == id]
            if same:
                return same[-1]
        at = index if type(index) is int else None
        known = [c for c in self.calls if at is None or c.index == at]
        newest = known[-1] if known else None
        begins = newest is None or bool(id and newest.id) or bool(name and newest.complete)
        if begins or newest is None:
            newest = ToolCall(len(self.calls) if at is None else at, id)
            self.calls.append(newest)
        return newest

    def message(self) -> list[dict[str, Any]]:
        """The calls as a chat message has them."""
        return [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in sorted(self.calls, key=lambda c: c.index)
        ]


class What(Enum):
    OPEN = "open"
    ARGUMENTS = "arguments"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to tell the client about a call; `text` is new argument text."""

    what: What
    call: ToolCall
    text: str = ""


class InOrder:
    """Lets calls out one after another: the first unfinished one streams, the others wait their turn."""

    def __init__(self, id_prefix: str) -> None:
        self._calls = ToolCalls()
        self._prefix = id_prefix
        self._at = 0
        self._told = 0
        """characters of the current call's arguments that are out"""
        self._open = False

    def add(self, deltas: Iterable[Any]) -> list[Step]:
        self._calls.add(deltas)
        return self._advance(final=False)

    def finish(self) -> list[Step]:
        """The rest, at the end of the answer."""
        return self._advance(final=True)

    def settle(self) -> list[Step]:
        """Something else follows: close the open call if nothing can be missing."""
        newest = self._at == len(self._calls.calls) - 1
        return self._advance(final=True) if newest and self._open and self._calls.calls[self._at].complete else []

    @property
    def busy(self) -> bool:
        """A call has begun and may still grow."""
        return self._at < len(self._calls.calls)

    def _advance(self, *, final: bool) -> list[Step]:
        steps: list[Step] = []
        calls = self._calls.calls
        while self._at < len(calls):
            call = calls[self._at]
            last = self._at == len(calls) - 1
            if not self._open and (call.name or final):
                call.id = call.id or f"{self._prefix}{self._at}"
                steps.append(Step(What.OPEN, call))
                self._open = True
            if self._open and len(call.arguments) > self._told:
                steps.append(Step(What.ARGUMENTS, call, call.arguments[self._told :]))
                self._told = len(call.arguments)
            if not (final or (not last and self._open and call.complete)):
                break
            steps.append(Step(What.CLOSE, call))
            self._at, self._told, self._open = self._at + 1, 0, False
        return steps
