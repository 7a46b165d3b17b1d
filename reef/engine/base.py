"""One client for every engine.

An engine is an OpenAI-style server with vLLM's field names: it returns sampled token ids and
log-probs on request and loads named LoRA adapters at run time. vLLM does, SGLang does, the embedded
CPU engine offers the same surface. This module owns the connection and nothing else; it knows no
session, no store and no training.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson
from yarl import URL

from reef.errors import UpstreamError

_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
_KEEP_ALIVE_S = 4.0
"""how long an idle connection is kept: engines on uvicorn close theirs after five seconds"""
_PIECE = 256 * 1024
"""bytes of a large body that are sent at a time, so that no other request waits for the whole of it"""
_LARGE = 1 << 20
"""bytes; copying them takes about a millisecond"""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Streams are bounded by silence (`first_byte`, then `idle`), every answer by `total`."""

    connect: float = 10.0
    first_byte: float = 300.0
    idle: float = 300.0
    total: float = 3600.0


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    detail: str


class EngineClient:
    """An engine at a base URL (without /v1). Belongs to the event loop it is first used in."""

    def __init__(self, url: str, *, key: str | None = None, timeouts: Timeouts = Timeouts()) -> None:
        self.url = url.rstrip("/")
        self.timeouts = timeouts
        self._headers = {**_HEADERS, "authorization": f"Bearer {key}"} if key else _HEADERS
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._whole = aiohttp.ClientTimeout(total=timeouts.total, sock_connect=timeouts.connect)
        self._streamed = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect)
        self._brief = aiohttp.ClientTimeout(total=timeouts.connect)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer, parsed. Raises UpstreamError with the engine's status and body."""
        return _parsed(await self.ask(path, orjson.dumps(body)))

    async def ask(self, path: str, content: bytes) -> bytes:
        """The bytes of a whole answer to a JSON body. Raises UpstreamError with the engine's status and body."""
        try:
            async with self._post(path, content, self._whole) as response:
                return _accepted(response, await _all_of(response))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    @asynccontextmanager
    async def stream(self, path: str, content: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """The raw bytes of a streamed answer to a JSON body. Raises UpstreamError before the first byte if refused;
        leaving the context early closes the connection, which cancels generation. Silence is the
        caller's to bound."""
        try:
            response = await self._post(path, content, self._streamed)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        try:
            if response.status >= 400:
                try:
                    _accepted(response, await response.read())
                except aiohttp.ClientError as error:
                    raise self._unreachable(error) from error
            yield _pieces(response)
        finally:
            response.close()  # one read to its end has given its connection back already

    async def count_tokens(self, model: str, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> int:
        """Length of the prompt these messages become, in tokens. Raises UpstreamError."""
        body: dict[str, Any] = {"model": model, "messages": messages, "add_generation_prompt": True}
        answer = await self.post("/tokenize", {**body, "tools": tools} if tools else body)
        if not isinstance(answer.get("count"), int):
            raise UpstreamError(f"the engine at {self.url} does not count tokens", status=501)
        return answer["count"]

    async def base_model(self) -> str:
        """Name of the base model: the first that is listed without a parent."""
        models = (await self._get("/v1/models")).get("data") or []
        for model in models:
            if not model.get("parent"):
                return str(model["id"])
        raise UpstreamError(f"the engine at {self.url} lists no model")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter; one that is loaded already is fine."""
        try:
            await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except UpstreamError as error:
            if "already" not in str(error):
                raise

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter; requests in flight on it finish first. One that isn't loaded is fine."""
        try:
            await self.post("/v1/unload_lora_adapter", {"lora_name": name})
        except UpstreamError as error:
            if error.status not in (400, 404):
                raise

    async def health(self) -> Health:
        try:
            async with self._open().get(self._at("/health"), timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                return Health(response.status < 400, f"status {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            return Health(False, f"not reachable: {type(error).__name__}")

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._open().get(self._at(path), timeout=self._brief) as response:
                return _parsed(_accepted(response, await response.read()))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _post(self, path: str, content: bytes, timeout: aiohttp.ClientTimeout) -> Any:
        """The request, to be awaited or entered."""
        if len(content) <= _PIECE:
            return self._open().post(self._at(path), data=content, timeout=timeout)
        size = {"content-length": str(len(content))}
        return self._open().post(self._at(path), data=_in_pieces(content), headers=size, timeout=timeout)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                proxy=_proxy_for(self.url),
            )
        return self._session

    def _at(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.url + path)
        return url

    def _unreachable(self, error: Exception) -> UpstreamError:
        status = 504 if isinstance(error, TimeoutError) else 502
        return UpstreamError(f"the engine at {self.url} can't be reached: {type(error).__name__}", status=status)


def _proxy_for(url: str) -> str | None:
    """The proxy the environment names for this URL."""
    parts = urlsplit(url)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


async def _in_pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), _PIECE):
        yield content[at : at + _PIECE]
        await asyncio.sleep(0)


async def _all_of(response: aiohttp.ClientResponse) -> bytes:
    """A whole answer. A large one is put together in a thread, where joining lets the others run."""
    pieces = [piece async for piece in response.content.iter_any()]
    if sum(map(len, pieces)) > _LARGE:
        return await asyncio.to_thread(b"".join, pieces)
    return b"".join(pieces)


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UpstreamError(f"the engine broke off: {type(error).__name__}") from error


def _refused(response: aiohttp.ClientResponse, content: bytes) -> UpstreamError:
    try:
        body: Any = orjson.loads(content)
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    told = message or (body.get("message") if isinstance(body, dict) else None)
    text = told or content.decode(errors="replace")[:500]
    after = response.headers.get("retry-after")
    return UpstreamError(str(text), status=response.status, body=body, retry_after=after)


def _accepted(response: aiohttp.ClientResponse, content: bytes) -> bytes:
    if response.status >= 400:
        raise _refused(response, content)
    return content


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(content)
    except ValueError:
        return {}  # vLLM answers adapter calls with plain text
    return body if isinstance(body, dict) else {}
