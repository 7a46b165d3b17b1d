"""The rows a run leaves: one CSV a run, one row a session, and one line a run in `runs.csv`.

Invariant: a run's CSV is complete or absent. `summary` is a pure function of rows. Knows no model.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.openclawrl.recipe import OpenClawRL

if TYPE_CHECKING:
    from recipes.openclawrl.examples.openclawrl.trial.arms import Arm
    from recipes.openclawrl.examples.openclawrl.trial.run import Run, State


def name_of(persona: str, arm: Arm, seed: int, sessions: int) -> str:
    """A run's name; other settings make another run."""
    return f"{persona}-{arm.key}-seed{seed:02d}-{sessions}-{settings_hash(arm)}"


def adapted_at(passes: Sequence[bool]) -> int | None:
    """The first of three passes in a row, from 1."""
    for k in range(len(passes) - 2):
        if all(passes[k : k + 3]):
            return k + 1
    return None


def write_run(folder: Path, run: Run, state: State) -> dict[str, Any]:
    """Write a finished run's CSV and its line; returns the line."""
    folder.mkdir(parents=True, exist_ok=True)
    name = name_of(run.persona.name, run.arm, run.seed, run.sessions)
    talks = sorted(state.done, key=lambda t: t.index)
    rows = [
        {
            "session": t.index + 1,
            "pass": int(t.looks[0].passes),
            "turns": len(t.looks),
            "accepted": int(t.looks[-1].passes),
            "wrong": " ".join(t.looks[0].wrong),
            "correct": int(t.looks[0].correct),
            "length": t.lengths[0],
            "version": t.versions[0],
            "reply": t.replies[0],
        }
        for t in talks
    ]
    steps = state.standing.steps
    held = state.held_out or {}
    passes = [bool(r["pass"]) for r in rows]
    line: dict[str, Any] = {
        "run": name,
        "persona": run.persona.name,
        "arm": run.arm.key,
        "seed": run.seed,
        "sessions": run.sessions,
        "adapted_at": adapted_at(passes) or "",
        "passes_first_36": sum(passes[:36]),
        "passes_last_12": sum(passes[-12:]),
        "held_out_n": held.get("n", ""),
        "held_out_passes": held.get("passes", ""),
        "held_out_correct": held.get("correct", ""),
        "held_out_length": round(held.get("length", 0.0), 1),
        "kl_to_base": next((round(s["kl_to_base"], 5) for s in reversed(steps) if s["status"] != "rejected"), ""),
        "updates": sum(s["status"] != "rejected" for s in steps),
        "rejected": sum(s["status"] == "rejected" for s in steps),
        "turns_trained": state.standing.trained,
        "replies": sum(len(t.looks) for t in talks),
        "judge": run.judge_name,
        "judge_agreement": round(sum(state.agreed) / len(state.agreed), 4) if state.agreed else "",
        "generating_s": round(state.generating, 1),
        "training_s": round(state.training, 1),
        "judging_s": round(state.judging, 1),
        "settings": settings_hash(run.arm),
    }
    _write_csv(folder / f"{name}.csv", rows)
    (folder / f"{name}.json").write_text(
        json.dumps({"run": line, "steps": steps, "arm": _arm(run.arm)}, indent=1) + "\n"
    )
    return line


def _arm(arm: Arm) -> dict[str, Any]:
    return {**asdict(arm), "recipe": arm.recipe.model_dump()}


def settings_hash(arm: Arm) -> str:
    """Names what of an arm's settings can matter, its preset's values included, so that rows of different settings
    are never averaged."""
    settings: dict[str, Any] = {"memory": arm.memory, "memory_tokens": arm.memory_tokens, "judge": arm.judge}
    if arm.learns:
        recipe = OpenClawRL(arm.recipe)
        settings |= {**asdict(arm), "recipe": arm.recipe.model_dump(exclude_defaults=True)}
        settings |= {"objective": asdict(recipe.objective()), "rehearsals": recipe.rehearsals()}
        settings["demonstrations"] = recipe.together()
        if recipe.choose_best():  # rows from before the switch are those without it
            settings["choose_best"] = True
    for name in ("title", "key"):
        settings.pop(name, None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]


def _write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    scratch = file.with_suffix(".tmp")
    scratch.write_text(text.getvalue(), encoding="utf-8")
    os.replace(scratch, file)
