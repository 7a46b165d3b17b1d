"""The form of replies, and what one had that others lacked, said in one short positive sentence.

Small models follow "Write plain sentences." and ignore "Don't use bullets.", so a contrast is always
put as what to do. Pure functions of texts; they know no model and no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LENGTH_RATIO = 1.8
"""a difference in words that is worth a sentence"""
SHARE = 0.6
"""of a group's replies that have a mark, for the group to have it"""

_MARKS: dict[str, re.Pattern[str]] = {
    "list": re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+\S", re.MULTILINE),
    "heading": re.compile(r"^\s*(?:#{1,6}\s+\S|\*\*[^*\n]+\*\*:?\s*$)", re.MULTILINE),
    "bold": re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),
    "table": re.compile(r"^\s*\|.*\|\s*$", re.MULTILINE),
    "code": re.compile(r"^```", re.MULTILINE),
    "emoji": re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]"),
}
_WANTED = {
    "list": "Write the points as a short list.",
    "heading": "Put a short heading over each part.",
    "bold": "Set the key words in bold.",
    "table": "Put the answer in a table.",
    "code": "Put the code in a code block.",
    "emoji": "Add an emoji where it fits.",
}
_INSTEAD = {
    "table": "Say it in plain running sentences.",
    "list": "Write it as plain running sentences.",
    "heading": "Write it as plain paragraphs, one after the other.",
    "bold": "Write it as plain text in one weight.",
    "code": "Answer in words.",
    "emoji": "Write in words only.",
}
"""by how much a mark shapes a reply, the strongest first"""
_WORDS = re.compile(r"[\u3040-\u9fff]|[^\W_]+")


@dataclass(frozen=True, slots=True)
class Style:
    """Marks of a reply's form and its length."""

    marks: frozenset[str]
    words: int

    @staticmethod
    def of(text: str) -> Style:
        return Style(frozenset(name for name, mark in _MARKS.items() if mark.search(text)), len(_WORDS.findall(text)))


def contrast(refused: Sequence[str], accepted: Sequence[str]) -> str | None:
    """What the accepted replies have and the refused ones have not, as one instruction; None if nothing is."""
    if not refused or not accepted:
        return None
    bad, good = [Style.of(text) for text in refused], [Style.of(text) for text in accepted]
    for mark, sentence in _INSTEAD.items():
        if _share(bad, mark) >= SHARE and _share(good, mark) <= 1 - SHARE:
            return sentence
    for mark, sentence in _WANTED.items():
        if _share(good, mark) >= SHARE and _share(bad, mark) <= 1 - SHARE:
            return sentence
    was, wanted = median(s.words for s in bad), median(s.words for s in good)
    if was >= LENGTH_RATIO * max(wanted, 1):
        return f"Answer in about {_round(wanted)} words."
    if wanted >= LENGTH_RATIO * max(was, 1):
        return f"Answer at more length, in about {_round(wanted)} words."
    return None


def plainer(reply: str) -> str | None:
    """What to write instead of a reply whose form was refused; None when its form has no mark."""
    marks = Style.of(reply).marks
    return next((sentence for mark, sentence in _INSTEAD.items() if mark in marks), None)


def _share(styles: Sequence[Style], mark: str) -> float:
    return sum(mark in style.marks for style in styles) / len(styles)


def _round(words: float) -> int:
    return max(5, round(words / 5) * 5)
