"""Steps: batches of judged turns become stored jobs, and finished jobs become releases.

Invariant: a step names its turns in the learn database before it runs; its release folder is complete
and renamed before one transaction marks step, turns and release; only then is it served. A crash at any
point leaves a step that is rerun or finished, never one that counts twice. Turns beyond the batch wait
for the next one. Knows no tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulid import ULID

from reef.learner.turns import Turns
from reef.recipe import JudgedTurn, Recipe, Refusal
from reef.releases.chain import failed_checks, read_release
from reef.sessions.fate import Fate
from reef.store.files import write_json
from reef.store.learn import LearnStore, StepRow
from reef.store.log import LogReader
from reef.train.sample import Sample

log = logging.getLogger("reef.steps")


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a job tells the trainer, and when one is formed."""

    batch_size: int
    max_staleness: int
    lr: float
    epochs: int
    seed: int
    max_attempts: int


class Steps:
    def __init__(
        self, log: LogReader, learn: LearnStore, turns: Turns, recipe: Recipe, folder: Path, settings: StepSettings
    ) -> None:
        self._log = log
        self._learn = learn
        self._turns = turns
        self._recipe = recipe
        self._folder = folder
        self._settings = settings

    def form(self) -> list[StepRow]:
        """Store a step for each scenario that has a full batch and none running, and write its job."""
        running = self._learn.running_steps()
        for step in running:
            self._write_job(step)
        busy = {step.scenario for step in running}
        busy |= {release.scenario for release in self._learn.unpublished()}  # the next parent is not served yet
        waiting: dict[str, list[str]] = {}
        for row in self._learn.with_fate(Fate.JUDGED):
            waiting.setdefault(row.scenario, []).append(row.id)
        formed = []
        for scenario, ids in waiting.items():
            if scenario not in busy and (step := self._form(scenario, ids)) is not None:
                formed.append(step)
        return formed

    def preview(self) -> Path | None:
        """Write the job that the waiting judged turns would make, however few; the store stays as it
        is. None when nothing trainable waits."""
        waiting = self._learn.with_fate(Fate.JUDGED)
        if not waiting:
            return None
        scenario = waiting[0].scenario
        parent, past = self._standing(scenario)
        samples = []
        for row in waiting:
            made = self._make(row.id, parent, past) if row.scenario == scenario else None
            if isinstance(made, Sample):
                samples.append(made)
        samples = samples[: self._settings.batch_size]
        if not samples:
            return None
        samples, carried = self._recipe.form(samples, self._learn.last_carried(scenario))
        version = self._learn.newest_version(scenario) + 1
        step = StepRow("preview", scenario, version, parent, tuple(s.turn for s in samples), "running", 1, carried)
        self._write(step, samples)
        return self._folder / step.id / "job.json"

    def _form(self, scenario: str, ids: Sequence[str]) -> StepRow | None:
        if len(ids) < self._settings.batch_size:
            return None
        parent, past = self._standing(scenario)
        samples = []
        for id in ids:
            if (sample := self._sample(id, parent, past)) is not None:
                samples.append(sample)
            if len(samples) == self._settings.batch_size:
                break
        else:
            return None  # refusals left too few; the rest waits
        samples, carried = self._recipe.form(samples, self._learn.last_carried(scenario))
        version = self._learn.newest_version(scenario) + 1
        turns = tuple(sample.turn for sample in samples)
        step = StepRow(str(ULID()), scenario, version, parent, turns, "running", 1, carried)
        with self._learn.begin() as c:
            self._learn.add_step(c, step)
        self._write(step, samples)
        log.info("step %s: %d turns of %s become version %d", step.id, len(turns), scenario, version)
        return step

    def _standing(self, scenario: str) -> tuple[int, list[JudgedTurn]]:
        """(served version, newest accepted turns): what a batch is formed against."""
        return self._log.served().get(scenario, 0), self._turns.accepted(scenario)

    def _sample(self, id: str, current: int, past: Sequence[JudgedTurn]) -> Sample | None:
        made = self._make(id, current, past)
        if isinstance(made, Refusal):
            with self._learn.begin() as c:
                self._learn.set_fate(c, id, Fate(made.fate), "sample", made.reason)
            return None
        return made

    def _make(self, id: str, current: int, past: Sequence[JudgedTurn]) -> Sample | Refusal:
        judged = self._turns.judged(id)
        if judged is None or judged.turn.sampled is None:
            return Refusal(Fate.MISSING_LOGPROBS, "its record is gone")
        if current - judged.turn.sampled.version > self._settings.max_staleness:
            return Refusal(Fate.STALE, f"sampled by version {judged.turn.sampled.version}, now at {current}")
        return self._recipe.sample(judged.turn, judged.verdict, past)

    def _write_job(self, step: StepRow) -> None:
        """Write the job of a stored step that has none: the learner died in between."""
        if (self._folder / step.id / "job.json").exists():
            return
        past = self._turns.accepted(step.scenario)
        made = [self._make(id, step.parent, past) for id in step.turns]
        samples = [m for m in made if isinstance(m, Sample)]
        samples, _ = self._recipe.form(samples, self._learn.last_carried(step.scenario))
        self._write(step, samples)

    def _write(self, step: StepRow, samples: Sequence[Sample]) -> None:
        settings = self._settings
        job = {
            "step": step.id,
            "scenario": step.scenario,
            "version": step.version,
            "parent": step.parent,
            "turns": list(step.turns),
            "samples": [sample.to_json() for sample in samples],
            "seed": settings.seed,
            "lr": settings.lr,
            "epochs": settings.epochs,
            "carried": dict(step.carried),
        }
        write_json(self._folder / step.id / "job.json", job)

    def collect(self) -> int:
        """Take in what the trainer has finished; returns how many steps ended."""
        ended = 0
        for step in self._learn.running_steps():
            file = self._folder / step.id / "result.json"
            if not file.exists():
                continue
            result = json.loads(file.read_text())
            if "error" in result:
                ended += self._failed(step, str(result["error"]), file)
            else:
                self._finished(step, result)
                ended += 1
        return ended

    def _finished(self, step: StepRow, result: Mapping[str, Any]) -> None:
        release = read_release(Path(result["release"]))
        good = release.servable
        failed = failed_checks(release.gate)
        with self._learn.begin() as c:
            self._learn.end_step(c, step.id, "released" if good else "rejected", failed)
            self._learn.add_release(
                c,
                {
                    "scenario": step.scenario,
                    "version": step.version,
                    "parent": step.parent,
                    "path": str(result["release"]),
                    "hash": release.content_hash,
                    "turns": list(step.turns),
                    "metrics": {**release.metrics, "seconds": result.get("seconds", 0.0)},
                    "gate": release.gate,
                    "status": "released" if good else "rejected",
                    "step": step.id,
                },
            )
            for turn in step.turns:
                if good:
                    reason = f"in version {step.version} of {step.scenario}"
                    self._learn.set_fate(c, turn, Fate.TRAINED, "step", reason, version=step.version)
                else:
                    self._learn.set_fate(c, turn, Fate.GATE_REJECTED, "gate", failed or "the gate said no")
        log.info("version %d of %s is %s", step.version, step.scenario, "released" if good else f"rejected: {failed}")

    def _failed(self, step: StepRow, reason: str, file: Path) -> int:
        if step.attempts < self._settings.max_attempts:
            log.warning("step %s failed (%s); trying again", step.id, reason)
            with self._learn.begin() as c:
                self._learn.retry_step(c, step.id)
            file.unlink()
            return 0
        log.error("step %s failed %d times, its turns are let go: %s", step.id, step.attempts, reason)
        with self._learn.begin() as c:
            self._learn.end_step(c, step.id, "failed", reason)
            for turn in step.turns:
                self._learn.set_fate(c, turn, Fate.GATE_REJECTED, "step_failed", reason)
        return 1
