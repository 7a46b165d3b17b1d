"""The traffic file: exchanges as JSON lines, in completion order, for import, match, tests and export.

Reading is tolerant of what a recorder left out and strict about what makes a line meaningless. Knows no
database.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reef.errors import BadRequest
from reef.wire.exchange import Api, Delivered, Exchange, Sampled


def read_traffic(path: Path, *, scenario: str = "default") -> Iterator[Exchange]:
    """The file's exchanges. Raises BadRequest naming the line."""
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"can't read {path}: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                yield _exchange(data, number, scenario)
            except (ValueError, KeyError, TypeError) as error:
                raise BadRequest(f"{path}, line {number}: not a traffic record: {error!r}") from None


def _exchange(data: Mapping[str, Any], number: int, scenario: str) -> Exchange:
    sampled = data.get("sampled")
    return Exchange(
        id=str(data["id"]),
        time=float(data["time"]),
        started=float(data.get("started", data["time"])),
        api=Api(data.get("api", "chat")),
        scenario=data.get("scenario", scenario),
        client=data.get("client"),
        headers={k.lower(): v for k, v in (data.get("headers") or {}).items()},
        request=data["request"],
        response=data.get("response"),
        status=int(data.get("status", 200)),
        delivered=Delivered(data.get("delivered", "full")),
        sampled=Sampled.from_json(sampled) if sampled else None,
        error=data.get("error"),
        memo=tuple(data.get("memo") or ()),
        seq=number,
    )


def traffic_line(exchange: Exchange) -> str:
    """One exchange as a line of a traffic file, whole."""
    data = {
        "id": exchange.id,
        "time": exchange.time,
        "started": exchange.started,
        "api": exchange.api.value,
        "scenario": exchange.scenario,
        "client": exchange.client,
        "headers": dict(exchange.headers),
        "request": exchange.request,
        "response": exchange.response,
        "status": exchange.status,
        "delivered": exchange.delivered.value,
        "error": exchange.error,
    }
    if exchange.sampled:
        data["sampled"] = exchange.sampled.to_json()
    if exchange.memo:
        data["memo"] = list(exchange.memo)
    line = json.dumps(data, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half a surrogate pair can only be written escaped
        return json.dumps(data)
    return line
