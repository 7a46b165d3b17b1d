"""The labelled conversations the embedded judge is trained on.

Owns the file's fields and the grouping: rows that share a conversation or form a pair stay on one side
of every split. It knows no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation that ends with a reply, what came next, and what that says about the reply."""

    id: str
    history: tuple[Mapping[str, str], ...]
    next: Mapping[str, str]
    verdict: int
    target: int | None
    """index in `history` of the reply meant; None exactly when the verdict is 0"""
    kind: str
    lang: str
    pair: str | None


def corpus_bytes() -> bytes:
    """The corpus shipped with the package."""
    return resources.files("recipes.openclawrl.judge").joinpath("corpus.jsonl").read_bytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rows_of(data: bytes) -> list[Row]:
    """Parse a JSON-lines corpus. Raises ValueError on a row that breaks the field rules."""
    return [_row(json.loads(line)) for line in data.decode("utf-8").splitlines() if line.strip()]


def read_rows(path: str | Path) -> list[Row]:
    return rows_of(Path(path).read_bytes())


def groups(rows: Sequence[Row]) -> list[int]:
    """A group number for each row: rows with the same last request, or the same pair, share one."""
    parent = list(range(len(rows)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[tuple[str, str], int] = {}
    for i, row in enumerate(rows):
        asked = next((m["content"] for m in reversed(row.history) if m["role"] == "user"), "")
        keys = [("asked", " ".join(asked.casefold().split()))]
        keys += [("pair", row.pair)] if row.pair else []
        for key in keys:
            parent[root(i)] = root(first.setdefault(key, i))
    return [root(i) for i in range(len(rows))]


def _row(data: Mapping[str, Any]) -> Row:
    history = tuple(data["history"])
    target = data["target"]
    if not history or history[-1]["role"] != "assistant":
        raise ValueError(f"row {data['id']}: the history must end with a reply")
    if data["verdict"] not in (-1, 0, 1) or (target is None) != (data["verdict"] == 0):
        raise ValueError(f"row {data['id']}: verdict {data['verdict']!r} with target {target!r}")
    if target is not None and history[target]["role"] != "assistant":
        raise ValueError(f"row {data['id']}: target {target} is no reply")
    return Row(
        id=data["id"],
        history=history,
        next=data["next"],
        verdict=data["verdict"],
        target=target,
        kind=data["kind"],
        lang=data["lang"],
        pair=data.get("pair"),
    )
