"""Looking at what was recorded: status, funnel, sessions, turns, releases, match, export.

Reads the store directly, so it works with or without a running service.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel

from reef.cli.output import clock, counts, print_json, print_lines, print_table
from reef.config import StoreConfig
from reef.observe.views import Views
from reef.releases.chain import failed_checks
from reef.store.database import open_database
from reef.store.log import LogReader
from reef.store.migrations import LEARN, LOG

Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Store = Annotated[Path, typer.Option("--store", "-s", help="the service's store.dir", envvar="REEF_STORE")]
DEFAULT_STORE = Path("reef-data")


def register(app: typer.Typer) -> None:
    for command in (status, doctor, funnel, sessions, turns, releases, match, export):
        app.command()(command)
    app.command("import")(import_)


def views(store: Path) -> Views:
    """The store's views. Raises StoreError if there is no store."""
    urls = located(store)
    return Views(open_database(urls.log_url, LOG, create=False), open_database(urls.learn_url, LEARN, create=False))


def log_of(store: Path) -> LogReader:
    """The store's log. Raises StoreError if there is none."""
    return LogReader(open_database(located(store).log_url, LOG, create=False))


def located(store: Path) -> StoreConfig:
    """Where the databases of a store.dir are, as its last `reef serve` was configured."""
    try:
        said = json_module.loads((store / "run" / "config.json").read_text())["store"]
    except (OSError, ValueError, KeyError):
        return StoreConfig(dir=store)
    return StoreConfig(dir=store, log=said.get("log"), learn=said.get("learn"))


def status(store: Store = DEFAULT_STORE, json: Json = False) -> None:
    """The state of the loop in a few numbers."""
    reading = views(store)
    view = {**reading.status(), "served": reading.served()}
    if json:
        print_json(view)
        return
    print_table("status", ("what", "value"), view.items())


def doctor(store: Store = DEFAULT_STORE, json: Json = False) -> None:
    """What stands in the way of learning, and what would do better: one finding a line, with what to do."""
    from dataclasses import asdict

    from reef.config import Config
    from reef.observe.doctor import findings
    from reef.service import read_run_config

    reading = views(store)
    file = store / "run" / "config.json"
    config = read_run_config(file)[0] if file.exists() else Config()
    found = findings(config, reading.funnel()["fates"], reading.judge_errors(), reading.unsure())
    if json:
        print_json([asdict(finding) for finding in found])
        return
    for finding in found:
        print(f"{finding.level}: {finding.about}: {finding.said}\n  {finding.do}")


def funnel(store: Store = DEFAULT_STORE, json: Json = False) -> None:
    """Every exchange by its fate; the counts add up to all exchanges."""
    view = views(store).funnel()
    if json:
        print_json(view)
        return
    total = view["exchanges"]
    rows = [(fate, n, f"{n / max(1, total):.1%}") for fate, n in view["fates"].items()]
    rows += [("(not read yet)", view["unread"], "")] if view["unread"] else []
    print_table("funnel", ("fate", "exchanges", "share"), [*rows, ("all", total, "")])
    print(f"judged {view['judged']} of {view['finished']} finished turns ({view['judged_share']:.0%})")


def sessions(
    session: Annotated[str | None, typer.Argument(help="a session's id: show its exchanges")] = None,
    store: Store = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """The newest sessions, or the exchanges of one."""
    if session is None:
        rows = views(store).sessions()
        if json:
            print_json({"sessions": rows})
            return
        shown = [(r["session"], r["exchanges"], clock(r["first"]), clock(r["last"]), counts(r["fates"])) for r in rows]
        print_table("sessions", ("session", "exchanges", "first", "last", "fates"), shown)
        return
    view = views(store).session(session)
    if json:
        print_json(view)
        return
    shown = [(t["id"], clock(t["time"]), t["fate"], t["version"], t["method"], t["reason"]) for t in view["turns"]]
    print_table(f"session {session}", ("receipt", "time", "fate", "version", "matched by", "reason"), shown)


def turns(receipt: str, store: Store = DEFAULT_STORE, json: Json = False) -> None:
    """Everything known of one exchange: words, tokens, matching, verdicts, fates."""
    view = views(store).turn(receipt)
    if json:
        print_json(view)
        return
    console = Console(highlight=False)
    for message in view["messages"]:
        console.print(
            Panel(message["content"], title=message["role"], title_align="left", border_style="dim"), markup=False
        )
    console.print(Panel(view["reply"] or "", title="reply", title_align="left"), markup=False)
    for state in view["next_states"]:
        console.print(Panel(state["next_state"], title=f"next: {state['role']}", title_align="left"), markup=False)
    for rule in view["memo"]:
        console.print(f"served with the memo's rule: {rule}", markup=False)
    facts = {**(view["sampled"] or {}), **{k: v for k, v in (view["matching"] or {}).items() if k != "id"}}
    print_table(f"turn {receipt}", ("what", "value"), facts.items())
    said = [(v["judge"], v["verdict"], v["charged"], v["body"].get("hint"), v["seconds"]) for v in view["verdicts"]]
    print_table("verdicts", ("judge", "verdict", "charged", "hint", "seconds"), said)
    print_table(
        "fates",
        ("time", "fate", "rule", "reason"),
        [(clock(f["time"]), f["fate"], f["rule"], f["reason"]) for f in view["fates"]],
    )


def releases(store: Store = DEFAULT_STORE, json: Json = False) -> None:
    """Every version with the turns it learned from, its metrics and its gate."""
    reading = views(store)
    rows, served = reading.releases(), reading.served()
    if json:
        print_json({"served": served, "releases": rows})
        return
    print_table(
        "releases",
        ("release", "from", "status", "turns", "loss by epoch", "KL to base", "seconds", "heard to served", "gate"),
        [
            (
                f"{r['scenario']}@{r['version']}",
                r["parent"],
                "serving" if served.get(r["scenario"], 0) == r["version"] else r["status"],
                len(r["turns"]),
                losses(r["metrics"]),
                r["metrics"].get("kl_to_base"),
                f"{r['metrics'].get('seconds', 0):.0f}",
                waited(r["reaction_to_serving_s"]),
                failed_checks(r["gate"]) or "passed",
            )
            for r in rows
        ],
    )


def waited(seconds: list[float] | None) -> str:
    """How long the newest and the oldest reaction waited for the version that learned from them."""
    return f"{seconds[0]:.0f}-{seconds[1]:.0f} s" if seconds else ""


def losses(metrics: dict[str, Any]) -> str:
    """The loss of each epoch."""
    return " ".join(f"{e['loss']:.2f}" for e in metrics.get("epochs") or () if e.get("loss") is not None)


def match(
    traffic: Annotated[Path, typer.Argument(help="traffic file (JSON lines)")],
    online: Annotated[bool, typer.Option("--online", help="what the live service would have decided")] = False,
    json: Json = False,
) -> None:
    """Rebuild conversations from recorded traffic and say which request answers which reply."""
    from reef.sessions.replay import replay
    from reef.wire.traffic import read_traffic

    rows = list(replay(read_traffic(traffic), online=online))
    if json:
        print_lines(rows)
        return
    columns = ("id", "session", "fate", "binds", "method", "score", "reason")
    print_table(str(traffic), columns, [[r[c] for c in columns] for r in rows])


def export(store: Store = DEFAULT_STORE) -> None:
    """Write every exchange, but erased ones, as a line of the traffic format to stdout."""
    from reef.wire.traffic import traffic_line

    for exchange in log_of(store).everything():
        sys.stdout.buffer.write(traffic_line(exchange).encode() + b"\n")
    sys.stdout.buffer.flush()


def import_(
    traffic: Annotated[Path, typer.Argument(help="traffic file (JSON lines)")], store: Store = DEFAULT_STORE
) -> None:
    """Append a traffic file to a store's log; ids that are there already are left alone."""
    import asyncio

    from reef.store.log import LogWriter
    from reef.wire.traffic import read_traffic

    engine = open_database(located(store).log_url, LOG)
    open_database(located(store).learn_url, LEARN)
    reader = LogReader(engine)
    writer = LogWriter(engine)

    async def run() -> tuple[int, int]:
        added = known = 0
        for exchange in read_traffic(traffic):
            if reader.get(exchange.id):
                known += 1
            else:
                await writer.exchange(exchange)
                added += 1
        return added, known

    added, known = asyncio.run(run())
    writer.close()
    print(f"{added} exchanges added, {known} were there")
