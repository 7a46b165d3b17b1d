"""The memo: what this user has asked of replies so far, as a few short rules.

Invariants: no rule twice, none against a newer one, all together within a token budget (the oldest are
forgotten first, those a person wrote last). Pure functions of rules; where they are kept, and that they
stay out of served prompts, is the service's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from recipes.openclawrl.judge.attribution import stems
from reef.recipe import Rule

MEMO_TOKENS = 256
ALIKE = 0.6
"""rules whose stems overlap by this share (Jaccard) say the same"""

_POLES: dict[str, tuple[str, str]] = {
    "layout": (r"\b(list|lists|bullet|bullets|table|numbered|headings?)\b", r"\b(plain|prose|paragraphs?|running)\b"),
    "length": (
        r"\b(short|shorter|brief|briefly|concise|terse)\b",
        r"\b(longer|length|detailed|thorough|in depth)\b",
    ),
    "tone": (r"\b(formal|formally|polite|professional)\b", r"\b(casual|casually|informal|friendly|relaxed)\b"),
    "emoji": (r"\b(add|use|with) .*\bemojis?\b", r"\b(no|without|words only) ?.*\bemojis?\b|\bin words only\b"),
    "working": (r"\b(show|all|every|each) .*\b(steps?|working)\b", r"\bonly the (answer|result)\b"),
    "address": (r"\bfirst person\b", r"\bthird person\b"),
    "units": (r"\b(metric|celsius|kilomet\w+|grams?)\b", r"\b(imperial|fahrenheit|miles|ounces|cups)\b"),
}
"""opposite ways in which replies differ; the newest rule on one of them displaces older ones of the other pole"""
_PATTERNS = {name: tuple(re.compile(pole, re.IGNORECASE) for pole in poles) for name, poles in _POLES.items()}
_NEGATED = re.compile(r"\b(don't|do not|never|avoid|without|no|stop|drop|skip)\b", re.IGNORECASE)
_LANGUAGE = re.compile(
    r"\bin (english|german|french|spanish|portuguese|italian|dutch|chinese|japanese)\b", re.IGNORECASE
)


def add(
    rules: Sequence[Rule], new: Rule, *, tokens: int = MEMO_TOKENS, count: Callable[[str], int]
) -> tuple[Rule, ...]:
    """The memo with `new` as its newest rule, oldest first; `count` gives a text's tokens."""
    text = " ".join(new.text.split())
    if not text or count(text) > tokens:
        return tuple(rules)
    same = next((rule for rule in rules if alike(rule.text, text)), None)
    if same is not None:
        new = replace(new, text=same.text, seen=same.seen + 1, turn=new.turn if same.turn else None)
    else:
        new = replace(new, text=text)
    kept = [rule for rule in rules if rule is not same and not contradicts(rule.text, new.text)]
    return _within([*kept, new], tokens, count)


def alike(a: str, b: str) -> bool:
    """Whether two rules ask for the same."""
    if a.casefold() == b.casefold():
        return True
    if bool(_NEGATED.search(a)) != bool(_NEGATED.search(b)) or contradicts(a, b):
        return False
    one, other = stems(a), stems(b)
    return len(one & other) >= ALIKE * max(len(one | other), 1)


def contradicts(a: str, b: str) -> bool:
    """Whether two rules can't both hold: opposite poles of one matter, another language, one negating the other."""
    if any(_pole(name, a) * _pole(name, b) < 0 for name in _PATTERNS):
        return True
    spoken = [{m.casefold() for m in _LANGUAGE.findall(text)} for text in (a, b)]
    if spoken[0] and spoken[1] and not spoken[0] & spoken[1]:
        return True
    if bool(_NEGATED.search(a)) == bool(_NEGATED.search(b)):
        return False
    one, other = (stems(_NEGATED.sub("", text)) for text in (a, b))
    return bool(one) and len(one & other) >= ALIKE * len(one | other)


def rendered(rules: Sequence[str]) -> str:
    """The memo as the judge and the teacher read it, one rule a line; empty when there is none."""
    return "\n".join(f"- {rule}" for rule in rules)


def _pole(name: str, text: str) -> int:
    """+1 or -1 for the side of a matter that a rule takes, 0 for neither or both."""
    sides = [bool(pattern.search(text)) for pattern in _PATTERNS[name]]
    side = sides[0] - sides[1]
    return -side if name in ("layout", "length") and _NEGATED.search(text) else side


def _within(rules: Sequence[Rule], tokens: int, count: Callable[[str], int]) -> tuple[Rule, ...]:
    """The newest rules that fit; a person's own are kept before those of verdicts."""
    order = sorted(range(len(rules)), key=lambda i: (i != len(rules) - 1, rules[i].turn is not None, -i))
    kept: set[int] = set()
    left = tokens
    for i in order:
        cost = count(rules[i].text)
        if cost <= left:
            kept.add(i)
            left -= cost
    return tuple(rule for i, rule in enumerate(rules) if i in kept)
