"""Request bodies: read within limits, parsed strictly. Knows no route and no dialect's fields but the
report's."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from reef.errors import BadRequest, BodyTooLarge

MAX_JSON_DEPTH = 200


async def read_json(request: Request, limit_mb: float) -> Any:
    """The body, parsed. Raises BodyTooLarge or BadRequest."""
    limit = int(limit_mb * 2**20)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the body is larger than {limit_mb:g} MiB")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit_mb:g} MiB")
    try:
        parsed = json.loads(bytes(body), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if _too_deep(parsed):
        raise BadRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")
    return parsed


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
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
