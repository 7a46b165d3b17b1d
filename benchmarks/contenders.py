"""The processes that `gateway.py` measures, each started on a free loopback port and ended with it.

LiteLLM and reef-infra live in virtual environments of their own, made in a folder the user names; what
is not there is left out with a line that says so. Knows how each is started, nothing of measuring.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

HERE = Path(__file__).parent
PACKAGES = {"litellm": "litellm[proxy]", "reef-infra": "reef-infra==0.0.2"}
START_S = 120.0


@dataclass
class Contender(AbstractContextManager["Contender"]):
    """A server process."""

    name: str
    command: Sequence[str]
    port: int
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/v1/models"
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def __enter__(self) -> Contender:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = (self.folder / f"{self.name}.log").open("wb")
        self.process = subprocess.Popen(
            self.command, stdout=self.log, stderr=subprocess.STDOUT, cwd=self.folder, env={**os.environ, **self.env}
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(self.url + self.ready, timeout=2).status_code < 500:
                    return self
            except httpx.HTTPError:
                time.sleep(0.1)
        self.__exit__(None, None, None)
        raise RuntimeError(f"{self.name} did not start: {(self.folder / f'{self.name}.log').read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.log is not None:
            self.log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def engine(folder: Path, *options: str) -> Contender:
    port = free_port()
    return Contender("engine", [sys.executable, str(HERE / "canned.py"), "engine", str(port), *options], port, folder)


def bare_proxy(folder: Path, engine_url: str) -> Contender:
    port = free_port()
    return Contender("bare", [sys.executable, str(HERE / "canned.py"), "proxy", str(port), engine_url], port, folder)


def reef(folder: Path, engine_url: str, durability: str) -> Contender:
    """The gateway process as `reef serve` starts it, without a learner beside it."""
    name = f"reef-{durability}"
    home = folder / name
    home.mkdir(parents=True)
    port = free_port()
    config = home / "config.json"
    settings = {
        "model_dir": str(home),
        "server": {"port": port},
        "store": {"dir": str(home / "data"), "durability": durability},
        "engine": {"kind": "vllm", "url": engine_url},
    }
    config.write_text(json.dumps(settings))
    env = {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    return Contender(name, [sys.executable, "-m", "reef.gateway", str(config)], port, home, env)


def litellm(folder: Path, engine_url: str, others: Path) -> Contender:
    port = free_port()
    home = folder / "litellm"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text(
        "model_list:\n  - model_name: canned\n    litellm_params:\n      model: openai/canned\n"
        f"      api_base: {engine_url}/v1\n      api_key: none\nlitellm_settings:\n  telemetry: false\n"
    )
    command = [str(others / "litellm/bin/litellm"), "--config", "config.yaml", "--host", "127.0.0.1"]
    env = {"PYTHONPATH": "", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # loopback, for minutes
    return Contender("litellm", [*command, "--port", str(port)], port, home, env, "/health/liveliness")


def reef_infra(folder: Path, engine_url: str, others: Path) -> Contender:
    """Its record-only recipe in front of the engine. Needs git-lfs."""
    port = free_port()
    home = folder / "reef-infra"
    home.mkdir(parents=True)
    (home / "serve.yaml").write_text(
        f"reef:\n  recipe: recipe\n  host: 127.0.0.1\n  port: {port}\n"
        f"  upstream_url: {engine_url}\n  upstream_model: canned\n"
    )
    env = {"PYTHONPATH": "", "REEF_CONFIG": str(home / "serve.yaml")}
    python = str(others / "reef-infra/bin/python")
    return Contender("reef-infra", [python, "-m", "reef.service"], port, home, env, "/healthz")


def install(others: Path) -> None:
    """Make the environments that are missing in `others`. Asks the package index."""
    for name, package in PACKAGES.items():
        target = others / name
        if target.exists():
            continue
        print(f"installing {package} into {target}", flush=True)
        venv.create(target, with_pip=True)
        subprocess.run([target / "bin/python", "-m", "pip", "install", "--quiet", package], check=True)
