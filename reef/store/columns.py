"""Column types that take whatever a conversation contains, on SQLite and on PostgreSQL alike.

PostgreSQL refuses NUL characters, lone surrogates and non-finite numbers; SQLite's driver refuses lone
surrogates. A record must never be lost to one of them, so text that holds one is stored escaped and comes
back as it was. Knows no table.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator

SEQ = BigInteger().with_variant(Integer, "sqlite")
"""64 bits; SQLite's rowid needs the plain name"""
MARK = "\x1a"
"""first character of text that is stored as JSON"""
LONGEST_KEY = 256
_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Words(TypeDecorator[str]):
    """Text of any length and content."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (not value.startswith(MARK) and _plain(value)):
            return value
        return MARK + json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return json.loads(value[1:]) if value and value.startswith(MARK) else value


class Raw(str):
    """JSON text that is stored as it is."""


class Json(TypeDecorator[Any]):
    """A JSON value, kept as text so that nothing a conversation holds is refused."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return value if value is None or isinstance(value, Raw) else to_json(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        return self


def _plain(text: str) -> bool:
    if "\x00" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(value: Any) -> str:
    """ASCII JSON by the standard; a number that is not finite becomes its name."""
    try:
        return _ENCODE(value)
    except ValueError:
        return _ENCODE(_named(value))


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _named(child) for key, child in value.items()}
    return [_named(child) for child in value] if isinstance(value, list | tuple) else value


def key(name: str) -> str:
    """A name that an index can hold: a long one, or one with a NUL, ends in its digest."""
    if len(name) <= LONGEST_KEY and _plain(name):
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    head = name[: LONGEST_KEY // 4].encode("ascii", "replace").decode().replace("\x00", "?")
    return f"{head}#{digest}"
