"""Steps: batches of judged turns become stored jobs, and finished jobs become releases.

Invariant: a step names its turns in the learn database before it runs; its release folder is complete
and renamed before one transaction marks step, turns and release; only then is it served. A crash at any
point leaves a step that is rerun or finished, never one that counts twice. Turns beyond the batch wait
for the next one. Knows no tensors.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row
from ulid import ULID

from reef.errors import ModelError, StoreError
from reef.learner.turns import Turns
from reef.recipe import JudgedTurn, Recipe, Refusal
from reef.releases.chain import Release, failed_checks, read_release
from reef.sessions.fate import Fate
from reef.store.files import write_json
from reef.store.learn import LearnStore
from reef.store.log import LogReader
from reef.store.steps import StepRow
from reef.train.jobs import ENDED
from reef.train.sample import Sample

log = logging.getLogger("reef.steps")

DEMAND = "train-now"
"""a file of this name in the steps folder asks for a step of what waits, however few"""
OLDEST = 4
"""batches of waiting turns that are looked at: some may be refused"""
REJECTED_SCALE = 0.5
RECOVERY = 1.25


def lr_scale(outcomes: Sequence[str]) -> float:
    """What the learning rate is multiplied by after these steps, oldest first: halved by each one that was
    rejected or taken back, raised by a quarter, up to 1, by each that went well."""
    scale = 1.0
    for outcome in outcomes:
        if outcome in ("rejected", "rolled_back"):
            scale *= REJECTED_SCALE
        elif outcome == "released":
            scale = min(1.0, scale * RECOVERY)
    return scale


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a job tells the trainer, and when one is formed."""

    batch_size: int
    max_staleness: int
    lr: float
    epochs: int
    seed: int
    max_attempts: int
    idle_s: float = 0.0
    """a smaller batch is formed when its newest turn has waited this long; 0: it waits for more"""
    min_batch: int = 2
    """turns such a smaller batch has at least"""
    joint: str | None = None
    """the one chain that all scenarios share; None: each scenario has its own"""


class Past:
    """The newest accepted turns of the scenarios a batch touches, each read once."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._known: dict[str, list[JudgedTurn]] = {}

    def of(self, scenario: str) -> list[JudgedTurn]:
        if scenario not in self._known:
            self._known[scenario] = self._turns.accepted(scenario)
        return self._known[scenario]

    def all(self) -> list[JudgedTurn]:
        return [judged for known in self._known.values() for judged in known]


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
        self._retire_ended()

    def form(self) -> list[StepRow]:
        """Store a step for each scenario that has a full batch and none running, and write its job."""
        running = self._learn.steps.running()
        for step in running:
            self._write_job(step)
        busy = {step.scenario for step in running}
        busy |= {release.scenario for release in self._learn.steps.unpublished()}  # the next parent is not served yet
        demanded = self._folder / DEMAND
        at_once = demanded.exists()
        formed = []
        waiting = self._waiting()
        for chain, rows in waiting.items():
            size = self._size(rows, at_once)
            if chain not in busy and size and (step := self._form(chain, rows, size)) is not None:
                formed.append(step)
        if at_once and (formed or not waiting):
            demanded.unlink(missing_ok=True)
        return formed

    def _waiting(self) -> dict[str, list[Row[Any]]]:
        """Each chain's oldest judged turns, in log order; asked for by scenario, so that none hides another."""
        limit = OLDEST * self._settings.batch_size
        found = {
            scenario: self._learn.oldest_with(Fate.JUDGED, scenario, limit)
            for scenario in self._learn.scenarios_with(Fate.JUDGED)
        }
        joint = self._settings.joint
        if joint is None or not found:
            return found
        return {joint: sorted((row for rows in found.values() for row in rows), key=lambda row: row.seq)}

    def _size(self, rows: Sequence[Row[Any]], at_once: bool) -> int:
        """How many turns a step would take now; 0 when more are to be waited for."""
        full, have = self._settings.batch_size, len(rows)
        if have >= full:
            return full
        if at_once:
            return have
        if not self._settings.idle_s or have < self._settings.min_batch:
            return 0
        newest = max(at for row in rows if (at := self._learn.since(row.id)) is not None)
        return have if time.time() - newest >= self._settings.idle_s else 0

    def preview(self) -> Path | None:
        """Write the job that the waiting judged turns would make, however few; the store stays as it
        is. None when nothing trainable waits."""
        waiting = self._waiting()
        if not waiting:
            return None
        scenario, rows = next(iter(waiting.items()))
        parent, past = self._standing(scenario), Past(self._turns)
        made = [self._make(row, parent, past) for row in rows]
        samples = [m for m in made if isinstance(m, Sample)]
        samples = samples[: self._settings.batch_size]
        if not samples:
            return None
        samples, carried = self._recipe.form(samples, self._learn.steps.last_carried(scenario))
        version = self._learn.steps.newest_version(scenario) + 1
        step = StepRow("preview", scenario, version, parent, tuple(s.turn for s in samples), "running", 1, carried)
        self._write(step, samples, past)
        return self._folder / step.id / "job.json"

    def _form(self, scenario: str, rows: Sequence[Row[Any]], size: int) -> StepRow | None:
        parent, past = self._standing(scenario), Past(self._turns)
        samples = []
        for row in rows:
            if (sample := self._sample(row, parent, past)) is not None:
                samples.append(sample)
            if len(samples) == size:
                break
        else:
            return None  # refusals left too few; the rest waits
        samples, carried = self._recipe.form(samples, self._learn.steps.last_carried(scenario))
        version = self._next_version(scenario)
        turns = tuple(sample.turn for sample in samples)
        step = StepRow(str(ULID()), scenario, version, parent, turns, "running", 1, carried)
        try:
            with self._learn.begin() as c:
                self._learn.steps.add(c, step)
        except StoreError as error:  # a fate has changed since it was read: the next round sees it
            log.info("%s", error)
            return None
        self._write(step, samples, past)
        log.info("step %s: %d turns of %s become version %d", step.id, len(turns), scenario, version)
        return step

    def _next_version(self, scenario: str) -> int:
        """Higher than any step's and any release folder's: after a restored backup or a power cut there
        may be folders that no step of the database wrote."""
        folders = (self._folder.parent / "releases" / scenario).glob("v*")
        on_disk = [int(f.name[1:]) for f in folders if f.name[1:].isdigit()]
        return max(self._learn.steps.newest_version(scenario), *on_disk, 0) + 1

    def _standing(self, chain: str) -> int:
        """The version a step starts from: the one being served."""
        return self._log.served().get(chain, 0)

    def _sample(self, row: Row[Any], current: int, past: Past) -> Sample | None:
        made = self._make(row, current, past)
        if isinstance(made, Refusal):
            with self._learn.begin() as c:
                self._learn.set_fate(c, row.id, Fate(made.fate), "sample", made.reason)
            return None
        return made

    def _make(self, row: Row[Any], current: int, past: Past) -> Sample | Refusal:
        judged = self._turns.judged(row.id)
        if judged is None or judged.turn.sampled is None:
            return Refusal(Fate.MISSING_LOGPROBS, "its record is gone")
        if current - judged.turn.sampled.version > self._settings.max_staleness:
            return Refusal(Fate.STALE, f"sampled by version {judged.turn.sampled.version}, now at {current}")
        return self._recipe.sample(judged.turn, judged.verdict, past.of(row.scenario))

    def _write_job(self, step: StepRow) -> None:
        """Write the job of a stored step that has none: the learner died in between."""
        if (self._folder / step.id / "job.json").exists():
            return
        past = Past(self._turns)
        rows = [row for id in step.turns if (row := self._learn.turn(id)) is not None]
        made = [self._make(row, step.parent, past) for row in rows]
        samples = [m for m in made if isinstance(m, Sample)]
        samples, _ = self._recipe.form(samples, self._learn.steps.last_carried(step.scenario))
        self._write(step, samples, past)

    def _write(self, step: StepRow, samples: Sequence[Sample], past: Past) -> None:
        settings = self._settings
        rehearsal = self._recipe.rehearse(past.all(), step.version, step.turns)
        job = {
            "step": step.id,
            "scenario": step.scenario,
            "version": step.version,
            "parent": step.parent,
            "turns": list(step.turns),
            "sources": self._sources(step, past),
            "samples": [sample.to_json() for sample in (*samples, *rehearsal.trained)],
            "held_out": [sample.to_json() for sample in rehearsal.held_out],
            "seed": settings.seed,
            "lr": settings.lr * lr_scale(self._learn.steps.outcomes(step.scenario)) * step.carried.get("lr_scale", 1.0),
            "epochs": settings.epochs,
            "carried": dict(step.carried),
        }
        write_json(self._folder / step.id / "job.json", job)

    def _sources(self, step: StepRow, past: Past) -> list[str]:
        """The receipts that all words of a job come from, so that it can follow an erasure."""
        rows = [row for id in step.turns if (row := self._learn.turn(id)) is not None]
        rules = [rule for scenario in {row.scenario for row in rows} for rule in self._learn.memo.of(scenario)]
        learned = {judged.turn.id for judged in past.all()} | {rule.turn for rule in rules if rule.turn}
        return sorted({*step.turns, *learned})

    def collect(self) -> int:
        """Take in what the trainer has finished; returns how many steps ended."""
        ended = 0
        for step in self._learn.steps.running():
            file = self._folder / step.id / "result.json"
            if not file.exists():
                continue
            try:
                result = json.loads(file.read_text())
                release = read_release(Path(result["release"])) if "error" not in result else None
            except (ValueError, KeyError, ModelError) as error:
                result, release = {"error": f"its release can't be read: {error}"}, None
            if release is not None and (release.version, release.turns) != (step.version, step.turns):
                result, release = {"error": f"{release.folder} is not this step's release"}, None
            if release is None:
                ended += self._failed(step, str(result["error"]), file)
            else:
                self._finished(step, release, result)
                ended += 1
        return ended

    def _retire(self, step: str) -> None:
        """Move an ended step's folder out of the trainer's sight."""
        (self._folder / ENDED).mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / step).rename(self._folder / ENDED / step)
        except OSError as error:  # it is moved at the next start
            log.warning("the folder of step %s stays where it is: %s", step, error)

    def _retire_ended(self) -> None:
        """Move the folders of steps that ended, or that the database does not know, as the learner starts."""
        found = [job.parent.name for job in self._folder.glob("*/job.json")]
        for step in self._learn.steps.ended(found):
            self._retire(step)

    def _finished(self, step: StepRow, release: Release, result: Mapping[str, Any]) -> None:
        good = release.servable
        failed = failed_checks(release.gate)
        with self._learn.begin() as c:
            self._learn.steps.end(c, step.id, "released" if good else "rejected", failed)
            self._learn.steps.add_release(
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
                    self._learn.contradict_since(c, turn, step.created)
                else:
                    self._let_go(c, step, turn, "gate", failed or "the gate said no")
        self._retire(step.id)
        log.info("version %d of %s is %s", step.version, step.scenario, "released" if good else f"rejected: {failed}")

    def _failed(self, step: StepRow, reason: str, file: Path) -> int:
        if step.attempts < self._settings.max_attempts:
            log.warning("step %s failed (%s); trying again", step.id, reason)
            with self._learn.begin() as c:
                self._learn.steps.retry(c, step.id)
            file.unlink()
            return 0
        log.error("step %s failed %d times, its turns are let go: %s", step.id, step.attempts, reason)
        with self._learn.begin() as c:
            self._learn.steps.end(c, step.id, "failed", reason)
            for turn in step.turns:
                self._let_go(c, step, turn, "step_failed", reason)
        self._retire(step.id)
        return 1

    def _let_go(self, c: Connection, step: StepRow, turn: str, rule: str, reason: str) -> None:
        """A turn of a step that trained nothing, unless a report or a verdict has come in while the step ran."""
        if self._learn.fate_in(c, turn) is Fate.JUDGED and not self._learn.changed_in(c, turn, step.created):
            self._learn.set_fate(c, turn, Fate.GATE_REJECTED, rule, reason)
