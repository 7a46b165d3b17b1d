"""The engine's routes, in OpenAI's shapes with vLLM's additions.

A client that goes away cancels its row. Errors are OpenAI error JSON. This module moves pieces from
the scheduler's thread to HTTP answers; it knows no tensors.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from reef.engine.embedded.engine import Engine
from reef.engine.embedded.request import Bounds, Call, PromptReader, read_chat, read_completion, read_tokenize
from reef.engine.embedded.response import Shape
from reef.engine.embedded.scheduler import Failure, Piece, Ticket
from reef.errors import BadRequest, ModelError, UpstreamError

Read = Callable[[Mapping[str, Any], PromptReader, Bounds], Call]


def create_app(engine: Engine, on_ready: Callable[[], None] = lambda: None) -> Starlette:
    """The ASGI app; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        on_ready()
        yield
        await asyncio.to_thread(engine.stop)

    async def health(_: Request) -> Response:
        load = engine.load_now
        return JSONResponse({"status": "ok", "running": load.running, "waiting": load.waiting})

    async def models(_: Request) -> Response:
        common = {"object": "model", "created": started, "owned_by": "reef", "max_model_len": engine.bounds.context}
        base = {"id": engine.name, **common, "root": engine.name, "parent": None}
        tuned = [{"id": a.name, **common, "root": a.path, "parent": engine.name} for a in engine.adapters()]
        return JSONResponse({"object": "list", "data": [base, *tuned]})

    async def chat(request: Request) -> Response:
        return await _generate(engine, request, read_chat, chat=True)

    async def completions(request: Request) -> Response:
        return await _generate(engine, request, read_completion, chat=False)

    async def tokenize(request: Request) -> Response:
        tokens = read_tokenize(await _body(request), engine.tokenizer)
        return JSONResponse({"count": len(tokens), "max_model_len": engine.bounds.context, "tokens": tokens})

    async def load_adapter(request: Request) -> Response:
        body = await _body(request)
        name, path = _text(body, "lora_name"), Path(_text(body, "lora_path"))
        try:
            await asyncio.to_thread(engine.load_adapter, name, path)
        except ModelError as error:
            raise BadRequest(str(error), param="lora_path") from error
        return JSONResponse({"status": "loaded", "lora_name": name})

    async def unload_adapter(request: Request) -> Response:
        name = _text(await _body(request), "lora_name")
        engine.unload_adapter(name)
        return JSONResponse({"status": "unloaded", "lora_name": name})

    started = int(time.time())
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {BadRequest: _bad_request, UpstreamError: _failed, HTTPException: _http, 500: _broken}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


class _Answer:
    """The pieces of one answer, carried from the scheduler's thread into the event loop."""

    def __init__(self, engine: Engine, call: Call) -> None:
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | Failure] = asyncio.Queue()

        def emit(event: Piece | Failure) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, event)

        self.model, self._ticket = _submit(engine, call, emit)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises UpstreamError when the engine failed; leaving early cancels the row."""
        try:
            while True:
                event = await self._queue.get()
                if isinstance(event, Failure):
                    raise UpstreamError(event.message, status=500)
                yield event
                if event.finish:
                    return
        finally:
            self._ticket.cancel()

    async def whole(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]


def _submit(engine: Engine, call: Call, emit: Callable[[Piece | Failure], None]) -> tuple[str, Ticket]:
    return engine.submit(call.model, call.job, emit)


async def _generate(engine: Engine, request: Request, read: Read, *, chat: bool) -> Response:
    call = read(await _body(request), engine.tokenizer, engine.bounds)
    answer = _Answer(engine, call)
    shape = Shape(call, answer.model, engine.tokenizer.spell, chat=chat)
    if call.stream:
        return StreamingResponse(_events(answer, shape, call), media_type="text/event-stream")
    pieces = await _unless_gone(request, answer)
    return JSONResponse(shape.whole(pieces)) if pieces else Response(status_code=499)


async def _unless_gone(request: Request, answer: _Answer) -> list[Piece] | None:
    """The whole answer, or None once the client has closed the connection."""
    work = asyncio.ensure_future(answer.whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, UpstreamError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(answer: _Answer, shape: Shape, call: Call) -> AsyncIterator[bytes]:
    pieces = answer.pieces()
    count = 0
    try:
        if (opening := shape.first()) is not None:
            yield _event(opening)
        async for piece in pieces:
            count += 1
            if (chunk := shape.next(piece)) is not None:
                yield _event(chunk)
        if call.include_usage:
            yield _event(shape.last(count))
    except UpstreamError as error:
        yield _event(_error(str(error), "server_error", None, None))
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be a non-empty string", param=name)
    return value


def _error(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _bad_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return JSONResponse(_error(str(error), error.type, error.param, error.code), status_code=error.status)


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse(_error(str(error), "server_error", None, None), status_code=500)


async def _broken(_: Request, error: Exception) -> Response:
    return JSONResponse(_error(f"{type(error).__name__}: {error}", "server_error", None, None), status_code=500)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_error(error.detail, "invalid_request_error", None, None), status_code=error.status_code)
