"""Inference alone: `reef judge` says what the reactions in a file mean, and how often that is right."""

from __future__ import annotations

import asyncio
import json as json_module
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from reef.cli.output import print_lines, print_table, print_to_stderr
from reef.config import load_config
from reef.errors import BadRequest, JudgeError
from reef.observe.agreement import agreement
from reef.recipe import NextState, Recipe, Turn
from reef.wire.exchange import Message

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="serve.yaml; without it all defaults")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output: one line a turn")]


def register(app: typer.Typer) -> None:
    app.command()(judge)


def judge(
    turns: Annotated[Path, typer.Argument(help="turn file (JSON lines: id, history, next)")],
    config: ConfigFile = None,
    truth: Annotated[
        bool, typer.Option("--truth", help="the lines also have verdict, target, kind, lang: print the agreement")
    ] = False,
    json: Json = False,
) -> None:
    """Say what each reaction means: accepted, rejected or neither, about which reply, and why."""
    from reef.learner.__main__ import make_recipe
    from reef.model import resolve

    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bar of weights between the rows
    settings = load_config(config)
    rows = read_turns(turns, labelled=truth)
    recipe = make_recipe(settings, resolve(settings.policy.model, progress=print_to_stderr))
    results = asyncio.run(judged(recipe, rows))
    found = agreement(rows, results) if truth else None
    if json:
        print_lines([*results, {"agreement": found}] if found else results)
    elif found:
        print_agreement(found)
    else:
        columns = ("id", "verdict", "target", "confidence", "hint")
        shown = [[r.get(c) for c in columns[:-1]] + [r.get("hint") or r.get("error")] for r in results]
        print_table(str(turns), columns, shown)


async def judged(recipe: Recipe, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the answer, in the order of `rows`; a turn without a valid verdict says why."""
    limit = asyncio.Semaphore(max(getattr(recipe.config, "prm_concurrency", 8), 64))

    async def one(row: Mapping[str, Any]) -> dict[str, Any]:
        nothing = {"id": row.get("id"), "verdict": None, "target": None, "charges": []}
        async with limit:
            try:
                verdict = await recipe.judge(turn_of(row))
            except JudgeError as error:
                return {**nothing, "error": str(error)}
        if verdict is None:
            return nothing
        return {
            "id": row.get("id"),
            "verdict": verdict.verdict,
            "target": verdict.target,
            "charges": [{"index": i, "verdict": v} for i, v in verdict.charges],
            "reject": verdict.reject,
            "keep": verdict.keep,
            "hint": verdict.hint,
            "confidence": verdict.confidence,
            "votes": list(verdict.votes),
            "judge": verdict.judge,
            "seconds": verdict.seconds,
            "tokens": verdict.tokens,
        }

    return list(await asyncio.gather(*(one(row) for row in rows)))


def read_turns(path: Path, *, labelled: bool = False) -> list[dict[str, Any]]:
    """The lines of a turn file. Raises BadRequest naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json_module.loads(line)
            turn_of(row)
            if labelled and row["verdict"] not in (-1, 0, 1):
                raise ValueError(f"verdict {row['verdict']!r}")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BadRequest(f"{path}, line {number}: not a turn: {error!r}") from None
        rows.append(row)
    return rows


def turn_of(row: Mapping[str, Any]) -> Turn:
    """A line of a turn file as a turn."""
    history = [Message(m["role"], m["content"]) for m in row["history"]]
    return Turn(
        id=str(row.get("id", "")),
        scenario="default",
        session="",
        messages=tuple(history[:-1]),
        reply=history[-1],
        next=NextState(row["next"]["role"], row["next"]["content"]),
        sampled=None,
    )


def print_agreement(found: Mapping[str, Any]) -> None:
    """Agreement with the labels as tables."""
    overall = [(name, found[name]) for name in ("rows", "judged", "accuracy", "reversed", "seconds", "tokens")]
    overall += [(f"target: {name}", value) for name, value in found["targets"].items()]
    print_table("agreement", ("what", "value"), overall)
    columns = ("label", "-1", "0", "1", "none")
    confusion = [[label, *(row[c] for c in columns[1:])] for label, row in found["confusion"].items()]
    print_table("confusion (rows: label, columns: judge)", columns, confusion)
    for name in ("by_kind", "by_lang"):
        rows = [[key, row["rows"], row["accuracy"]] for key, row in found[name].items()]
        print_table(name.replace("_", " "), ("value", "rows", "accuracy"), rows)
    print_table("the surest share", ("share", "accuracy"), found["by_coverage"].items())
