"""One client for every engine.

An engine is an OpenAI-style server with vLLM's field names: it returns sampled token ids and
log-probs on request and loads named LoRA adapters at run time. vLLM does, SGLang does, the embedded
CPU engine offers the same surface. This module owns the connection and nothing else; it knows no
session, no store and no training.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from reef.errors import UpstreamError

_JSON = {"content-type": "application/json"}


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
    """An engine at a base URL (without /v1)."""

    def __init__(self, url: str, *, key: str | None = None, timeouts: Timeouts = Timeouts()) -> None:
        self.url = url.rstrip("/")
        self.timeouts = timeouts
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeouts.total, connect=timeouts.connect),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer. Raises UpstreamError with the engine's status and body."""
        try:
            response = await self._client.post(path, content=orjson.dumps(body), headers=_JSON)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return _answer(response)

    @asynccontextmanager
    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The raw bytes of a streamed answer. Raises UpstreamError before the first byte if refused;
        leaving the context early closes the connection, which cancels generation. Silence is the
        caller's to bound."""
        request = self._client.build_request("POST", path, content=orjson.dumps(body), headers=_JSON)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        try:
            if response.status_code >= 400:
                await response.aread()
                raise _refused(response)
            yield self._bytes(response)
        finally:
            await response.aclose()

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
            response = await self._client.get("/health", timeout=5.0)
        except httpx.HTTPError as error:
            return Health(False, f"not reachable: {type(error).__name__}")
        return Health(response.status_code < 400, f"status {response.status_code}")

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._client.get(path, timeout=self.timeouts.connect)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return _answer(response)

    async def _bytes(self, response: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for chunk in response.aiter_bytes():
                yield chunk
        except httpx.HTTPError as error:
            raise UpstreamError(f"the engine broke off: {type(error).__name__}") from error

    def _unreachable(self, error: httpx.HTTPError) -> UpstreamError:
        status = 504 if isinstance(error, httpx.TimeoutException) else 502
        return UpstreamError(f"the engine at {self.url} can't be reached: {type(error).__name__}", status=status)


def _refused(response: httpx.Response) -> UpstreamError:
    try:
        body: Any = response.json()
    except ValueError:
        body = None
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    text = message or (body.get("message") if isinstance(body, dict) else None) or response.text[:500]
    after = response.headers.get("retry-after")
    return UpstreamError(str(text), status=response.status_code, body=body, retry_after=after)


def _answer(response: httpx.Response) -> dict[str, Any]:
    if response.status_code >= 400:
        raise _refused(response)
    try:
        body = orjson.loads(response.content)
    except ValueError:
        return {}  # vLLM answers adapter calls with plain text
    return body if isinstance(body, dict) else {}
