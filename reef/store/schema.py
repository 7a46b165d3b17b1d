"""The two databases, table by table.

`log` is written by gateways only, `learn` by the learner only; each reads the other. The log is the
only source of truth: everything in `learn` but the verdicts can be derived from it again.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

log_metadata = MetaData()
learn_metadata = MetaData()

exchanges = Table(
    "exchanges",
    log_metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),  # commit order
    Column("id", String(128), nullable=False, unique=True),  # the receipt, a ULID
    Column("time", Float, nullable=False),
    Column("started", Float, nullable=False),
    Column("api", String(16), nullable=False),
    Column("scenario", String(128), nullable=False),
    Column("client", String(128)),
    Column("headers", JSON, nullable=False),
    Column("request", JSON, nullable=False),
    Column("response", JSON),
    Column("status", Integer, nullable=False),
    Column("delivered", String(8), nullable=False),
    Column("sampled", JSON),
    Column("version", Integer),
    Column("error", Text),
    sqlite_autoincrement=True,
)

reports = Table(
    "reports",
    log_metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(128), nullable=False, unique=True),  # idempotency key
    Column("time", Float, nullable=False),
    Column("references", JSON, nullable=False),  # receipts
    Column("score", Float),
    Column("feedback", Text),
    sqlite_autoincrement=True,
)

serving = Table(
    "serving",
    log_metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("scenario", String(128), nullable=False),
    Column("version", Integer, nullable=False),
    Column("time", Float, nullable=False),
    Column("by", String(128), nullable=False),  # learner or operator
    Index("serving_latest", "scenario", "seq"),
    sqlite_autoincrement=True,
)

cursors = Table(
    "cursors",
    learn_metadata,
    Column("name", String(32), primary_key=True),
    Column("seq", Integer, nullable=False),
)

turns = Table(
    "turns",
    learn_metadata,
    Column("id", String(128), primary_key=True),  # the exchange's receipt
    Column("seq", Integer, nullable=False, unique=True),
    Column("time", Float, nullable=False),
    Column("scenario", String(128), nullable=False),
    Column("session", String(64), nullable=False),
    Column("turn_type", String(8), nullable=False),
    Column("binds", String(128)),  # the exchange whose reply this request answers
    Column("method", String(32), nullable=False),
    Column("score", Float, nullable=False),
    Column("reason", Text, nullable=False),
    Column("fate", String(24), nullable=False),  # latest row of `fates`, kept here for counting
    Column("version", Integer),
    Index("turns_session", "session", "seq"),
    Index("turns_fate", "fate", "seq"),
)

fates = Table(
    "fates",
    learn_metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("turn", String(128), nullable=False),
    Column("fate", String(24), nullable=False),
    Column("rule", String(48), nullable=False),
    Column("reason", Text, nullable=False),
    Column("time", Float, nullable=False),
    Column("version", Integer),
    Index("fates_turn", "turn", "seq"),
)

bindings = Table(
    "bindings",
    learn_metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("turn", String(128), nullable=False),  # whose reply
    Column("child", String(128), nullable=False),  # the request that answers it
    Column("role", String(16), nullable=False),
    Column("next_state", Text, nullable=False),
    Column("firm", Boolean, nullable=False),
    Column("time", Float, nullable=False),
    Index("bindings_turn", "turn", "seq"),
)

verdicts = Table(
    "verdicts",
    learn_metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("turn", String(128), nullable=False),  # the turn that was judged
    Column("binding", Integer),  # the binding it was judged by; null for a report
    Column("charged", String(128)),  # the turn that is charged, null when none is
    Column("verdict", Integer, nullable=False),  # of the charge
    Column("body", JSON, nullable=False),  # the whole Verdict
    Column("judge", String(128), nullable=False),
    Column("seconds", Float, nullable=False),
    Column("time", Float, nullable=False),
    Index("verdicts_turn", "turn", "seq"),
)

match_nodes = Table(
    "match_nodes",
    learn_metadata,
    Column("id", String(128), primary_key=True),
    Column("seq", Integer, nullable=False),
    Column("time", Float, nullable=False),
    Column("session", String(64), nullable=False),
    Column("body", JSON, nullable=False),  # a matching Node
    Index("match_nodes_time", "time"),
    Index("match_nodes_session", "session"),
)

match_keys = Table(
    "match_keys",
    learn_metadata,
    Column("key", LargeBinary(17), primary_key=True),
    Column("seq", Integer, primary_key=True),  # of the node
    Column("id", String(128), nullable=False),
    Index("match_keys_id", "id"),
)

turn_reports = Table(
    "turn_reports",
    learn_metadata,
    Column("report", String(128), primary_key=True),
    Column("turn", String(128), primary_key=True),
    Column("score", Float),
    Column("feedback", Text),
    Index("turn_reports_turn", "turn"),
)

steps = Table(
    "steps",
    learn_metadata,
    Column("id", String(128), primary_key=True),
    Column("scenario", String(128), nullable=False),
    Column("version", Integer, nullable=False),  # the version it produces
    Column("parent", Integer, nullable=False),
    Column("turns", JSON, nullable=False),
    Column("status", String(16), nullable=False),  # running, released, rejected, failed
    Column("attempts", Integer, nullable=False),
    Column("carried", JSON, nullable=False),  # the recipe's state after this step
    Column("reason", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("ended", Float),
    UniqueConstraint("scenario", "version"),
)

releases = Table(
    "releases",
    learn_metadata,
    Column("scenario", String(128), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("parent", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("turns", JSON, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("gate", JSON, nullable=False),
    Column("status", String(16), nullable=False),  # candidate, released, rejected
    Column("step", String(128), nullable=False, unique=True),
    Column("time", Float, nullable=False),
    Column("published", Float),
)
