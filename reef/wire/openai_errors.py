"""Errors as OpenAI writes them. Knows JSON shapes, not sockets."""

from __future__ import annotations

from typing import Any

from reef.errors import BadRequest, ReefError, UpstreamError


def openai_error(error: ReefError) -> dict[str, Any]:
    """OpenAI's error object; an engine's own is passed on as it is."""
    if isinstance(error, UpstreamError) and isinstance(error.body, dict) and isinstance(error.body.get("error"), dict):
        return error.body
    if isinstance(error, BadRequest):
        kind, param, code = error.type, error.param, error.code
    elif isinstance(error, UpstreamError):
        kind, param, code = "upstream_error", None, "engine_failed"
    else:
        kind, param, code = "server_error", None, None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
