"""From judged turns to releases: the recipe and the trainer, called directly.

Does what `reef.learner.steps` does on its database: a batch of the oldest waiting turns, formed against
the newest accepted ones, becomes a job; its release is served unless the gate rejected it, and a
rejection halves the learning rate. Knows no session and no rule.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.openclawrl.examples.openclawrl.trial.arms import Arm
from recipes.openclawrl.recipe import OpenClawRL
from reef.learner.steps import lr_scale
from reef.model import ModelTokenizer
from reef.recipe import JudgedTurn, RecipeTools, Refusal
from reef.releases.chain import version_folder
from reef.train.checks import GateLimits
from reef.train.jobs import Job
from reef.train.lora import LoraPolicy
from reef.train.sample import Sample
from reef.train.trainer import Trainer

SCENARIO = "default"
ACCEPTED = 16
"""newest accepted turns a batch is formed against, as in the service"""


@dataclass(slots=True)
class Standing:
    """What learning has come to; everything a later start needs."""

    served: int = 0
    newest: int = 0
    """highest version any step has claimed"""
    outcomes: list[str] = field(default_factory=list)
    """how the steps so far went"""
    carried: Mapping[str, Any] = field(default_factory=dict)
    waiting: list[JudgedTurn] = field(default_factory=list)
    accepted: list[JudgedTurn] = field(default_factory=list)
    trained: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    """one line a step: version, parent, turns, gate, loss terms, seconds"""


class InProcessLearner:
    def __init__(self, arm: Arm, model: Path, tokenizer: ModelTokenizer, releases: Path, seed: int) -> None:
        self._arm, self._seed = arm, seed
        self.recipe = OpenClawRL(arm.recipe, RecipeTools(tokenizer, str(model), None))
        self.releases = releases
        policy = LoraPolicy.load(model, rank=arm.rank, alpha=arm.alpha, layers=arm.layers)
        self._trainer = Trainer(policy, self.recipe, tokenizer, releases, limits=GateLimits(kl_to_base=arm.max_kl))
        self.seconds = 0.0

    def folder(self, version: int) -> Path | None:
        return version_folder(self.releases, SCENARIO, version) if version else None

    def take(self, standing: Standing, judged: JudgedTurn) -> None:
        """A verdict arrived."""
        if not judged.verdict.charges:
            return
        standing.waiting.append(judged)
        if judged.verdict.verdict > 0:
            standing.accepted = [*standing.accepted, judged][-ACCEPTED:]

    def step(self, standing: Standing) -> int | None:
        """Train one batch if one waits; returns the version to serve, None when there is none."""
        size = self._arm.recipe.batch_size
        past = standing.accepted
        samples: list[Sample] = []
        turns: list[str] = []
        left: list[JudgedTurn] = []
        for judged in standing.waiting:
            if len(samples) == size:
                left.append(judged)
                continue
            made = self.recipe.sample(judged.turn, judged.verdict, past)
            if isinstance(made, Refusal):
                standing.refused[made.fate] = standing.refused.get(made.fate, 0) + 1
            else:
                samples.append(made)
                turns.append(judged.turn.id)
                left.append(judged)
        if len(samples) < size:
            standing.waiting = left
            return None
        standing.waiting = [j for j in left if j.turn.id not in set(turns)]
        formed, carried = self.recipe.form(samples, standing.carried)
        version = standing.newest + 1
        repeated = self.recipe.rehearse(past, version, turns)
        started = time.process_time()
        job = Job(
            step=f"step-{version}",
            scenario=SCENARIO,
            version=version,
            parent=standing.served,
            turns=tuple(turns),
            samples=(*formed, *repeated.trained),
            held_out=repeated.held_out,
            seed=self._seed,
            lr=self._arm.lr * lr_scale(standing.outcomes) * carried.get("lr_scale", 1.0),
            epochs=self._arm.epochs,
            carried=carried,
        )
        result = self._trainer.run(job)
        spent = time.process_time() - started
        self.seconds += spent
        standing.newest, standing.carried = version, carried
        standing.trained += len(turns)
        good = result["status"] != "rejected"
        standing.outcomes.append("released" if good else "rejected")
        standing.steps.append(
            {
                "version": version,
                "parent": job.parent,
                "rewards": [s.reward for s in formed],
                "status": result["status"],
                "gate": result["gate"]["reason"],
                "kl_to_base": result["metrics"]["kl_to_base"],
                "lr": job.lr,
                "first_epoch": {k: round(v, 4) for k, v in result["metrics"]["epochs"][0].items()},
                "last_epoch": {k: round(v, 4) for k, v in result["metrics"]["epochs"][-1].items()},
                "seconds": round(spent, 1),
            }
        )
        return version if good else None
