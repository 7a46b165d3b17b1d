"""Kill -9 a random process of a running Reef at a random moment, again and again, under client load.

The stack is the real one: `reef serve` with gateway, learner and trainer (a tiny model, real steps), a
scripted engine in a process of its own, SQLite or a private PostgreSQL server. Clients hold conversations
and note each answer they received in full. In the end everything settles and the databases, the release
folders and the clients' notes must agree (`benchmarks/crash_check.py` says how). A run that was
interrupted goes on where it was.

    python benchmarks/crash.py --kills 300 --store sqlite --out runs/crash-sqlite
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.crash_check import Findings, check  # noqa: E402
from reef.config import StoreConfig  # noqa: E402
from reef.service import claim_port  # noqa: E402
from tests.postgres import Server  # noqa: E402

BATCH = 8
PROCESSES = {"reef.gateway": "gateway", "reef.learner": "learner", "reef.train": "trainer"}
WHOLE = {"engine", "service", "gateway", "learner", "trainer"}
WEIGHTS = {"gateway": 3, "learner": 3, "trainer": 2, "database": 1, "service": 1, "engine": 1}
"""how often each is killed: the service takes three others along"""


@dataclass
class Stack:
    """The processes under test, and what starts those that nobody else does."""

    dir: Path
    store: str
    model: Path
    postgres: Server | None = None
    engine: subprocess.Popen[bytes] | None = None
    service: subprocess.Popen[bytes] | None = None
    port: int = field(default_factory=lambda: claim_port("127.0.0.1", 0))
    engine_port: int = field(default_factory=lambda: claim_port("127.0.0.1", 0))
    batch: int = BATCH

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def urls(self) -> StoreConfig:
        """Where the databases are."""
        return StoreConfig(**yaml.safe_load((self.dir / "serve.yaml").read_text())["store"])

    def write_config(self, **store: Any) -> None:
        if self.postgres is not None and not store:
            name = self.dir / "database"
            if not name.exists():
                name.write_text(self.postgres.database().rpartition("/")[2])
            url = self.postgres.url(name.read_text())
            store = {"log": url, "learn": url}
        config = {
            "server": {"port": self.port},
            "store": {"dir": str(self.dir / "data"), **store},
            "engine": {"kind": "vllm", "url": f"http://127.0.0.1:{self.engine_port}"},
            "policy": {"model": str(self.model)},
            "recipe": {
                "name": "tests.rule_recipe:RuleJudge",
                "batch_size": self.batch,
                "max_staleness": 10**6,
                "session_ttl_s": 10**6,
            },
            "train": {"lr": 1e-5, "epochs": 1, "rank": 2, "alpha": 4, "max_attempts": 20, "idle_s": 0},
            "gate": {"enabled": False},
        }
        (self.dir / "serve.yaml").write_text(yaml.safe_dump(config))

    def keep_up(self) -> None:
        """Start what has died and has no supervisor."""
        if self.postgres is not None and not self.postgres.alive():
            self.postgres.start()  # a server that can't recover in time gives up; an init system starts it again
        if self.engine is None or self.engine.poll() is not None:
            self.engine = self._start("engine", [str(Path(__file__)), "--engine", str(self.engine_port)])
        if self.service is None or self.service.poll() is not None:
            code = "from reef.cli import main; main()"
            self.service = self._start("service", ["-c", code, "serve", "-c", str(self.dir / "serve.yaml")])

    def _start(self, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.dir / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log, env=env, cwd=ROOT)

    def victims(self) -> dict[str, psutil.Process]:
        """Whatever runs now, by name. `kill` of such a process never hits another that got its number."""
        found: dict[str, psutil.Process] = {}
        try:
            for name, process in (("engine", self.engine), ("service", self.service)):
                if process is not None and process.poll() is None:
                    found[name] = psutil.Process(process.pid)
            for child in found["service"].children():
                for part in child.cmdline():
                    if part in PROCESSES:
                        found[PROCESSES[part]] = child
            backends = self.postgres.backends() if self.postgres is not None else []
            if backends:
                found["database"] = random.choice(backends)
        except (psutil.Error, KeyError):
            pass
        return found

    def stop(self) -> None:
        for process in (self.service, self.engine):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def status(self) -> dict[str, Any] | None:
        try:
            return httpx.get(f"{self.url}/reef/status", timeout=10).raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            return None


class Client(threading.Thread):
    """One person: conversations of three turns, a failed request is sent again in other words."""

    def __init__(self, name: str, stack: Stack, notes: Path, pause_s: float, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._who = name
        self._stack = stack
        self._notes = notes
        self._pause = pause_s
        self._stop_now = stop
        self.over = threading.Event()
        """once set, an answer that arrives is not noted: those who would answer are gone, if not yet stopped"""
        self.answered = 0
        self.failed = 0
        self.slowest_s = 0.0

    def run(self) -> None:
        conversation = 0
        with httpx.Client(timeout=60) as http, self._notes.open("a") as notes:
            while not self._stop_now.is_set():
                conversation += 1
                messages: list[dict[str, str]] = []
                for turn in range(3):
                    words = f"{self._who} {conversation}" if turn == 0 else random.choice(("thanks", "no, shorter"))
                    answer = self._until_answered(http, messages, words, stream=conversation % 2 == 0)
                    if answer is None or self.over.is_set():
                        return
                    text, receipt, said = answer
                    messages += [{"role": "user", "content": said}, {"role": "assistant", "content": text}]
                    notes.write(
                        json.dumps({"who": f"{self._who} {conversation}", "turn": turn, "id": receipt, "reply": text})
                        + "\n"
                    )
                    notes.flush()
                    self.answered += 1
                    self._stop_now.wait(self._pause * random.random() * 2)

    def _until_answered(
        self, http: httpx.Client, history: Sequence[dict[str, str]], words: str, *, stream: bool
    ) -> tuple[str, str, str] | None:
        attempt = 0
        while not self._stop_now.is_set():
            said = f"{words} ({attempt}, {time.time_ns() % 10**9})"
            body = {
                "model": "m",
                "messages": [*history, {"role": "user", "content": said}],
                "temperature": 1.0,
                "stream": stream,
            }
            started = time.monotonic()
            try:
                text, receipt = ask(http, self._stack.url, body)
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                return text, receipt, said
            except (httpx.HTTPError, ValueError, KeyError):
                self.failed += 1
                attempt += 1
                self._stop_now.wait(0.2)
        return None


def ask(http: httpx.Client, url: str, body: dict[str, Any]) -> tuple[str, str]:
    """(reply, receipt) of an answer that arrived whole. Raises HTTPError or ValueError otherwise."""
    if not body["stream"]:
        response = http.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
        return response.json()["choices"][0]["message"]["content"], response.headers["x-reef-agent-record-id"]
    text, ended = "", False
    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["delta"].get("content") or ""
        if not ended:
            raise ValueError("the stream broke off")
        return text, response.headers["x-reef-agent-record-id"]


@contextmanager
def load(stack: Stack, clients: int, pause_s: float) -> Iterator[list[Client]]:
    """Clients that talk for as long as the block lasts."""
    stop = threading.Event()
    run = time.time_ns() % 10**8
    people = [Client(f"c{run}-{n}", stack, stack.dir / f"notes-{run}-{n}.jsonl", pause_s, stop) for n in range(clients)]
    for person in people:
        person.start()
    try:
        yield people
    finally:
        stop.set()
        for person in people:
            person.join(90)


def wait_ready(stack: Stack, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        stack.keep_up()
        if stack.ready():
            return
        time.sleep(0.1)
    raise TimeoutError(f"the service did not come up; see {stack.dir}")


def settle(stack: Stack, patience_s: float) -> bool:
    """Wait until all that is recorded has been worked off, as long as that makes progress."""
    left: Any = None
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        stack.keep_up()
        s = stack.status()
        if s is not None:
            now = [s[n] for n in ("unread", "queued", "waiting_for_batch", "steps_running", "unpublished", "trained")]
            if not any(now[:2] + now[3:5]) and s["waiting_for_batch"] < stack.batch:
                return True
            if now != left:
                left, deadline = now, time.monotonic() + patience_s
        time.sleep(0.3)
    return False


def kill_for(stack: Stack, kills: int, mean_s: float, seed: int) -> Counter[str]:
    """Kill -9 until `kills` were done in all, counting those of earlier runs in the same folder."""
    dice = random.Random(seed + time.time_ns())
    file = stack.dir / "kills.jsonl"
    done = [json.loads(line)["victim"] for line in file.read_text().splitlines()] if file.exists() else []
    with file.open("a") as notes:
        while len(done) < kills:
            if dice.random() < 0.75:  # mostly hit a stack that works, sometimes one that is getting up
                whole = time.monotonic() + 20
                while time.monotonic() < whole and not (set(stack.victims()) >= WHOLE and stack.ready()):
                    stack.keep_up()
                    time.sleep(0.1)
            until = time.monotonic() + dice.expovariate(1 / mean_s)
            while time.monotonic() < until:
                stack.keep_up()
                time.sleep(min(0.05, max(0.0, until - time.monotonic())))
            running = stack.victims()
            if not running:
                continue
            names = sorted(running)
            name = dice.choices(names, [WEIGHTS[n] for n in names])[0]
            try:
                running[name].kill()
            except psutil.NoSuchProcess:
                continue
            done.append(name)
            notes.write(json.dumps({"victim": name, "time": time.time()}) + "\n")
            notes.flush()
            if len(done) % 25 == 0:
                print(f"{len(done)} kills", flush=True)
    return Counter(done)


def prepare(out: Path, store: str, batch: int = BATCH) -> Stack:
    """The folder of a run with its model, its database server and its configuration."""
    out.mkdir(parents=True, exist_ok=True)
    model = out / "model"
    if not (model / "config.json").exists():
        from tests.tiny import write_tiny_model

        write_tiny_model(model)
    postgres = None
    if store == "postgres":
        postgres = Server(out / "pg")
        remembered = out / "pg.json"
        if remembered.exists():
            postgres.password = remembered.read_text()
        else:
            postgres.initialise()
            remembered.write_text(postgres.password)
        postgres.start()
    stack = Stack(out, store, model, postgres, batch=batch)
    stack.write_config()
    return stack


def run(
    out: Path, store: str, kills: int, *, clients: int, pause_s: float, mean_s: float, seed: int, batch: int = BATCH
) -> Findings:
    """One run to its end. Raises TimeoutError if the service never comes up."""
    stack = prepare(out, store, batch)
    started = time.monotonic()
    try:
        wait_ready(stack)
        with load(stack, clients, pause_s) as people:
            victims = kill_for(stack, kills, mean_s, seed)
        settled = settle(stack, 400)
        failed = sum(p.failed for p in people)
        slowest = max(p.slowest_s for p in people)
        stack.stop()
        return check(
            out, stack.urls(), batch, victims=dict(victims), settled=settled, client_errors=failed,
            slowest_answer_s=round(slowest, 2), seconds=round(time.monotonic() - started, 1),
        )  # fmt: skip
    finally:
        stack.stop()
        if stack.postgres is not None:
            stack.postgres.stop()


def serve_engine(port: int) -> None:
    """The scripted engine, in this process."""
    import uvicorn

    from tests.scripted_engine import Script, scripted_app

    script = Script(reply=lambda body: f"re: {body['messages'][-1]['content']}", keep=0)
    uvicorn.run(scripted_app(script), host="127.0.0.1", port=port, log_level="error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--out", type=Path, help="run folder; an unfinished run in it goes on")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.4, help="mean seconds between a client's requests")
    parser.add_argument("--mean", type=float, default=2.0, help="mean seconds between kills")
    parser.add_argument("--batch", type=int, default=BATCH, help="turns per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve_engine(args.engine)
        return 0
    out = args.out or Path("runs") / f"crash-{args.store}"
    pace = {"clients": args.clients, "pause_s": args.pause, "mean_s": args.mean, "seed": args.seed, "batch": args.batch}
    findings = run(out.resolve(), args.store, args.kills, **pace)
    findings.show()
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
