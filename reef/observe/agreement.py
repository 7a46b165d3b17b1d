"""How far a judge agrees with labels: accuracy, confusion, per kind and language, targets, and by confidence.

Pure functions of labelled rows (`verdict`, `target`, `kind`, `lang`, `history`) and of the judge's answers to
them. A turn without a verdict counts as wrong. It knows no judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHARES = (1.0, 0.9, 0.75, 0.5, 0.25)

Pairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]


def agreement(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything `reef judge --truth` prints; shares are rounded to four places."""
    pairs = list(zip(rows, answers, strict=True))
    judged = [(row, answer) for row, answer in pairs if answer["verdict"] is not None]
    return {
        "rows": len(pairs),
        "judged": len(judged),
        "accuracy": _share(pairs, right),
        "reversed": _share(pairs, lambda row, answer: row["verdict"] * (answer["verdict"] or 0) == -1),
        "confusion": confusion(pairs),
        "by_kind": _by(pairs, "kind"),
        "by_lang": _by(pairs, "lang"),
        "by_coverage": by_coverage(judged),
        "targets": targets(pairs),
        "seconds": round(sum(answer.get("seconds", 0.0) for _, answer in judged) / max(len(judged), 1), 4),
        "tokens": round(sum(answer.get("tokens", 0) for _, answer in judged) / max(len(judged), 1), 1),
    }


def right(row: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    return row["verdict"] == answer["verdict"]


def confusion(pairs: Pairs) -> dict[str, dict[str, int]]:
    """For each label how often each verdict was given."""
    names = ["-1", "0", "1", "none"]
    table: dict[str, dict[str, int]] = {label: dict.fromkeys(names, 0) for label in names[:-1]}
    for row, answer in pairs:
        given = "none" if answer["verdict"] is None else str(answer["verdict"])
        table[str(row["verdict"])][given] += 1
    return table


def by_coverage(judged: Pairs) -> dict[str, float]:
    """Accuracy on the share of verdicts that the judge is surest of."""
    order = sorted(judged, key=lambda pair: -(pair[1].get("confidence") or 0.0))
    return {str(s): _share(order[: max(1, round(s * len(order)))], right) for s in SHARES}


def targets(pairs: Pairs) -> dict[str, Any]:
    """How often the reply meant is named: over rows with several replies, and over those that mean an earlier one."""
    several = [(r, a) for r, a in pairs if r.get("target") is not None and _replies(r) > 1]
    earlier = [(r, a) for r, a in several if r["target"] != len(r["history"]) - 1]
    return {
        "rows with several replies": len(several),
        "right": _share(several, _found),
        "rows that mean an earlier reply": len(earlier),
        "earlier right": _share(earlier, _found),
        "earlier right where a verdict was given": _share([(r, a) for r, a in earlier if a["verdict"]], _found),
    }


def _found(row: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    return answer["target"] == row["target"]


def _replies(row: Mapping[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in row["history"])


def _by(pairs: Pairs, field: str) -> dict[str, dict[str, Any]]:
    found: dict[str, list[Any]] = {}
    for row, answer in pairs:
        found.setdefault(str(row.get(field, "-")), []).append((row, answer))
    return {k: {"rows": len(v), "accuracy": _share(v, right)} for k, v in sorted(found.items())}


def _share(pairs: Pairs, of: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]) -> float:
    return round(sum(of(row, answer) for row, answer in pairs) / max(len(pairs), 1), 4)
