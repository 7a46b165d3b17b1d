"""Taking secrets out of an exchange before it is stored.

Patterns are applied to every string of request and response and to header values; what they find becomes
`[redacted:NAME]`. The same text is always redacted the same way, so a conversation's resent history still
matches. Token ids spell the secret too, so an exchange that held one keeps none and trains nothing: it
says so in a stored header. Knows no database.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reef.errors import ConfigError
from reef.wire.exchange import Exchange

FOUND_HEADER = "x-reef-redacted"

_KEY_SHAPES = (
    r"sk-(?:ant-|proj-|svcacct-)?[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic and those that copy them
    r"(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"hf_[A-Za-z0-9]{30,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"AIza[A-Za-z0-9_-]{35}",
    r"xox[abprs]-[A-Za-z0-9-]{10,}",
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",
    r"npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}",
    r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",  # a JSON web token
)
_KEYS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:" + "|".join(_KEY_SHAPES) + r")"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
)
_EMAILS = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-])"
)
_CARDS = re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What to look for, and whether a hit is what it looks like."""

    name: str
    expression: re.Pattern[str]
    real: Callable[[str], bool] = lambda _: True


def luhn(text: str) -> bool:
    """Whether the digits end in the check digit that cards carry."""
    digits = [int(c) for c in text if c.isdigit()]
    doubled = [d if n % 2 == 0 else d * 2 - 9 * (d > 4) for n, d in enumerate(reversed(digits))]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and sum(doubled) % 10 == 0


READY: Mapping[str, Pattern] = {
    "keys": Pattern("key", _KEYS),
    "emails": Pattern("email", _EMAILS),
    "cards": Pattern("card", _CARDS, luhn),
}


class Redactor:
    """The configured patterns, in order. Raises ConfigError for one that is not known or not valid."""

    def __init__(self, ready: tuple[str, ...], own: Mapping[str, str] | None = None) -> None:
        self._patterns = []
        for name in ready:
            if name not in READY:
                raise ConfigError(f"store.redact: no pattern {name!r}; there are {', '.join(READY)}")
            self._patterns.append(READY[name])
        for name, expression in (own or {}).items():
            try:
                self._patterns.append(Pattern(name, re.compile(expression)))
            except re.error as error:
                raise ConfigError(f"store.redact_patterns: {name}: {error}") from None

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        return self._text(text, set())

    def exchange(self, exchange: Exchange) -> Exchange:
        """The exchange as it may be stored."""
        found: set[str] = set()
        request, response = self._walk(exchange.request, found), self._walk(exchange.response, found)
        error = self._text(exchange.error, found) if exchange.error else exchange.error
        in_words = set(found)
        headers = self._walk(exchange.headers, found)
        if not found:
            return exchange
        headers = {**headers, FOUND_HEADER: ", ".join(sorted(found))}
        sampled = None if in_words else exchange.sampled
        return replace(exchange, request=request, response=response, headers=headers, error=error, sampled=sampled)

    def _walk(self, value: Any, found: set[str]) -> Any:
        if isinstance(value, str):
            return self._text(value, found)
        if isinstance(value, Mapping):
            return {key: self._walk(child, found) for key, child in value.items()}
        return [self._walk(child, found) for child in value] if isinstance(value, list | tuple) else value

    def _text(self, text: str, found: set[str]) -> str:
        for pattern in self._patterns:

            def put(match: re.Match[str], pattern: Pattern = pattern) -> str:
                if not pattern.real(match.group()):
                    return match.group()
                found.add(pattern.name)
                return f"[redacted:{pattern.name}]"

            text = pattern.expression.sub(put, text)
        return text
