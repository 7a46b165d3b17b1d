"""Training jobs as folders: `steps/<id>/job.json` in, `steps/<id>/result.json` out.

Invariant: both files appear complete, by rename; a step with a job and no result is run, again if
need be. The learner moves what has ended to `steps/ended/`, so that looking for work costs the same
however many steps there were. That is all learner and trainer share, so they may run on different machines with one
storage. This module knows neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from reef.errors import ReefError, StoreError
from reef.store.files import write_json
from reef.store.lock import acquire
from reef.train.sample import Sample

ENDED = "ended"
"""folder within `steps` of the steps that have ended"""
LOCK_WAIT_S = 20.0
"""for the trainer of a service that was killed a moment ago to end"""
PAUSES_S = (1.0, 5.0, 15.0, 60.0)
"""before a job is tried again that the disk had no room for"""


@dataclass(frozen=True, slots=True)
class Job:
    """One step, as the learner stored it."""

    step: str
    scenario: str
    version: int
    """the version to produce"""
    parent: int
    """the version to start from; 0 is the untrained policy"""
    turns: tuple[str, ...]
    samples: tuple[Sample, ...]
    seed: int = 0
    lr: float = 6e-4
    epochs: int = 2
    carried: Mapping[str, Any] = field(default_factory=dict)
    held_out: tuple[Sample, ...] = ()
    """accepted replies the candidate may not find less likely than its parent does"""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        """Raises StoreError when a field is missing or malformed."""
        try:
            return Job(
                step=str(data["step"]),
                scenario=str(data["scenario"]),
                version=int(data["version"]),
                parent=int(data["parent"]),
                turns=tuple(data["turns"]),
                samples=tuple(Sample.from_json(s) for s in data["samples"]),
                seed=int(data.get("seed", 0)),
                lr=float(data.get("lr", 6e-4)),
                epochs=int(data.get("epochs", 2)),
                carried=data.get("carried") or {},
                held_out=tuple(Sample.from_json(s) for s in data.get("held_out") or ()),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"job can't be read: {error!r}") from error


class Runner(Protocol):
    """What does a job: `reef.train.trainer.Trainer`."""

    releases: Path

    def run(self, job: Job) -> dict[str, Any]: ...


def pending(steps: Path) -> list[Path]:
    """Step folders with a job and without a result, oldest job first."""
    found = [j for j in steps.glob("*/job.json") if not (j.parent / "result.json").exists()]
    return [j.parent for j in sorted(found, key=lambda j: (j.stat().st_mtime_ns, j.parent.name))]


def work(
    trainer: Runner,
    steps: Path,
    *,
    once: bool = False,
    poll_s: float = 0.2,
    alive: Callable[[], bool] = lambda: True,
) -> None:
    """Do jobs as they come, until `alive` says no; with `once`, those that wait now.

    A job that can't be done gets a result with its error. While the disk refuses, the job waits and
    `trainer.json` and the log say why. Raises StoreError if another trainer works on this folder.
    """
    with contextlib.closing(acquire(steps / "trainer.lock", wait_s=LOCK_WAIT_S)):
        _work(trainer, steps, once, poll_s, alive)


def _work(trainer: Runner, steps: Path, once: bool, poll_s: float, alive: Callable[[], bool]) -> None:
    for leftover in trainer.releases.glob("*/.tmp-v*"):
        shutil.rmtree(leftover, ignore_errors=True)
    _tell(steps, "idle")
    refused = 0
    while alive():
        waiting = pending(steps)
        if not waiting:
            if once:
                return
            time.sleep(poll_s)
            continue
        _tell(steps, "training", waiting[0].name)
        try:
            write_json(waiting[0] / "result.json", do(trainer, waiting[0]))
            _tell(steps, "idle")
            refused = 0
        except OSError as error:
            if once:
                raise
            _tell(steps, "waiting", waiting[0].name, f"{type(error).__name__}: {error}")
            time.sleep(PAUSES_S[min(refused, len(PAUSES_S) - 1)])
            refused += 1


def do(trainer: Runner, folder: Path) -> dict[str, Any]:
    """Run one step folder's job; whatever is wrong with it becomes its result. Raises OSError only."""
    try:
        return trainer.run(Job.from_json(json.loads((folder / "job.json").read_text())))
    except OSError:
        raise
    except ReefError as error:
        return {"error": str(error)}
    except Exception as error:  # the recipe is foreign code and a job is foreign data: serving goes on
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _tell(steps: Path, state: str, step: str = "", reason: str = "") -> None:
    """Say what the trainer does, for whoever looks; never a reason to stop."""
    try:
        if reason:
            print(f"trainer {state} {step}: {reason}", file=sys.stderr, flush=True)
        report = {"pid": os.getpid(), "state": state, "step": step, "reason": reason, "time": time.time()}
        write_json(steps / "trainer.json", report)
    except OSError:
        pass
