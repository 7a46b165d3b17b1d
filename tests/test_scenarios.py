"""Many scenarios on one base: opposite wishes side by side, trained in turn, loaded when asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from reef.engine.base import EngineClient
from reef.model import ModelTokenizer
from reef.recipe import Loss, Scorer
from reef.releases.publish import Publisher
from reef.store.files import write_json
from reef.train.checks import GateLimits
from reef.train.jobs import work
from reef.train.lora import LoraPolicy
from reef.train.sample import Batch, Sample
from reef.train.trainer import Trainer
from tests.stack import Stack, stack
from tests.test_learner import THANKS, Rule, finish, steps_for, talk
from tests.tiny import serve_embedded

ASK = [{"role": "user", "content": "Tom has 12 apples and gives 5 to Ann."}]
WISHES = ("he keeps 7 apples", "no lists, plain sentences")
EIGHT = tuple(f"user{k}" for k in range(8))
"""the even ones wish for one reply, the odd ones for the other"""
WIDE = GateLimits(kl_to_base=90, length_ratio=90, repeated_4grams=1, missing_eos=1, held_out_drop=90)


class Likelihood:
    """What a trainer needs of a recipe: make rewarded replies likely."""

    def active(self, sample: Sample) -> bool:
        return True

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss:
        total = torch.zeros(())
        for sample in batch.samples:
            logp = policy.logits(sample.prompt_ids, sample.response_ids).log_softmax(-1)
            taken = logp.gather(-1, torch.tensor(sample.response_ids).unsqueeze(-1))
            total = total - sample.reward * taken.mean() / batch.n_eff
        return Loss(total)


def wish_of(scenario: str) -> int:
    return int(scenario[-1]) % 2


def a_job(tokenizer: ModelTokenizer, scenario: str, version: int) -> dict[str, Any]:
    reply = (*tokenizer.encode(WISHES[wish_of(scenario)]), 2)
    mask = (1,) * len(reply)
    sample = Sample(f"t{version}", 0, tuple(tokenizer.render(ASK)), reply, (-1.0,) * len(reply), (), mask, 1.0, 1)
    return {
        "step": f"{version}-{scenario}",
        "scenario": scenario,
        "version": version,
        "parent": version - 1,
        "turns": [f"{scenario} t{version}"],
        "samples": [sample.to_json()],
        "lr": 2e-2,
        "epochs": 16,
    }


def test_eight_scenarios_with_opposite_wishes_learn_in_one_process_and_each_serves_its_own(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Two steps each, in turn; then one engine with room for three of them answers all eight."""
    torch.set_num_threads(1)
    tokenizer = ModelTokenizer(tiny_model_dir)
    trainer = Trainer(LoraPolicy.load(tiny_model_dir), Likelihood(), tokenizer, tmp_path / "releases", limits=WIDE)
    for version in (1, 2):
        for scenario in EIGHT:
            job = a_job(tokenizer, scenario, version)
            write_json(tmp_path / "steps" / job["step"] / "job.json", job)
    work(trainer, tmp_path / "steps", once=True)

    async def all_answers(url: str) -> list[str]:
        async def record(scenario: str, version: int, by: str) -> None: ...

        engine = EngineClient(url)
        publisher = Publisher(engine, tmp_path / "releases", record, {}, max_loaded=3)
        for scenario in EIGHT:
            await publisher.serve(scenario, 2, "test")
        assert sum(publisher.is_loaded(f"{s}@2") for s in EIGHT) <= 3, "a version that nobody asks for makes room too"
        answers = []
        for scenario in (*EIGHT, *reversed(EIGHT)):
            async with publisher.lease(scenario) as lease:
                body = {"model": lease.model, "messages": ASK, "temperature": 0, "max_tokens": 24}
                answer = await engine.post("/v1/chat/completions", body)
                answers.append(answer["choices"][0]["message"]["content"])
        loaded = sum(publisher.is_loaded(f"{s}@2") for s in EIGHT)
        assert loaded <= 3, "idle scenarios make room"
        await engine.close()
        return answers

    with serve_embedded(tiny_model_dir) as url:
        answers = asyncio.run(all_answers(url))
    served = zip((*EIGHT, *reversed(EIGHT)), answers, strict=True)
    assert all(answer.startswith(WISHES[wish_of(scenario)][:12]) for scenario, answer in served), answers


def test_scenarios_with_many_turns_do_not_hold_up_one_with_few(tmp_path: Path) -> None:
    """One step of each scenario at a time: the talkative one waits for its own, the quiet one does not."""
    with stack(tmp_path) as running:
        for k in range(12):
            talk(running, f"question {k}", THANKS, **{"x-reef-scenario": "talkative"})
        for k in range(4):
            talk(running, f"one more {k}", THANKS, **{"x-reef-scenario": "quiet"})
        recipe = judged(running)
        steps = steps_for(running, recipe)
        first = steps.form()
        assert sorted(step.scenario for step in first) == ["quiet", "talkative"]
        assert steps.form() == []
        for step in first:
            finish(running, steps, step.id)
        assert [step.scenario for step in steps.form()] == ["talkative"]


def judged(running: Stack) -> Rule:
    running.observer().step()
    recipe = Rule()
    running.judge_all(recipe)
    return recipe


def test_joint_learning_makes_one_chain_that_answers_everybody(tmp_path: Path) -> None:
    with stack(tmp_path, policy__learning="joint", policy__scenario="all") as running:
        for k in range(2):
            for name in ("ann", "ben"):
                talk(running, f"question {k} of {name}", THANKS, **{"x-reef-scenario": name})
        recipe = judged(running)
        steps = steps_for(running, recipe, joint="all")
        (step,) = steps.form()
        assert (step.scenario, len(step.turns)) == ("all", 4)
        finish(running, steps, step.id)
        served = httpx.post(f"{running.url}/reef/releases/1/serve", headers={"x-reef-scenario": "ann"})
        assert served.status_code == 200
        running.ask([{"role": "user", "content": "hello"}], **{"x-reef-scenario": "ben"})
        assert running.script.requests[-1]["model"] == "all@1"


@pytest.mark.parametrize(("idle", "demanded", "formed"), [(0.0, False, 0), (0.001, False, 1), (0.0, True, 1)])
def test_few_turns_train_after_idle_time_or_on_demand(tmp_path: Path, idle: float, demanded: bool, formed: int) -> None:
    with stack(tmp_path) as running:
        for k in range(2):
            talk(running, f"question {k}", THANKS)
        steps = steps_for(running, judged(running), idle_s=idle)
        if demanded:
            (running.dir / "steps").mkdir(exist_ok=True)
            (running.dir / "steps" / "train-now").touch()
        found = steps.form()
        assert [len(step.turns) for step in found] == [2] * formed
        assert not (running.dir / "steps" / "train-now").exists()
