"""The HTTP surface: OpenAI's and Anthropic's routes for agents, `/reef/*` for people and for the learner.

Owns routing, limits and error JSON. Everything it reports is read from the two databases; it decides
nothing about learning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from reef.config import Config
from reef.engine.base import EngineClient
from reef.errors import BadRequest, Forbidden, NotFound, ReefError, UnknownModel, UpstreamError
from reef.gateway.auth import Caller, identify, require_admin, without_secrets
from reef.gateway.body import Limits, aside, check_report, parse, read_body, read_json
from reef.gateway.delivery import EventStream, while_connected
from reef.gateway.dialects import ROUTES, dialect_of
from reef.gateway.errors import headers_of, status_of
from reef.gateway.history import History
from reef.gateway.openapi import document
from reef.gateway.proxy import Call, Proxy
from reef.gateway.upkeep import Upkeep
from reef.observe.views import Views
from reef.releases.publish import Publisher
from reef.store.log import LogWriter
from reef.wire.dialect import Dialect
from reef.wire.exchange import Api
from reef.wire.fields import refuse
from reef.wire.images import first_media
from reef.wire.messages import check_prompt
from reef.wire.messages_events import MESSAGES

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
    history: History
    limits: Limits
    upkeep: Upkeep | None = None
    forget: Callable[[str], Awaitable[dict[str, Any]]] | None = None
    """forgets a session, by its id"""


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
        exception_handlers={404: _no_route, 405: _no_route, Exception: _unexpected},
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


def problem(request: Request, error: ReefError, status: int | None = None) -> Response:
    """An error in the dialect of the request."""
    body = dialect_of(request.url.path, request.headers).error(error)
    return JSONResponse(body, status or status_of(error), headers_of(error))


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such route" if status == 404 else "this route does not take this method"
    return problem(request, NotFound(f"{what}: {request.method} {request.url.path}"), status)


async def _unexpected(request: Request, error: Exception) -> Response:
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


class Inference:
    """A POST route that a model answers. An ASGI app of its own, since it must notice a client that
    leaves."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._s = services
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        started = False

        async def tell(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await self._answer(request, tell)
        except ReefError as error:
            response = problem(request, error)
        except ClientDisconnect:
            return
        except Exception as error:
            if started:
                raise
            response = await _unexpected(request, error)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, request: Request, send: Send) -> Response | None:
        """The answer, or None if it was streamed or nobody waits for it any more."""
        if request.method != "POST":
            response = problem(request, BadRequest("use POST"), 405)
            response.headers["allow"] = "POST"
            return response
        call = await self._call(request)
        if not call.request.get("stream"):
            body = await while_connected(request.receive, self._whole(call, request))
            return body
        out = EventStream(send, lambda: self._s.proxy.headers(call))
        return await while_connected(request.receive, self._stream(call, out, request))

    async def _whole(self, call: Call, request: Request) -> Response:
        try:
            body = await self._s.proxy.whole(call)
        except ReefError as error:
            return self._with_receipt(problem(request, error), call)
        return Response(orjson.dumps(body), 200, self._s.proxy.headers(call), "application/json")

    async def _stream(self, call: Call, out: EventStream, request: Request) -> Response | None:
        try:
            await self._s.proxy.stream(call, out)
        except ReefError as error:
            return self._with_receipt(problem(request, error), call)
        return None

    def _with_receipt(self, response: Response, call: Call) -> Response:
        response.headers.update(self._s.proxy.headers(call))
        return response

    async def _call(self, request: Request) -> Call:
        """The request, checked and translated. Raises BadRequest."""
        config = self._s.config
        headers = dict(request.headers)
        caller = identify(headers, config.server.keys)
        raw = await read_body(request, self._s.limits)
        body = self._dialect.check(await aside(len(raw), parse, raw, self._s.limits))
        scenario = scenario_of(headers, caller, config)
        await self._check_model(body, scenario)
        if self._blind and (where := first_media(body)):
            refuse(where, "can't be read: the engine takes text only")
        full = body
        if self._dialect.api is Api.RESPONSES:
            full = await self._s.history.expand(body, caller.name, scenario)
        asked = self._dialect.to_engine(full)
        return Call(self._dialect, scenario, caller.name, without_secrets(headers), body, asked, len(raw))

    @property
    def _blind(self) -> bool:
        engine = self._s.config.engine
        return engine.kind == "embedded" or not engine.vision

    async def _check_model(self, body: dict[str, Any], scenario: str) -> None:
        if self._s.config.server.models == "any":
            return
        known = await model_names(self._s, scenario)
        if body.get("model") not in known:
            raise UnknownModel(
                f"the model '{body.get('model')}' does not exist; served: {', '.join(known)}", param="model"
            )


def scenario_of(headers: dict[str, str], caller: Caller, config: Config) -> str:
    """The scenario a request belongs to. Raises Forbidden if its key is bound to another."""
    asked = headers.get("x-reef-scenario")
    if caller.scenario and asked not in (None, caller.scenario):
        raise Forbidden(f"this key belongs to scenario '{caller.scenario}'")
    name = caller.scenario or asked or config.policy.scenario
    if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
        raise BadRequest("a scenario's name has at most 64 letters, digits, '-' and '_'")
    return name


async def model_names(services: Services, scenario: str) -> list[str]:
    """Names a client may use under `strict`: the base model's and the scenario's."""
    return list(dict.fromkeys((await services.publisher.base_model(), scenario)))


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
