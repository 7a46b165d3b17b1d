"""The HTTP surface: OpenAI's and Anthropic's routes for agents, `/reef/*` for people and for the learner.

Owns the routes, and the answers of all that no model answers. Everything it reports is read from the two
databases; it decides nothing about learning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from ulid import ULID

from reef.errors import BadRequest, NotFound, UnknownModel, UpstreamError
from reef.gateway.answers import Handler, guarded, no_route, unexpected
from reef.gateway.auth import Caller, identify, require_admin
from reef.gateway.body import check_report, read_json
from reef.gateway.dialects import ROUTES
from reef.gateway.inference import Inference
from reef.gateway.openapi import document
from reef.gateway.services import Services, model_names, scenario_of
from reef.wire.messages import check_prompt
from reef.wire.messages_events import MESSAGES


def build_app(services: Services) -> Starlette:
    """The gateway's ASGI application."""
    routes = Routes(services)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        upkeep = asyncio.create_task(services.upkeep.run()) if services.upkeep else None
        yield
        if upkeep is not None:
            upkeep.cancel()
            await asyncio.gather(upkeep, return_exceptions=True)
        await services.engine.close()
        await services.writer.drain()
        services.writer.close()

    def get(path: str, handler: Handler) -> Route:
        return Route(path, guarded(handler), methods=["GET"])

    inference = {path: Inference(services, dialect) for path, dialect in ROUTES.items()}
    return Gateway(
        inference,
        routes=[
            *(Route(path, app) for path, app in inference.items()),
            Route("/v1/messages/count_tokens", guarded(routes.count_tokens), methods=["POST"]),
            get("/v1/responses/{id}", routes.response),
            get("/v1/models", routes.models),
            get("/v1/models/{id:path}", routes.model),
            Route("/reef/report", guarded(routes.report), methods=["POST"]),
            get("/reef/status", routes.status),
            get("/reef/funnel", routes.funnel),
            get("/reef/sessions", routes.sessions),
            get("/reef/sessions/{id}", routes.session),
            Route("/reef/sessions/{id}", guarded(routes.forget), methods=["DELETE"]),
            get("/reef/turns/{receipt}", routes.turn),
            get("/reef/releases", routes.releases),
            Route("/reef/releases/{version}/serve", guarded(routes.serve_release), methods=["POST"]),
            get("/healthz", routes.alive),
            get("/readyz", routes.ready),
            get("/openapi.json", routes.openapi),
        ],
        exception_handlers={404: no_route, 405: no_route, Exception: unexpected},
        lifespan=lifespan,
    )


class Gateway(Starlette):
    """Starlette, with a short way to the routes that nearly all of the traffic takes."""

    def __init__(self, short: Mapping[str, ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._short = short

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._short.get(scope["path"]) if scope["type"] == "http" else None
        if app is None:
            await super().__call__(scope, receive, send)
        else:
            await app(scope, receive, send)


def _openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "reef"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _id(request: Request, name: str) -> str:
    """An id from the path. Raises NotFound for one that no store could hold."""
    id = request.path_params[name]
    if "\0" in id:
        raise NotFound(f"no such {name}")
    return id


class Routes:
    """Everything but inference."""

    def __init__(self, services: Services) -> None:
        self._s = services

    def _caller(self, request: Request) -> Caller:
        return identify(dict(request.headers), self._s.config.server.keys)

    async def models(self, request: Request) -> Response:
        caller = self._caller(request)
        names = await model_names(self._s, scenario_of(dict(request.headers), caller, self._s.config))
        if "anthropic-version" in request.headers:
            data = [_anthropic_model(name) for name in names]
            return JSONResponse({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return JSONResponse({"object": "list", "data": [_openai_model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        caller = self._caller(request)
        name = request.path_params["id"]
        names = await model_names(self._s, scenario_of(dict(request.headers), caller, self._s.config))
        if name not in names and self._s.config.server.models == "strict":
            raise UnknownModel(f"the model '{name}' does not exist", param="model")
        return JSONResponse(_anthropic_model(name) if "anthropic-version" in request.headers else _openai_model(name))

    async def count_tokens(self, request: Request) -> Response:
        """How long a Messages request's prompt is, by the engine's own tokenizer."""
        caller = self._caller(request)
        body = check_prompt(await read_json(request, self._s.limits))
        scenario = scenario_of(dict(request.headers), caller, self._s.config)
        asked, _ = self._s.proxy.memo.put(MESSAGES, scenario, MESSAGES.to_engine(body))
        async with self._s.publisher.lease(scenario) as lease:
            tools = asked.get("tools") if asked.get("tool_choice") != "none" else None
            count = await self._s.engine.count_tokens(lease.model, asked["messages"], tools)
        return JSONResponse({"input_tokens": count})

    async def response(self, request: Request) -> Response:
        """A stored response of this client."""
        caller = self._caller(request)
        scenario = scenario_of(dict(request.headers), caller, self._s.config)
        id = request.path_params["id"]
        exchange = await asyncio.to_thread(self._s.history.stored, id, caller.name, scenario)
        if exchange is None:
            raise NotFound(f"no response '{id}' is stored here for this client")
        return JSONResponse(exchange.response)

    async def report(self, request: Request) -> Response:
        self._caller(request)
        body = await read_json(request, self._s.limits)
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
        view["recording"] = {"ok": self._s.writer.trouble is None, "reason": self._s.writer.trouble}
        return JSONResponse(view)

    async def funnel(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse(self._s.views.funnel())

    async def sessions(self, request: Request) -> Response:
        require_admin(self._caller(request))
        return JSONResponse({"sessions": self._s.views.sessions()})

    async def session(self, request: Request) -> Response:
        require_admin(self._caller(request))
        return JSONResponse(self._s.views.session(_id(request, "id")))

    async def forget(self, request: Request) -> Response:
        require_admin(self._caller(request))
        assert self._s.forget is not None
        return JSONResponse(await self._s.forget(request.path_params["id"]))

    async def turn(self, request: Request) -> Response:
        require_admin(self._caller(request))
        return JSONResponse(self._s.views.turn(_id(request, "receipt")))

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

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document(request.app.routes))

    async def alive(self, request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def ready(self, request: Request) -> Response:
        health = await self._s.engine.health()
        if not health.ok:
            raise UpstreamError(f"the engine is {health.detail}", status=503)
        return JSONResponse({"ok": True})
