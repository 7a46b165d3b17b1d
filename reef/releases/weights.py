"""The folder format of full weights: `weights.safetensors` beside `weights.json`.

Tensors are float32 and named as in the model's own state dict, those of the trained layers only, so that
any tool can lay them over the base. The same weights give the same bytes, with no path of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reef.errors import ModelError
from reef.releases.chain import FILES

_CONFIG, _WEIGHTS = FILES["full"]
_FORMAT = 1


def write_weights(folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
    """Write both files; `base` names the model whose layers these are. Raises OSError, SafetensorError."""
    save_file(dict(tensors), folder / _WEIGHTS, metadata={"format": "pt"})
    about = {"reef_weights": _FORMAT, "base_model": base, "dtype": "float32", "tensors": len(tensors)}
    (folder / _CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors by name; they lie in the file until copied. Raises ModelError when the folder holds none,
    or those of a newer format."""
    try:
        about = json.loads((folder / _CONFIG).read_text())
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"can't read the weights in {folder}: {error}") from error
    if not isinstance(about, dict) or about.get("reef_weights") != _FORMAT:
        raise ModelError(f"{folder / _CONFIG} is not of format {_FORMAT}, which is all this Reef reads")
    if not tensors or any(t.dtype != torch.float32 for t in tensors.values()):
        raise ModelError(f"{folder / _WEIGHTS} holds no float32 weights")
    return tensors
