"""Earlier turns that a Responses request only names by `previous_response_id`.

Reads them from the record log: a response's id carries its exchange's receipt. Only the same client
and scenario may continue one, and only if it was to be stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from reef.store.log import LogReader
from reef.wire import fields
from reef.wire.exchange import Api, Exchange
from reef.wire.responses import RECEIPT_PREFIX

LONGEST_CHAIN = 1000
_FIELD = "previous_response_id"


class History:
    """Puts the earlier turns in front of a request's input."""

    def __init__(self, log: LogReader) -> None:
        self._log = log

    async def expand(self, request: Mapping[str, Any], client: str | None, scenario: str) -> dict[str, Any]:
        """The request with its whole input. Raises BadRequest naming the field."""
        if not request.get(_FIELD):
            return dict(request)
        return await asyncio.to_thread(self._expand, request, client, scenario)

    def stored(self, response_id: str, client: str | None, scenario: str) -> Exchange | None:
        """The exchange behind a response's id, if this client may see it."""
        exchange = self._log.get(response_id.removeprefix(RECEIPT_PREFIX)) if "\0" not in response_id else None
        mine = exchange is not None and (exchange.client, exchange.scenario) == (client, scenario)
        if exchange is None or not mine or exchange.api is not Api.RESPONSES or not exchange.response:
            return None
        return exchange if exchange.request.get("store") is not False else None

    def _expand(self, request: Mapping[str, Any], client: str | None, scenario: str) -> dict[str, Any]:
        turns = [_items(request.get("input"))]
        wanted = request.get(_FIELD)
        while wanted:
            exchange = self.stored(wanted, client, scenario)
            if exchange is None or exchange.response is None or len(turns) > LONGEST_CHAIN:
                fields.refuse(_FIELD, f"names '{wanted}', which is not stored here for this client")
            turns.append([*_items(exchange.request.get("input")), *exchange.response.get("output", [])])
            wanted = exchange.request.get(_FIELD)
        return {**request, "input": [item for turn in reversed(turns) for item in turn]}


def _items(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given or [])
