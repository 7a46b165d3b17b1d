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

import orjson
from sqlalchemy import BigInteger, Dialect, Integer, Text
from sqlalchemy.types import TypeDecorator

from reef.wire.tokenids import WrittenIds

SEQ = BigInteger().with_variant(Integer, "sqlite")
"""64 bits; SQLite's rowid needs the plain name"""
MARK = "\x1a"
"""first character of text that is stored as JSON"""
LONGEST_KEY = 256
_PIECE = 1 << 20
_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=lambda value: list(_ids(value))).encode
_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS


class Words(TypeDecorator[str]):
    """Text of any length and content."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else words(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return json.loads(value[1:]) if value and value.startswith(MARK) else value


def words(value: str) -> str:
    """Text as `Words` stores it."""
    return value if not value.startswith(MARK) and _plain(value) else MARK + json.dumps(value)


class Json(TypeDecorator[Any]):
    """A JSON value, kept as text so that nothing a conversation holds is refused."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else to_json(value)

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
    """JSON by the standard; a number that is not finite becomes its name, half a surrogate pair an escape,
    and an integer is written whole, however long."""
    try:
        text = orjson.dumps(value, _as_written, _OPTIONS)
        if not _has_null(text) or _finite(value):  # orjson writes a number that is not finite as null
            return text.decode()
    except TypeError:
        pass
    try:
        return _ENCODE(value)
    except ValueError:
        return _ENCODE(_named(value))


def _has_null(text: bytes) -> bool:
    """Looks piece by piece: other threads wait meanwhile."""
    return any(text.find(b"null", at, at + _PIECE + 3) >= 0 for at in range(0, len(text), _PIECE))


def _as_written(value: Any) -> orjson.Fragment:
    return orjson.Fragment(_ids(value).text)


def _ids(value: Any) -> WrittenIds:
    if isinstance(value, WrittenIds):
        return value
    raise TypeError(f"not JSON: {type(value).__name__}")


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(_finite(child) for child in value.values())
    return not isinstance(value, list | tuple) or all(_finite(child) for child in value)


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
