"""An engine that says what a test tells it to, with vLLM's field names, over a real socket.

It guarantees exactness, not sense: each character is one token whose id is its code point, and its
log-prob is -(id % 7) / 10, so that a test can recompute whatever Reef recorded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BASE = "scripted-base"
TOP = 4
Pieces = list[tuple[dict[str, Any], str]]
"""(delta, sampled text) of each chunk of an answer"""


def logprob(token: int) -> float:
    return -(token % 7) / 10


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


@dataclass
class Script:
    """What the engine does next. Tests change it while it runs."""

    reply: Callable[[dict[str, Any]], str | Pieces] = lambda body: f"reply to {body['messages'][-1]['content']}"
    status: int = 200
    """answer with this status and an error body instead"""
    break_after: int | None = None
    """drop the connection after that many streamed tokens"""
    pause_s: float = 0.0
    """between streamed tokens, or before a whole answer"""
    exact: bool = True
    """return token ids and log-probs when asked"""
    failures: list[int] = field(default_factory=list)
    """statuses to answer with first, each once"""
    retry_after: str | None = None
    """header of failures"""
    before_headers_s: float = 0.0
    """wait before even the headers of an answer"""
    pieces: Pieces | None = None
    """the chunks of every answer, instead of one for each character of `reply`"""
    finish: str = "stop"
    stop_reason: str | None = None
    error_event: str | None = None
    """end the stream with an error event of this message"""
    keep: int | None = None
    """how many requests are remembered; None for all"""
    requests: list[dict[str, Any]] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)
    cancelled: int = 0


def _entry(token: int) -> dict[str, Any]:
    top = [{"token": f"token_id:{token + k}", "logprob": logprob(token) - k, "bytes": [65]} for k in range(TOP)]
    return {
        "token": f"token_id:{token}",
        "logprob": logprob(token),
        "bytes": list(chr(token).encode()),
        "top_logprobs": top,
    }


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """A delta without an id continues the call of its index."""
    known = [call for call in calls if call.get("index") == delta.get("index")]
    if "id" in delta or not known:
        calls.append({**delta, "function": dict(delta.get("function") or {})})
    else:
        known[-1]["function"]["arguments"] += delta["function"]["arguments"]


def scripted_app(script: Script) -> Starlette:
    async def refuse(body: dict[str, Any]) -> Response | None:
        await asyncio.sleep(script.before_headers_s)
        status = script.failures.pop(0) if script.failures else script.status
        if status != 200:
            error = {"message": "scripted failure", "type": "server_error", "param": None, "code": None}
            headers = {"retry-after": script.retry_after} if script.retry_after else None
            return JSONResponse({"error": error}, status, headers)
        if body["model"] != BASE and body["model"] not in script.loaded:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        return None

    def pieces_of(body: dict[str, Any]) -> Pieces:
        if script.pieces is not None:
            return script.pieces
        reply = script.reply(body)
        if not isinstance(reply, str):
            return reply
        pieces: Pieces = [({"content": c}, c) for c in reply]
        return [({"role": "assistant", **delta}, text) for delta, text in pieces[:1]] + pieces[1:]

    def end(pieces: Pieces) -> dict[str, Any]:
        called = script.finish == "stop" and any(delta.get("tool_calls") for delta, _ in pieces)
        return {"finish_reason": "tool_calls" if called else script.finish, "stop_reason": script.stop_reason}

    def usage(prompt: str, reply: str) -> dict[str, int]:
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(reply)}
        return {**counts, "total_tokens": len(prompt) + len(reply)}

    async def chat(request: Request) -> Response:
        body = await request.json()
        if script.keep is None or len(script.requests) < script.keep:
            script.requests.append(body)
        if (refused := await refuse(body)) is not None:
            return refused
        pieces = pieces_of(body)
        exact = script.exact and bool(body.get("return_token_ids"))
        common = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            return StreamingResponse(stream(body, pieces, exact, common), media_type="text/event-stream")
        await asyncio.sleep(script.pause_s)
        text = "".join(sampled for _, sampled in pieces)
        prompt = prompt_of(body)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for delta, _ in pieces:
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls") or []:
                _add_call(message.setdefault("tool_calls", []), call)
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            **end(pieces),
            "logprobs": {"content": [_entry(t) for t in ids(text)]} if exact else None,
        }
        answer = {**common, "object": "chat.completion", "choices": [choice], "usage": usage(prompt, text)}
        if exact:
            choice["token_ids"] = ids(text)
            answer["prompt_token_ids"] = ids(prompt)
        return JSONResponse(answer)

    def prompt_of(body: dict[str, Any]) -> str:
        content = body["messages"][-1].get("content")
        return content if isinstance(content, str) and content else "?"

    async def stream(body: dict[str, Any], pieces: Pieces, exact: bool, common: dict[str, Any]) -> AsyncIterator[bytes]:
        head = {**common, "object": "chat.completion.chunk"}
        try:
            for n, (delta, sampled) in enumerate(pieces):
                if n == script.break_after:
                    raise ConnectionResetError("scripted break")
                await asyncio.sleep(script.pause_s)
                choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
                if exact:
                    entries = [_entry(token) for token in ids(sampled)]
                    choice |= {"token_ids": ids(sampled), "logprobs": {"content": entries}}
                chunk = {**head, "choices": [choice]}
                if n == 0 and exact:
                    chunk["prompt_token_ids"] = ids(prompt_of(body))
                yield f"data: {json.dumps(chunk)}\n\n".encode()
            if script.error_event:
                yield f"data: {json.dumps({'error': {'message': script.error_event}})}\n\ndata: [DONE]\n\n".encode()
                return
            last = {"index": 0, "delta": {}, **end(pieces)}
            yield f"data: {json.dumps({**head, 'choices': [last]})}\n\n".encode()
            if (body.get("stream_options") or {}).get("include_usage"):
                text = "".join(sampled for _, sampled in pieces)
                told = {**head, "choices": [], "usage": usage(prompt_of(body), text)}
                yield f"data: {json.dumps(told)}\n\n".encode()
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            script.cancelled += 1
            raise

    async def completions(request: Request) -> Response:
        body = await request.json()
        if script.keep is None or len(script.requests) < script.keep:
            script.requests.append(body)
        if (refused := await refuse(body)) is not None:
            return refused
        given = body["prompt"]
        given = given[0] if isinstance(given, list) and isinstance(given[0], str | list) else given
        prompt = given if isinstance(given, str) else "".join(chr(token % 0xD800) for token in given)
        text = f" and {prompt}"

        def choice(piece: str, finish: str | None, *, first: bool = True) -> dict[str, Any]:
            tops = [{f"token_id:{t + k}": logprob(t) - k for k in range(TOP)} for t in ids(piece)]
            told = {"tokens": list(piece), "token_logprobs": [logprob(t) for t in ids(piece)], "top_logprobs": tops}
            exact = {"token_ids": ids(piece), **({"prompt_token_ids": ids(prompt)} if first else {})}
            return {"index": 0, "text": piece, "finish_reason": finish, "logprobs": told, **exact}

        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            return JSONResponse({**head, "choices": [choice(text, "length")], "usage": usage(prompt, text)})

        async def parts() -> AsyncIterator[bytes]:
            for n, char in enumerate(text):
                chunk = {**head, "choices": [choice(char, "length" if n == len(text) - 1 else None, first=n == 0)]}
                yield f"data: {json.dumps(chunk)}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if script.keep is None or len(script.requests) < script.keep:
            script.requests.append(body)
        text = "".join(prompt_of({"messages": [message]}) for message in body["messages"])
        return JSONResponse({"count": len(text), "max_model_len": 4096, "tokens": ids(text)})

    async def models(_request: Request) -> Response:
        loaded = [{"id": name, "parent": BASE} for name in script.loaded]
        return JSONResponse({"object": "list", "data": [{"id": BASE}, *loaded]})

    async def load(request: Request) -> Response:
        body = await request.json()
        script.loaded[body["lora_name"]] = body["lora_path"]
        return Response("ok")

    async def unload(request: Request) -> Response:
        script.loaded.pop((await request.json())["lora_name"], None)
        return Response("ok")

    async def health(_request: Request) -> Response:
        return Response("")

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
            Route("/health", health),
        ]
    )
