"""The parts of a message, and which of them refuse, keep or instruct.

Owns how a message is cut into clauses and how scored clauses become `reject`, `keep` and a hint. Where a
clause stands in for the message, its probabilities come from whoever calls. It knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.openclawrl.judge.votes import HINT_CHARS

CLAUSES = 8
"""of a message that are scored, at most"""
SURE = 0.6
"""a clause less probable than this is neither refusal nor praise"""
PHRASE_CHARS = 120

_BREAK = re.compile(
    r"(?<=[.!?;])\s+|(?<=[。！？；])|\n+|\s+[—–]\s+|,\s+(?=(?:but|just|only|aber|nur|mais|juste|pero|solo|mas|só)\b)"
    r"|[,，、](?=但|不过|只是|でも|ただ)"
)
_OPENING = re.compile(
    r"^(?:(?:no|nope|hm+|ok(?:ay)?|well|sorry|thanks?|great|nice|but|and|so|oh|nein|aber|nee|non|mais|pero|mas|não)"
    r"\b[\s,.!…:-]*)+",
    re.IGNORECASE,
)


def clauses(text: str) -> list[str]:
    """The message's clauses in order, at most `CLAUSES`; one when it can't be divided."""
    parts = [" ".join(part.split()) for part in _BREAK.split(text)]
    return [part for part in parts if any(c.isalnum() for c in part)][:CLAUSES]


def phrases(
    parts: Sequence[str], refusing: Sequence[float], praising: Sequence[float]
) -> tuple[str | None, str | None]:
    """(reject, keep): the clause that most surely refuses and the one that most surely praises, where one does."""
    return _surest(parts, refusing), _surest(parts, praising)


def instruction(parts: Sequence[str], refusing: Sequence[float]) -> str | None:
    """The part of a correction that says what is wanted: its refusing clauses without the opening words.

    None when what remains is too short to instruct anybody.
    """
    least, most = HINT_CHARS
    if not parts:
        return None
    bar = min(SURE, max(refusing))
    kept = [part for part, p in zip(parts, refusing, strict=True) if p >= bar]
    text = _OPENING.sub("", " ".join(kept)).strip(" ,.;:-")
    if len(text) <= least:
        text = " ".join(kept).strip()
    text = text[:1].upper() + text[1:]
    return text[:most] if len(text) > least else None


def _surest(parts: Sequence[str], scores: Sequence[float]) -> str | None:
    best = max(range(len(parts)), key=lambda i: scores[i], default=None)
    if best is None or scores[best] < SURE:
        return None
    return _OPENING.sub("", parts[best])[:PHRASE_CHARS].strip(" ,.;:-") or None
