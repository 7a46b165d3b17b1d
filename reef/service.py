"""`reef serve`: the processes of one machine, started, watched and ended together.

Invariant: each process can die alone; it is started again with growing pauses while the others go on.
One service owns a store at a time: a second start is refused with the holder's name. Knows commands
and ports, nothing of what the processes do.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

import httpx

from reef.config import Config, GateConfig
from reef.errors import ConfigError, ModelError, ReefError
from reef.store.files import write_json
from reef.store.lock import acquire
from reef.train.checks import GateLimits

log = logging.getLogger("reef.service")
RESTART_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 15.0)
PR_SET_PDEATHSIG = 1
STABLE_S = 10.0
"""a process that ran this long has its pauses reset"""
PORT_WAIT_S = 5.0
"""for the gateway of a service that was killed a moment ago to let go of its port"""
STOP_S = 15.0
LOG_BYTES = 16 * 2**20
"""a process's log is set aside above this size; one older file is kept"""


@dataclass(slots=True)
class Managed:
    """A process of the service."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    start_at: float = 0.0
    log_file: IO[bytes] | None = field(default=None, repr=False)


class Service:
    """Everything `reef serve` runs. Use as a context manager, or call `run`."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._model = model_dir
        self._stopping = False
        self._dir = config.store.dir
        self._run_dir = self._dir / "run"
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = acquire(self._dir / "serve.lock")
        port = claim_port(config.server.host, config.server.port, wait_s=PORT_WAIT_S)
        engine_url = config.engine.url
        if config.engine.kind == "embedded":
            engine_url = f"http://127.0.0.1:{claim_port('127.0.0.1', 0)}"
        elif engine_url is None:
            raise ConfigError(f"engine.kind {config.engine.kind} needs engine.url")
        self.config = config.model_copy(
            update={
                "server": config.server.model_copy(update={"port": port}),
                "engine": config.engine.model_copy(update={"url": engine_url}),
            }
        )
        self.url = f"http://{'127.0.0.1' if config.server.host == 'localhost' else config.server.host}:{port}"
        self._processes = self._plan()

    def _plan(self) -> list[Managed]:
        config = self.config
        file = self._run_dir / "config.json"
        write_json(file, {**config.model_dump(mode="json"), "model_dir": str(self._model)})
        file.chmod(0o600)  # it may hold keys
        one = thread_env(1)
        plan = []
        if config.engine.kind == "embedded":
            assert config.engine.url is not None
            plan.append(
                Managed(
                    "engine",
                    [
                        *module("reef.engine.embedded"),
                        "--model", str(self._model),
                        "--host", "127.0.0.1",
                        "--port", config.engine.url.rpartition(":")[2],
                        "--dtype", config.engine.dtype,
                        "--threads", str(config.engine.threads),
                        "--max-batch", str(config.engine.max_batch),
                        "--max-context", str(config.engine.max_context),
                    ],
                    thread_env(config.engine.threads),
                )
            )  # fmt: skip
        plan.append(Managed("gateway", [*module("reef.gateway"), str(file)], one))
        plan.append(Managed("learner", [*module("reef.learner"), str(file)], one))
        if config.train.enabled:
            recipe_file = self._run_dir / "recipe.json"
            write_json(recipe_file, config.recipe_settings)
            plan.append(
                Managed("trainer", trainer_command(config, self._model, recipe_file), thread_env(config.train.threads))
            )
        return plan

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for managed in self._processes:
            self._start(managed)

    def pids(self) -> dict[str, int]:
        """The running processes by name."""
        return {m.name: m.process.pid for m in self._processes if m.process and m.process.poll() is None}

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Return once requests can be answered. Raises ReefError if that takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._stopping:
            self.watch()
            try:
                if httpx.get(f"{self.url}/readyz", timeout=2.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise ReefError(f"the service is not ready after {timeout_s:g} s; see the logs in {self._run_dir}")

    def watch(self) -> None:
        """Start again what has died, each with its own pauses."""
        now = time.monotonic()
        for managed in self._processes:
            self._turn_log(managed)
            process = managed.process
            if process is None:
                if now >= managed.start_at:
                    self._start(managed)
            elif (code := process.poll()) is not None:
                if now - managed.started > STABLE_S:
                    managed.failures = 0
                pause = RESTART_PAUSES_S[min(managed.failures, len(RESTART_PAUSES_S) - 1)]
                managed.failures += 1
                managed.process = None
                managed.start_at = now + pause
                log.warning("%s ended with status %s; starting it again in %g s", managed.name, code, pause)

    def run(self) -> None:
        """Watch until SIGINT or SIGTERM, then stop everything in order."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            while not self._stopping:
                self.watch()
                time.sleep(0.2)
        finally:
            self.stop()

    def stop(self) -> None:
        """End all processes: the gateway first, so that nothing new comes in and answers in flight end
        (`server.drain_timeout_s`), the engine last."""
        self._stopping = True
        order = {"gateway": 0, "learner": 1, "trainer": 2, "engine": 3}
        for managed in sorted(self._processes, key=lambda m: order[m.name]):
            process = managed.process
            if process is not None and process.poll() is None:
                process.terminate()
                drain = self.config.server.drain_timeout_s if managed.name == "gateway" else 0.0
                try:
                    process.wait(STOP_S + drain)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if managed.log_file is not None:
                managed.log_file.close()
        self._lock.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _turn_log(self, managed: Managed) -> None:
        """Set a log aside that has grown large; its process goes on appending to the emptied file."""
        file = self._run_dir / f"{managed.name}.log"
        try:
            if managed.log_file is not None and file.stat().st_size > LOG_BYTES:
                shutil.copyfile(file, file.with_suffix(".log.1"))
                managed.log_file.truncate(0)
        except OSError:  # a full disk: emptying it is what helps
            if managed.log_file is not None:
                managed.log_file.truncate(0)

    def _start(self, managed: Managed) -> None:
        if managed.log_file is None:
            managed.log_file = (self._run_dir / f"{managed.name}.log").open("ab")
        managed.process = subprocess.Popen(
            managed.command,
            env={**os.environ, **managed.env},
            stdout=managed.log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
            start_new_session=True,  # Ctrl-C reaches the service alone, which ends the others in order
        )
        managed.started = time.monotonic()


def module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


def trainer_command(config: Config, model_dir: Path, recipe_file: Path) -> list[str]:
    """The trainer process for this configuration; `recipe_file` holds the recipe's settings as JSON."""
    limits = asdict(gate_limits(config.gate))
    gate = ["--limits", json.dumps(limits)] if config.gate.enabled else ["--no-gate"]
    return [
        *module("reef.train"),
        *("--model", str(model_dir)),
        *("--steps", str(config.store.dir / "steps")),
        *("--releases", str(config.store.dir / "releases")),
        *("--recipe", config.recipe_name),
        *("--recipe-config", str(recipe_file)),
        *("--threads", str(config.train.threads)),
        *("--method", config.train.method),
        *("--rank", str(config.train.rank)),
        *("--alpha", str(config.train.alpha)),
        *("--layers", str(config.train.layers)),
        *("--dtype", config.train.dtype),
        *("--device", config.train.device),
        "--follow-parent",
        *gate,
    ]


def gate_limits(gate: GateConfig) -> GateLimits:
    """The `gate` section as limits."""
    return GateLimits(
        gate.max_kl, gate.max_length_ratio, gate.max_repeated, gate.max_unfinished, gate.max_held_out_drop
    )


def die_with_parent() -> None:
    """Have the kernel end this child when the service is killed, so that no process is orphaned."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def thread_env(threads: int) -> dict[str, str]:
    """Threads that wait without spinning: two busy-waiting pools on two cores starve each other."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }


def claim_port(host: str, port: int, *, wait_s: float = 0.0) -> int:
    """A port that is free now. Raises ConfigError if the wanted one does not become free in time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + wait_s
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return probe.getsockname()[1]
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}; set server.port") from None
        time.sleep(0.1)


def read_run_config(file: Path) -> tuple[Config, Path]:
    """(config, model folder) as `reef serve` wrote them for its processes."""
    data = json.loads(file.read_text())
    model_dir = data.pop("model_dir")
    if not Path(model_dir).is_dir():
        raise ModelError(f"the model folder {model_dir} is gone")
    return Config.model_validate(data), Path(model_dir)
