"""Schema versions: a numbered list of steps, each applied once, in one transaction.

A database made by a newer Reef is refused rather than guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, insert, inspect, select, update

from reef.errors import StoreError
from reef.store import schema

Migration = Callable[[Connection], None]

_meta = MetaData()
_version = Table("reef_schema", _meta, Column("version", Integer, nullable=False))


def _match_tables(connection: Connection) -> None:
    schema.learn_metadata.create_all(connection, tables=[schema.match_nodes, schema.match_keys])


LOG: Sequence[Migration] = (schema.log_metadata.create_all,)
LEARN: Sequence[Migration] = (schema.learn_metadata.create_all, _match_tables)


def migrate(engine: Engine, migrations: Sequence[Migration]) -> None:
    """Bring a database to the newest schema. Raises StoreError if it is newer than this code."""
    with engine.begin() as connection:
        if not inspect(connection).has_table("reef_schema"):
            _meta.create_all(connection)
            connection.execute(insert(_version).values(version=0))
        at = connection.execute(select(_version.c.version)).scalar_one()
        if at > len(migrations):
            raise StoreError(
                f"{engine.url.render_as_string()}: schema {at} is newer than this Reef ({len(migrations)})"
            )
        for step in migrations[at:]:
            step(connection)
        if at < len(migrations):
            connection.execute(update(_version).values(version=len(migrations)))
