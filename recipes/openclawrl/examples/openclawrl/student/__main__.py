"""Run the student against any OpenAI-compatible server: `python -m ...student --help`.

It writes sessions.jsonl and control.jsonl only, and prints what the student saw; the full report
needs the service's own numbers and is written by `reef demo`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from reef.errors import ReefError

from .live import View
from .problems import stream
from .report import IN_A_ROW, adapted_at
from .rule import chance_of_run
from .run import Control, Result, run_control, run_student
from .session import Settings


def main(
    base_url: Annotated[str, typer.Option(help="the server's /v1")],
    out: Annotated[Path, typer.Option(help="run folder; a run found there is continued")],
    sessions: int = 36,
    seed: int = 0,
    parallel: Annotated[int, typer.Option(help="sessions side by side")] = 4,
    control_n: Annotated[int, typer.Option(help="untrained first replies; 0 for none")] = 200,
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K test.jsonl: the 72 problems of the stream")] = None,
    strict: Annotated[bool, typer.Option(help="the right number is asked for as well")] = False,
    model: str = "default",
    max_tokens: int = Settings().max_tokens,
    api_key: str = "student",
) -> None:
    """Hold homework sessions with a hidden preference."""
    settings = Settings(model=model, max_tokens=max_tokens, strict=strict)

    async def both() -> tuple[Result, Control]:
        problem = stream(seed, gsm8k)
        async with View(sessions, control=control_n) as view:
            shared = {"on_event": view.on_event, "problem": problem, "settings": settings, "api_key": api_key}
            control = await run_control(base_url, out, control_n, seed, **shared)
            return await run_student(base_url, out, sessions, seed, parallel=parallel, **shared), control

    try:
        result, control = asyncio.run(both())
    except ReefError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    echo = Console(highlight=False).print
    rate = control.pass_rate
    echo(f"untrained: {sum(control.passes)} of {len(control.passes)} first replies pass ({rate:.1%})")
    luck = chance_of_run(rate, sessions, IN_A_ROW)
    echo(f"chance that an untrained model passes {IN_A_ROW} times running in {sessions} sessions: {luck:.1%}")
    echo(f"first replies that passed: {sum(result.passes)} of {sessions}; adapted at {adapted_at(result.passes)}")
    echo(f"failed requests: {result.failed_requests + control.failed_requests}")


if __name__ == "__main__":
    typer.run(main)
