"""The example as a whole: the demo is not judged by heart, and its settings are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path

from recipes.openclawrl.examples.openclawrl.student import reactions
from recipes.openclawrl.judge.corpus import corpus_bytes
from recipes.openclawrl.recipe import Config
from reef.config import load_config

EXAMPLE = Path(__file__).parent.parent / "recipes/openclawrl/examples/openclawrl"
REPORT_KEYS = [
    "sessions", "first_reply_passes", "adapted_at", "exchanges", "fates", "judged", "trained", "versions",
    "failed_requests", "control", "judge", "untrained_pass_rate", "seed", "seconds",
]  # fmt: skip


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def test_no_wording_of_the_student_occurs_in_the_judges_corpus() -> None:
    said = [words(json.loads(line)["next"]["content"]) for line in corpus_bytes().decode().splitlines()]
    phrases = [p for degrees in reactions.COMPLAINTS.values() for degree in degrees for p in degree]
    phrases += [*reactions.REDO, *reactions.THANKS]
    long = [words(p) for p in phrases if len(words(p).split()) >= 4]  # "thank you" belongs to everybody
    assert len(long) > 60
    assert [p for p in long if any(p in s for s in said)] == []


def test_the_examples_settings_are_valid() -> None:
    config = load_config(EXAMPLE / "serve.yaml", environ={})
    assert Config.model_validate(config.recipe_settings).batch_size == 4


def test_committed_reports_add_up() -> None:
    files = sorted(EXAMPLE.glob("results/*/report.json"))
    assert files
    for file in files:
        report = json.loads(file.read_text())
        assert list(report)[: len(REPORT_KEYS)] == REPORT_KEYS
        assert sum(report["fates"].values()) == report["exchanges"]
        assert len(report["first_reply_passes"]) == report["sessions"]
        assert (file.parent / "learning_curve.png").exists()
        assert (file.parent / "sessions.csv").exists()
