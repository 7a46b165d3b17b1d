"""The hidden preference: a reply must look hand-written and show its calculation.

Invariant: `check` is a pure function of reply and problem; nothing here is ever sent to the service.
The student scores every reply with it; learning never sees it. It knows no conversation.

Hand-written means: no bold or italics marks, no headings, no bullet or numbered lists, no "Step 1:"
labels, no LaTeX (`\\boxed`, `\\(`, `\\frac`), no tables or code fences, no "final answer". Showing the
calculation means at least `CALCULATIONS` written-out ones: numbers joined by an operator, then `=`
and a number ("6 x 4 = 24", "$24 - $5 = $19", "3 boxes * 12 pencils = 36"). A reply that the token
limit cut off is judged by what can be read of it: being cut off is no violation by itself. The
right number matters in the strict rule only, meant for larger models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .problems import Problem

CALCULATIONS = 1
"""How many written-out calculations a reply must show."""

MARKUP: Mapping[str, re.Pattern[str]] = {
    "bold": re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__|<b>|<strong>|(?<![\w*])\*[A-Za-z][^*\n]*\*(?![\w*])", re.I),
    "heading": re.compile(r"^[ \t]{0,3}(#{1,6}[ \t]+\S|[A-Z][\w-]*(?:[ \t][\w-]+){0,2}:[ \t]*$|={3,}[ \t]*$)", re.M),
    "bullets": re.compile(r"^[ \t]*(?:[-*+•‣◦–—]|[a-z]\))[ \t]+\S", re.M | re.I),
    "numbered": re.compile(r"^[ \t>]*\(?\d{1,2}[.):](?:[ \t]+\S|[ \t]*$)", re.M),
    "steps": re.compile(r"\bstep\s*(?:#\s*)?(?:\d+|one|two|three|four)\b\s*[:.)\-–]|^[ \t]*step\s+\d+\b", re.I | re.M),
    "latex": re.compile(r"\\(?:boxed|frac|times|div|cdot|text|begin|[(\[])|\$\$"),
    "table": re.compile(r"^[ \t]*\|.*\|[ \t]*$|^[ \t]*```", re.M),
    "final": re.compile(r"\bfinal\s+(?:answer|result|solution)\b", re.I),
}
"""What does not look hand-written, by the name the records use."""

_NUMBER = r"[$€£]?\s?-?\d[\d,]*(?:\.\d+)?%?"
_UNIT = r"(?:\s?[A-Za-z][A-Za-z']*){0,3}(?:\s?\([^()=\n]{1,30}\))?\s?"
_OPERATOR = r"(?:[+*/×÷]|[-−–](?!\w*[A-Za-z])|x|times|plus|minus|divided by)"
_CALCULATION = re.compile(rf"{_NUMBER}{_UNIT}(?:\(?\s*{_OPERATOR}\s*\(?\s*{_NUMBER}{_UNIT}\)?)+\s*=\s*{_NUMBER}")
_ANY_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Check:
    """What the student sees in one reply."""

    passes: bool
    violations: tuple[str, ...]
    """keys of MARKUP that were found, in its order"""
    calculations: int
    correct: bool
    """the problem's number is the last one in the reply"""

    @property
    def shows_calculation(self) -> bool:
        return self.calculations >= CALCULATIONS

    @property
    def wrong(self) -> tuple[str, ...]:
        """What a complaint can be about, most visible first."""
        return self.violations if self.shows_calculation else (*self.violations, "calculation")


def check(reply: str, problem: Problem, strict: bool = False) -> Check:
    """Judge a reply by the student's preference; `strict` asks for the right number as well."""
    violations = tuple(name for name, pattern in MARKUP.items() if pattern.search(reply))
    calculations = len(_CALCULATION.findall(reply))
    correct = _last_number(reply) == problem.answer
    passes = not violations and calculations >= CALCULATIONS and (correct or not strict)
    return Check(passes, violations, calculations, correct)


def _last_number(reply: str) -> float | None:
    found = _ANY_NUMBER.findall(reply)
    return float(found[-1].replace(",", "")) if found else None


def chance_of_run(p: float, n: int, k: int = 3) -> float:
    """Probability that n independent trials, each passing with p, hold k passes in a row.

    Exact: a Markov chain over the length of the running streak, with k absorbing.
    """
    streak = [1.0] + [0.0] * k
    for _ in range(n):
        streak = [(1 - p) * sum(streak[:k])] + [p * s for s in streak[: k - 1]] + [streak[k] + p * streak[k - 1]]
    return streak[k]
