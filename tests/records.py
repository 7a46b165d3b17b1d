"""Exchanges to store, cheap to import: processes that a test starts need nothing but these."""

from __future__ import annotations

import time
from typing import Any

from ulid import ULID

from reef.wire.exchange import Api, Delivered, Exchange, Sampled, Sampling


def record(text: str, **changes: Any) -> Exchange:
    """An answered chat request of one message."""
    about = {"role": "user", "content": text}
    values: dict[str, Any] = {
        "id": str(ULID()),
        "time": time.time(),
        "started": time.time(),
        "api": Api.CHAT,
        "scenario": "default",
        "client": None,
        "headers": {},
        "request": {"model": "m", "messages": [about]},
        "response": {"choices": [{"message": {"role": "assistant", "content": f"re: {text}"}}]},
        "status": 200,
        "delivered": Delivered.FULL,
        "sampled": None,
    }
    return Exchange(**{**values, **changes})


def sampled(tokens: int, top: int = 16) -> Sampled:
    """Token ids with log-probs, as many as asked for."""
    ids = tuple(range(100, 100 + tokens))
    row = tuple((n, -0.123456 * (n + 1)) for n in range(top))
    return Sampled(ids, ids, tuple(-0.123456 for _ in ids), tuple(row for _ in ids), 0, Sampling(1.0))
