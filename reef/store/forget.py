"""Removing words and tokens from both databases.

An erasure is a row of the log: the gateway empties the exchanges and appends it in one transaction, the
learner reads it like any other row and empties what it derived. Rows stay, with their receipts, fates and
times, so that counts still add up and no turn can be trained again. Knows why only as a word.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, delete, select, text, update

from reef.sessions.fate import WAITING, Fate
from reef.store.pieces import remove as remove_pieces
from reef.store.rows import append
from reef.store.schema import (
    bindings,
    claims,
    erasures,
    exchanges,
    fates,
    match_keys,
    match_nodes,
    memo_rules,
    releases,
    reports,
    steps,
    turn_reports,
    turns,
    verdicts,
)

FORGOTTEN = "forgotten"
ERASED_HEADER = "x-reef-erased"
CHUNK = 500
SCRUB_WAIT_MS = 1000
ERASED_FROM = (
    *("exchanges", "pieces", "reports", "bindings", "verdicts", "turn_reports", "turns", "fates"),
    *("match_nodes", "memo_rules"),
)
"""tables whose old rows may hold words"""


def erase_in_log(c: Connection, ids: Sequence[str], why: str) -> int:
    """Empty exchanges (of forgotten ones also the feedback that names them) and append the erasure; returns
    its seq. The caller holds the log's write lock."""
    headers = {"x-reef-train": "off", ERASED_HEADER: why}  # to whoever reads it later it is opted out
    empty = {"headers": headers, "request": {}, "response": None, "sampled": None, "error": None}
    empty |= {"memo": None, "pieces": None}
    for some in _chunks(ids):
        mine = exchanges.c.id.in_(some)
        c.execute(update(exchanges).where(mine, exchanges.c.erased.is_(None)).values(**empty, size=0, erased=why))
        remove_pieces(c, some)
    if why == FORGOTTEN:  # rare, unlike retention, so reports need no index by what they name
        gone = set(ids)
        said = select(reports.c.seq, reports.c.references).where(reports.c.feedback.is_not(None))
        named = [row.seq for row in c.execute(said) if gone.intersection(row._mapping["references"])]
        for some in _chunks(named):
            c.execute(update(reports).where(reports.c.seq.in_(some)).values(feedback=None))
    return append(c, erasures, [{"turns": list(ids), "why": why, "time": time.time()}])


def erase_in_learn(c: Connection, ids: Sequence[str], why: str) -> None:
    """Empty what was derived from exchanges. A turn that still waits is opted out if it was forgotten."""
    for some in _chunks(ids):
        c.execute(update(bindings).where(bindings.c.turn.in_(some) | bindings.c.child.in_(some)).values(next_state=""))
        judged = verdicts.c.turn.in_(some) | verdicts.c.charged.in_(some)
        for row in c.execute(select(verdicts.c.seq, verdicts.c.body).where(judged)).all():
            body = {"verdict": row.body.get("verdict"), "target": row.body.get("target")}
            c.execute(update(verdicts).where(verdicts.c.seq == row.seq).values(body=body))
        c.execute(update(turn_reports).where(turn_reports.c.turn.in_(some)).values(feedback=None))
        c.execute(update(turns).where(turns.c.id.in_(some)).values(reason=""))
        c.execute(update(fates).where(fates.c.turn.in_(some)).values(reason=""))
        c.execute(delete(match_keys).where(match_keys.c.id.in_(some)))
        c.execute(delete(match_nodes).where(match_nodes.c.id.in_(some)))
        if why == FORGOTTEN:
            told = memo_rules.c.turn.in_(some)
            c.execute(update(memo_rules).where(told).values(text="", dropped=time.time(), why=why))
            waiting = select(turns.c.id).where(turns.c.id.in_(some), turns.c.fate.in_([f.value for f in WAITING]))
            for turn in c.execute(waiting).scalars().all():
                row = {"turn": turn, "fate": Fate.OPTED_OUT.value, "rule": FORGOTTEN, "reason": "", "time": time.time()}
                c.execute(fates.insert().values(**row))
                c.execute(update(turns).where(turns.c.id == turn).values(fate=Fate.OPTED_OUT.value))


def turns_of(learn: Engine, session: str) -> list[str]:
    """Receipts of a session's exchanges, in log order."""
    with learn.connect() as c:
        return list(c.execute(select(turns.c.id).where(turns.c.session == session).order_by(turns.c.seq)).scalars())


def learned_from(learn: Engine, ids: Sequence[str]) -> list[dict[str, Any]]:
    """Which releases were or are being trained on these turns themselves, oldest first: scenario, version,
    status (training, released, held, pruned) and the turns. Later ones may have rehearsed a turn or been shown
    it; only their jobs know."""
    found: dict[str, dict[str, Any]] = {}
    with learn.connect() as c:
        for some in _chunks(ids):
            query = (
                select(claims.c.turn, steps.c.id, steps.c.scenario, steps.c.version, releases.c.status)
                .join(steps, steps.c.id == claims.c.step)
                .outerjoin(releases, releases.c.step == steps.c.id)
                .where(claims.c.turn.in_(some))
            )
            for row in c.execute(query):
                about = {"scenario": row.scenario, "version": row.version, "status": row.status or "training"}
                found.setdefault(row.id, {**about, "turns": []})["turns"].append(row.turn)
    return sorted(found.values(), key=lambda r: (r["scenario"], r["version"]))


def scrub(engine: Engine) -> bool:
    """Have erased bytes leave the files too: SQLite's write-ahead log, PostgreSQL's dead rows. False if
    a reader was in the way; try again then."""
    if engine.dialect.name == "sqlite":
        with engine.connect().execution_options(sqlite_begin=None) as c:  # outside any transaction
            plain: Any = c.connection.dbapi_connection
            plain.execute(f"PRAGMA busy_timeout={SCRUB_WAIT_MS}")
            try:
                plain.execute("PRAGMA incremental_vacuum").fetchall()
                busy, deadline = True, time.monotonic() + SCRUB_WAIT_MS / 1000
                while busy and time.monotonic() < deadline:  # for another checkpoint SQLite itself does not wait
                    busy = plain.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                    time.sleep(0.02 if busy else 0.0)
            except sqlite3.OperationalError:  # somebody writes
                busy = True
            finally:
                c.invalidate()  # its busy_timeout is not for others
        return not busy
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as c:
        for name in ERASED_FROM:
            if c.execute(text("SELECT to_regclass(:name)"), {"name": name}).scalar():
                c.execute(text(f"VACUUM {name}"))
    return True


def _chunks(ids: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]
