"""Translating nothing: for the dialects that engines speak themselves.

Chunks leave as they came, and those that end the answer are held back until its record is durable. The
answer is put together beside them, for the record. Knows no dialect's fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from reef.errors import ReefError
from reef.wire import sse
from reef.wire.answer import Answer
from reef.wire.openai_errors import openai_error


class PassThrough(ABC):
    """A translator that lets chunks through."""

    def __init__(self, request: Mapping[str, Any], receipt: str, answer: Answer) -> None:
        self.response: dict[str, Any] | None = None
        self.finished = False
        self._held: list[bytes] = []

    def whole(self, shown: dict[str, Any]) -> dict[str, Any]:
        self.response = shown
        return shown

    def chunk(self, shown: dict[str, Any]) -> bytes:
        self._assemble(shown)
        event = sse.event(shown)
        if not self.finished:
            return event
        self._held.append(event)
        return b""

    def final(self) -> bytes:
        return b"".join(self._held) + sse.DONE

    def failed(self, error: ReefError) -> bytes:
        return sse.event(openai_error(error))

    def keep_alive(self) -> bytes:
        return sse.COMMENT

    @abstractmethod
    def _assemble(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk to `response`; set `finished` once it says why the answer ended."""
