"""Do the clients' notes, the two databases and the release folders tell the same story?

Reads a run's folder after everything has settled and stopped; knows nothing of how it was disturbed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, select, text

from reef.config import StoreConfig
from reef.errors import ModelError
from reef.releases.chain import read_release
from reef.sessions.fate import Fate
from reef.store.database import open_database
from reef.store.log import LogReader
from reef.store.migrations import LEARN, LOG
from reef.store.schema import claims, exchanges, fates, releases, steps, turns, verdicts
from reef.wire.chat import reply_of

GOOD = (Fate.TRAINED, Fate.JUDGED)


@dataclass
class Findings:
    """What a run came to. It passed if there are no problems."""

    problems: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def expect(self, good: bool, problem: str) -> None:
        if not good:
            self.problems.append(problem)

    def show(self) -> None:
        """A table, then one line of JSON."""
        for name, value in self.numbers.items():
            print(f"{name:28} {value}")
        for problem in self.problems:
            print(f"PROBLEM  {problem}")
        print(json.dumps({**self.numbers, "problems": self.problems, "passed": not self.problems}))


def check(folder: Path, store: StoreConfig, batch: int, **about: Any) -> Findings:
    """Compare everything a run left behind."""
    found = Findings(numbers=about)
    log, learn = open_database(store.log_url, LOG), open_database(store.learn_url, LEARN)
    try:
        notes = list(read_notes(folder))
        found.numbers["answered"] = len(notes)
        found.expect(about.get("settled", True), "the backlog was not worked off in time")
        _log(found, log, notes)
        fate = _fates(found, log, learn)
        _none_skipped(found, notes, fate)
        _trained_once(found, learn, fate, batch)
        _chain(found, log, learn, store.dir / "releases")
        for engine in (log, learn):
            if engine.dialect.name == "sqlite":
                with engine.connect() as c:
                    said = c.execute(text("pragma integrity_check")).scalar()
                found.expect(said == "ok", f"integrity_check: {said}")
    finally:
        log.dispose()
        learn.dispose()
    return found


def read_notes(folder: Path) -> Iterator[dict[str, Any]]:
    """What clients received in full; a note that was being written when its client died is no note."""
    for file in sorted(folder.glob("notes-*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _log(found: Findings, log: Engine, notes: list[dict[str, Any]]) -> None:
    reader = LogReader(log)
    missing = wrong = 0
    for note in notes:
        exchange = reader.get(note["id"])
        if exchange is None or exchange.status != 200:
            missing += 1
        else:
            reply = reply_of(exchange.response)
            wrong += reply is None or reply.content != note["reply"]
    found.numbers |= {"answered but not in the log": missing, "recorded otherwise": wrong}
    found.expect(not missing, f"{missing} answered requests are not in the log")
    found.expect(not wrong, f"{wrong} answers were recorded with another text")
    with log.connect() as c:
        rows, last = c.execute(select(func.count(), func.max(exchanges.c.seq))).one()
    found.numbers["recorded"] = rows
    found.expect(rows == (last or 0), f"seq goes to {last} over {rows} rows")


def _fates(found: Findings, log: Engine, learn: Engine) -> dict[str, Fate]:
    with log.connect() as c:
        recorded = set(c.execute(select(exchanges.c.id)).scalars())
    with learn.connect() as c:
        current = {id: Fate(fate) for id, fate in c.execute(select(turns.c.id, turns.c.fate))}
        history = defaultdict(list)
        for turn, fate in c.execute(select(fates.c.turn, fates.c.fate).order_by(fates.c.seq)):
            history[turn].append(Fate(fate))
        doubled = c.execute(
            select(func.count())
            .select_from(verdicts)
            .group_by(verdicts.c.turn, verdicts.c.binding, verdicts.c.charged)
            .having(func.count() > 1)
        ).all()
    counts = Counter(fate.value for fate in current.values())
    found.numbers["fates"] = dict(counts.most_common())
    found.expect(set(current) == recorded, f"{len(set(current) ^ recorded)} exchanges without a fate, or the reverse")
    stale = sum(history[turn][-1] is not fate for turn, fate in current.items())
    found.expect(not stale, f"{stale} turns whose fate is not the end of their history")
    twice = sum(h.count(Fate.TRAINED) > 1 for h in history.values())
    found.expect(not twice, f"{twice} turns became trained twice")
    found.expect(not doubled, f"{len(doubled)} reactions have two verdicts")
    return current


def _none_skipped(found: Findings, notes: list[dict[str, Any]], fate: dict[str, Fate]) -> None:
    """A reply that its client answered, and got an answer to, was judged and is trained or waits."""
    newest: dict[str, int] = {}
    for note in notes:
        newest[note["who"]] = max(newest.get(note["who"], 0), note["turn"])
    answered = [note["id"] for note in notes if note["turn"] < newest[note["who"]]]
    skipped = Counter(str(fate.get(id)) for id in answered if fate.get(id) not in GOOD)
    found.numbers |= {"replies with a reaction": len(answered), "of these not learned from": sum(skipped.values())}
    found.expect(not skipped, f"replies with a reaction that were not learned from: {dict(skipped)}")


def _trained_once(found: Findings, learn: Engine, fate: dict[str, Fate], batch: int) -> None:
    with learn.connect() as c:
        rows = c.execute(select(releases.c.version, releases.c.turns, releases.c.status)).all()
        running = c.execute(select(func.count()).select_from(steps).where(steps.c.status == "running")).scalar_one()
        claimed = set(c.execute(select(claims.c.turn)).scalars())
        states = Counter(c.execute(select(steps.c.status)).scalars())
    times = Counter(turn for row in rows if row.status != "rejected" for turn in row.turns)
    trained = {turn for turn, f in fate.items() if f is Fate.TRAINED}
    more = sum(n > 1 for n in times.values())
    found.numbers |= {"releases": len(rows), "steps": dict(states), "trained": len(trained)}
    found.numbers |= {"trained more than once": more, "wait for a batch": sum(f is Fate.JUDGED for f in fate.values())}
    found.expect(not more, f"{more} turns are in two releases")
    found.expect(trained == set(times), f"{len(trained ^ set(times))} turns trained in name or in weights only")
    found.expect(trained == claimed, f"{len(trained ^ claimed)} claims do not match")
    found.expect(not running, f"{running} steps still run")
    found.expect(found.numbers["wait for a batch"] < batch, "a full batch waits")


def _chain(found: Findings, log: Engine, learn: Engine, folder: Path) -> None:
    with learn.connect() as c:
        rows = c.execute(select(releases).order_by(releases.c.version)).all()
    before = 0
    broken = 0
    for row in rows:
        try:
            release = read_release(row.path)
            release.verify()
        except ModelError as error:
            found.expect(False, str(error))
            broken += 1
            continue
        same = (release.version, list(release.turns), release.content_hash) == (row.version, row.turns, row.hash)
        if not same or row.parent != before or row.published is None or row.status != "released":
            broken += 1
        before = row.version
    on_disk = {int(f.name[1:]) for f in folder.glob("*/v*")}
    found.numbers["broken links in the chain"] = broken
    found.expect(not broken, f"{broken} releases do not follow the one before")
    found.expect(on_disk == {row.version for row in rows}, "release folders and the database differ")
    found.expect(LogReader(log).served().get("default", 0) == before, "the newest release is not served")
