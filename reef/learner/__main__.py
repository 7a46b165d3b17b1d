"""The learner process: `python -m reef.learner CONFIG.json`, as `reef serve` starts it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reef.config import Config, explain
from reef.engine.base import EngineClient
from reef.errors import ConfigError
from reef.learner.canary import Canaries
from reef.learner.erasing import Erasing
from reef.learner.judging import Judging
from reef.learner.loop import GatewayAdmin, Learner
from reef.learner.observer import Observer
from reef.learner.steps import Steps, StepSettings
from reef.learner.turns import Turns
from reef.recipe import Recipe, RecipeTools, load
from reef.service import gate_limits, read_run_config
from reef.sessions.index import expect_many
from reef.store.database import open_database
from reef.store.learn import LearnStore
from reef.store.lock import acquire_database
from reef.store.log import LogReader
from reef.store.migrations import LEARN, LOG
from reef.store.retention import Pruning

LOCK_WAIT_S = 20.0
"""for the learner of a service that was killed a moment ago to end"""

HINDSIGHT_TOKENS = 256
"""limit of a reply that a recipe asks of the untrained policy"""


def make_recipe(config: Config, model_dir: Path) -> Recipe:
    """The configured recipe with its tools. Raises ConfigError or RecipeError."""
    from reef.model import ModelTokenizer

    generate = untrained(config) if config.engine.url else None
    tools = RecipeTools(ModelTokenizer(model_dir), str(model_dir), config.prm, generate, config.store.dir)
    found = load(config.recipe_name)
    return found(recipe_config(config), tools)


def untrained(config: Config) -> Callable[[Sequence[Mapping[str, str]], int], Awaitable[list[str]]]:
    """Replies of the base model, asked of the engine directly: they are nobody's traffic."""
    assert config.engine.url is not None
    engine = EngineClient(config.engine.url, key=config.engine.key)

    async def generate(messages: Sequence[Mapping[str, str]], n: int) -> list[str]:
        body = {
            "model": await engine.base_model(),
            "messages": list(messages),
            "temperature": config.policy.temperature,
            "max_tokens": HINDSIGHT_TOKENS,
        }
        answers = await asyncio.gather(*(engine.post("/v1/chat/completions", body) for _ in range(n)))
        return [answer["choices"][0]["message"]["content"] or "" for answer in answers]

    return generate


def recipe_config(config: Config) -> Any:
    """The `recipe` section, checked by the recipe's own model. Raises ConfigError."""
    model = load(config.recipe_name).Config
    try:
        return model.model_validate(config.recipe_settings)
    except ValidationError as error:
        raise ConfigError(explain(error, model, "recipe")) from None


def step_settings(config: Config, recipe: Recipe) -> StepSettings:
    return StepSettings(
        batch_size=recipe.config.batch_size,
        max_staleness=recipe.config.max_staleness,
        lr=config.train.lr,
        epochs=config.train.epochs,
        seed=config.train.seed,
        max_attempts=config.train.max_attempts,
        idle_s=config.train.idle_s,
        min_batch=config.train.min_batch,
        joint=config.joint_chain,
    )


def make_learner(config: Config, recipe: Recipe, gateway: GatewayAdmin | None) -> Learner:
    """A learner on the configured store, the only one. Raises StoreError naming the other."""
    log = LogReader(open_database(config.store.log_url, LOG))
    engine = open_database(config.store.learn_url, LEARN, durability=config.store.durability)
    lock = acquire_database(engine, "learner", config.store.dir, wait_s=LOCK_WAIT_S)
    learn = LearnStore(engine)
    turns = Turns(log, learn)
    observer = Observer(
        log,
        learn,
        config.sessions,
        session_ttl_s=recipe.config.session_ttl_s,
    )
    judging = Judging(learn, turns, recipe, concurrency=getattr(recipe.config, "prm_concurrency", 8))
    steps = None
    if config.train.enabled:
        folder = config.store.dir / "steps"
        steps = Steps(log, learn, turns, recipe, folder, step_settings(config, recipe))
    also = getattr(recipe, "forget", None)  # a recipe that keeps words of its own
    forget = [observer.forget, also] if also else [observer.forget]
    erasing = Erasing(log, learn, engine, config.store.dir / "steps", forget)
    keep = config.store.keep_releases
    pruning = Pruning(config.store.dir / "releases", engine, log, keep) if keep else None
    canaries = make_canaries(config, log, learn, gateway)
    return Learner(log, learn, observer, judging, steps, gateway, canaries, erasing=erasing, pruning=pruning, lock=lock)


def make_canaries(config: Config, log: LogReader, learn: LearnStore, gateway: GatewayAdmin | None) -> Canaries | None:
    """The watch over what is served, unless it is switched off or nothing switches versions."""
    if gateway is None or config.engine.url is None or not (config.gate.enabled and config.gate.canary_s):
        return None
    engine = EngineClient(config.engine.url, key=config.engine.key)
    return Canaries(log, learn, engine, gateway.url, gate_limits(config.gate), config.gate.canary_s)


async def _run(config: Config, model_dir: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    admin = next((k.key for k in config.server.keys if k.role == "admin"), None)
    host = config.server.host if config.server.host not in ("0.0.0.0", "::", "localhost") else "127.0.0.1"
    gateway = GatewayAdmin(f"http://{host}:{config.server.port}", admin)
    learner = make_learner(config, make_recipe(config, model_dir), gateway)
    await learner.run(stop)


def main() -> None:
    config, model_dir = read_run_config(Path(sys.argv[1]))
    logging.basicConfig(
        level=config.observe.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    expect_many()
    asyncio.run(_run(config, model_dir))


if __name__ == "__main__":
    main()
