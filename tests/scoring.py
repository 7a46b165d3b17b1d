"""Scores a matcher's lines against a truth file: right, wrong, missed, side calls recognised.

right: a request binds the exchange it reacts to and hands over the reaction. wrong: it binds another one, hands
over another text, or buries a user's text in several times as much; also a side call that binds anything.
missed: a reply somebody reacted to that no request binds. A reply counts once. A request marked optional need
not bind, but must not bind elsewhere.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass
class Score:
    learnable: int = 0
    right: int = 0
    wrong: int = 0
    side: int = 0
    side_recognised: int = 0
    mistakes: list[str] = field(default_factory=list)
    """every request that is not as the truth says, readably"""

    @property
    def missed(self) -> int:
        return self.learnable - self.right

    def add(self, other: Score) -> None:
        for name in ("learnable", "right", "wrong", "side", "side_recognised"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.mistakes += other.mistakes


def read_truth(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def score(truth: Sequence[Row], lines: Iterable[Row]) -> Score:
    """How well the lines of `reef match` agree with the truth."""
    got = {line["id"]: line for line in lines}
    wanted: dict[str, set[str]] = defaultdict(set)
    for row in truth:
        if row["binds"] and not row.get("optional"):
            wanted[row["binds"]].add(_fold(row["next_state"]))
    out = Score(learnable=len(wanted))
    found: set[str] = set()
    for row in truth:
        line = got[row["id"]]
        verdict = _verdict(row, line, wanted)
        if row["turn_type"] == "side" and not row.get("optional"):
            out.side += 1
            out.side_recognised += line["turn_type"] == "side"
        if verdict == "right":
            found.add(row["binds"])
        elif verdict:
            out.wrong += verdict == "wrong"
            out.mistakes.append(f"{row['id']}: {verdict}, binds {line['binds']}, not {row['binds']}: {line['reason']}")
    out.right = len(found)
    lost = [row["id"] for row in truth if row["binds"] in wanted.keys() - found and not row.get("optional")]
    out.mistakes += [f"{id}: missed, binds {got[id]['binds']}: {got[id]['reason']}" for id in lost]
    return out


def by_class(truth: Sequence[Row], lines: Sequence[Row]) -> dict[str, Score]:
    """One score for each client."""
    out: dict[str, Score] = {}
    for name in Counter(row["class"] for row in truth):
        mine = [row for row in truth if row["class"] == name]
        ids = {row["id"] for row in mine}
        out[name] = score(mine, [line for line in lines if line["id"] in ids])
    return out


def _verdict(row: Row, line: Row, wanted: Mapping[str, set[str]]) -> str:
    """right, wrong, another complaint, or nothing."""
    binds, text = line["binds"], _fold(line["next_state"])
    if row.get("optional"):
        return "wrong" if row["binds"] and binds not in (None, row["binds"]) else ""
    if row["turn_type"] == "side":
        return "wrong" if binds else "" if line["turn_type"] == "side" else "a side call taken for a turn"
    if line["turn_type"] == "side":
        return "wrong" if binds else "a turn taken for a side call"
    if not binds:
        return ""
    texts = wanted.get(binds, set()) if binds == row["binds"] else set()
    fits = [t for t in texts if t in text and not (row.get("next_state_role") == "user" and t and _buried(t, text))]
    return "right" if fits else "wrong"


def _buried(text: str, inside: str) -> bool:
    return len(inside) > 3 * len(text) + 400


def _fold(text: str | None) -> str:
    return " ".join((text or "").split())
