"""What the gateway's routes work with, and whom a request belongs to.

Knows no route and no dialect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reef.config import Config
from reef.engine.base import EngineClient
from reef.errors import BadRequest, Forbidden
from reef.gateway.auth import Caller
from reef.gateway.body import Limits
from reef.gateway.history import History
from reef.gateway.proxy import Proxy
from reef.gateway.upkeep import Upkeep
from reef.observe.views import Views
from reef.releases.chain import SCENARIO_RULE, is_scenario
from reef.releases.publish import Publisher
from reef.store.log import LogWriter


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes work with."""

    config: Config
    engine: EngineClient
    publisher: Publisher
    writer: LogWriter
    proxy: Proxy
    views: Views
    history: History
    limits: Limits
    upkeep: Upkeep | None = None
    forget: Callable[[str], Awaitable[dict[str, Any]]] | None = None
    """forgets a session, by its id"""


def scenario_of(headers: Mapping[str, str], caller: Caller, config: Config) -> str:
    """The scenario a request belongs to. Raises Forbidden if its key is bound to another, BadRequest for a name
    that none can have."""
    asked = headers.get("x-reef-scenario")
    if caller.scenario and asked not in (None, caller.scenario):
        raise Forbidden(f"this key belongs to scenario '{caller.scenario}'")
    name = caller.scenario or asked or config.policy.scenario
    if not is_scenario(name):
        raise BadRequest(SCENARIO_RULE)
    return name


async def model_names(services: Services, scenario: str) -> list[str]:
    """Names a client may use under `strict`: the base model's and the scenario's."""
    return list(dict.fromkeys((await services.publisher.base_model(), scenario)))
