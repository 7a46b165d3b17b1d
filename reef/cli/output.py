"""Tables for people, JSON for programs. Knows no command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, ensure_ascii=False, indent=2, default=str))


def print_lines(rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines on stdout."""
    for row in rows:
        print(json.dumps(row, ensure_ascii=False, default=str))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(shown(cell) for cell in row))
    Console().print(table)


def print_to_stderr(line: str) -> None:
    """Progress, apart from what a program reads."""
    typer.echo(line, err=True)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def clock(seconds: float | None) -> str:
    """A time of day, local."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")


def counts(fates: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {n}" for name, n in fates.items())
