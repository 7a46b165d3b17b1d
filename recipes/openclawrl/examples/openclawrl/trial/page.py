"""The study's figures and its written page, from the rows alone.

Invariant: every number on the page is computed here from the committed CSVs; nothing is typed in. Runs
of different settings are never averaged. It knows no model and no run.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.openclawrl.examples.openclawrl.trial.arms import ARMS
from recipes.openclawrl.examples.openclawrl.trial.results import adapted_at

RESAMPLES = 2000
NEVER = 10**6
"""stands for a run that did not adapt: later than any session"""


@dataclass(frozen=True, slots=True)
class Finished:
    """One run's rows."""

    line: dict[str, Any]
    passes: tuple[bool, ...]
    right: int
    """first replies with the right number"""
    steps: tuple[dict[str, Any], ...]
    title: str

    @property
    def adapted(self) -> int:
        return adapted_at(self.passes) or NEVER


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one arm, persona, length and settings."""

    persona: str
    arm: str
    sessions: int
    settings: str
    runs: tuple[Finished, ...]

    @property
    def title(self) -> str:
        return f"{self.arm}: {self.runs[0].title}"


def read(folder: Path) -> list[Finished]:
    """Every finished run in a results folder, by name."""
    found = []
    for file in sorted(folder.glob("*.csv")):
        report = json.loads(file.with_suffix(".json").read_text())
        with file.open(encoding="utf-8", newline="") as rows:
            lines = list(csv.DictReader(rows))
        passes = tuple(line["pass"] == "1" for line in lines)
        right = sum(line["correct"] == "1" for line in lines)
        found.append(Finished(report["run"], passes, right, tuple(report["steps"]), report["arm"]["title"]))
    return found


def grouped(runs: Iterable[Finished]) -> list[Group]:
    found: dict[tuple[str, str, int, str], list[Finished]] = defaultdict(list)
    for run in runs:
        line = run.line
        found[line["persona"], line["arm"], line["sessions"], line["settings"]].append(run)
    return [Group(*key, tuple(runs)) for key, runs in sorted(found.items())]


def bootstrap(values: Sequence[float], measure: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
    """The measure and its 95 % percentile interval over runs drawn with replacement."""
    rng = random.Random(0)
    drawn = sorted(measure(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return measure(values), drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1]


def write_page(results: Path, docs: Path) -> None:
    """Write `docs/study.md` and its figures. Raises OSError."""
    groups = grouped(read(results))
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "study.md").write_text(page(groups), encoding="utf-8")
    for persona, sessions in sorted({(g.persona, g.sessions) for g in groups}):
        chosen = [g for g in groups if (g.persona, g.sessions) == (persona, sessions)]
        draw(chosen, docs / f"study-{persona}-{sessions}.png")


HEAD = """# Does it learn, how fast, and does it last?

This page and its figures are written by

    python -m recipes.openclawrl.examples.openclawrl.study report

from the rows in `recipes/openclawrl/examples/openclawrl/results/study`; runs are added by

    python -m recipes.openclawrl.examples.openclawrl.study run --arms a,e,f,g --seeds 0-4

which skips what is finished and goes on with what was stopped. A row of settings that changed is a group of
its own. What was tried on the way, and why the settings are what they are, is in [study-notes.md](study-notes.md).

## How a run is made

A run is one process on one thread, with the parts of the service called directly: the embedded engine's
forward pass and sampling, the recipe, the trainer with its gate and release folders. There is no HTTP, no
matching and no database in it (`reef demo` runs all of that); in exchange a run is the same on every machine
of one kind and needs no second core. Sessions follow each other, as one user has them. After each reply its
user reacts; then at most one step is trained, and its release is served from the reply after the next, as if
the user had gone on talking meanwhile. A user gives up after four replies. A session passes when its *first*
reply meets the user's wish. Adaptation is the first of three passes in a row; a run without it counts as
later than any session, so a median can be "never". Sampling seeds depend on the run's seed and the place in
it only: with the same seed all arms meet the same problems and the same chance.

Held-out: first replies of the last version to 24 problems of another seed, 128 tokens; the wish is read from
the first 64. KL to the base is the gate's, nat per token on fixed replies. Intervals are 95 % bootstrap over
seeds; with few seeds they are wide, and with one they say nothing.

Arms c, d and e minimise the published objective (raw reward, top-4 surrogate, no anchors) with the laptop's
batch, learning rate, epochs and adapted layers, the same as f: the published batch of 16 would be two
updates in a run. Arms that distil draw contexts from one source: accepted replies, and where there is none
the user's complaint (f: accepted replies only). Arm b keeps what the user said in a Markdown file in the
system prompt; b2 adds the newest accepted answer to it. Arm f is preset `reef` with a weaker RL term (0.3, not 1)
and no anchor to the base (`beta_kl` 0). Its groups: 63f3cd rehearses two accepted replies a step at half weight,
899088 four at full weight, 81812a those of them first that were accepted at once and whole (`choose_best`). All were
trained while a step was still examined on accepted replies that it trained itself. Arms a to f have the rule as judge,
g has the embedded judge (its name, with the hash of its weights, is in each run's JSON).

The student asks again in one of fourteen sentences; one of them was put in other words after the rows of arms a to f
that are here, since a conversation of the judge's corpus had come to hold it. Replaying a run that drew it would part
from its row there.
"""


def page(groups: Sequence[Group]) -> str:
    parts = [HEAD]
    for persona, sessions in sorted({(g.persona, g.sessions) for g in groups}):
        chosen = [g for g in groups if (g.persona, g.sessions) == (persona, sessions)]
        parts.append(f"\n## {persona}, {sessions} sessions\n\n![curves](study-{persona}-{sessions}.png)\n")
        parts.append(table(chosen))
        parts.append(by_seed(chosen))
    if not groups:
        parts.append("\nNo run is finished yet.\n")
    return "\n".join(parts)


COUNTED = ("updates", "rejected", "turns_trained")
COLUMNS = (
    "arm", "settings", "seeds", "sessions to adaptation", "not adapted", "first replies accepted, of 36",
    "last 12", "held-out", "right numbers, held-out", "KL", "length", "updates / rejected / turns",
    "processor s",
)  # fmt: skip


def table(groups: Sequence[Group]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(g)) + " |" for g in groups]
    return "\n".join(lines) + "\n"


def cells(group: Group) -> list[str]:
    runs = group.runs
    adapted = bootstrap([r.adapted for r in runs], statistics.median)
    missed = sum(r.adapted == NEVER for r in runs)
    lines = [r.line for r in runs]
    tried = sum(int(line["held_out_n"] or 0) for line in lines)
    kl = [float(line["kl_to_base"]) for line in lines if line["kl_to_base"] != ""]
    return [
        group.title,
        group.settings,
        str(len(runs)),
        interval(adapted, session),
        f"{missed} of {len(runs)}",
        interval(bootstrap([float(line["passes_first_36"]) for line in lines], statistics.fmean), "{:.1f}".format),
        interval(bootstrap([float(line["passes_last_12"]) for line in lines], statistics.fmean), "{:.1f}".format),
        share(sum(int(line["held_out_passes"] or 0) for line in lines), tried),
        share(sum(int(line["held_out_correct"] or 0) for line in lines), tried),
        f"{statistics.fmean(kl):.3f}" if kl else "",
        f"{statistics.fmean(float(line['held_out_length']) for line in lines):.0f}",
        " / ".join(f"{statistics.fmean(float(line[n]) for line in lines):.0f}" for n in COUNTED),
        f"{statistics.fmean(line['generating_s'] + line['training_s'] + line['judging_s'] for line in lines):.0f}",
    ]


def interval(found: tuple[float, float, float], shown: Callable[[float], str]) -> str:
    middle, low, high = map(shown, found)
    return f"{middle} ({low} to {high})"


def session(value: float) -> str:
    return "never" if value >= NEVER / 2 else f"{value:g}"


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else ""


def by_seed(groups: Sequence[Group]) -> str:
    """Every run as its row of passes."""
    lines = ["", "Every run, a 1 for each first reply that passed:", "", "```"]
    for group in groups:
        for run in group.runs:
            marks = "".join("1" if p else "0" for p in run.passes)
            lines.append(f"{group.arm:4} seed {run.line['seed']:<3} {group.settings}  {marks}")
    return "\n".join([*lines, "```", ""])


DASHES = ("--", "-", "-.", ":")


def draw(groups: Sequence[Group], file: Path) -> None:
    """Accepted first replies so far, mean over seeds with each seed faint behind it; the groups of one arm share its
    colour and differ in their dashes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    order = {key: i for i, key in enumerate(ARMS)}
    seen: Counter[str] = Counter()
    for group in groups:
        style = DASHES[seen[group.arm] % len(DASHES)]
        seen[group.arm] += 1
        color = f"C{order.get(group.arm, len(order)) % 10}"
        curves = [[sum(r.passes[: k + 1]) for k in range(len(r.passes))] for r in group.runs]
        sessions = range(1, min(map(len, curves)) + 1)
        for curve in curves:
            axes.plot(sessions, curve[: len(sessions)], color=color, alpha=0.15, linewidth=1)
        mean = [statistics.fmean(curve[k - 1] for curve in curves) for k in sessions]
        label = f"{group.title}, {group.settings} ({len(curves)})"
        axes.plot(sessions, mean, color=color, linestyle=style, label=label)
    axes.set_xlabel("session")
    axes.set_ylabel("first replies accepted so far")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
