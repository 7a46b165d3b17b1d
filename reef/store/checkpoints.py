"""Moving SQLite's write-ahead log into the database file, beside the writer instead of within its commits.

A commit is as durable as `synchronous` says once it is in the write-ahead log; copying it from there into
the database syncs the disk twice, and no answer is to wait for that. Invariant: the log stays near
`LIMIT_PAGES` under any load, since the writer itself helps where this thread can't catch up. Other
databases need nothing of this. Knows no table.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import SQLAlchemyError

log = logging.getLogger("reef.log")
EVERY_BYTES = 4 << 20
"""written between two checkpoints, as SQLite does by itself"""
LIMIT_PAGES = 16_384
LIMIT_BYTES = LIMIT_PAGES * 4096
_OURS = "reef checkpoints"


class Checkpoints:
    """The checkpoints of the database that one writer writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._written = 0
        self._behind = False
        """the log is long, and can only start anew while nobody writes"""
        self._uncopied = 0
        """written since the log could last start anew, about: no more than `LIMIT_BYTES` before the writer helps"""
        self._idle = threading.Event()
        self._idle.set()
        self._due = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        if engine.dialect.name == "sqlite" and engine.url.database not in (None, "", ":memory:"):
            event.listen(engine, "checkout", _no_automatic_ones)
            self._thread = threading.Thread(target=self._run, name="log-checkpoints", daemon=True)
            self._thread.start()

    def wrote(self, size: int) -> None:
        """The writer has committed about `size` bytes. Called between transactions, in its thread."""
        self._written += size
        if self._thread is None:
            return
        self._uncopied += size
        if self._behind or self._uncopied > LIMIT_BYTES:
            self._idle.wait()  # a slow disk: rather does the writer wait than the log grow
            self._behind, self._uncopied = False, 0
            self._checkpoint()  # mostly short: the thread has copied what was there when it last began
        elif self._written >= EVERY_BYTES:
            self._written = 0
            self._due.set()

    def close(self) -> None:
        """Leave checkpoints to SQLite again."""
        if self._thread is None:
            return
        self._closed = True
        self._due.set()
        self._thread.join()
        event.remove(self._engine, "checkout", _no_automatic_ones)

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._closed:
                return
            self._idle.clear()
            try:
                pages = self._checkpoint()
            finally:
                self._idle.set()
            self._behind = pages > LIMIT_PAGES
            self._uncopied = min(self._uncopied, pages * 4096)

    def _checkpoint(self) -> int:
        """Copy what is in the log now; returns how long the log is, in pages."""
        try:
            with self._engine.connect().execution_options(sqlite_begin=None) as connection:  # in no transaction
                _, pages, _ = connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").one()
        except SQLAlchemyError as error:
            log.warning("the write-ahead log could not be copied; it is tried again: %s", error)
            return 0
        return pages


def _no_automatic_ones(connection: Any, record: Any, _proxy: Any) -> None:
    if _OURS not in record.info:
        connection.execute("PRAGMA wal_autocheckpoint=0")
        record.info[_OURS] = True
