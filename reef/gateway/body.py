"""Request bodies: read within limits, parsed strictly. Knows no route and no dialect's fields but the
report's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import orjson
from starlette.requests import Request

from reef.errors import BadRequest, BodyTooLarge, HeadersTooLarge

LARGE = 1 << 20
"""bytes; parsing or writing them takes about a millisecond"""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a request may be."""

    body: int = 32 * 2**20
    """bytes"""
    headers: int = 64 * 1024
    """bytes, names and values together"""
    depth: int = 200
    """levels of nested JSON"""


def check_headers(request: Request, limits: Limits) -> None:
    """Raises HeadersTooLarge."""
    if sum(len(name) + len(value) for name, value in request.scope["headers"]) > limits.headers:
        raise HeadersTooLarge(f"the headers are larger than {limits.headers} bytes")


async def read_json(request: Request, limits: Limits) -> Any:
    """The body, parsed. Raises BodyTooLarge or BadRequest."""
    body = await read_body(request, limits)
    return await aside(len(body), parse, body, limits)


async def aside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work` on `size` bytes: at once, or in a thread where others would have to wait for it too long."""
    return work(*args, **kwargs) if size <= LARGE else await asyncio.to_thread(work, *args, **kwargs)


async def read_body(request: Request, limits: Limits) -> bytearray:
    """The body's bytes. Raises BodyTooLarge or HeadersTooLarge."""
    check_headers(request, limits)
    too_large = f"the body is larger than {limits.body / 2**20:g} MiB"
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body:
        raise BodyTooLarge(too_large)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body:
            raise BodyTooLarge(too_large)
    return body


def parse(body: bytearray, limits: Limits) -> Any:
    """The JSON of a body. Raises BadRequest.

    What can't be text (lone surrogates, broken UTF-8), NaN and infinities are refused, integers beyond
    64 bits become floats.
    """
    try:
        parsed = orjson.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if _more_containers(body, limits.depth) and _too_deep(parsed, limits.depth):
        raise BadRequest(f"the body is nested deeper than {limits.depth} levels")
    return parsed


def _more_containers(body: bytearray, limit: int) -> bool:
    """Whether it may hold more than `limit` lists and objects. Looks piece by piece: other threads wait meanwhile."""
    seen = 0
    for at in range(0, len(body), LARGE):
        seen += body.count(b"{", at, at + LARGE) + body.count(b"[", at, at + LARGE)
        if seen > limit:
            return True
    return False


def _too_deep(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def check_report(body: Any) -> tuple[list[str], float | None, str | None]:
    """(receipts, score, feedback) of a report. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    references = body.get("references")
    if not isinstance(references, list) or not references or not all(isinstance(r, str) for r in references):
        raise BadRequest("'references' must be a non-empty list of receipts", param="references")
    score = body.get("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise BadRequest("'score' must be a number", param="score")
    feedback = body.get("feedback")
    if feedback is not None and not isinstance(feedback, str):
        feedback = json.dumps(feedback, ensure_ascii=False)
    if score is None and not feedback:
        raise BadRequest("a report needs a 'score' or 'feedback'")
    return references, None if score is None else float(score), feedback
