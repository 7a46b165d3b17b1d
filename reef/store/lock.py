"""One holder at a time: of a store, of a learn database, of a steps folder.

Invariant: a lock ends with its process, however that dies, and whoever is refused learns who holds it.
Folders are locked by `flock`; a PostgreSQL database by an advisory lock on a connection of its own, so
that processes on other machines are refused too.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO, Protocol

from sqlalchemy import Connection, Engine, text

from reef.errors import StoreError
from reef.store.transactions import lock_key


class Held(Protocol):
    """A lock that is held until it is closed."""

    def close(self) -> None: ...


def holder() -> str:
    """How this process is named to others."""
    return f"{socket.gethostname()} pid {os.getpid()}"


def acquire(path: Path, *, wait_s: float = 0.0) -> IO[str]:
    """Hold a folder's lock file for this process. Raises StoreError naming the holder if another has
    it and does not let go in time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("a+")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() >= deadline:
                handle.seek(0)
                other = handle.read().strip() or "another process"
                handle.close()
                raise StoreError(f"the store {path.parent} is in use by {other}") from None
            time.sleep(0.1)
    try:
        handle.seek(0)
        handle.truncate()
        handle.write(holder())
        handle.flush()
    except OSError:  # a full disk: the lock holds without the name
        pass
    return handle


def acquire_database(engine: Engine, name: str, folder: Path, *, wait_s: float = 0.0) -> Held:
    """Hold `name` for this process in the database, or in `folder` for SQLite. Raises StoreError naming
    the holder."""
    if engine.dialect.name == "sqlite":
        return acquire(folder / f"{name}.lock", wait_s=wait_s)
    connection = engine.connect()
    connection.detach()  # not the pool's any more: it lives as long as the lock
    deadline = time.monotonic() + wait_s
    key = lock_key(f"reef {name}")
    while not connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar_one():
        if time.monotonic() >= deadline:
            other = _database_holder(connection, key)
            connection.close()
            raise StoreError(f"the {name} of {engine.url.render_as_string()} is in use by {other}")
        connection.commit()
        time.sleep(0.2)
    connection.execute(text("SELECT set_config('application_name', :name, false)"), {"name": f"reef {holder()}"})
    connection.commit()
    return connection


def _database_holder(connection: Connection, key: int) -> str:
    query = text(
        "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'"
        " AND l.granted AND l.objsubid = 1 AND l.classid::bigint = :high AND l.objid::bigint = :low"
    )
    unsigned = key % 2**64
    found = connection.execute(query, {"high": unsigned >> 32, "low": unsigned % 2**32}).scalar()
    return str(found or "another process").removeprefix("reef ")
