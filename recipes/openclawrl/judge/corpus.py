"""The labelled conversations the embedded judge is trained on: `python -m recipes.openclawrl.judge.corpus`.

Owns the file's fields, the grouping (rows that share a conversation or form a pair stay on one side of
every split), and how files of new rows are merged in: checked, without repetitions, ids continued. Run
as a program it merges the files it is given and prints what the corpus holds. It knows no model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from zlib import crc32

ROLES = ("user", "assistant", "tool")
LANGUAGES = ("en", "de", "fr", "es", "zh", "pt", "ja")
KINDS = (
    "accept_explicit",
    "accept_implicit",
    "accept_moves_on",
    "tool_ok",
    "reject_format",
    "reject_length",
    "reject_tone",
    "reject_content",
    "reject_wrong",
    "reject_polite",
    "reject_mixed",
    "redo",
    "restated",
    "sarcasm",
    "tool_error_caused",
    "tool_outage",
    "new_topic",
    "clarify_question",
    "filler",
    "earlier_target",
    "undo_to_earlier",
    "injection",
)
"""kinds of reaction, in the order of the trained head's rows"""
NEAR = 0.7
"""rows whose 5-character shingles overlap by this share (Jaccard) are near-duplicates"""
SKETCH = 24
"""smallest shingle hashes of a row that are compared to find candidates"""
COMMON = 20
"""a shingle that more rows have finds none"""


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
    hint: str | None = None


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


def merge(corpus: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`corpus` and those rows of `new` that it lacks, with ids continued. Raises ValueError on a bad row."""
    out = [dict(data) for data in corpus]
    seen = {_said(data) for data in out}
    pairs: dict[str, str] = {}
    for data in new:
        said = _said(data)
        if said in seen:
            continue
        seen.add(said)
        row = {"id": f"c{len(out) + 1:04d}", **{k: v for k, v in data.items() if k not in ("id", "pair")}}
        if data.get("pair"):  # a pair's name is only good within its own file
            row["pair"] = pairs.setdefault(str(data["pair"]), f"p{len(out) + 1:04d}")
        made = _row(row)
        if made.kind not in KINDS or made.lang not in LANGUAGES:
            raise ValueError(f"row {made.id}: unknown kind {made.kind!r} or language {made.lang!r}")
        out.append(row)
    return out


def near_duplicates(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Pairs of rows, of different groups, whose whole text is nearly the same."""
    shingles = [_shingles(row) for row in rows]
    group = groups(rows)
    holders: dict[int, list[int]] = {}
    for i, found in enumerate(shingles):
        for mark in sorted(found)[:SKETCH]:
            holders.setdefault(mark, []).append(i)
    rare = [held for held in holders.values() if len(held) <= COMMON]
    candidates = {(i, j) for held in rare for n, i in enumerate(held) for j in held[n + 1 :]}
    return sorted(
        (i, j)
        for i, j in candidates
        if group[i] != group[j] and len(shingles[i] & shingles[j]) >= NEAR * len(shingles[i] | shingles[j])
    )


def describe(rows: Sequence[Row]) -> Iterator[str]:
    """What the corpus holds, line by line."""
    near = {i for pair in near_duplicates(rows) for i in pair}
    same = Counter(" ".join(row.next["content"].casefold().split()) for row in rows)
    earlier = sum(row.target is not None and row.target != len(row.history) - 1 for row in rows)
    yield f"rows {len(rows)}, conversations {len(set(groups(rows)))}, pairs {len({r.pair for r in rows if r.pair})}"
    yield f"near-duplicates across conversations {len(near)} ({len(near) / max(len(rows), 1):.2%})"
    yield f"messages that occur more than once {sum(n for n in same.values() if n > 1)}"
    yield f"targets that are earlier replies {earlier}"
    for name in ("verdict", "kind", "lang"):
        counts = Counter(getattr(row, name) for row in rows)
        yield f"{name}: " + ", ".join(f"{k} {n}" for k, n in counts.most_common())


def main(argv: Sequence[str] | None = None) -> None:
    """Merge files into the corpus, if any are given, and describe it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="JSON-lines files whose rows are merged in")
    parser.add_argument("--corpus", type=Path, default=Path(__file__).with_name("corpus.jsonl"))
    given = parser.parse_args(argv)
    if given.files:
        old, new = (
            [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines() if line.strip()]
            for files in ([given.corpus], given.files)
        )
        lines = [json.dumps(row, ensure_ascii=False) for row in merge(old, new)]
        given.corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for line in describe(read_rows(given.corpus)):
        print(line)


def _said(data: Mapping[str, Any]) -> str:
    return json.dumps([data["history"], data["next"]], ensure_ascii=False, sort_keys=True)


def _shingles(row: Row) -> set[int]:
    text = " ".join(" ".join([*(m["content"] for m in row.history), row.next["content"]]).casefold().split())
    return {crc32(text[i : i + 5].encode()) for i in range(max(1, len(text) - 4))}


def _row(data: Mapping[str, Any]) -> Row:
    history = tuple(data["history"])
    target = data["target"]
    if not history or history[-1]["role"] != "assistant":
        raise ValueError(f"row {data['id']}: the history must end with a reply")
    if any(m["role"] not in ROLES or not m["content"].strip() for m in (*history, data["next"])):
        raise ValueError(f"row {data['id']}: a message without a known role or without content")
    if data["verdict"] not in (-1, 0, 1) or (target is None) != (data["verdict"] == 0):
        raise ValueError(f"row {data['id']}: verdict {data['verdict']!r} with target {target!r}")
    if target is not None and (not 0 <= target < len(history) or history[target]["role"] != "assistant"):
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
        hint=data.get("hint"),
    )


if __name__ == "__main__":
    main()
