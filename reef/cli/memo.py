"""`reef memo`: the rules Reef has gathered from a scenario's reactions, to read and to change.

Apart from the learner the only writer of the learn database; what it writes is one short transaction.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from reef.cli.inspect import located
from reef.cli.output import clock, print_json, print_table
from reef.errors import BadRequest
from reef.recipe import Rule
from reef.store.database import open_database
from reef.store.learn import LearnStore
from reef.store.migrations import LEARN

Store = Annotated[Path, typer.Option("--store", "-s", help="the service's store.dir", envvar="REEF_STORE")]


def register(app: typer.Typer) -> None:
    app.command()(memo)


def memo(
    store: Store = Path("reef-data"),
    scenario: Annotated[str, typer.Option("--scenario", help="whose memo")] = "default",
    add: Annotated[list[str] | None, typer.Option("--add", help="write a rule; it outlives those of verdicts")] = None,
    drop: Annotated[list[int] | None, typer.Option("--drop", help="number of a rule to remove")] = None,
    history: Annotated[bool, typer.Option("--history", help="also the rules that were displaced or removed")] = False,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """What this user has asked of replies so far. Judge and teacher read it, served prompts only with
    policy.serve_memo: true; --drop and --add change it."""
    learn = LearnStore(open_database(located(store).learn_url, LEARN, create=False))
    rules = learn.memo.of(scenario)
    if add or drop:
        rules = _changed(rules, add or [], drop or [])
        with learn.begin() as c:
            learn.memo.set(c, scenario, rules, "removed by hand")
        rules = learn.memo.of(scenario)
    if history:
        past = learn.memo.history(scenario)
        columns = ("text", "turn", "seen", "time", "dropped", "why")
        lines = [{c: getattr(row, c) for c in columns} for row in past]
    else:
        columns = ("number", "text", "turn", "seen", "time")
        lines = [
            {"number": n, "text": r.text, "turn": r.turn, "seen": r.seen, "time": r.time}
            for n, r in enumerate(rules, 1)
        ]
    if json:
        print_json(lines)
        return
    shown = [[clock(line[c]) if c in ("time", "dropped") else line[c] for c in columns] for line in lines]
    print_table(f"memo of {scenario}", columns, shown)


def _changed(rules: tuple[Rule, ...], add: list[str], drop: list[int]) -> tuple[Rule, ...]:
    """The rules without those numbered in `drop` and with those in `add`. Raises BadRequest."""
    for number in drop:
        if not 1 <= number <= len(rules):
            raise BadRequest(f"no rule {number}; there are {len(rules)}")
    kept = [rule for n, rule in enumerate(rules, 1) if n not in drop]
    written = [" ".join(text.split()) for text in add]
    if not all(written):
        raise BadRequest("a rule needs words")
    kept = [rule for rule in kept if rule.text not in written]
    return (*kept, *(Rule(text, None, time.time()) for text in written))
