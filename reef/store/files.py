"""JSON files that are whole or absent, whatever dies while they are written. Knows no content."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees all of it or none, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    scratch.write_text(dumps(data))
    fsync(scratch)
    scratch.replace(path)
    fsync(path.parent)


def dumps(data: Any) -> str:
    """Strict JSON for people and programs; a number that is not finite becomes null."""
    return json.dumps(_finite(data), indent=1, allow_nan=False, default=str) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(k): _finite(v) for k, v in data.items()}
    return [_finite(v) for v in data] if isinstance(data, list | tuple) else data


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
