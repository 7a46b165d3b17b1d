"""Makes the texts of a recorded conversation its own, so that many copies of it can be told apart.

Every word of a text that no rule about harnesses knows gets a mark of three letters before it, wherever it
stands: a quote, a cut echo or a summary of a text stays one. Ids of conversations get it as well. A text
without such a word gets the mark behind it.
"""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reef.sessions import harness, ladder, turntype
from reef.wire.exchange import Exchange

_SOURCE = "".join(inspect.getsource(module) for module in (harness, ladder, turntype))
_KNOWN = {word.lower() for word in re.findall(r"[A-Za-z]{2,}", _SOURCE)}
_UUID = re.compile(r"[0-9a-f]{8}(?=-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")
_WORDS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\\u[0-9a-fA-F]{4}|\\.|(?<![A-Za-z0-9])[A-Za-z]{2,}",
    re.S,
)
_NAMED = {"x-session-id", "x-parent-session-id", "x-session-affinity", "x-reef-tag-session", "session_id", "session-id"}
_TEXTS = {"text", "content", "arguments", "input", "output", "prompt", "summary"}
_ASIDE = {"tools", "instructions", "system", "metadata", "client_metadata", "model", "stop"}


def mark(n: int) -> str:
    """Three letters for a number below 17,576."""
    letters = string.ascii_lowercase
    return letters[n // 676 % 26] + letters[n // 26 % 26] + letters[n % 26]


def distinct(talk: Sequence[Exchange], n: int) -> list[Exchange]:
    """A copy of a conversation whose texts and ids nobody else has."""
    return [_exchange(exchange, n) for exchange in talk]


def _exchange(exchange: Exchange, n: int) -> Exchange:
    request = {k: v if k in _ASIDE else _value(v, n, k) for k, v in exchange.request.items()}
    for name in ("conversation", "previous_response_id"):
        if name in request:
            request[name] = _named(exchange.request[name], n)
    response = exchange.response
    if response is not None:
        id = response.get("id")
        response = {**_value(response, n, ""), "id": _named(id, n) if id else id}
    headers = {k: f"{v}{mark(n)}" if k in _NAMED else _ids(v, n) for k, v in exchange.headers.items()}
    changed = replace(exchange, id=f"{mark(n)}/{exchange.id}", request=_all_ids(request, n), headers=headers)
    return replace(changed, response=response)


def _named(value: Any, n: int) -> Any:
    if isinstance(value, Mapping):
        return {**value, "id": _named(value["id"], n)}
    return f"{value}{mark(n)}"


def _value(value: Any, n: int, name: str) -> Any:
    if isinstance(value, str):
        return _text(value, n, name) if name in _TEXTS else value
    if isinstance(value, list):
        return [_value(v, n, name) for v in value]
    if isinstance(value, Mapping):
        if value.get("role") in ("system", "developer"):
            return value
        if "name" in value and ("arguments" in value or "input" in value):
            return {k: _every(v, n) if k in ("name", "arguments", "input") else v for k, v in value.items()}
        return {k: _value(v, n, k) for k, v in value.items()}
    return value


def _every(value: Any, n: int) -> Any:
    """All texts of a tool call."""
    if isinstance(value, str):
        return _words(value, n)
    if isinstance(value, list):
        return [_every(v, n) for v in value]
    return {k: _every(v, n) for k, v in value.items()} if isinstance(value, Mapping) else value


def _text(text: str, n: int, name: str) -> str:
    changed = _words(text, n)
    if changed != text or not text.strip() or name == "arguments" or _is_known(text):
        return changed
    return f"{text} {mark(n)}"


def _is_known(text: str) -> bool:
    return any(part.kind == "harness" for part in harness.said(text)) or not harness.said(text)


def _words(text: str, n: int) -> str:
    lower = mark(n)

    def change(found: re.Match[str]) -> str:
        word = found[0]
        if not word.isalpha() or word.lower() in _KNOWN:
            return word
        return (lower.capitalize() if word[0].isupper() else lower) + word

    return _ids(_WORDS.sub(change, text), n)


def _ids(text: str, n: int) -> str:
    return _UUID.sub(f"{n:08x}", text)


def _all_ids(value: Any, n: int) -> Any:
    if isinstance(value, str):
        return _ids(value, n)
    if isinstance(value, list):
        return [_all_ids(v, n) for v in value]
    return {k: _all_ids(v, n) for k, v in value.items()} if isinstance(value, Mapping) else value
