"""What waits for the log's writer, and how those who wait for it are told.

Invariant: each item has one caller, a future of the caller's own event loop, which is settled once and in that
loop. Knows no thread and no transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table

from reef.store.pieces import Piece
from reef.store.schema import exchanges

Change = Callable[[Connection], Any]
Outcome = tuple[asyncio.Future[Any], Any]
"""who waits, and the result or the exception"""


@dataclass(slots=True)
class Entry:
    """A row to append; made in the writer's thread unless it was before."""

    table: Table
    make: Callable[[], Mapping[str, Any]]
    caller: asyncio.Future[Any]
    row: Mapping[str, Any] | None = None

    def size(self) -> int:
        """Bytes of an exchange's JSON."""
        if self.row is None:
            self.row = self.make()
        return self.row.get("size", 0)


@dataclass(slots=True)
class Work:
    """Anything else that writes, in its place among the rows."""

    run: Change
    caller: asyncio.Future[Any]


@dataclass(slots=True)
class InPieces:
    """A record on its way in pieces, its own row last."""

    row: Entry
    pieces: deque[Piece]


@dataclass(slots=True)
class Gap:
    """A time during which nothing can be recorded."""

    reason: str
    started: float = field(default_factory=time.time)
    refused: int = 0
    """requests not let in; counted by the event loop"""
    failed: int = 0
    """exchanges that could not be written; counted by the writer's thread"""


def small_records(batch: Sequence[Entry | Work]) -> list[Mapping[str, Any]] | None:
    """The rows of a batch of nothing but exchanges that are whole without pieces; else None."""
    rows: list[Mapping[str, Any]] = []
    for item in batch:
        if not isinstance(item, Entry) or item.table is not exchanges:
            return None
        rows.append(item.row or item.make())
        if rows[-1]["pieces"]:
            return None
    return rows


def waiting() -> asyncio.Future[Any]:
    """A future of the running loop, for a caller to wait on."""
    return asyncio.get_running_loop().create_future()


def tell(outcomes: Sequence[Outcome]) -> None:
    """Hand results to their callers, waking each event loop once."""
    for loop in {caller.get_loop() for caller, _ in outcomes}:
        mine = [(caller, result) for caller, result in outcomes if caller.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits any more
            loop.call_soon_threadsafe(_settle, mine)


def _settle(outcomes: Sequence[Outcome]) -> None:
    for caller, result in outcomes:
        if caller.done():
            continue  # it left, or knows already
        if isinstance(result, BaseException):
            caller.set_exception(result)
        else:
            caller.set_result(result)
