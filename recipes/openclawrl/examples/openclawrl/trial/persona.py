"""Who the user is: its problems, what it wants to see in a reply, and what it says when it doesn't.

Invariant: a persona is a pure function of (seed, session, turn) and of the reply; it never states its
wish before a reply has missed it. It knows no model, no arm and no run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from recipes.openclawrl.examples.openclawrl.student import problems, reactions, rule
from recipes.openclawrl.examples.openclawrl.student.problems import Problem


@dataclass(frozen=True, slots=True)
class Look:
    """What the user sees in one reply."""

    passes: bool
    wrong: tuple[str, ...]
    """what a complaint can be about, most visible first"""
    correct: bool
    """the problem's number is the last one in the reply; reported, never a condition"""


class Persona(Protocol):
    name: str
    max_tokens: int
    """limit of a reply that the user's client sends"""

    def problem(self, seed: int, session: int) -> Problem: ...
    def look(self, reply: str, problem: Problem, ended: bool) -> Look: ...
    def complaint(self, look: Look, degree: int, seed: int, session: int, turn: int) -> str: ...
    def thanks(self, seed: int, session: int) -> str: ...


class Notebook:
    """The example's student: hand-written homework with its calculation."""

    name = "notebook"
    max_tokens = 64

    def problem(self, seed: int, session: int) -> Problem:
        return problems.generated(seed, session)

    def look(self, reply: str, problem: Problem, ended: bool) -> Look:
        seen = rule.check(reply, problem)
        return Look(seen.passes, seen.wrong, seen.correct)

    def complaint(self, look: Look, degree: int, seed: int, session: int, turn: int) -> str:
        seen = rule.Check(look.passes, tuple(w for w in look.wrong if w != "calculation"), 0, look.correct)
        if "calculation" not in look.wrong:
            seen = rule.Check(seen.passes, seen.violations, rule.CALCULATIONS, seen.correct)
        return reactions.complaint(seen, degree, seed, session, turn)

    def thanks(self, seed: int, session: int) -> str:
        return reactions.thanks(seed, session)


PERSONAS: Mapping[str, type[Persona]] = {p.name: p for p in (Notebook,)}


def pick(phrases: Sequence[str], *key: object) -> str:
    """One of the phrases, the same for the same key."""
    return random.Random(" ".join(map(str, key))).choice(phrases)
