"""Opening a database by URL with the settings Reef relies on.

SQLite: WAL, so that readers never block the writer; `synchronous` NORMAL survives the death of any
process, FULL survives a power cut. PostgreSQL: the server's own settings; under `power` a server that
does not sync is refused. Freed pages are overwritten, so that what is erased is gone from the file.
Knows nothing of tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from reef.errors import StoreError
from reef.store.migrations import Schema, migrate

Durability = Literal["process", "power"]
BUSY_MS = 60_000
"""how long a writer waits for another one's transaction"""


def open_database(url: str, wanted: Schema, *, durability: Durability = "process", create: bool = True) -> Engine:
    """An engine on `url` with the newest schema. Raises StoreError.

    With `create=False` a missing SQLite file is an error instead of a new, empty database.
    """
    parsed = _parse(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    if sqlite and parsed.database and parsed.database != ":memory:":
        file = Path(parsed.database)
        if not create and not file.exists():
            raise StoreError(f"no store at {file}: has `reef serve` run with this store.dir?")
        file.parent.mkdir(parents=True, exist_ok=True)
    shown = parsed.render_as_string()
    try:
        if sqlite:
            engine = create_engine(parsed, max_overflow=64)
            _tune_sqlite(engine, durability)
        else:
            engine = create_engine(parsed, pool_pre_ping=True, max_overflow=16)
    except SQLAlchemyError as error:
        raise StoreError(f"can't open {shown}: {error}") from error
    except ModuleNotFoundError as error:
        raise StoreError(f"{shown} needs the package {error.name}: pip install 'reef[postgres]'") from error
    try:
        if not sqlite and durability == "power":
            _check_syncing(engine)
        migrate(engine, wanted)
    except SQLAlchemyError as error:
        raise StoreError(f"can't use {shown}: {error}") from error
    return engine


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except SQLAlchemyError as error:
        raise StoreError(f"not a database URL: {error}") from None
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"{parsed.render_as_string()}: the store is SQLite or PostgreSQL")
    return parsed


def _tune_sqlite(engine: Engine, durability: Durability) -> None:
    synchronous = "FULL" if durability == "power" else "NORMAL"

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where Reef says so, in the `begin` event
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        if cursor.execute("PRAGMA page_count").fetchone()[0] == 0:  # in a file with pages it would want the write lock
            cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={synchronous}")
        cursor.execute("PRAGMA fullfsync=1")  # macOS: a plain fsync there leaves data in the drive's cache
        cursor.execute("PRAGMA secure_delete=ON")
        cursor.execute("PRAGMA journal_size_limit=67108864")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        how = connection.get_execution_options().get("sqlite_begin", "DEFERRED")
        if how is not None:
            connection.exec_driver_sql(f"BEGIN {how}")


def _check_syncing(engine: Engine) -> None:
    """Raises StoreError if the server would answer a commit before it is on the disk."""
    with engine.connect() as connection:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            value = connection.execute(text(f"SHOW {setting}")).scalar_one()
            if value == "off":
                raise StoreError(f"store.durability power: the PostgreSQL server runs with {setting} = off")
