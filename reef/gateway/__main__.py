"""The gateway process: `python -m reef.gateway CONFIG.json`, as `reef serve` starts it."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from reef.config import Config
from reef.engine.base import EngineClient, Timeouts
from reef.gateway.app import build_app
from reef.gateway.body import Limits
from reef.gateway.forget import forget_session
from reef.gateway.history import History
from reef.gateway.memo import ServedMemo
from reef.gateway.proxy import Proxy
from reef.gateway.services import Services
from reef.gateway.upkeep import Upkeep, shared
from reef.observe.views import Views
from reef.releases.publish import Publisher
from reef.service import read_run_config
from reef.store.database import open_database
from reef.store.log import LogReader, LogWriter
from reef.store.memo import MemoStore
from reef.store.migrations import LEARN, LOG
from reef.store.redact import Redactor
from reef.store.retention import Limits as Kept
from reef.store.retention import Retention


def gateway_app(config: Config) -> Starlette:
    """The application with its real parts. Raises StoreError."""
    log = open_database(config.store.log_url, LOG, durability=config.store.durability)
    learn = open_database(config.store.learn_url, LEARN)
    assert config.engine.url is not None
    server = config.server
    times = Timeouts(
        connect=server.connect_timeout_s,
        first_byte=server.first_byte_timeout_s,
        idle=server.idle_timeout_s,
        total=server.total_timeout_s,
    )
    limits = Limits(body=int(server.max_body_mb * 2**20), headers=int(server.max_header_kb * 1024))
    engine = EngineClient(config.engine.url, key=config.engine.key, timeouts=times)
    redactor = Redactor(config.store.redact, config.store.redact_patterns)
    writer = LogWriter(
        log,
        capacity=config.store.queue,
        when_full=config.store.when_full,
        redact=redactor.exchange if redactor else None,
        redact_text=redactor.text if redactor else None,
    )
    reader = LogReader(log)
    publisher = Publisher(
        engine,
        config.store.dir / "releases",
        writer.serving,
        reader.served(),
        max_loaded=config.max_adapters,
        joint=config.joint_chain,
    )
    memo = ServedMemo(MemoStore(learn)) if config.policy.serve_memo else None
    proxy = Proxy(config, engine, publisher, writer, memo)
    kept = Kept(config.store.keep_days, int(config.store.keep_gb * 2**30) if config.store.keep_gb else None)
    upkeep = Upkeep(publisher, reader, writer, shared(log), Retention(log, learn, writer, kept) if kept else None, memo)

    async def forget(session: str) -> dict[str, Any]:
        return await forget_session(session, log, learn, writer)

    views, history = Views(log, learn), History(reader)
    return build_app(Services(config, engine, publisher, writer, proxy, views, history, limits, upkeep, forget))


SWITCH_S = 0.0005
"""how long a thread that computes may keep the others waiting: the writer holds up answers otherwise"""


def _calm() -> None:
    """Have collector and threads interrupt requests less: an answer is thousands of objects and no cycle, which
    the collector walks again and again with its usual thresholds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    sys.setswitchinterval(SWITCH_S)


def main() -> None:
    config, _ = read_run_config(Path(sys.argv[1]))
    logging.basicConfig(
        level=config.observe.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _calm()
    uvicorn.run(
        gateway_app(config),
        host=config.server.host,
        port=config.server.port,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=max(1, int(config.server.drain_timeout_s)),
    )


if __name__ == "__main__":
    main()
