"""Which reply a message is about, as far as words tell: features of each reply, and the charges of a verdict.

Pure functions of texts and indices; the trained weights that turn features into a choice are the head's.
It knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from recipes.openclawrl.judge.prompt import asked_before

ROLES = ("last", "previous", "first")
"""places a reply can have among those shown; with two replies the earlier one is previous and first"""
FEATURES = ("own words", "words of its request")
"""measures of how far the message speaks of a reply, each 0..1"""

_WORD = re.compile(r"[^\W_]+")
_PIECE = 4
"""characters of a stem: `titles` and `title` meet, and so do most inflected forms"""


def places(replies: Sequence[int]) -> list[list[float]]:
    """For each shown reply 1.0 at each of `ROLES` it has."""
    n = len(replies)
    return [[float(i == n - 1), float(i == n - 2), float(i == 0 and n > 1)] for i in range(n)]


def features(
    history: Sequence[Mapping[str, str]], next: Mapping[str, str], replies: Sequence[int]
) -> list[list[float]]:
    """`FEATURES` of each reply in `replies`: the share of the message's stems that only this reply has."""
    said = stems(next["content"])
    own = [stems(history[i]["content"]) for i in replies]
    asked = [stems(asked_before(history, i)) for i in replies]
    return [[_share(said, own, n), _share(said, asked, n)] for n in range(len(replies))]


def charges(verdict: int, target: int, newest: int, undo: bool) -> tuple[tuple[int, int], ...]:
    """(index, verdict) of each reply that is charged: the target, or for going back to it the newest and the target."""
    if verdict == 0:
        return ()
    if undo and verdict == -1 and target != newest:
        return (newest, -1), (target, 1)
    return ((target, verdict),)


def stems(text: str) -> frozenset[str]:
    """Beginnings of the words of `text`; of scripts without spaces, pairs of characters."""
    out: set[str] = set()
    for word in _WORD.findall(text.casefold()):
        if any("\u3040" <= c <= "\u9fff" for c in word):
            out |= {word[i : i + 2] for i in range(len(word) - 1)}
        elif len(word) >= _PIECE or word.isdigit():
            out.add(word[: _PIECE + 1])
    return frozenset(out)


def _share(said: frozenset[str], texts: Sequence[frozenset[str]], n: int) -> float:
    others = frozenset().union(*texts[:n], *texts[n + 1 :])
    return len((said & texts[n]) - others) / max(len(said), 3)
