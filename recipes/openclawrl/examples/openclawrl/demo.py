"""`reef demo`: the whole service, the student at its door, and a report of what happened.

Starts the example's service with its store in the run folder, measures the untrained policy, lets the
student bring its homework, waits until everything judged is trained, and writes the report. A run that
was killed goes on where it stopped. Knows how to run the parts; decides nothing for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from recipes.openclawrl.examples.openclawrl.student.live import LiveStatus, View
from recipes.openclawrl.examples.openclawrl.student.problems import generated
from recipes.openclawrl.examples.openclawrl.student.report import ServiceNumbers, agreement, write_report
from recipes.openclawrl.examples.openclawrl.student.run import Control, Result, run_control, run_student
from reef.config import Config, load_config
from reef.model import resolve
from reef.observe.views import Views
from reef.service import Service
from reef.store.database import open_database
from reef.store.migrations import LEARN, LOG

SETTINGS = Path(__file__).with_name("serve.yaml")
PARALLEL = 4
"""sessions side by side"""
CONTROL_PARALLEL = 8
CONTROL_REPLIES = 200
"""untrained first replies behind `untrained_pass_rate`; a short run asks for 6 per session"""
DRAIN_S = 600.0
SAMPLE_S = 5.0
POLL_S = 0.5


@dataclass(slots=True)
class Meter:
    """The largest memory of all processes together, and the time spent waiting for learning."""

    pids: tuple[int, ...] = ()
    peak_bytes: int = 0
    waited_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        total = 0
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(pid).memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, total)

    @contextlib.contextmanager
    def watching(self, service: Service) -> Iterator[None]:
        """Keep the service's processes alive and measured."""

        def run() -> None:
            own = psutil.Process().pid
            sampled = 0.0
            while not self._stop.wait(0.5):
                service.watch()
                if time.monotonic() - sampled > SAMPLE_S:  # adding up shared pages is not free
                    self.pids = (own, *service.pids().values())
                    self.sample()
                    sampled = time.monotonic()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def run_demo(sessions: int, seed: int, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run the example and return its report. Raises ReefError when the service can't run."""
    console = Console(stderr=quiet, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    config = load_config(SETTINGS, [("store.dir", str(out / "store")), ("server.port", "0")])
    model = resolve(config.policy.model, progress=console.print)
    meter = Meter()
    with Service(config, model) as service:
        service.wait_ready()
        console.print(f"reef serves {service.url}/v1, store {config.store.dir}")
        with meter.watching(service):
            report = asyncio.run(_run(service, config, sessions, seed, out, meter, console))
    summarise(report, out, console)
    return report


async def _run(
    service: Service, config: Config, sessions: int, seed: int, out: Path, meter: Meter, console: Console
) -> dict[str, Any]:
    url = f"{service.url}/v1"
    batch = int(config.recipe_settings["batch_size"])
    control_n = min(CONTROL_REPLIES, 6 * sessions)
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        untrained = await greedy_logprobs(http, "control")  # a scenario that stays at version 0

        async def live_status() -> LiveStatus:
            s = (await http.get("/reef/status")).json()
            training = ", a step is running" if s["steps_running"] else ""
            note = f"{s['queued']} turns wait for the judge, {s['waiting_for_batch']} for a batch{training}"
            return LiveStatus(s["judged"], s["trained"], s["served"].get("default", 0), note)

        async def catch_up(_session: int) -> None:
            """Let learning keep pace: at most one batch beyond the one in training is waiting."""
            started = time.monotonic()
            while True:
                s = (await http.get("/reef/status")).json()
                if s["queued"] + s["waiting_for_batch"] < batch * (2 if s["steps_running"] else 1):
                    break
                await asyncio.sleep(POLL_S)
            meter.waited_s += time.monotonic() - started

        async with View(sessions, status=live_status, control=control_n, console=console) as view:
            # side by side: decoding a few rows more costs little, and the trainer is what takes long
            control, result = await asyncio.gather(
                run_control(url, out, control_n, seed, parallel=CONTROL_PARALLEL, on_event=view.on_event),
                run_student(
                    url, out, sessions, seed, parallel=PARALLEL, on_event=view.on_event, before_session=catch_up
                ),
            )
            started = time.monotonic()
            await drain(http, batch)
            meter.waited_s += time.monotonic() - started
        proof = await prove(http, untrained)
        await drain(http, batch)
    numbers = service_numbers(config, result, meter)
    return write_report(out, result, control, numbers) | keep(out, proof, control, config)


async def drain(http: httpx.AsyncClient, batch: int) -> None:
    """Wait until all that was said is read, judged and, in full batches, trained and served."""
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        s = (await http.get("/reef/status")).json()
        idle = not (s["unread"] or s["queued"] or s["steps_running"]) and s["waiting_for_batch"] < batch
        if idle and s["unpublished"] == 0:
            return
        await asyncio.sleep(POLL_S)


async def greedy_logprobs(http: httpx.AsyncClient, scenario: str = "default") -> list[float]:
    """Log-probs of the greedy reply to a fixed prompt, alone in its batch."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": generated(10_007, 0).text}],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
    }
    headers = {"x-reef-scenario": scenario, "x-reef-train": "off"}
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    answer.raise_for_status()
    return [t["logprob"] for t in answer.json()["choices"][0]["logprobs"]["content"]]


async def prove(http: httpx.AsyncClient, untrained: list[float]) -> dict[str, Any]:
    """Ask the same prompt of the last version, of version 0 after a rollback, and of the last again."""
    served = (await http.get("/reef/status")).json()["served"].get("default", 0)
    learned = await greedy_logprobs(http)
    (await http.post("/reef/releases/0/serve")).raise_for_status()
    rolled_back = await greedy_logprobs(http)
    (await http.post(f"/reef/releases/{served}/serve")).raise_for_status()
    again = await greedy_logprobs(http)
    return {
        "last_version": served,
        "learned_differs": learned != untrained,
        "rollback_is_bitwise": rolled_back == untrained,
        "promotion_is_bitwise": again == learned,
        "logprobs_version_0": untrained[:8],
        "logprobs_last_version": learned[:8],
    }


def service_numbers(config: Config, result: Result, meter: Meter) -> ServiceNumbers:
    """The service's side of the report, read from its store."""
    views = Views(open_database(config.store.log_url, LOG), open_database(config.store.learn_url, LEARN))
    funnel = views.funnel()
    releases = views.releases()
    seconds = {
        "serving": views.busy_seconds(),
        "judging": views.status()["judge_seconds"],
        "training": math.fsum(r["metrics"].get("seconds", 0.0) for r in releases),
        "waiting": meter.waited_s,
    }
    return ServiceNumbers(
        exchanges=funnel["exchanges"],
        fates=funnel["fates"],
        judged=funnel["judged"],
        trained=funnel["trained"],
        versions=sum(r["status"] == "released" for r in releases),
        judge_name=", ".join(views.judges()) or "none",
        judge_agreement=agreement(result.labels(), views.verdicts()),
        seconds=seconds,
        peak_memory_bytes=meter.peak_bytes,
    )


def keep(out: Path, proof: dict[str, Any], control: Control, config: Config) -> dict[str, Any]:
    """Add what only this run knows to report.json."""
    file = out / "report.json"
    report = json.loads(file.read_text())
    report["same_prompt"] = proof
    report["control_seconds"] = control.seconds
    report["machine"] = {"processor": platform.processor() or platform.machine(), "cores": psutil.cpu_count()}
    report["settings"] = {"recipe": config.recipe, "train": config.train.model_dump()}
    file.write_text(json.dumps(report, indent=2) + "\n")
    return report


def summarise(report: dict[str, Any], out: Path, console: Console) -> None:
    """The run in a few lines."""
    n = report["sessions"]
    last = report["last_passes"]
    rate = report["untrained_pass_rate"]
    parts = ", ".join(f"{name} {s:.0f} s" for name, s in report["seconds_by_part"].items())
    proof = report["same_prompt"]
    agreed = report["judge"]["agreement_with_rule"]
    lines = [
        f"first replies that met the preference: {sum(report['first_reply_passes'])} of {n}"
        f" (untrained: {sum(report['control']['first_reply_passes'])} of {n})",
        f"last {last['sessions']} sessions: {last['learned']} (untrained: {last['control']})",
        f"adapted at session {report['adapted_at'] or '-'} (untrained: {report['control']['adapted_at'] or '-'})",
        f"untrained pass rate {rate:.1%} over {report['untrained_replies']} replies; chance that it passes"
        f" three in a row within {n} sessions: {report['chance_untrained_adapts']:.1%}",
        f"{report['exchanges']} exchanges, fates {report['fates']} (sum {sum(report['fates'].values())}),"
        f" {report['failed_requests']} failed requests",
        f"{report['judged']} turns judged by {report['judge']['name']}"
        + (f" (agrees with the rule on {agreed:.0%})" if agreed is not None else "")
        + f", {report['trained']} trained, {report['versions']} versions released",
        f"same prompt, greedy: version {proof['last_version']} differs from 0: {proof['learned_differs']},"
        f" rollback to 0 is bitwise: {proof['rollback_is_bitwise']}",
        f"time: {parts}; peak memory {report['peak_memory_bytes'] / 2**30:.2f} GiB (all processes)",
        f"written: {out}/report.json, sessions.csv, learning_curve.png",
    ]
    console.print("\n" + "\n".join(lines))
