"""Transactions that write: one writer at a time where that is what makes an invariant hold.

On SQLite a writing transaction takes the write lock as it begins, so that it waits for another process
instead of failing half-way with "database is locked". On PostgreSQL a named advisory lock does the same;
the server releases it only after the transaction's rows have become visible, hence a number assigned
under the lock is never seen after a larger one. (Reading up to the oldest running transaction instead
would let batches of several gateways overlap, but any long transaction in that database, a backup for
one, would stop the learner.) Knows no table.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError


@contextmanager
def writing(engine: Engine, *, lock: str | None = None) -> Iterator[Connection]:
    """A transaction that may write; with `lock`, alone among those of that name."""
    with engine.connect().execution_options(sqlite_begin="IMMEDIATE") as connection, connection.begin():
        if lock and connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": lock_key(lock)})
        yield connection


@contextmanager
def writing_plainly(engine: Engine) -> Iterator[sqlite3.Connection]:
    """`writing` for SQLite alone, past SQLAlchemy, whose layers cost more than a short transaction does. Raises
    sqlite3.Error too."""
    pooled = engine.raw_connection()
    try:
        connection = pooled.driver_connection
        assert isinstance(connection, sqlite3.Connection)
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    finally:
        pooled.close()  # the pool rolls back what is not committed


def lock_key(name: str) -> int:
    """The 64-bit signed number PostgreSQL knows an advisory lock by."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


class Trouble(Enum):
    """Why a transaction failed, as far as the remedy differs."""

    LOST = "the database can't be reached"
    """it may come back at any moment, and whether the last commit took place is not known"""
    FULL = "the database can't be written"
    """no room, or the storage refuses"""
    OTHER = "the database refused"


_FULL_STATES = ("53100", "58030")
_LOST_STATES = ("57P01", "57P02", "57P03", "25006")


def trouble(error: Exception) -> Trouble:
    """What kind of failure a database error is."""
    original: Any = error.orig if isinstance(error, DBAPIError) else error
    name = getattr(original, "sqlite_errorname", None)
    if name is not None:
        full = name in ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_CANTOPEN") or name.startswith("SQLITE_IOERR")
        return Trouble.FULL if full else Trouble.OTHER
    if not isinstance(error, DBAPIError):
        return Trouble.OTHER
    state = getattr(original, "sqlstate", None)
    if state in _FULL_STATES:
        return Trouble.FULL
    unreachable = isinstance(error, OperationalError) and state is None
    if error.connection_invalidated or state in _LOST_STATES or unreachable:
        return Trouble.LOST
    return Trouble.OTHER


def placeholders(connection: Connection, count: int) -> str:
    """So many marks for values in SQL that is handed to the driver as it is."""
    return ", ".join(["?" if connection.dialect.paramstyle == "qmark" else "%s"] * count)
