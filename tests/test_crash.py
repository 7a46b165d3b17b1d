"""Kill -9 and power cuts against the real stack: `benchmarks/crash.py` and `benchmarks/power.py`, short."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks import crash, power
from reef.config import load_config
from reef.service import claim_port
from reef.store.database import open_database
from reef.store.files import write_json
from reef.store.log import LogReader
from reef.store.migrations import LOG
from tests.postgres import binaries
from tests.scripted_engine import Script, scripted_app
from tests.sockets import serving

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_twenty_kills_lose_nothing_and_train_nothing_twice(store: str, tmp_path: Path) -> None:
    if store == "postgres" and binaries() is None:
        pytest.skip("no PostgreSQL server is installed")
    found = crash.run(tmp_path, store, 20, clients=2, pause_s=0.3, mean_s=0.5, seed=0)
    assert found.problems == []
    assert found.numbers["trained"] >= 8, found.numbers
    assert found.numbers["answered"] > 20, found.numbers


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_power_cut_loses_no_answer_that_power_promised(durability: str, tmp_path: Path) -> None:
    if (reason := power.impossible()) is not None:
        pytest.skip(reason)
    cuts = 2 if durability == "power" else 1
    found = power.run(tmp_path, cuts, durability=durability, clients=4, pause_s=0.05, seconds=4.0)
    if durability == "power":
        assert found.problems == []
        assert found.numbers["answered"] > 20, found.numbers
    else:  # what is promised less costs less, and shows that the cut is one
        assert found.numbers["answered but not in the log"] > 0, found.numbers


def test_at_sigterm_an_answer_in_flight_ends_and_is_recorded(tmp_path: Path) -> None:
    script = Script(reply=lambda body: "a slow answer of some length", pause_s=0.05)
    with serving(scripted_app(script)) as engine:
        pairs = [("store.dir", str(tmp_path / "data")), ("engine.kind", "vllm"), ("engine.url", engine)]
        port = claim_port("127.0.0.1", 0)
        config = load_config(None, [*pairs, ("server.port", str(port))], {})
        write_json(tmp_path / "config.json", {**config.model_dump(mode="json"), "model_dir": str(tmp_path)})
        command = [sys.executable, "-m", "reef.gateway", str(tmp_path / "config.json")]
        gateway = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        url = f"http://127.0.0.1:{port}"
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        try:
            deadline = time.monotonic() + 180
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/readyz").status_code == 200:
                        break
                time.sleep(0.1)
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                gateway.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert gateway.wait(60) is not None
        finally:
            gateway.kill()
            gateway.wait()
        (exchange,) = LogReader(open_database(config.store.log_url, LOG)).tail(0)
        assert exchange.id == response.headers["x-reef-agent-record-id"]
        assert exchange.status == 200
