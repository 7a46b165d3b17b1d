"""Which HTTP status an error is answered with, and which headers go along. Knows no dialect."""

from __future__ import annotations

from reef.errors import BadRequest, ReefError, StoreError, UpstreamError


def status_of(error: ReefError) -> int:
    """The HTTP status an error is answered with."""
    if isinstance(error, BadRequest | UpstreamError):
        return error.status
    return 503 if isinstance(error, StoreError) else 500


def headers_of(error: ReefError) -> dict[str, str]:
    """Headers an error's answer carries: how long to wait before trying again, if the engine said so."""
    after = error.retry_after if isinstance(error, UpstreamError) else None
    return {"retry-after": after} if after else {}
