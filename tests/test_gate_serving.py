"""The gate in the loop: a harmful batch is refused and explained, a bad release is taken back, the rate halves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from reef.cli.app import build
from reef.engine.base import EngineClient
from reef.learner.canary import Canaries
from reef.learner.steps import lr_scale
from reef.model import ModelTokenizer
from reef.releases.chain import content_hash
from reef.sessions.fate import Fate
from reef.train.checks import GateLimits
from reef.train.jobs import Job
from reef.train.lora import LoraPolicy
from reef.train.trainer import Trainer
from tests.reports_recipe import Config, ReportsOnly
from tests.stack import Stack, stack
from tests.test_learner import Rule, finish, judged_turns, steps_for


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as s:
        yield s


def test_the_learning_rate_halves_after_a_rejection_and_recovers(running: Stack) -> None:
    assert lr_scale([]) == lr_scale(["released"] * 3) == 1.0
    assert lr_scale(["released", "rejected", "rolled_back"]) == 0.25
    assert lr_scale(["rejected", "failed", "released"]) == 0.625
    steps = steps_for(running, judged_turns(running, 8))
    rates = []
    for _ in range(2):
        (step,) = steps.form()
        rates.append(json.loads((running.dir / "steps" / step.id / "job.json").read_text())["lr"])
        finish(running, steps, step.id, status="rejected")
    assert rates == [1e-3, 5e-4]


class Flipped(Rule):
    """A judge that says the opposite of what was meant."""

    def form(self, samples: Any, carried: Any) -> Any:
        formed, state = super().form(samples, carried)
        return [replace(s, reward=-s.reward, advantage=-(s.advantage or 0.0)) for s in formed], state


def test_a_harmful_batch_is_refused_not_served_and_explained(running: Stack, tiny_model_dir: Path) -> None:
    """Rewards flipped and the learning rate a hundred times too large."""
    torch.set_num_threads(1)
    judged_turns(running, 4)
    steps = steps_for(running, Flipped())
    (step,) = steps.form()
    folder = running.dir / "steps" / step.id
    job = Job.from_json(json.loads((folder / "job.json").read_text()))
    policy = LoraPolicy.load(tiny_model_dir)
    limits = GateLimits(length_ratio=50, repeated_4grams=1, missing_eos=1)  # a random model babbles anyway
    trainer = Trainer(
        policy, ReportsOnly(Config()), ModelTokenizer(tiny_model_dir), running.dir / "releases", limits=limits
    )
    result = trainer.run(replace(job, lr=100 * job.lr, epochs=3))
    (folder / "result.json").write_text(json.dumps(result))
    steps.collect()
    assert result["status"] == "rejected"
    assert running.fates()[Fate.GATE_REJECTED] == 4 and running.learn.steps.unpublished() == []
    assert running.log.served().get("default", 0) == 0
    refused = httpx.post(f"{running.url}/reef/releases/1/serve")
    assert refused.status_code == 404 and "rejected" in refused.text
    shown = CliRunner().invoke(build(), ["releases", "--store", str(running.dir)], env={"COLUMNS": "250"}).output
    assert "rejected" in shown and "kl_to_base" in shown
    assert (running.dir / "releases" / "default" / "v000001" / "adapter_model.safetensors").exists()


LOOPING = "ab" * 12


def watched(s: Stack, every_s: float = 0.0, between: Callable[[], None] = lambda: None) -> int:
    """Let the watch look twice; returns how many versions went back."""

    async def look() -> int:
        engine = EngineClient(s.script_url)
        canaries = Canaries(s.log, s.learn, engine, s.url, GateLimits(), every_s)
        async with httpx.AsyncClient() as http:
            back = await canaries.step(http)
            await asyncio.to_thread(between)
            back += await canaries.step(http)
        await engine.close()
        return back

    return asyncio.run(look())


def publish(s: Stack, version: int) -> None:
    assert httpx.post(f"{s.url}/reef/releases/{version}/serve").status_code == 200


def two_versions(s: Stack) -> None:
    steps = steps_for(s, judged_turns(s, 8))
    for version in (1, 2):
        (step,) = steps.form()
        finish(s, steps, step.id)
        publish(s, version)


def test_a_release_that_loops_is_taken_back_and_says_why(running: Stack) -> None:
    two_versions(running)
    running.script.reply = lambda body: LOOPING if body["model"].endswith("@2") else "It is Rome."
    assert watched(running) == 1
    assert running.log.served() == {"default": 1}
    row = running.learn.steps.release("default", 2)
    assert row is not None and row.status == "rolled_back" and "canary_repeated_4grams" in row.gate["reason"]
    assert running.learn.steps.outcomes("default") == ["released", "rolled_back"]
    shown = CliRunner().invoke(build(), ["releases", "--store", str(running.dir)], env={"COLUMNS": "250"}).output
    assert "rolled_back" in shown and "canary_repeated_4grams" in shown
    assert watched(running) == 0


@pytest.mark.parametrize("reply", ["It is Rome.", "Rome"])
def test_a_healthy_release_stays(running: Stack, reply: str) -> None:
    two_versions(running)
    running.script.reply = lambda body: reply
    assert watched(running) == 0
    assert running.log.served() == {"default": 2}


def test_what_users_got_counts_too(running: Stack) -> None:
    """The canaries are fine, the replies in traffic repeat themselves."""
    two_versions(running)
    running.script.reply = lambda body: LOOPING if "tell me" in str(body) else "It is Rome."

    def use() -> None:
        for k in range(12):
            running.ask([{"role": "user", "content": f"tell me {k}"}])

    assert watched(running, 300.0, between=use) == 1
    row = running.learn.steps.release("default", 2)
    assert row is not None and "live_repeated_4grams" in row.gate["reason"]


def test_an_adapter_that_was_changed_on_disk_is_not_served(running: Stack) -> None:
    steps = steps_for(running, judged_turns(running, 4))
    (step,) = steps.form()
    finish(running, steps, step.id)
    folder = running.dir / "releases" / "default" / "v000001"
    before = content_hash(folder)
    (folder / "adapter_model.safetensors").write_text("[]")
    assert content_hash(folder) != before
    answer = httpx.post(f"{running.url}/reef/releases/1/serve")
    assert answer.status_code == 404 and "content hash" in answer.text
    assert running.log.served() == {}
