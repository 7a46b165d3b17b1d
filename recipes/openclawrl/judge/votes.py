"""What a language-model judge wrote, read as a vote, and many votes made one opinion.

Owns the forms that count as a vote and the counting rules (METHOD: quorum of two thirds, plurality,
a tie is 0). A text that holds no vote is `None`, never a neutral vote. It knows no network, no prompt
and no trained weights; everything here is a pure function.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

VERDICTS = (-1, 0, 1)
"""in the order in which the embedded judge gives their probabilities"""
HINT_CHARS = (10, 400)
"""a hint is longer than the first and no longer than the second"""
READ_CHARS = 20_000
"""only the end of a longer text is read"""

_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*([^{}]*?)\s*\}")


@dataclass(frozen=True, slots=True)
class Vote:
    """One judge's opinion as it was written; indices are not checked against any history."""

    verdict: int
    target: int | None = None
    restore: int | None = None
    """an earlier reply that is wanted back"""
    reject: str | None = None
    keep: str | None = None
    hint: str | None = None
    rule: str | None = None
    """a preference that holds beyond this task"""


@dataclass(frozen=True, slots=True)
class Tally:
    """The votes' common opinion, its indices among the replies that were shown."""

    verdict: int
    target: int | None
    charges: tuple[tuple[int, int], ...]
    reject: str | None
    keep: str | None
    hints: tuple[str, ...]
    rule: str | None
    share: float
    """votes for the verdict, as a share of those that were valid"""


def quorum(m: int) -> int:
    """The least number of valid votes of `m`: two thirds, rounded up."""
    return (2 * m + 2) // 3


def parse_vote(text: str) -> Vote | None:
    r"""Read a vote: the last JSON object with a valid `verdict`, else the last `\boxed{}`, else a bare number.

    What comes before `</think>` is not read; thinking that never ended holds no vote.
    """
    answer = text[-READ_CHARS:]
    _, ended, after = answer.rpartition("</think>")
    if ended:
        answer = after
    elif "<think>" in text:
        return None
    votes = [vote for found in _objects(answer) if (vote := _from_object(found)) is not None]
    if votes:
        return votes[-1]
    boxed = [v for m in _BOXED.finditer(answer) if (v := _verdict(m.group(1))) is not None]
    if boxed:
        return Vote(boxed[-1])
    bare = _verdict(answer)
    return None if bare is None else Vote(bare)


def tally(votes: Sequence[Vote | None], m: int, replies: Sequence[int], max_hints: int = 3) -> Tally | None:
    """Count the valid votes of `m` on a history whose assistant messages have the indices `replies`.

    None below the quorum. An index that is no reply's counts as the last reply. A rejected last reply with
    an earlier one wanted back charges both: the last -1, the wanted one +1.
    """
    valid = [v for v in votes if v is not None]
    if len(valid) < quorum(m) or not valid or not replies:
        return None
    ranked = Counter(v.verdict for v in valid).most_common()
    verdict, count = ranked[0]
    if len(ranked) > 1 and ranked[1][1] == count:
        verdict, count = 0, sum(v.verdict == 0 for v in valid)
    share = count / len(valid)
    if verdict == 0:
        return Tally(0, None, (), None, None, (), None, share)
    newest = max(replies)
    winners = [v for v in valid if v.verdict == verdict]
    target = _plural((v.target for v in winners), replies, newest)
    restore = _plural((v.restore for v in winners), replies, newest)
    charges: tuple[tuple[int, int], ...] = ((target, verdict),)
    if verdict == -1 and restore != newest:
        target, charges = restore, ((newest, -1), (restore, 1))
    return Tally(
        verdict=verdict,
        target=target,
        charges=charges,
        reject=_shortest(v.reject for v in winners) if verdict == -1 else None,
        keep=_shortest(v.keep for v in winners),
        hints=merge_hints((v.hint for v in winners), max_hints),
        rule=next(iter(merge_hints((v.rule for v in winners), 1)), None),
        share=share,
    )


def merge_hints(hints: Iterable[str | None], limit: int = 3) -> tuple[str, ...]:
    """Hints of usable length on one line each, duplicates merged, shortest first, at most `limit`."""
    least, most = HINT_CHARS
    seen: dict[str, str] = {}
    for hint in hints:
        line = " ".join((hint or "").split())
        if least < len(line) <= most:
            seen.setdefault(line.casefold().rstrip(".!"), line)
    return tuple(sorted(seen.values(), key=lambda h: (len(h), h))[:limit])


def _plural(named: Iterable[int | None], replies: Sequence[int], newest: int) -> int:
    counts = Counter(newest if i is None or i not in replies else i for i in named)
    return max(counts, key=lambda i: (counts[i], i))


def _shortest(phrases: Iterable[str | None]) -> str | None:
    return min((p for p in phrases if p), key=len, default=None)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object in `text` that is not inside one with a verdict, in order."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        step = at + 1
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            pass
        else:
            if isinstance(found, dict):
                yield found
                step = end if "verdict" in found else step
        at = text.find("{", step)


def _from_object(found: dict[str, Any]) -> Vote | None:
    verdict = _verdict(found.get("verdict"))
    if verdict is None:
        return None
    return Vote(
        verdict=verdict,
        target=_index(found.get("target")),
        restore=_index(found.get("restore")),
        reject=_phrase(found.get("reject")),
        keep=_phrase(found.get("keep")),
        hint=_phrase(found.get("hint")),
        rule=_phrase(found.get("rule")),
    )


def _verdict(value: object) -> int | None:
    number = _number(value)
    return int(number) if number in (-1.0, 0.0, 1.0) else None


def _index(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() and number >= 0 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    text = value.strip().strip("*`\"'. ").replace("\u2212", "-") if isinstance(value, str) else value
    try:
        return float(text)
    except (ValueError, OverflowError):
        return None


def _phrase(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    line = " ".join(value.split())
    return line if line and line.casefold() not in ("null", "none") else None
