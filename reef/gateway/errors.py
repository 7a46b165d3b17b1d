"""Errors as the client's dialect writes them. Knows JSON shapes, not sockets."""

from __future__ import annotations

from typing import Any

from reef.errors import BadRequest, ReefError, StoreError, UpstreamError


def status_of(error: ReefError) -> int:
    """The HTTP status an error is answered with."""
    if isinstance(error, BadRequest | UpstreamError):
        return error.status
    return 503 if isinstance(error, StoreError) else 500


def openai_error(error: ReefError) -> dict[str, Any]:
    """OpenAI's error object."""
    if isinstance(error, BadRequest):
        kind, param, code = error.type, error.param, error.code
    elif isinstance(error, UpstreamError):
        kind, param, code = "upstream_error", None, "engine_failed"
    else:
        kind, param, code = "server_error", None, None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
