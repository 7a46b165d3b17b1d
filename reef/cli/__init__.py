"""The `reef` command: one small module per group of commands, each readable without the others."""

from __future__ import annotations

from reef.cli.app import main

__all__ = ["main"]
