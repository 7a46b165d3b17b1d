"""The HTTP surface: OpenAI routes for agents, `/reef/*` for people and for the learner.

Owns routing, limits and error JSON. Everything it reports is read from the two databases; it decides
nothing about learning.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from ulid import ULID

from reef.config import Config
from reef.engine.base import EngineClient
from reef.errors import BadRequest, NotFound, ReefError, UnknownModel, UpstreamError
from reef.gateway.auth import Caller, identify, require_admin, without_secrets
from reef.gateway.body import check_report, read_json
from reef.gateway.delivery import EventStream, while_connected
from reef.gateway.errors import openai_error, status_of
from reef.gateway.proxy import Call, Proxy
from reef.observe.views import Views
from reef.releases.publish import Publisher
from reef.store.log import LogWriter
from reef.wire.chat import check_request

log = logging.getLogger("reef.gateway")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes work with."""

    config: Config
    engine: EngineClient
    publisher: Publisher
    writer: LogWriter
    proxy: Proxy
    views: Views


def build_app(services: Services) -> Starlette:
    """The gateway's ASGI application."""
    routes = Routes(services)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await services.engine.close()
        services.writer.close()

    def get(path: str, handler: Handler) -> Route:
        return Route(path, guarded(handler), methods=["GET"])

    return Starlette(
        routes=[
            Route("/v1/chat/completions", ChatEndpoint(services)),
            get("/v1/models", routes.models),
            Route("/reef/report", guarded(routes.report), methods=["POST"]),
            get("/reef/status", routes.status),
            get("/reef/funnel", routes.funnel),
            get("/reef/sessions", routes.sessions),
            get("/reef/sessions/{id}", routes.session),
            get("/reef/turns/{receipt}", routes.turn),
            get("/reef/releases", routes.releases),
            Route("/reef/releases/{version}/serve", guarded(routes.serve_release), methods=["POST"]),
            get("/healthz", routes.alive),
            get("/readyz", routes.ready),
        ],
        exception_handlers={404: _no_route, 405: _no_route, Exception: _unexpected},
        lifespan=lifespan,
    )


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such route" if status == 404 else "this route does not take this method"
    problem = NotFound(f"{what}: {request.method} {request.url.path}")
    return JSONResponse(openai_error(problem), status)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(openai_error(ReefError("internal error; the service's log has the details")), 500)


def guarded(handler: Handler) -> Handler:
    """Turn Reef's errors into the client's error JSON."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ReefError as error:
            return JSONResponse(openai_error(error), status_of(error))

    return run


class ChatEndpoint:
    """POST /v1/chat/completions. An ASGI app of its own, since it must notice a client that leaves."""

    def __init__(self, services: Services) -> None:
        self._s = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ReefError as error:
            response = JSONResponse(openai_error(error), status_of(error))
        except ClientDisconnect:
            return
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, request: Request) -> Any:
        if request.method != "POST":
            return JSONResponse(openai_error(BadRequest("use POST")), 405, {"allow": "POST"})
        config = self._s.config
        headers = dict(request.headers)
        caller = identify(headers, config.server.keys)
        body = check_request(await read_json(request, config.server.max_body_mb))
        scenario = scenario_of(headers, caller, config)
        await self._check_model(body, scenario)
        call = Call(scenario, caller.name, without_secrets(headers), body)
        if body.get("stream"):
            opened = await while_connected(request.receive, self._s.proxy.stream(call))
            if opened is None:
                return None
            status, content, extra = opened
            if not isinstance(content, dict):
                return EventStream(content, extra)
            return JSONResponse(content, status, extra)
        result = await while_connected(request.receive, self._s.proxy.whole(call))
        if result is None:
            return None
        status, content, extra = result
        return JSONResponse(content, status, extra)

    async def _check_model(self, body: dict[str, Any], scenario: str) -> None:
        if self._s.config.server.models == "any":
            return
        known = await model_names(self._s, scenario)
        if body.get("model") not in known:
            raise UnknownModel(
                f"the model '{body.get('model')}' does not exist; served: {', '.join(known)}", param="model"
            )


def scenario_of(headers: dict[str, str], caller: Caller, config: Config) -> str:
    """The scenario a request belongs to. Raises BadRequest if its key is bound to another."""
    asked = headers.get("x-reef-scenario")
    if caller.scenario and asked not in (None, caller.scenario):
        raise BadRequest(f"this key belongs to scenario '{caller.scenario}'")
    name = caller.scenario or asked or config.policy.scenario
    if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
        raise BadRequest("a scenario's name has at most 64 letters, digits, '-' and '_'")
    return name


async def model_names(services: Services, scenario: str) -> list[str]:
    """Names a client may use under `strict`: the base model's and the scenario's."""
    return [await services.publisher.base_model(), scenario]


class Routes:
    """Everything but inference."""

    def __init__(self, services: Services) -> None:
        self._s = services

    def _caller(self, request: Request) -> Caller:
        return identify(dict(request.headers), self._s.config.server.keys)

    async def models(self, request: Request) -> Response:
        caller = self._caller(request)
        scenario = scenario_of(dict(request.headers), caller, self._s.config)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "reef"}
            for name in await model_names(self._s, scenario)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def report(self, request: Request) -> Response:
        self._caller(request)
        body = await read_json(request, self._s.config.server.max_body_mb)
        references, score, feedback = check_report(body)
        given = body.get("id")
        id = given if isinstance(given, str) and given else str(ULID())
        fresh = await self._s.writer.report(id, references, score, feedback)
        return JSONResponse({"id": id, "recorded": fresh})

    async def status(self, request: Request) -> Response:
        self._caller(request)
        health = await self._s.engine.health()
        view = self._s.views.status()
        view["engine"] = {"url": self._s.engine.url, "ok": health.ok, "detail": health.detail}
        view["served"] = self._s.publisher.served
        return JSONResponse(view)

    async def funnel(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse(self._s.views.funnel())

    async def sessions(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"sessions": self._s.views.sessions()})

    async def session(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse(self._s.views.session(request.path_params["id"]))

    async def turn(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse(self._s.views.turn(request.path_params["receipt"]))

    async def releases(self, request: Request) -> Response:
        self._caller(request)
        served = self._s.publisher.served
        return JSONResponse({"served": served, "releases": self._s.views.releases()})

    async def serve_release(self, request: Request) -> Response:
        caller = self._caller(request)
        require_admin(caller)
        try:
            version = int(request.path_params["version"])
        except ValueError:
            raise BadRequest("a version is a number") from None
        scenario = scenario_of(dict(request.headers), caller, self._s.config)
        by = request.headers.get("x-reef-by", caller.name or "operator")
        before = self._s.publisher.version(scenario)
        await self._s.publisher.serve(scenario, version, by)
        return JSONResponse({"scenario": scenario, "version": version, "before": before})

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def ready(self, request: Request) -> Response:
        health = await self._s.engine.health()
        if not health.ok:
            raise UpstreamError(f"the engine is {health.detail}", status=503)
        return JSONResponse({"ok": True})
