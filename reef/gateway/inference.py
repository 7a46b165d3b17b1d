"""The routes that a model answers, from the request's bytes to the answer's.

An ASGI app of its own for each dialect, since it must notice a client that leaves. Invariant: whatever goes
wrong is told in the route's dialect, and once an answer has begun nothing else is sent in its place. Knows
no session, no release and no store.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from reef.errors import BadRequest, ReefError, UnknownModel
from reef.gateway.answers import problem, unexpected
from reef.gateway.auth import identify, without_secrets
from reef.gateway.body import aside, parse, read_body
from reef.gateway.delivery import EventStream, while_connected
from reef.gateway.proxy import Call
from reef.gateway.services import Services, model_names, scenario_of
from reef.wire.dialect import Dialect
from reef.wire.exchange import Api
from reef.wire.fields import refuse
from reef.wire.images import first_media


class Inference:
    """A route that a model answers, by POST."""

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
            response = await unexpected(request, error)
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
