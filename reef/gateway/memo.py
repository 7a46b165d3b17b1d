"""The memo as the gateway serves it: every scenario's rules, held in memory, read again behind the requests.

Invariant: no request waits for the store; a changed memo is in the prompts `REFRESH_S` later at most, and a
store that can't be read leaves the last known rules. Knows nothing of how rules come about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from reef.store.memo import MemoStore
from reef.wire.dialect import Dialect
from reef.wire.exchange import Api
from reef.wire.memo import with_memo

REFRESH_S = 2.0


class ServedMemo:
    """The rules that go into prompts; none at all without a store."""

    def __init__(self, store: MemoStore | None = None) -> None:
        """Reads the rules once. Raises StoreError."""
        self._store = store
        self._mark: tuple[Any, ...] | None = None
        self._rules: Mapping[str, tuple[str, ...]] = {}
        self._read()

    def put(self, dialect: Dialect, scenario: str, asked: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the engine is asked, and the rules that were put into it. Text completions get none."""
        rules = () if dialect.api is Api.COMPLETIONS else self._rules.get(scenario, ())
        return with_memo(asked, rules), rules

    async def refresh(self) -> None:
        """Read the rules again if any changed."""
        await asyncio.to_thread(self._read)

    def _read(self) -> None:
        if self._store is None:
            return
        mark = self._store.mark()
        if mark != self._mark:
            self._rules, self._mark = self._store.all(), mark
