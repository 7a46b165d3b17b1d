"""Errors as the client reads them: in the dialect of the route, with the status they have.

Invariant: no handler's exception reaches the server. Knows no route's work.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from reef.errors import NotFound, ReefError
from reef.gateway.dialects import dialect_of
from reef.gateway.errors import headers_of, status_of

log = logging.getLogger("reef.gateway")
Handler = Callable[[Request], Awaitable[Response]]


def problem(request: Request, error: ReefError, status: int | None = None) -> Response:
    """An error in the dialect of the request."""
    body = dialect_of(request.url.path, request.headers).error(error)
    return JSONResponse(body, status or status_of(error), headers_of(error))


async def no_route(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405."""
    status = getattr(error, "status_code", 404)
    what = "no such route" if status == 404 else "this route does not take this method"
    return problem(request, NotFound(f"{what}: {request.method} {request.url.path}"), status)


async def unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours: logged, and told without its details."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(request, ReefError("internal error; the service's log has the details"))


def guarded(handler: Handler) -> Handler:
    """Turn Reef's errors into the client's error JSON."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ReefError as error:
            return problem(request, error)

    return run
