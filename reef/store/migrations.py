"""Schema versions: a numbered list of steps, each applied once, all in one transaction.

The first step of a list makes the tables as they are today, so every later one finds its work done in a
fresh database and must be able to say so. A database made by a newer Reef is refused rather than guessed
at. Log and learn keep separate numbers, since they may live in one PostgreSQL database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, Text, insert, inspect, select, text, update
from sqlalchemy.schema import CreateColumn

from reef.errors import StoreError
from reef.store import schema
from reef.store.transactions import writing

Migration = Callable[[Connection], None]

_meta = MetaData()
_versions = Table(
    "reef_schema", _meta, Column("name", Text, primary_key=True), Column("version", Integer, nullable=False)
)


@dataclass(frozen=True, slots=True)
class Schema:
    """A database's name and the steps that make it; a step's number is its place in the list, from 1."""

    name: str
    steps: Sequence[Migration]


def migrate(engine: Engine, wanted: Schema) -> None:
    """Bring a database to the newest schema; several processes may try at once. Raises StoreError if it
    is newer than this code."""
    with engine.connect() as connection:  # the usual case needs no lock and no room on the disk
        if inspect(connection).has_table(_versions.name) and _current(connection, wanted):
            return
    with writing(engine, lock="reef schema") as connection:
        at = _version(connection, wanted)
        if at > len(wanted.steps):
            where = engine.url.render_as_string()
            raise StoreError(f"{where}: schema {at} of {wanted.name} is newer than this Reef ({len(wanted.steps)})")
        for step in wanted.steps[at:]:
            step(connection)
        if at < len(wanted.steps):
            mine = _versions.c.name == wanted.name
            connection.execute(update(_versions).where(mine).values(version=len(wanted.steps)))


def _current(connection: Connection, wanted: Schema) -> bool:
    if "name" not in {c["name"] for c in inspect(connection).get_columns(_versions.name)}:
        return False
    query = select(_versions.c.version).where(_versions.c.name == wanted.name)
    return connection.execute(query).scalar() == len(wanted.steps)


def _version(connection: Connection, wanted: Schema) -> int:
    if not inspect(connection).has_table(_versions.name):
        _meta.create_all(connection)
    elif "name" not in {c["name"] for c in inspect(connection).get_columns(_versions.name)}:
        connection.execute(text("ALTER TABLE reef_schema ADD COLUMN name TEXT"))
        connection.execute(update(_versions).values(name=wanted.name))
    at = connection.execute(select(_versions.c.version).where(_versions.c.name == wanted.name)).scalar()
    if at is None:
        connection.execute(insert(_versions).values(name=wanted.name, version=0))
    return at or 0


def add_columns(connection: Connection, *columns: Column) -> None:
    """Those of the columns that their table lacks."""
    for column in columns:
        table = column.table
        assert isinstance(table, Table)
        if column.name not in {c["name"] for c in inspect(connection).get_columns(table.name)}:
            made = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {made}"))


def _log_erasures_and_gaps(connection: Connection) -> None:
    """Words and tokens can be erased, and gaps in the record are themselves recorded."""
    add_columns(connection, schema.exchanges.c.size, schema.exchanges.c.erased)
    schema.log_metadata.create_all(connection, tables=[schema.erasures, schema.gaps])
    schema.kept.create(connection, checkfirst=True)


def _log_memo(connection: Connection) -> None:
    """Which rules of the memo an exchange was served with."""
    add_columns(connection, schema.exchanges.c.memo)


def _log_pieces(connection: Connection) -> None:
    """Large records are written in pieces."""
    add_columns(connection, schema.exchanges.c.pieces)
    schema.log_metadata.create_all(connection, tables=[schema.pieces])


def _learn_claims(connection: Connection) -> None:
    """Each turn is claimed by the step that trains it."""
    schema.learn_metadata.create_all(connection, tables=[schema.claims])
    for index in (schema.by_child, schema.by_charged, schema.by_status):
        index.create(connection, checkfirst=True)
    known = set(connection.execute(select(schema.claims.c.turn)).scalars())
    taken = schema.steps.c.status.in_(("running", "released"))
    for step in connection.execute(select(schema.steps.c.id, schema.steps.c.turns).where(taken)).all():
        rows = [{"turn": turn, "step": step.id} for turn in step.turns if turn not in known]
        known |= {row["turn"] for row in rows}
        if rows:
            connection.execute(insert(schema.claims), rows)


def _memo(connection: Connection) -> None:
    """The memo's rules, and the order of reports."""
    schema.learn_metadata.create_all(connection, tables=[schema.memo_rules])
    add_columns(connection, schema.turn_reports.c.seq)


def _match_memory(connection: Connection) -> None:
    """What the matcher remembers."""
    schema.learn_metadata.create_all(connection, tables=[schema.match_nodes, schema.match_keys])


LOG = Schema("log", (schema.log_metadata.create_all, _log_erasures_and_gaps, _log_memo, _log_pieces))
LEARN = Schema("learn", (schema.learn_metadata.create_all, _learn_claims, _match_memory, _memo))
