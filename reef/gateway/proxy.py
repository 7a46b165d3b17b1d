"""One request through the engine: lease a version, inject, forward, strip, record, answer.

Invariant: the exchange is durable before its last byte (or final event) leaves, and each request that
reached this module ends as exactly one record, also when the client leaves or the engine breaks off.
Knows one dialect's reader; knows no session and no training.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from ulid import ULID

from reef.config import Config
from reef.engine.base import EngineClient
from reef.errors import UpstreamError
from reef.gateway.errors import openai_error
from reef.releases.publish import Lease, Publisher
from reef.store.log import LogWriter
from reef.wire import chat, sse
from reef.wire.exchange import Api, Delivered, Exchange


@dataclass(slots=True)
class Call:
    """A request on its way: what is needed to record it, filled in as it is answered."""

    scenario: str
    client: str | None
    headers: Mapping[str, str]
    request: Mapping[str, Any]
    """as the client sent it"""
    id: str = field(default_factory=lambda: str(ULID()))
    started: float = field(default_factory=time.time)


class Proxy:
    """Answers chat requests from the engine and records each as one exchange."""

    def __init__(self, config: Config, engine: EngineClient, publisher: Publisher, writer: LogWriter) -> None:
        self._config = config
        self._engine = engine
        self._publisher = publisher
        self._writer = writer
        self._exact = config.engine.kind != "openai"

    def _sent(self, call: Call, lease: Lease) -> dict[str, Any]:
        policy = self._config.policy
        sent = chat.inject(
            call.request, model=lease.model, top_logprobs=self._config.engine.top_logprobs, exact=self._exact
        )
        if policy.sampling == "train":
            sent.update(temperature=policy.temperature, top_p=1.0)
            sent.pop("top_k", None)
        elif sent.get("temperature") is None:
            sent["temperature"] = policy.temperature
        return sent

    def headers(self, call: Call, version: int) -> dict[str, str]:
        return {"x-reef-agent-record-id": call.id, "x-reef-version": str(version)}

    async def whole(self, call: Call) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) of a non-streamed answer, recorded."""
        answer = chat.Answer(call.request)
        async with self._publisher.lease(call.scenario) as lease:
            sent = self._sent(call, lease)
            headers = self.headers(call, lease.version)
            try:
                response = await self._with_reload(lease, sent)
                shown = answer.whole(response)
            except asyncio.CancelledError:
                await asyncio.shield(self._record(call, answer, sent, lease, 499, Delivered.NONE))
                raise
            except UpstreamError as error:
                body = error.body if isinstance(error.body, dict) else openai_error(error)
                await self._record(call, answer, sent, lease, error.status, Delivered.FULL, error=str(error))
                return error.status, body, headers
            await self._record(call, answer, sent, lease, 200, Delivered.FULL)
            return 200, shown, headers

    async def stream(self, call: Call) -> tuple[int, dict[str, Any] | AsyncGenerator[bytes, None], dict[str, str]]:
        """(status, events or error body, headers) of a streamed answer, recorded as it ends.

        The caller must exhaust or close the iterator; closing it early is the client leaving.
        """
        answer = chat.Answer(call.request)
        stack = AsyncExitStack()
        lease = await stack.enter_async_context(self._publisher.lease(call.scenario))
        sent = self._sent(call, lease)
        headers = self.headers(call, lease.version)
        try:
            upstream = await stack.enter_async_context(self._engine.chat_stream(sent))
        except UpstreamError as error:
            await stack.aclose()
            if self._lost_adapter(error, lease):
                self._publisher.forget_loaded()
                return await self.stream(call)
            body = error.body if isinstance(error.body, dict) else openai_error(error)
            await self._record(call, answer, sent, lease, error.status, Delivered.FULL, error=str(error))
            return error.status, body, headers
        except asyncio.CancelledError:
            await stack.aclose()
            await asyncio.shield(self._record(call, answer, sent, lease, 499, Delivered.NONE))
            raise
        return 200, self._events(call, answer, sent, lease, upstream, stack), headers

    async def _events(
        self,
        call: Call,
        answer: chat.Answer,
        sent: Mapping[str, Any],
        lease: Lease,
        upstream: AsyncIterator[bytes],
        stack: AsyncExitStack,
    ) -> AsyncGenerator[bytes, None]:
        outcome = (499, Delivered.PARTIAL, None)
        held: bytes | None = None  # the newest event waits until it is known not to be the last one
        recorded = False
        try:
            ended = False
            async for data in sse.events(upstream):
                if data.strip() == "[DONE]":
                    ended = True
                    break
                if held is not None:
                    yield held
                held = sse.event(answer.chunk(json.loads(data)))
            if not ended:
                raise UpstreamError("the engine ended its stream without a final event")
            await self._record(call, answer, sent, lease, 200, Delivered.FULL)
            recorded = True
            if held is not None:
                yield held
            yield sse.DONE
        except (UpstreamError, json.JSONDecodeError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, UpstreamError) else f"unreadable stream: {error!r}"
            outcome = (502, Delivered.PARTIAL, reason)
            await self._record(call, answer, sent, lease, 502, Delivered.PARTIAL, error=reason)
            recorded = True
            if held is not None:
                yield held
            yield sse.event(openai_error(UpstreamError(reason)))
        finally:
            if not recorded:
                status, delivered, reason = outcome
                await asyncio.shield(self._record(call, answer, sent, lease, status, delivered, error=reason))
            await stack.aclose()

    async def _with_reload(self, lease: Lease, sent: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._engine.chat(sent)
        except UpstreamError as error:
            if not self._lost_adapter(error, lease):
                raise
            self._publisher.forget_loaded()
            async with self._publisher.lease(lease.scenario):  # loads it again
                return await self._engine.chat(sent)

    def _lost_adapter(self, error: UpstreamError, lease: Lease) -> bool:
        """A restarted engine does not know its adapters any more."""
        return error.status == 404 and lease.version > 0 and self._publisher.is_loaded(lease.model)

    async def _record(
        self,
        call: Call,
        answer: chat.Answer,
        sent: Mapping[str, Any],
        lease: Lease,
        status: int,
        delivered: Delivered,
        *,
        error: str | None = None,
    ) -> None:
        await self._writer.exchange(
            Exchange(
                id=call.id,
                time=time.time(),
                started=call.started,
                api=Api.CHAT,
                scenario=call.scenario,
                client=call.client,
                headers=call.headers,
                request=call.request,
                response=answer.response,
                status=status,
                delivered=delivered,
                sampled=answer.sampled(lease.version, chat.sampling_of(sent)),
                error=error,
            )
        )
