"""Large records in pieces, so that no record is a transaction that the others wait long for.

A database has one writer at a time. The long columns of a record above `LARGE` are cut into pieces, each
written in a short transaction of its own with those of others between them; the exchange's own row comes
last and says how many there are. Invariant: a row whose pieces are not all there is never committed, so a
record is whole or not in the log. What a crash left behind belongs to no row and is removed after a while.
Knows the text of columns, not what it says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, select

from reef.errors import StoreError
from reef.store.schema import exchanges, pieces
from reef.store.transactions import placeholders

LARGE = 1 << 20
"""bytes of a record's JSON"""
PIECE = 1 << 19
"""characters"""
LEFTOVER_S = 3600.0
"""how long pieces may wait for their row"""
COLUMNS = ("headers", "request", "response", "sampled", "memo")
_EMPTY = {"headers": "{}", "request": "{}"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a column's JSON."""

    id: str
    column: str
    n: int
    text: str


def split(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Piece]]:
    """A row of `exchanges` without its long columns, and their pieces; as it is, and none, if it is not large."""
    if row["size"] <= LARGE:
        return row, []
    cut: list[Piece] = []
    counts: dict[str, int] = {}
    for column in COLUMNS:
        text = row[column]
        if text is None or len(text) <= PIECE:
            continue
        mine = [Piece(row["id"], column, n, text[at : at + PIECE]) for n, at in enumerate(range(0, len(text), PIECE))]
        counts[column] = len(mine)
        cut += mine
    left = {column: _EMPTY.get(column) for column in counts}
    return ({**row, **left, "pieces": json.dumps(counts)}, cut) if cut else (row, [])


def put(c: Connection, piece: Piece) -> None:
    """Write a piece; one that is there already is left alone."""
    statement = f"INSERT INTO pieces (id, part, n, text, time) VALUES ({placeholders(c, 5)}) ON CONFLICT DO NOTHING"
    c.exec_driver_sql(statement, (piece.id, piece.column, piece.n, piece.text, time.time()))


def check_whole(c: Connection, row: Mapping[str, Any]) -> None:
    """Raises StoreError unless all pieces of a row that is about to be written are there."""
    wanted = sum(json.loads(row["pieces"]).values())
    if c.execute(select(func.count()).where(pieces.c.id == row["id"])).scalar() != wanted:
        raise StoreError("pieces of the record were removed before it was whole")


def joined(c: Connection, row: Row[Any]) -> dict[str, Any] | None:
    """The values of those columns of a row of `exchanges` that are in pieces; None if some are gone, which an
    erasure does."""
    counts: Mapping[str, int] = row.pieces or {}
    values: dict[str, Any] = {}
    for column in counts.keys() & set(row._fields):
        query = select(pieces.c.text).where(pieces.c.id == row.id, pieces.c.part == column).order_by(pieces.c.n)
        texts = c.execute(query).scalars().all()
        if len(texts) != counts[column]:
            return None
        values[column] = json.loads("".join(texts))
    return values


def remove(c: Connection, ids: Sequence[str]) -> None:
    """Remove the pieces of erased exchanges."""
    c.execute(delete(pieces).where(pieces.c.id.in_(ids)))


def remove_unfinished(c: Connection, id: str) -> None:
    """Remove the pieces of a record whose row was not written."""
    c.execute(delete(pieces).where(pieces.c.id == id, _without_row()))


def remove_leftovers(c: Connection, before: float) -> int:
    """Remove pieces written before a time whose row never came; returns how many."""
    return c.execute(delete(pieces).where(pieces.c.time < before, _without_row())).rowcount


def _without_row() -> ColumnElement[bool]:
    """Correlated: PostgreSQL reads all receipts for a NOT IN."""
    return ~exists().where(exchanges.c.id == pieces.c.id)
