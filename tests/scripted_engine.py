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


def logprob(token: int) -> float:
    return -(token % 7) / 10


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


@dataclass
class Script:
    """What the engine does next. Tests change it while it runs."""

    reply: Callable[[dict[str, Any]], str] = lambda body: f"reply to {body['messages'][-1]['content']}"
    status: int = 200
    """answer with this status and an error body instead"""
    break_after: int | None = None
    """drop the connection after that many streamed tokens"""
    pause_s: float = 0.0
    """between streamed tokens, or before a whole answer"""
    exact: bool = True
    """return token ids and log-probs when asked"""
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


def scripted_app(script: Script) -> Starlette:
    async def chat(request: Request) -> Response:
        body = await request.json()
        script.requests.append(body)
        if script.status != 200:
            error = {"message": "scripted failure", "type": "server_error", "param": None, "code": None}
            return JSONResponse({"error": error}, script.status)
        if body["model"] != BASE and body["model"] not in script.loaded:
            return JSONResponse({"error": {"message": f"no model {body['model']}"}}, 404)
        text = script.reply(body)
        exact = script.exact and body.get("return_token_ids")
        common = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            return StreamingResponse(stream(body, text, exact, common), media_type="text/event-stream")
        await asyncio.sleep(script.pause_s)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "logprobs": {"content": [_entry(t) for t in ids(text)]} if exact else None,
        }
        answer = {**common, "object": "chat.completion", "choices": [choice]}
        if exact:
            choice["token_ids"] = ids(text)
            answer["prompt_token_ids"] = ids(body["messages"][-1]["content"])
        return JSONResponse(answer)

    async def stream(body: dict[str, Any], text: str, exact: bool, common: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            for n, char in enumerate(text):
                if n == script.break_after:
                    raise ConnectionResetError("scripted break")
                await asyncio.sleep(script.pause_s)
                choice: dict[str, Any] = {"index": 0, "delta": {"content": char}, "finish_reason": None}
                if n == 0:
                    choice["delta"]["role"] = "assistant"
                if exact:
                    choice |= {"token_ids": ids(char), "logprobs": {"content": [_entry(ord(char))]}}
                chunk = {**common, "object": "chat.completion.chunk", "choices": [choice]}
                if n == 0 and exact:
                    chunk["prompt_token_ids"] = ids(body["messages"][-1]["content"])
                yield f"data: {json.dumps(chunk)}\n\n".encode()
            last = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield f"data: {json.dumps({**common, 'object': 'chat.completion.chunk', 'choices': [last]})}\n\n".encode()
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            script.cancelled += 1
            raise

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
            Route("/v1/models", models),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
            Route("/health", health),
        ]
    )
