"""The study's laboratory on a tiny model: runs resume to the same end, numbers follow from rows."""

from __future__ import annotations

import csv
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.openclawrl import objective
from recipes.openclawrl.examples.openclawrl.student.problems import Problem, generated
from recipes.openclawrl.examples.openclawrl.student.rule import check
from recipes.openclawrl.examples.openclawrl.trial.arms import ARMS, REEF, changed
from recipes.openclawrl.examples.openclawrl.trial.page import NEVER, bootstrap, grouped, page, read, session
from recipes.openclawrl.examples.openclawrl.trial.persona import PERSONAS, Look, Notebook, grade
from recipes.openclawrl.examples.openclawrl.trial.results import adapted_at, settings_hash, write_run
from recipes.openclawrl.examples.openclawrl.trial.run import Run
from reef.errors import ConfigError


class Even(Notebook):
    """Accepts replies with an even number of characters: about half of a random model's."""

    name = "even"
    max_tokens = 6

    def look(self, reply: str, problem: Problem, ended: bool) -> Look:
        even = len(reply) % 2 == 0
        return Look(even, () if even else ("bullets",), False)


SMALL = replace(
    REEF, recipe=REEF.recipe.model_copy(update={"max_turn_tokens": 400}), lr=1e-4, epochs=1, max_kl=90.0, layers=1.0
)


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.openclawrl.examples.openclawrl.trial.run.HELD_OUT", 2)


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    whole = Run(SMALL, Even(), 3, 6, tmp_path / "whole", tiny_model_dir)
    expected = whole.go()
    first = Run(SMALL, Even(), 3, 6, tmp_path / "parts", tiny_model_dir)
    for _ in range(3):
        first._round()
        first._save()
    again = Run(SMALL, Even(), 3, 6, tmp_path / "parts", tiny_model_dir)
    assert again.state.round == 3
    state = again.go()
    assert [t.replies for t in state.done] == [t.replies for t in expected.done]
    assert [s["version"] for s in state.standing.steps] == [s["version"] for s in expected.standing.steps]
    assert state.standing.steps and state.standing.trained >= 2
    line = write_run(tmp_path / "results", again, state)
    assert line["updates"] + line["rejected"] == len(state.standing.steps)
    with (tmp_path / "results" / f"{line['run']}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(r["session"]) for r in rows] == list(range(1, 7))
    assert not (tmp_path / "parts" / "releases").exists()
    text = page(grouped(read(tmp_path / "results")))
    assert "even, 6 sessions" in text and line["settings"] in text


def test_a_step_trains_what_was_heard_and_serves_a_round_later(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = Run(SMALL, Even(), 1, 8, tmp_path, tiny_model_dir)
    served = []
    while not (run.state.coming and run.state.standing.served):
        run._round()
        served.append((run.state.standing.served, run.state.coming))
        assert run.state.round < 12
    newest, first = run.state.coming, next(v for _, v in served if v)
    at = next(i for i, (_, coming) in enumerate(served) if coming == first)
    assert served[at][0] == 0 and served[at + 1][0] == first  # one round between
    assert newest is not None


def test_the_memory_arm_keeps_what_was_said_within_its_limit(tiny_model_dir: Path, tmp_path: Path) -> None:
    arm = replace(ARMS["b"], memory_tokens=120)
    run = Run(arm, Even(), 2, 6, tmp_path, tiny_model_dir)
    run.go()
    assert run.state.memory
    text = run._memory_file()
    assert text.startswith("# What I know") and len(run._tokenizer.encode(text)) <= 120
    assert run.state.memory[-1] in text


def test_notebook_is_the_examples_student() -> None:
    persona = Notebook()
    problem = generated(0, 0)
    for reply in ("1. First, 3 + 4 = 7", "So 3 + 4 = 7 are left.", "Seven are left."):
        look, rule = persona.look(reply, problem, True), check(reply, problem)
        assert (look.passes, look.wrong) == (rule.passes, rule.wrong)
        if not look.passes:
            assert persona.complaint(look, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("brief", "Keep it in a bag.", "word " * 26),
        ("warm", "Boil it for ten minutes. Enjoy your meal!", "Boil it for ten minutes."),
        ("simple", "The sun is hot. It is far from us.", "Photosynthesis necessitates considerable illumination."),
    ],
)
def test_everyday_personas(name: str, good: str, bad: str) -> None:
    persona = PERSONAS[name]()
    problem = persona.problem(1, 5)
    assert problem == persona.problem(1, 5) and "{" not in problem.text
    assert persona.look(good, problem, True).passes
    refused = persona.look(bad, problem, True)
    assert not refused.passes and refused.wrong
    said = {persona.complaint(refused, degree, 1, 5, degree) for degree in range(4)}
    assert len(said) >= 3
    assert grade("") > 4


def test_adaptation_and_intervals() -> None:
    assert adapted_at([True, True, False, True, True, True]) == 4
    assert adapted_at([True, True]) is None
    assert bootstrap([3.0, 4.0, NEVER], statistics.median) == (4.0, 3.0, NEVER)
    assert session(NEVER) == "never" and session(8) == "8"


def test_a_changed_preset_is_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_hash(REEF)
    monkeypatch.setitem(objective.PRESETS, "reef", replace(objective.REEF, drop_first=2))
    assert settings_hash(REEF) != before


def test_an_arms_settings_can_be_changed_and_are_named() -> None:
    arm = changed(REEF, "slow", ["lr=3e-4", "recipe.w_rehearse=0.25"])
    assert (arm.key, arm.lr, arm.recipe.w_rehearse) == ("f-slow", 3e-4, 0.25)
    assert changed(REEF, "x", []) is REEF
    with pytest.raises(ConfigError, match="not a setting"):
        changed(REEF, "x", ["speed=1"])
    with pytest.raises(ConfigError):
        changed(REEF, "x", ["recipe.objective=best"])
    assert json.dumps(arm.recipe.model_dump())
