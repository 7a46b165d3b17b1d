"""The command line's frame: the list of commands, shared options, and how errors are shown.

A mistake of the user ends in one clear line on stderr and exit status 2, never in a traceback.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from reef.errors import ReefError


def build() -> typer.Typer:
    """The command tree."""
    from reef.cli import inspect, judging, learning, memo, serving

    app = typer.Typer(
        name="reef",
        help="Reef turns everyday use of an agent into training.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    serving.register(app)
    inspect.register(app)
    judging.register(app)
    memo.register(app)
    learning.register(app)
    return app


def main() -> None:
    try:
        build()()
    except ReefError as error:
        Console(stderr=True, highlight=False).print(f"[red]reef:[/red] {error}", markup=True, soft_wrap=True)
        sys.exit(2)
