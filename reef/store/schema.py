"""The two databases, table by table, the same on SQLite and PostgreSQL.

`log` is written by gateways only, `learn` by the learner only; each reads the other. The log is the
only source of truth: everything in `learn` but the verdicts can be derived from it again.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from reef.store.columns import SEQ, Json, Words

log_metadata = MetaData()
learn_metadata = MetaData()

exchanges = Table(
    "exchanges",
    log_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),  # commit order, without gaps
    Column("id", Words, nullable=False, unique=True),  # the receipt, a ULID
    Column("time", Double, nullable=False),
    Column("started", Double, nullable=False),
    Column("api", Words, nullable=False),
    Column("scenario", Words, nullable=False),
    Column("client", Words),
    Column("headers", Json, nullable=False),
    Column("request", Json, nullable=False),
    Column("response", Json),
    Column("status", Integer, nullable=False),
    Column("delivered", Words, nullable=False),
    Column("sampled", Json),
    Column("version", Integer),
    Column("error", Words),
    Column("size", Integer, nullable=False, server_default=text("0")),  # bytes of its JSON; 0 once erased
    Column("erased", Words),  # why its words and tokens are gone: forgotten, age, size
    Column("memo", Json),  # rules that were put into its prompt; null for none
    Column("pieces", Json),  # of a large record: its columns that are in `pieces`, and in how many each
    sqlite_autoincrement=True,
)
kept = Index(
    "exchanges_kept",
    exchanges.c.time,
    exchanges.c.seq,
    exchanges.c.size,
    sqlite_where=exchanges.c.erased.is_(None),
    postgresql_where=exchanges.c.erased.is_(None),
)

pieces = Table(
    "pieces",
    log_metadata,
    Column("id", Words, primary_key=True),  # the exchange's receipt
    Column("part", Words, primary_key=True),  # its column
    Column("n", Integer, primary_key=True, autoincrement=False),  # 0, 1, 2, ...
    Column("text", Text, nullable=False),  # of the column's JSON
    Column("time", Double, nullable=False),  # when it was written, before its row
    Index("pieces_time", "time", "id"),
)

reports = Table(
    "reports",
    log_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("id", Words, nullable=False, unique=True),  # idempotency key
    Column("time", Double, nullable=False),
    Column("references", Json, nullable=False),  # receipts
    Column("score", Double),
    Column("feedback", Words),
    sqlite_autoincrement=True,
)

serving = Table(
    "serving",
    log_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("scenario", Words, nullable=False),
    Column("version", Integer, nullable=False),
    Column("time", Double, nullable=False),
    Column("by", Words, nullable=False),  # learner or operator
    Index("serving_latest", "scenario", "seq"),
    sqlite_autoincrement=True,
)

erasures = Table(
    "erasures",
    log_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("turns", Json, nullable=False),  # receipts whose words and tokens are gone
    Column("why", Words, nullable=False),  # forgotten, age, size
    Column("time", Double, nullable=False),
    sqlite_autoincrement=True,
)

gaps = Table(
    "gaps",
    log_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
    Column("exchanges", Integer, nullable=False),  # answered without a record, or refused for want of one
    Column("reason", Words, nullable=False),
    sqlite_autoincrement=True,
)

cursors = Table(
    "cursors",
    learn_metadata,
    Column("name", Words, primary_key=True),
    Column("seq", SEQ, nullable=False),
)

turns = Table(
    "turns",
    learn_metadata,
    Column("id", Words, primary_key=True),  # the exchange's receipt
    Column("seq", SEQ, nullable=False, unique=True),
    Column("time", Double, nullable=False),
    Column("scenario", Words, nullable=False),
    Column("session", Words, nullable=False),
    Column("turn_type", Words, nullable=False),
    Column("binds", Words),  # the exchange whose reply this request answers
    Column("method", Words, nullable=False),
    Column("score", Double, nullable=False),
    Column("reason", Words, nullable=False),
    Column("fate", Words, nullable=False),  # latest row of `fates`, kept here for counting
    Column("version", Integer),
    Index("turns_session", "session", "seq"),
    Index("turns_fate", "fate", "seq"),
)

fates = Table(
    "fates",
    learn_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("turn", Words, nullable=False),
    Column("fate", Words, nullable=False),
    Column("rule", Words, nullable=False),
    Column("reason", Words, nullable=False),
    Column("time", Double, nullable=False),
    Column("version", Integer),
    Index("fates_turn", "turn", "seq"),
)

bindings = Table(
    "bindings",
    learn_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("turn", Words, nullable=False),  # whose reply
    Column("child", Words, nullable=False),  # the request that answers it
    Column("role", Words, nullable=False),
    Column("next_state", Words, nullable=False),
    Column("firm", Boolean, nullable=False),
    Column("time", Double, nullable=False),
    Index("bindings_turn", "turn", "seq"),
)
by_child = Index("bindings_child", bindings.c.child)

verdicts = Table(
    "verdicts",
    learn_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("turn", Words, nullable=False),  # the turn that was judged
    Column("binding", SEQ),  # the binding it was judged by; null for a report
    Column("charged", Words),  # the turn that is charged, null when none is
    Column("verdict", Integer, nullable=False),  # of the charge
    Column("body", Json, nullable=False),  # the whole Verdict
    Column("judge", Words, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("time", Double, nullable=False),
    Index("verdicts_turn", "turn", "seq"),
)
by_charged = Index("verdicts_charged", verdicts.c.charged, verdicts.c.seq)

match_nodes = Table(
    "match_nodes",
    learn_metadata,
    Column("id", Words, primary_key=True),
    Column("seq", SEQ, nullable=False),
    Column("time", Double, nullable=False),
    Column("session", Words, nullable=False),
    Column("body", Json, nullable=False),  # a matching Node
    Index("match_nodes_time", "time"),
    Index("match_nodes_session", "session"),
)

match_keys = Table(
    "match_keys",
    learn_metadata,
    Column("key", LargeBinary(17), primary_key=True),
    Column("seq", SEQ, primary_key=True, autoincrement=False),  # of the node
    Column("id", Words, nullable=False),
    Index("match_keys_id", "id"),
)

turn_reports = Table(
    "turn_reports",
    learn_metadata,
    Column("report", Words, primary_key=True),
    Column("turn", Words, primary_key=True),
    Column("score", Double),
    Column("feedback", Words),
    Column("seq", SEQ),  # the report's in the log: the newest one counts
    Index("turn_reports_turn", "turn"),
)

memo_rules = Table(
    "memo_rules",
    learn_metadata,
    Column("seq", SEQ, primary_key=True, autoincrement=True),
    Column("scenario", Words, nullable=False),
    Column("text", Words, nullable=False),
    Column("turn", Words),  # whose verdict it came from; null when a person wrote it
    Column("time", Double, nullable=False),
    Column("seen", Integer, nullable=False),  # verdicts that said so
    Column("dropped", Double),  # when it was displaced or removed; kept, so that the memo's history shows
    Column("why", Words),
    Index("memo_rules_scenario", "scenario", "seq"),
)

steps = Table(
    "steps",
    learn_metadata,
    Column("id", Words, primary_key=True),
    Column("scenario", Words, nullable=False),
    Column("version", Integer, nullable=False),  # the version it produces
    Column("parent", Integer, nullable=False),
    Column("turns", Json, nullable=False),
    Column("status", Words, nullable=False),  # running, released, rejected, failed
    Column("attempts", Integer, nullable=False),
    Column("carried", Json, nullable=False),  # the recipe's state after this step
    Column("reason", Words, nullable=False),
    Column("created", Double, nullable=False),
    Column("ended", Double),
    UniqueConstraint("scenario", "version"),
)
by_status = Index("steps_status", steps.c.status)

claims = Table(
    "claims",
    learn_metadata,
    Column("turn", Words, primary_key=True),  # a turn is in one step at most, whatever the code believes
    Column("step", Words, nullable=False),
    Index("claims_step", "step"),
)

releases = Table(
    "releases",
    learn_metadata,
    Column("scenario", Words, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("parent", Integer, nullable=False),
    Column("path", Words, nullable=False),
    Column("hash", Words, nullable=False),
    Column("turns", Json, nullable=False),
    Column("metrics", Json, nullable=False),
    Column("gate", Json, nullable=False),
    Column("status", Words, nullable=False),  # released, rejected, held, pruned
    Column("step", Words, nullable=False, unique=True),
    Column("time", Double, nullable=False),
    Column("published", Double),
)
