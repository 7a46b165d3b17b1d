"""What a dialect has to offer, and what all of them share when they translate an answer.

A dialect turns a client's request into one the engine understands and the engine's answer, already
stripped of what Reef asked for, into what the client expects: whole, or as stream events. Knows no
sockets and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from reef.errors import ReefError
from reef.wire.answer import Answer
from reef.wire.exchange import Api


class Translator(Protocol):
    """Translates one answer. `response` is the answer so far, as the client saw it."""

    @property
    def response(self) -> dict[str, Any] | None: ...

    @property
    def finished(self) -> bool:
        """The engine has said why the answer ended."""
        ...

    def whole(self, shown: dict[str, Any]) -> dict[str, Any]:
        """A non-streamed answer."""
        ...

    def chunk(self, shown: dict[str, Any]) -> bytes:
        """The events one engine chunk becomes; empty if it says nothing yet."""
        ...

    def final(self) -> bytes:
        """The events that end the answer. They leave only once the record is durable."""
        ...

    def failed(self, error: ReefError) -> bytes:
        """The events that tell of a failure; no clean end follows."""
        ...

    def keep_alive(self) -> bytes:
        """Something that tells the client, and its idle timer, that the answer is still coming."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect's functions."""

    api: Api
    engine_path: str
    """route of the engine that answers it"""
    check: Callable[[Any], dict[str, Any]]
    """the body, if it is a request of this dialect; raises BadRequest naming the field"""
    to_engine: Callable[[Mapping[str, Any]], dict[str, Any]]
    """a checked request as the engine's route takes it, before Reef adds anything"""
    translator: Callable[[Mapping[str, Any], str, Answer], Translator]
    """(request, receipt, answer) -> the translator of its answer"""
    error: Callable[[ReefError], dict[str, Any]]
    """an error as this dialect's JSON"""


def as_chunk(shown: Mapping[str, Any]) -> dict[str, Any]:
    """A whole chat answer as the one stream chunk that says all of it."""
    choice = (shown.get("choices") or [{}])[0]
    message = dict(choice.get("message") or {})
    calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    message["tool_calls"] = [{**call, "index": n} for n, call in enumerate(calls)]
    return {**shown, "choices": [{**choice, "delta": message}]}
