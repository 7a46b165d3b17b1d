"""Which version each scenario is served at, and switching it without a failed request.

Invariant: load first, switch after, unload when the last request of the old version has ended. A
version is pinned to a request by `lease` before it is sent, so an exchange has exactly one. The
switch is recorded in the log before it takes effect. Knows nothing of training.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from reef.engine.base import EngineClient
from reef.errors import ModelError, NotFound, UpstreamError
from reef.releases.chain import adapter_name, read_release, version_folder

log = logging.getLogger("reef.publish")
KEEP_LOADED = 2
"""older versions of a scenario kept in the engine, so that a rollback is instant"""
MAX_LOADED = 32
"""versions in the engine, over all scenarios; the one unused for longest makes room"""


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's hold on the version that answers it."""

    scenario: str
    version: int
    model: str
    """name to ask the engine for"""


class Publisher:
    """The versions being served. One per gateway process."""

    def __init__(
        self,
        engine: EngineClient,
        releases: Path,
        record: Callable[[str, int, str], Awaitable[None]],
        served: dict[str, int],
        *,
        max_loaded: int = MAX_LOADED,
        joint: str | None = None,
    ) -> None:
        self._engine = engine
        self._releases = releases
        self._record = record
        self._served = dict(served)
        self._in_flight: Counter[str] = Counter()
        self._loaded: dict[str, tuple[str, int]] = {}
        """in the engine, the one used last at the end"""
        self._max_loaded = max_loaded
        self._joint = joint
        self._base: str | None = None
        self._lock = asyncio.Lock()

    def chain(self, scenario: str) -> str:
        """The chain of versions that answers a scenario: its own, or the one all share."""
        return self._joint or scenario

    def version(self, scenario: str) -> int:
        return self._served.get(self.chain(scenario), 0)

    @property
    def served(self) -> dict[str, int]:
        return dict(self._served)

    async def base_model(self) -> str:
        if self._base is None:
            self._base = await self._engine.base_model()
        return self._base

    @asynccontextmanager
    async def lease(self, scenario: str) -> AsyncIterator[Lease]:
        """Hold the scenario's current version for one request."""
        scenario = self.chain(scenario)
        version = self.version(scenario)
        name = await self.base_model()
        if version:
            name = adapter_name(scenario, version)
            if name not in self._loaded:
                async with self._lock:
                    await self._load(scenario, version)
            self._loaded[name] = self._loaded.pop(name, (scenario, version))
        self._in_flight[name] += 1
        try:
            await self._make_room()
            yield Lease(scenario, version, name)
        finally:
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]

    async def serve(self, scenario: str, version: int, by: str) -> None:
        """Serve `version` from the next request on. Raises NotFound for a version that is not there
        or was rejected, UpstreamError if the engine can't load it (nothing is switched then)."""
        scenario = self.chain(scenario)
        async with self._lock:
            if version:
                await self._load(scenario, version)
            await self._record(scenario, version, by)
            self._served[scenario] = version
        log.info("%s is served at version %d (by %s)", scenario, version, by)
        await self._unload_idle(scenario)
        await self._make_room()

    async def follow(self, read: Callable[[], Awaitable[dict[str, int]]]) -> None:
        """Serve what the log says is served, since another gateway may have switched. A version is
        loaded by the first request that needs it."""
        async with self._lock:  # a switch of our own is either in what is read or comes after it
            for scenario, version in (await read()).items():
                if self.version(scenario) != version:
                    log.info("%s is served at version %d (switched elsewhere)", scenario, version)
                    self._served[scenario] = version

    def forget_loaded(self) -> None:
        """The engine has restarted: nothing is loaded there any more."""
        self._loaded.clear()
        self._base = None

    def is_loaded(self, name: str) -> bool:
        return name in self._loaded

    async def _load(self, scenario: str, version: int) -> None:
        name = adapter_name(scenario, version)
        if name in self._loaded:
            return
        folder = version_folder(self._releases, scenario, version)
        if not folder.is_dir():
            raise NotFound(f"{scenario} has no version {version}")
        release = read_release(folder)
        if not release.servable:
            raise NotFound(f"version {version} of {scenario} was rejected by its gate and can't be served")
        try:
            await asyncio.to_thread(release.verify)
        except ModelError as error:
            raise NotFound(f"version {version} of {scenario} can't be served: {error}") from error
        await self._engine.load_adapter(name, str(folder.resolve()))
        self._loaded[name] = (scenario, version)

    async def _unload_idle(self, scenario: str) -> None:
        mine = sorted(v for s, v in self._loaded.values() if s == scenario)
        current = self.version(scenario)
        for version in [v for v in mine if v != current][:-KEEP_LOADED]:
            await self._unload(adapter_name(scenario, version))

    async def _make_room(self) -> None:
        """Unload what was unused for longest until no more than `max_loaded` remain."""
        for name in list(self._loaded)[: max(0, len(self._loaded) - self._max_loaded)]:
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        """Drop an adapter nobody uses now; one in flight is taken up again later."""
        async with self._lock:  # else a load of the same name could overtake it
            if self._in_flight.get(name) or self._loaded.pop(name, None) is None:
                return
            try:
                await self._engine.unload_adapter(name)
            except UpstreamError as error:
                log.warning("could not unload %s: %s", name, error)
