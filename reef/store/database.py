"""Opening a database by URL with the settings Reef relies on.

SQLite: WAL, so that readers never block the writer; `synchronous` NORMAL survives the death of any
process, FULL survives a power cut. Knows nothing of tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from reef.errors import StoreError
from reef.store.migrations import Migration, migrate

Durability = Literal["process", "power"]


def open_database(
    url: str, migrations: Sequence[Migration], *, durability: Durability = "process", create: bool = True
) -> Engine:
    """An engine on `url` with the newest schema. Raises StoreError.

    With `create=False` a missing SQLite file is an error instead of a new, empty database.
    """
    parsed = make_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    if sqlite and parsed.database and parsed.database != ":memory:":
        file = Path(parsed.database)
        if not create and not file.exists():
            raise StoreError(f"no store at {file}: has `reef serve` run with this store.dir?")
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        engine = create_engine(url, pool_pre_ping=not sqlite)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        raise StoreError(f"can't open {url}: {error}") from error
    if sqlite:
        synchronous = "FULL" if durability == "power" else "NORMAL"

        @event.listens_for(engine, "connect")
        def _pragmas(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout=10000")
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute(f"PRAGMA synchronous={synchronous}")
            cursor.close()

    try:
        migrate(engine, migrations)
    except SQLAlchemyError as error:
        raise StoreError(f"can't use {url}: {error}") from error
    return engine
