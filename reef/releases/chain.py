"""The releases of a scenario, as folders: `<dir>/<scenario>/v000012/`.

Invariant: a release folder appears complete, by one rename, and is never changed afterwards, except
that its optimizer state may be removed. This module only reads; it knows no engine, no trainer and
no database, and not which release is served.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.errors import ModelError

MANIFEST = "release.json"
_SCENARIO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
SCENARIO_RULE = "a scenario's name has at most 64 of A-Z, a-z, 0-9, '.', '_' and '-', and no '.' or '-' in front"
_PIECE = 2**20
"""bytes read at a time: full weights are hundreds of megabytes"""
FILES: Mapping[str, tuple[str, str]] = {
    "lora": ("adapter_config.json", "adapter_model.safetensors"),
    "full": ("weights.json", "weights.safetensors"),
}
"""the files that make up a release's weights, by `train.method`, in hashing order"""


@dataclass(frozen=True, slots=True)
class Release:
    """One version of a scenario's policy."""

    scenario: str
    version: int
    parent: int
    """version it was trained from; 0 is the untrained policy"""
    folder: Path
    content_hash: str
    """SHA-256 over the files of its weights"""
    turns: tuple[str, ...]
    """receipts of the turns it learned from"""
    metrics: Mapping[str, Any]
    gate: Mapping[str, Any]
    """{"passed": bool, "checks": [{"name", "value", "limit", "passed"}]}"""
    status: str
    """candidate: passed its gate; rejected: kept, never served; broken: unreadable, see `reason`"""
    step: str = ""
    created: float = 0.0
    seconds: float = 0.0
    recipe: str = ""
    seed: int = 0
    reason: str = ""

    @property
    def servable(self) -> bool:
        return self.status == "candidate"

    def verify(self) -> None:
        """Raises ModelError when the files of its weights are not the ones that were released."""
        if (found := content_hash(self.folder)) != self.content_hash:
            raise ModelError(f"{self.folder}: content hash {found[:12]}, release.json says {self.content_hash[:12]}")


def adapter_name(scenario: str, version: int) -> str:
    """The name an engine knows a version by, e.g. `default@12`."""
    return f"{scenario}@{version}"


def is_scenario(name: str) -> bool:
    """Whether a name can be a scenario's: it names a folder, and comes from a client's header."""
    return _SCENARIO.fullmatch(name) is not None


def version_folder(directory: str | Path, scenario: str, version: int) -> Path:
    """Where a version lives, whether or not it exists. Raises ModelError for a name that is no scenario's."""
    if not is_scenario(scenario):
        raise ModelError(f"scenario {scenario!r}: {SCENARIO_RULE}")
    return Path(directory) / scenario / f"v{version:06d}"


def method_of(folder: str | Path) -> str:
    """The `train.method` whose weights a folder holds, by the file that describes them: lora or full."""
    return "full" if (Path(folder) / FILES["full"][0]).exists() else "lora"


def content_hash(folder: str | Path) -> str:
    """SHA-256 over names, sizes and bytes of the files of a folder's weights. Raises ModelError if one is
    missing."""
    digest = hashlib.sha256()
    for name in FILES[method_of(folder)]:
        try:
            with (Path(folder) / name).open("rb") as file:
                digest.update(f"{name} {os.fstat(file.fileno()).st_size}\n".encode())
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise ModelError(f"{folder}: {name} can't be read: {error.strerror}") from error
    return digest.hexdigest()


def read_release(folder: str | Path) -> Release:
    """Read one release folder. Raises ModelError when its manifest is missing or malformed."""
    folder = Path(folder)
    try:
        data = json.loads((folder / MANIFEST).read_text())
        return Release(
            scenario=data["scenario"],
            version=int(data["version"]),
            parent=int(data["parent"]),
            folder=folder,
            content_hash=data["content_hash"],
            turns=tuple(data["turns"]),
            metrics=data["metrics"],
            gate=data["gate"],
            status=data["status"],
            step=data.get("step", ""),
            created=data.get("created", 0.0),
            seconds=data.get("seconds", 0.0),
            recipe=data.get("recipe", ""),
            seed=data.get("seed", 0),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: {MANIFEST} can't be read: {error!r}") from error


def list_releases(directory: str | Path, scenario: str) -> list[Release]:
    """All releases of a scenario, oldest version first; unfinished folders are not releases.

    A folder that can't be read is listed as `broken`, so that one bad file hides no other release.
    """
    found = []
    for folder in sorted((Path(directory) / scenario).glob("v*")):
        if not folder.name[1:].isdigit():
            continue
        try:
            found.append(read_release(folder))
        except ModelError as error:
            found.append(
                Release(scenario, int(folder.name[1:]), 0, folder, "", (), {}, {}, "broken", reason=str(error))
            )
    return sorted(found, key=lambda release: release.version)


def failed_checks(gate: Mapping[str, Any]) -> str:
    """The checks a release's gate did not pass, for people; empty when it passed them all."""
    failed = [c for c in gate.get("checks", ()) if not c["passed"]]
    return ", ".join(f"{c['name']} {c['value']} (limit {c['limit']})" for c in failed)
