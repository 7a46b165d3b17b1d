"""Learning alone: `reef train` for one weight update."""

from __future__ import annotations

import json as json_module
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from reef.cli.inspect import located
from reef.cli.output import print_json, print_table, print_to_stderr
from reef.config import Config, StoreConfig, load_config, load_run
from reef.errors import ConfigError, ReefError
from reef.train.jobs import ENDED

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="serve.yaml; without it as the store's last `reef serve` was set")
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]


def register(app: typer.Typer) -> None:
    app.command()(train)


def train(
    store: Annotated[Path, typer.Option("--from", help="store.dir to learn from")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="report the step, write nothing")] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="train a step here; refused while a service runs on the store")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="have the running service train what waits, however few turns")
    ] = False,
    step: Annotated[
        str | None, typer.Option("--step", help="dry run of a stored step again; 'last' for the newest")
    ] = None,
    turns: Annotated[int | None, typer.Option("--turns", help="batch size; default: recipe.batch_size")] = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """One weight update alone: its batch, its loss terms, what would change.

    Without a service on the store, --publish forms a step of the waiting judged turns, trains it here
    and records the release; the next `reef serve` serves it.
    """
    if dry_run + publish + now != 1:
        raise ConfigError("choose one of --dry-run, --publish and --now")
    if now:
        demand(store)
        return
    settings = settings_for(store, config)
    report = _dry_run(settings, step, turns) if dry_run else _publish(settings, turns)
    if json:
        print_json(report)
        return
    print_report(report)


def settings_for(store: Path, config: Path | None) -> Config:
    """The settings of a serve.yaml, else those of the store's last `reef serve`, else the defaults; the databases are
    the store's unless the file names others. Raises ConfigError."""
    run = store / "run" / "config.json"
    settings = load_run(run) if config is None and run.exists() else load_config(config)
    found = located(store)
    at = {"dir": store, "log": settings.store.log or found.log, "learn": settings.store.learn or found.learn}
    return settings.model_copy(update={"store": settings.store.model_copy(update=at)})


def demand(store: Path) -> None:
    """Ask the service that runs on this store for a step. Raises ReefError without a store."""
    from reef.learner.steps import DEMAND

    if not (store / "log.db").exists() and not (store / "steps").exists():
        raise ReefError(f"no store in {store}")
    (store / "steps").mkdir(exist_ok=True)
    (store / "steps" / DEMAND).touch()
    typer.echo("asked; `reef releases` shows the step's release when it is there")


def _dry_run(settings: Config, step: str | None, turns: int | None) -> dict[str, Any]:
    folder = settings.store.dir / "steps"
    if step is not None:
        found = {f.parent.name: f for f in (*folder.glob("*/job.json"), *folder.glob(f"{ENDED}/*/job.json"))}
        job = found.get(max(found, default="") if step == "last" else step)
        if job is None:
            raise ConfigError(f"no stored step {step!r} in {folder}")
        return _trainer(settings, ["--dry-run", str(job)])
    with tempfile.TemporaryDirectory() as scratch:
        job = preview_job(settings, Path(scratch), turns)
        return _trainer(settings, ["--dry-run", str(job)])


def preview_job(settings: Config, scratch: Path, turns: int | None) -> Path:
    """The job the waiting judged turns would make, in a scratch folder; the store stays as it is."""
    steps = _steps(settings, scratch, turns)
    job = steps.preview()
    if job is None:
        raise ReefError("no judged turns wait for a batch; --step last looks at the newest stored step")
    return job


def _publish(settings: Config, turns: int | None) -> dict[str, Any]:
    from reef.store.lock import acquire

    lock = acquire(settings.store.dir / "serve.lock")  # a running service trains by itself
    try:
        steps = _steps(settings, settings.store.dir / "steps", turns)
        formed = steps.form()
        if not formed:
            raise ReefError("no full batch of judged turns waits; see `reef funnel`, or give --turns")
        _trainer(settings, ["--once"])
        if not steps.collect():
            raise ReefError("the step failed; it is tried again when `reef serve` runs, and its log says why")
        result = settings.store.dir / "steps" / ENDED / formed[0].id / "result.json"
        return {"step": formed[0].id, "version": formed[0].version, **json_module.loads(result.read_text())}
    finally:
        lock.close()


def _steps(settings: Config, folder: Path, turns: int | None) -> Any:
    from dataclasses import replace

    from reef.learner.__main__ import make_recipe, step_settings
    from reef.learner.steps import Steps
    from reef.learner.turns import Turns
    from reef.model import resolve
    from reef.store.database import open_database
    from reef.store.learn import LearnStore
    from reef.store.log import LogReader
    from reef.store.migrations import LEARN, LOG

    urls: StoreConfig = settings.store
    engine = open_database(urls.log_url, LOG, create=False)
    log = LogReader(engine)
    learn = LearnStore(open_database(urls.learn_url, LEARN, create=False))
    recipe = make_recipe(settings, resolve(settings.policy.model, progress=print_to_stderr))
    chosen = step_settings(settings, recipe)
    if turns is not None:
        chosen = replace(chosen, batch_size=turns)
    return Steps(log, learn, Turns(log, learn), recipe, folder, chosen)


def _trainer(settings: Config, arguments: list[str]) -> dict[str, Any]:
    """Run the trainer process to its end; returns the JSON it prints."""
    from reef.model import resolve
    from reef.service import thread_env, trainer_command

    model = resolve(settings.policy.model, progress=print_to_stderr)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / "recipe.json"
        recipe.write_text(json_module.dumps(settings.recipe_settings))
        command = [*trainer_command(settings, model, recipe), *arguments]
        done = subprocess.run(
            command, env={**os.environ, **thread_env(settings.train.threads)}, capture_output=True, text=True
        )
    if done.returncode != 0:
        raise ReefError(f"the trainer ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return json_module.loads(done.stdout) if done.stdout.strip() else {}


def print_report(report: Mapping[str, Any]) -> None:
    """A step's report as tables."""
    if report.get("samples"):
        columns = ("turn", "version", "reward", "advantage", "prompt_tokens", "trained_tokens", "contexts")
        rows = [[", ".join(s[c]) if c == "contexts" else s[c] for c in columns] for s in report["samples"]]
        print_table("batch", columns, rows)
    metrics = report.get("metrics", report)
    epochs = list(metrics.get("epochs") or [])
    if report.get("after"):
        epochs.append({**report["after"], "epoch": "after"})
    if epochs:
        names = [n for n in epochs[0] if n != "seconds"]
        print_table("loss terms by epoch", names, [[e.get(n) for n in names] for e in epochs])
    checks = (report.get("gate") or {}).get("checks", ())
    print_table(
        "gate",
        ("check", "value", "limit", "passed"),
        [[c["name"], c["value"], c["limit"], c["passed"]] for c in checks],
    )
    facts = {n: metrics.get(n) for n in ("update_norm", "weight_norm", "kl_to_base", "trained_tokens", "lr")}
    facts |= {n: report[n] for n in ("step", "version", "status", "release", "seconds") if n in report}
    print_table("what would change" if "samples" in report else "release", ("what", "value"), facts.items())
