"""A canned engine for measuring gateways: fixed answers with vLLM's fields, and a bare pass-through proxy.

    python -m benchmarks.canned engine PORT [--tokens 32] [--top 16] [--gap-ms 0]
    python -m benchmarks.canned proxy PORT URL

The engine is a plain asyncio protocol that never parses a body, so that it costs next to nothing beside
what is measured. It answers any POST with the same reply, whole or streamed; where the request asks for
token ids it adds them, with log-probs and the top K, as vLLM does. The proxy is what a gateway on this
stack costs that neither reads nor records: uvicorn, Starlette and aiohttp, bytes in, bytes out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import lru_cache
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

MODEL = "canned"
CHARS_A_TOKEN = 4
COMMON = {"id": "chatcmpl-canned", "created": 1_700_000_000, "model": MODEL}


def _entry(token: int, top: int) -> dict[str, Any]:
    def one(id: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{id}", "logprob": logprob, "bytes": [32, 119, 111, 114, 100]}

    alternatives = [one(token + k, -0.3125 - k * 0.731) for k in range(top)]
    return {**one(token, -0.3125), "top_logprobs": alternatives}


def _prompt_ids(size: int) -> list[int]:
    return [7919 * k % 49_152 for k in range(size // CHARS_A_TOKEN)]


class Replies:
    """The engine's answers as bytes, one for each kind of request and prompt size."""

    def __init__(self, tokens: int, top: int) -> None:
        self._ids = [1000 + 37 * k for k in range(tokens)]
        self._top = top
        self._usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}

    @lru_cache(maxsize=64)  # noqa: B019  one instance a process
    def whole(self, exact: bool, size: int) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": " word" * len(self._ids)},
            "finish_reason": "stop",
            "logprobs": None,
        }
        answer = {**COMMON, "object": "chat.completion", "choices": [choice], "usage": self._usage}
        if exact:
            choice |= {"logprobs": {"content": [_entry(t, self._top) for t in self._ids]}, "token_ids": self._ids}
            answer["prompt_token_ids"] = _prompt_ids(size)
        body = json.dumps(answer, separators=(",", ":")).encode()
        return _json_answer(body)

    @lru_cache(maxsize=64)  # noqa: B019
    def stream(self, exact: bool, size: int) -> tuple[bytes, ...]:
        """The head, then each event as an HTTP chunk, then the end."""
        parts = [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"]
        common = {**COMMON, "object": "chat.completion.chunk"}
        for n, token in enumerate(self._ids):
            choice: dict[str, Any] = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
            chunk = {**common, "choices": [choice]}
            if n == 0:
                choice["delta"]["role"] = "assistant"
            if exact:
                choice |= {"logprobs": {"content": [_entry(token, self._top)]}, "token_ids": [token]}
                if n == 0:
                    chunk["prompt_token_ids"] = _prompt_ids(size)
            parts.append(_chunk(_event(chunk)))
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        parts.append(_chunk(_event({**common, "choices": [end]})))
        parts.append(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return tuple(parts)


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _json_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class EngineProtocol(asyncio.Protocol):
    """HTTP/1.1 with keep-alive and content-length bodies: what every gateway here sends."""

    def __init__(self, replies: Replies, gap_s: float) -> None:
        self._replies = replies
        self._gap = gap_s
        self._buffer = bytearray()
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            _, _, rest = head.partition(b"content-length:")
            length = int(rest.partition(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            listed = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(listed)
                + listed
            )
            return
        settings = body[:200] + body[-400:]  # the fields before and after the messages
        exact = b'"return_token_ids":true' in settings.replace(b" ", b"")
        size = round(len(body), -3)
        if b'"stream":true' not in settings.replace(b" ", b""):
            self._transport.write(self._replies.whole(exact, size))
        elif self._gap:
            self._streaming = asyncio.ensure_future(self._paced(self._replies.stream(exact, size)))
        else:
            for part in self._replies.stream(exact, size):
                self._transport.write(part)

    async def _paced(self, parts: tuple[bytes, ...]) -> None:
        for part in parts:
            self._transport.write(part)
            await asyncio.sleep(self._gap)


async def serve_engine(port: int, tokens: int, top: int, gap_s: float) -> None:
    replies = Replies(tokens, top)
    server = await asyncio.get_running_loop().create_server(lambda: EngineProtocol(replies, gap_s), "127.0.0.1", port)
    await server.serve_forever()


def bare_proxy(url: str) -> Starlette:
    """Forwards bodies and answers untouched."""
    sessions: list[aiohttp.ClientSession] = []

    async def forward(request: Request) -> Response:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        body = await request.body()
        headers = {"content-type": "application/json"}
        response = await sessions[0].request(request.method, url + request.url.path, data=body, headers=headers)
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            return Response(await response.read(), response.status, media_type=kind)
        return StreamingResponse(response.content.iter_any(), media_type=kind)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["engine", "proxy"])
    parser.add_argument("port", type=int)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    options = parser.parse_args()
    if options.part == "engine":
        asyncio.run(serve_engine(options.port, options.tokens, options.top, options.gap_ms / 1000))
    else:
        uvicorn.run(bare_proxy(options.url), host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
