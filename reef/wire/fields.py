"""Typed reading of request fields: what is wrong is named, nothing is guessed.

Every check raises BadRequest with the field's path as `param`. Null counts as absent. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from reef.errors import BadRequest

Path = str
"""of a field: `messages[3].content[0].type`"""


def refuse(path: Path, why: str) -> NoReturn:
    """Raise the BadRequest that names `path`."""
    raise BadRequest(f"'{path}' {why}", param=path)


def check_body(body: Any) -> dict[str, Any]:
    """The body as a dict."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def text(body: Mapping[str, Any], name: str, at: Path = "") -> str | None:
    """A string field, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        refuse(at + name, "must be a string")
    return value


def flag(body: Mapping[str, Any], name: str, at: Path = "") -> bool | None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(at + name, "must be true or false")
    return value


def number(body: Mapping[str, Any], name: str, at: Path = "") -> float | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        refuse(at + name, "must be a number")
    return value


def whole_number(body: Mapping[str, Any], name: str, at: Path = "", *, low: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(at + name, "must be an integer within 64 bits")
    if low is not None and value < low:
        refuse(at + name, f"must be at least {low}")
    return value


def mapping(body: Mapping[str, Any], name: str, at: Path = "") -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(at + name, "must be an object")
    return value


def array(body: Mapping[str, Any], name: str, at: Path = "") -> list[Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        refuse(at + name, "must be a list")
    return value


def objects(body: Mapping[str, Any], name: str, at: Path = "") -> list[dict[str, Any]]:
    """A list of objects; absent is empty."""
    items = array(body, name, at) or []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            refuse(f"{at}{name}[{index}]", "must be an object")
    return items


def one_of(body: Mapping[str, Any], name: str, allowed: Sequence[str], at: Path = "") -> str | None:
    value = body.get(name)
    if value is not None and value not in allowed:
        refuse(at + name, f"must be one of {', '.join(allowed)}")
    return value


def required(value: Any, path: Path) -> Any:
    """`value`, unless it is null or absent."""
    if value is None:
        refuse(path, "is required")
    return value


def sampling(body: Mapping[str, Any]) -> None:
    """The settings every dialect shares, where they are present."""
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        number(body, name)
    for name in ("top_k", "seed"):
        whole_number(body, name)
    if body.get("n") not in (None, 1) or body.get("n") is True:
        refuse("n", "must be 1: one exchange records one answer")
    whole_number(body, "top_logprobs", low=0)
    for name in ("return_token_ids", "return_tokens_as_token_ids"):
        flag(body, name)


def stops(body: Mapping[str, Any], name: str) -> None:
    """Stop strings: one or a list."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        refuse(name, "must be a string or a list of strings")
