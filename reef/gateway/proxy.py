"""One request through the engine: lease a version, inject, forward, strip, translate, record, answer.

Invariant: the exchange is durable before its last byte (or final event) leaves, and each request that
reached this module ends as exactly one record, also when the client leaves or the engine breaks off.
The engine is asked again only while the client has nothing of the answer. Knows dialects by their
interface only; knows no session and no training.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from ulid import ULID

from reef.config import Config
from reef.engine.base import EngineClient
from reef.errors import ReefError, StoreError, UpstreamError
from reef.gateway.body import LARGE, aside
from reef.gateway.delivery import EventStream
from reef.gateway.errors import status_of
from reef.gateway.memo import ServedMemo
from reef.releases.publish import Lease, Publisher
from reef.store.log import LogWriter
from reef.wire import sse
from reef.wire.answer import Answer, inject, sampling_of
from reef.wire.dialect import Dialect, Translator
from reef.wire.exchange import Api, Delivered, Exchange

RETRIED = frozenset({429, 500, 502, 503, 529})
"""statuses of an engine that may do better in a moment"""
LONGEST_PAUSE_S = 5.0
TOKEN_BYTES = 500
"""of a sampled token in a record, about"""
DRAIN_S = 0.2
"""how long an engine may keep a stream open after its last event"""


@dataclass(slots=True)
class Call:
    """A request on its way: what is needed to record it, filled in as it is answered."""

    dialect: Dialect
    scenario: str
    client: str | None
    headers: Mapping[str, str]
    request: Mapping[str, Any]
    """as the client sent it"""
    asked: Mapping[str, Any]
    """as the engine's route takes it, before Reef adds anything"""
    size: int = 0
    """bytes of the client's body"""
    id: str = field(default_factory=lambda: str(ULID()))
    started: float = field(default_factory=time.time)
    version: int = 0
    sent: Mapping[str, Any] = field(default_factory=dict)
    memo: tuple[str, ...] = ()
    """rules of the memo that `sent` has in its prompt"""
    answer: Answer = field(init=False)
    translator: Translator = field(init=False)
    recorded: bool = False

    def __post_init__(self) -> None:
        self.answer = Answer(self.asked)
        self.translator = self.dialect.translator(self.request, self.id, self.answer)


class Proxy:
    """Answers requests from the engine and records each as one exchange."""

    def __init__(
        self,
        config: Config,
        engine: EngineClient,
        publisher: Publisher,
        writer: LogWriter,
        memo: ServedMemo | None = None,
    ) -> None:
        self.memo = memo or ServedMemo()
        self._config = config
        self._engine = engine
        self._publisher = publisher
        self._writer = writer
        self._exact = config.engine.kind != "openai"

    def headers(self, call: Call) -> dict[str, str]:
        """Response headers: the receipt, the version that answers, and how many rules of the memo it was told."""
        told = {"x-reef-memo": str(len(call.memo))} if call.memo else {}
        return {"x-reef-agent-record-id": call.id, "x-reef-version": str(call.version), **told}

    async def whole(self, call: Call) -> dict[str, Any]:
        """The body of a non-streamed answer, recorded. Raises ReefError once the failure is recorded, and
        StoreError where nothing can be recorded."""
        self._writer.admit()
        try:
            async with asyncio.timeout(self._engine.timeouts.total):
                shown = await self._attempts(call, self._whole_once)
        except asyncio.CancelledError:
            await self._record(call, 499, Delivered.NONE, error=None)
            raise
        except TimeoutError:
            raise await self._failed(call, _silent("the answer took too long")) from None
        except ReefError as error:
            raise await self._failed(call, error) from error
        except Exception as error:  # a fault of ours: it must not cost the record
            await self._failed(call, ReefError(f"internal error: {error!r}"))
            raise
        await self._record(call, 200, Delivered.FULL, error=None)
        return shown

    async def stream(self, call: Call, out: EventStream) -> None:
        """Send a streamed answer to `out`, recorded as it ends.

        Raises ReefError, once it is recorded, for what failed before `out` was started; later failures
        are events of the stream. Raises StoreError where nothing can be recorded.
        """
        self._writer.admit()
        last = b""
        try:
            async with out.kept_alive(lambda: call.translator.keep_alive(), self._config.server.keepalive_s):
                await self._attempts(call, lambda call, lease: self._stream_once(call, lease, out), out)
            last = call.translator.final()
            await self._record(call, 200, Delivered.FULL, error=None)
        except asyncio.CancelledError:
            delivered = Delivered.PARTIAL if out.wrote else Delivered.NONE
            await self._record(call, 499, delivered, error=None)
            raise
        except StoreError as error:  # the answer must not look complete: it is in no record
            if not out.started:
                raise
            last = call.translator.failed(error)
        except ReefError as error:
            delivered = Delivered.PARTIAL if out.started else Delivered.FULL
            error = await self._failed(call, error, delivered)
            if not out.started:
                raise error from None
            last = call.translator.failed(error)
        except Exception as error:  # a fault of ours: it must not cost the record
            await self._failed(call, ReefError(f"internal error: {error!r}"), Delivered.PARTIAL)
            raise
        await out.end(last)

    async def _attempts(self, call: Call, once: Any, out: EventStream | None = None) -> Any:
        """The result of `once`, tried again while that is allowed."""
        retries = self._config.engine.retries
        reloaded = False
        while True:
            lease: Lease | None = None
            try:
                async with self._publisher.lease(call.scenario) as lease:
                    call.version = lease.version
                    call.sent = self._sent(call, lease)
                    return await once(call, lease)
            except UpstreamError as error:
                if out is not None and out.wrote:
                    raise
                if lease is not None and not reloaded and _lost_adapter(error, lease):
                    if self._publisher.is_loaded(lease.model):  # else another request has seen the restart
                        self._publisher.forget_loaded()
                    reloaded = True
                elif error.status in RETRIED and retries > 0:
                    retries -= 1
                    await asyncio.sleep(_pause(error, self._config.engine.retries - retries))
                else:
                    raise
                call.answer.forget()

    async def _whole_once(self, call: Call, lease: Lease) -> dict[str, Any]:
        body = await aside(call.size, orjson.dumps, call.sent)
        content = await self._engine.ask(call.dialect.engine_path, body)
        return await aside(len(content), _translate_whole, call, content)

    async def _stream_once(self, call: Call, lease: Lease, out: EventStream) -> None:
        """Forward one stream. Returns when the engine has finished; what ends the answer is still held."""
        times = self._engine.timeouts
        loop = asyncio.get_running_loop()
        last = loop.time() + times.total
        ended = False
        body = await aside(call.size, orjson.dumps, call.sent)
        try:
            async with (
                asyncio.timeout_at(min(loop.time() + times.first_byte, last)) as clock,
                self._engine.stream(call.dialect.engine_path, body) as upstream,
            ):
                splitter = sse.Splitter()
                async for piece in upstream:
                    if ended:
                        continue
                    ready: list[bytes] = []
                    try:
                        for data in splitter.feed(piece):
                            if ended := data.strip() == b"[DONE]":
                                break
                            ready.append(_translate(call, data))
                    finally:  # what came before a chunk that can't be read is the client's
                        await out.write(b"".join(ready))
                    # the body is read to its end, else the connection could not be used again
                    clock.reschedule(min(loop.time() + (DRAIN_S if ended else times.idle), last))
        except TimeoutError:
            if not ended:
                raise _silent("the engine was silent for too long") from None
        except UpstreamError:
            if not ended:
                raise
        if not call.translator.finished:
            raise UpstreamError("the engine ended its stream without finishing the answer")

    def _sent(self, call: Call, lease: Lease) -> dict[str, Any]:
        policy = self._config.policy
        asked, call.memo = self.memo.put(call.dialect, call.scenario, call.asked)
        if policy.sampling == "train":
            asked.update(temperature=policy.temperature, top_p=1.0, top_k=None, min_p=None)
        elif asked.get("temperature") is None:
            asked["temperature"] = policy.temperature
        return inject(
            asked,
            model=lease.model,
            top_logprobs=self._config.engine.top_logprobs,
            exact=self._exact,
            chat=call.dialect.api is not Api.COMPLETIONS,
        )

    async def _failed(self, call: Call, error: ReefError, delivered: Delivered = Delivered.FULL) -> ReefError:
        """Record a failure; returns the error the client is told: that nothing can be recorded, if so."""
        try:
            await self._record(call, status_of(error), delivered, error=str(error) or type(error).__name__)
        except StoreError as unrecorded:
            return unrecorded
        return error

    async def _record(self, call: Call, status: int, delivered: Delivered, *, error: str | None) -> None:
        if call.recorded:
            return
        call.recorded = True
        exchange = Exchange(
            id=call.id,
            time=time.time(),
            started=call.started,
            api=call.dialect.api,
            scenario=call.scenario,
            client=call.client,
            headers=call.headers,
            request=call.request,
            response=call.translator.response,
            status=status,
            delivered=delivered,
            sampled=call.answer.sampled(call.version, sampling_of(call.sent)),
            error=error,
            memo=call.memo,
        )
        size = call.size + TOKEN_BYTES * len(call.answer.token_ids)
        await self._writer.exchange(exchange, large=size > LARGE)


def _lost_adapter(error: UpstreamError, lease: Lease) -> bool:
    """A restarted engine does not know its adapters any more."""
    return error.status == 404 and lease.version > 0


def _translate_whole(call: Call, content: bytes) -> dict[str, Any]:
    """A whole answer as the client's body. Raises UpstreamError for one that is unreadable."""
    try:
        response = call.answer.load(content)
        if not response.get("choices"):
            raise UpstreamError("the engine's answer has no choices")
        return call.translator.whole(call.answer.whole(response))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UpstreamError(f"the engine's answer is not readable: {error!r}") from error


def _translate(call: Call, data: bytes) -> bytes:
    """One chunk as the client's events. Raises UpstreamError for one that is an error or unreadable."""
    try:
        chunk = call.answer.load(data)
        if "error" in chunk and not chunk.get("choices"):
            told = chunk["error"]
            raise UpstreamError(str(told.get("message") if isinstance(told, dict) else told), body=chunk)
        shown = call.answer.chunk(chunk)
        return b"" if shown is None else call.translator.chunk(shown)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UpstreamError(f"the engine's stream is not readable: {error!r}") from error


def _silent(what: str) -> UpstreamError:
    return UpstreamError(what, status=504)


def _pause(error: UpstreamError, attempt: int) -> float:
    """Seconds before the next attempt: what the engine asked for, else growing and spread out."""
    try:
        asked = float(error.retry_after or "")
    except ValueError:
        asked = 0.1 * 2**attempt * random.uniform(0.5, 1.0)
    return min(max(asked, 0.0), LONGEST_PAUSE_S)
