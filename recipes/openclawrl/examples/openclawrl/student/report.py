"""What a run leaves behind: report.json, sessions.csv and learning_curve.png.

Invariant: every number is counted from the student's records or passed in by the caller as
`ServiceNumbers`; nothing is estimated, and the untrained control stands beside the learned run in
each file. This module talks to no service.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .rule import chance_of_run
from .run import Control, Result
from .session import Reply

IN_A_ROW = 3
LAST = 12
WINDOW = 10
LISTS = ("bullets", "numbered")
COLUMNS = (
    *("session", "problem", "first_reply_passes", "control_passes", "replies", "accepted"),
    *("bold", "list", "steps", "heading", "calculations", "correct", "version", "receipt", "seconds"),
)
"""of sessions.csv; bold to receipt are about the first reply"""


@dataclass(frozen=True, slots=True)
class ServiceNumbers:
    """What only the service knows."""

    exchanges: int
    fates: Mapping[str, int]
    """count of exchanges by fate; the sum is `exchanges`"""
    judged: int
    trained: int
    versions: int
    """released versions, version 0 not counted"""
    judge_name: str
    judge_agreement: float | None
    """share of judged replies on which judge and rule agree; see `agreement`"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """seconds spent in serving, judging, training and waiting"""
    peak_memory_bytes: int | None = None
    """largest sum over all processes"""


def agreement(labels: Mapping[str, bool], verdicts: Mapping[str, int]) -> float | None:
    """Share of the replies with a verdict (+1 or -1, by receipt) on which the judge says what the
    rule says; 0 counts as disagreement. None when no reply has both."""
    both = [(labels[r], v) for r, v in verdicts.items() if r in labels]
    return sum((v > 0) == passes and v != 0 for passes, v in both) / len(both) if both else None


def adapted_at(passes: Sequence[bool], in_a_row: int = IN_A_ROW) -> int | None:
    """1-based session index of the first of the first `in_a_row` consecutive passes; None if never."""
    for k in range(len(passes) - in_a_row + 1):
        if all(passes[k : k + in_a_row]):
            return k + 1
    return None


def report(result: Result, control: Control, service: ServiceNumbers) -> dict[str, Any]:
    """The report.json dictionary: the fixed keys first, in their order, then what explains them."""
    n = len(result.sessions)
    untrained = control.passes[:n]
    first = [s.replies[0] for s in result.sessions if s.replies]
    return {
        "sessions": n,
        "first_reply_passes": result.passes,
        "adapted_at": adapted_at(result.passes),
        "exchanges": service.exchanges,
        "fates": dict(service.fates),
        "judged": service.judged,
        "trained": service.trained,
        "versions": service.versions,
        "failed_requests": result.failed_requests + control.failed_requests,
        "control": {"first_reply_passes": untrained, "adapted_at": adapted_at(untrained)},
        "judge": {"name": service.judge_name, "agreement_with_rule": service.judge_agreement},
        "untrained_pass_rate": control.pass_rate,
        "seed": result.seed,
        "seconds": result.seconds,
        "untrained_replies": len(control.replies),
        "chance_untrained_adapts": chance_of_run(control.pass_rate, n, IN_A_ROW),
        "last_passes": {
            "sessions": min(LAST, n),
            "learned": sum(result.passes[-LAST:]),
            "control": sum(untrained[-LAST:]),
        },
        "replies": sum(s.turns for s in result.sessions),
        "correct_first_replies": {
            "learned": sum(r.check.correct for r in first),
            "control": sum(r.check.correct for r in control.replies[:n]),
        },
        "seconds_by_part": dict(service.seconds),
        "peak_memory_bytes": service.peak_memory_bytes,
    }


def write_report(out: Path, result: Result, control: Control, service: ServiceNumbers) -> dict[str, Any]:
    """Write the three files into `out` and return the report."""
    out.mkdir(parents=True, exist_ok=True)
    made = report(result, control, service)
    (out / "report.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    write_sessions(out / "sessions.csv", result, control)
    draw(out / "learning_curve.png", result, control)
    return made


def write_sessions(path: Path, result: Result, control: Control) -> None:
    """One row per session, readable in a spreadsheet; yes/no columns hold 1 or 0."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for s in result.sessions:
            seen = s.replies[0] if s.replies else None
            has = [int(_has(seen, kinds)) for kinds in (("bold",), LISTS, ("steps",), ("heading",))]
            beside = int(control.passes[s.index]) if s.index < len(control.replies) else ""
            rest = (seen.check.calculations, int(seen.check.correct), seen.version, seen.receipt) if seen else [""] * 4
            rows.writerow(
                [
                    s.index + 1,
                    s.problem,
                    int(s.first_reply_passes),
                    beside,
                    s.turns,
                    int(s.accepted),
                    *has,
                    *rest,
                    f"{s.seconds:.1f}",
                ]
            )


def draw(path: Path, result: Result, control: Control) -> None:
    """Cumulative accepted first replies, learned and control, over the rolling share of markup."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    n = len(result.sessions)
    x = range(1, n + 1)
    figure = Figure(figsize=(8, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(x, _cumulative(result.passes), color="C0", linewidth=2, label="learning")
    untrained = control.passes[:n]
    upper.plot(range(1, len(untrained) + 1), _cumulative(untrained), color="0.5", label="untrained control")
    upper.plot(x, [control.pass_rate * k for k in x], ":", color="0.5", label=f"untrained rate {control.pass_rate:.2f}")
    upper.set(ylabel="first replies accepted so far", title=f"Hidden preference, {n} sessions, seed {result.seed}")
    lines = (("list", LISTS, "C1", "-"), ("step labels", ("steps",), "C4", "-"), ("bold", ("bold",), "C3", "-."))
    for name, kinds, color, style in lines:
        flags = [_has(s.replies[0] if s.replies else None, kinds) for s in result.sessions]
        lower.plot(x, rolling(flags), style, color=color, label=name)
    lower.set(xlabel="session", ylabel=f"share of the last {WINDOW} first replies", ylim=(-0.03, 1.03))
    adapted = adapted_at(result.passes)
    for axes in (upper, lower):
        if adapted is not None:
            axes.axvline(adapted, linestyle="--", color="C2", label=f"adapted at session {adapted}")
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=120)


def rolling(flags: Sequence[bool], window: int = WINDOW) -> list[float]:
    """Share of true flags among the last `window` up to each place (fewer at the start)."""
    return [sum(part) / len(part) for k in range(len(flags)) if (part := flags[max(0, k + 1 - window) : k + 1])]


def _cumulative(flags: Sequence[bool]) -> list[int]:
    return [sum(flags[: k + 1]) for k in range(len(flags))]


def _has(reply: Reply | None, kinds: Sequence[str]) -> bool:
    return reply is not None and any(kind in reply.check.violations for kind in kinds)
