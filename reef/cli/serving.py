"""`reef serve`, `reef demo`, `reef rollback`: running the service and switching what it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from reef.cli.output import print_json
from reef.config import load_config
from reef.errors import ConfigError, ReefError

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="serve.yaml; without it all defaults")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]
Server = Annotated[str, typer.Option("--url", help="a running service", envvar="REEF_URL")]
Admin = Annotated[str | None, typer.Option("--key", help="API key with the admin role", envvar="REEF_KEY")]
Scenario = Annotated[str, typer.Option("--scenario", help="whose policy")]
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
DEFAULT_URL = "http://127.0.0.1:8800"


def register(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA)(serve)
    app.command()(demo)
    app.command()(rollback)


def overrides(extra: list[str]) -> list[tuple[str, str]]:
    """`--section.key value` and `--section.key=value` as pairs. Raises ConfigError."""
    pairs = []
    rest = list(extra)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or "." not in name:
            raise ConfigError(f"unexpected argument {name!r}; settings are given as --section.key value")
        name, equals, value = name.removeprefix("--").partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} needs a value")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs


def serve(context: typer.Context, config: ConfigFile = None, json: Json = False) -> None:
    """Run gateway, learner, trainer and engine until Ctrl-C. Any setting: --section.key value."""
    from reef.learner.__main__ import recipe_config
    from reef.model import resolve
    from reef.service import Service

    settings = load_config(config, overrides(context.args))
    recipe_config(settings)
    console = Console(stderr=True, highlight=False)
    model = resolve(settings.policy.model, progress=console.print)
    with Service(settings, model) as service:
        service.wait_ready()
        if json:
            print_json({"url": service.url, "store": str(settings.store.dir), "processes": service.pids()})
        else:
            console.print(f"serving on {service.url}/v1  (store {settings.store.dir}, Ctrl-C ends)")
        service.run()


def demo(
    sessions: Annotated[int, typer.Option("--sessions", min=1, help="homework sessions")] = 36,
    seed: Annotated[int, typer.Option("--seed", help="of problems, wording and sampling")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="run folder; an unfinished run in it goes on")] = None,
    json: Json = False,
) -> None:
    """Watch a 135M model learn a simulated student's hidden preference, through the whole service."""
    try:
        from recipes.openclawrl.examples.openclawrl.demo import run_demo
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo needs the extra 'demo' ({error.name} is missing): pip install 'reef[demo]'"
        ) from None
    report = run_demo(sessions, seed, out or Path("runs") / f"demo-{sessions}-seed{seed}", quiet=json)
    if json:
        print_json(report)


def rollback(
    version: Annotated[int, typer.Argument(help="version to serve; 0 is the untrained policy")],
    scenario: Scenario = "default",
    url: Server = DEFAULT_URL,
    key: Admin = None,
    json: Json = False,
) -> None:
    """Serve an earlier (or later) release from the next request on."""
    headers = {"x-reef-scenario": scenario, **({"authorization": f"Bearer {key}"} if key else {})}
    try:
        response = httpx.post(f"{url.rstrip('/')}/reef/releases/{version}/serve", headers=headers, timeout=60)
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ReefError(f"no service answers at {url}: {error}") from None
    if response.status_code != 200:
        raise ReefError(body["error"]["message"])
    if json:
        print_json(body)
    else:
        print(f"{scenario}: serving version {body['version']} (was {body['before']})")
