"""Rows of the log: what an exchange becomes, and how rows are appended.

Invariant: `seq` is the next number, taken under the write lock that the caller holds. Knows no thread and no
transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table, func, insert, select

from reef.store.columns import to_json, words
from reef.store.schema import exchanges
from reef.store.transactions import placeholders
from reef.wire.exchange import Exchange


def append(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> int:
    """Insert rows with the next numbers and return the last one. The caller holds the write lock."""
    after = connection.execute(select(func.max(table.c.seq))).scalar() or 0
    if rows:
        connection.execute(insert(table), [{**row, "seq": after + n} for n, row in enumerate(rows, 1)])
    return after + len(rows)


_COLUMNS = tuple(c.name for c in exchanges.c if c.name not in ("seq", "erased"))
_ANY_TEXT = [_COLUMNS.index(name) for name in ("client", "error")]
"""what may hold characters that a database refuses"""
_values = itemgetter(*_COLUMNS)


def append_exchanges(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """`append` for what is written with every request: past SQLAlchemy's types, which cost more than the
    database does. The caller holds the write lock."""
    if rows:
        connection.exec_driver_sql(_insert(placeholders(connection, len(_COLUMNS))), [*map(_written, rows)])


def append_plainly(connection: sqlite3.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """`append_exchanges` within `writing_plainly`."""
    connection.executemany(_INSERT, map(_written, rows))


def _insert(marks: str) -> str:
    return (
        f"INSERT INTO exchanges (seq, {', '.join(_COLUMNS)}) VALUES "
        f"((SELECT coalesce(max(seq), 0) + 1 FROM exchanges), {marks})"
    )


_INSERT = _insert(", ".join("?" * len(_COLUMNS)))


def _written(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row's values in the columns' order."""
    values = list(_values(row))
    for n in _ANY_TEXT:
        if values[n] is not None:
            values[n] = words(values[n])
    return tuple(values)


def exchange_row(exchange: Exchange) -> dict[str, Any]:
    """The exchange as a row of `exchanges`, without seq."""
    parts = {
        "headers": to_json(dict(exchange.headers)),
        "request": to_json(exchange.request),
        "response": to_json(exchange.response) if exchange.response is not None else None,
        "sampled": to_json(exchange.sampled.to_json()) if exchange.sampled else None,
        "memo": to_json(list(exchange.memo)) if exchange.memo else None,
    }
    return {
        "id": exchange.id,
        "time": exchange.time,
        "started": exchange.started,
        "api": exchange.api.value,
        "scenario": exchange.scenario,
        "client": exchange.client,
        **parts,
        "status": exchange.status,
        "delivered": exchange.delivered.value,
        "version": exchange.sampled.version if exchange.sampled else None,
        "error": exchange.error,
        "pieces": None,
        "size": sum(len(text) if text.isascii() else len(text.encode()) for text in parts.values() if text),
    }
