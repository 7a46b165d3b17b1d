"""LoRA adapters from PEFT folders: low-rank terms added to the base's output."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from reef.engine.embedded.adapter import Adapter, RoutedLinear
from reef.errors import ModelError
from reef.releases.chain import FILES

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """y + x A^T B^T, with the scaling in B."""

    a: Tensor
    """A^T [in, r]"""
    b: Tensor
    """scaling * B^T [r, out]"""
    whole: ClassVar[bool] = False

    def apply(self, x: Tensor, y: Tensor) -> None:
        y.addmm_(x @ self.a, self.b)


def load_lora(name: str, path: Path, linears: Mapping[str, RoutedLinear], dtype: torch.dtype) -> Adapter:
    """Read a PEFT LoRA folder. Raises ModelError when it is none, unsupported, or of another model."""
    config_file, weights_file = FILES["lora"]
    try:
        config = json.loads((path / config_file).read_text())
        tensors = load_file(path / weights_file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"adapter {name!r}: {path} is not a readable PEFT folder: {error}") from error
    _check_supported(name, config)
    factors = {}
    for key in sorted(tensors):
        module, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if part == "B.weight" and key.replace(".lora_B.", ".lora_A.") in tensors:
            continue
        b_key = key.replace(".lora_A.", ".lora_B.")
        if part != "A.weight" or module not in linears or b_key not in tensors:
            raise ModelError(f"adapter {name!r} does not fit this model: tensor {key}")
        a, b = tensors[key].to(dtype), tensors[b_key].to(dtype)
        if (b.shape[0], a.shape[1]) != linears[module].weight.shape or a.shape[0] != b.shape[1]:
            raise ModelError(f"adapter {name!r} does not fit this model: shape of {key}")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelError(f"adapter {name!r} holds values that are not finite: {key}")
        scaling = _scaling(config, module, a.shape[0])
        factors[module] = LowRank(a.t().contiguous(), (b * scaling).t().contiguous())
    if not factors:
        raise ModelError(f"adapter {name!r}: {path} holds no LoRA tensors")
    return Adapter(name, str(path), factors)


def _check_supported(name: str, config: Mapping[str, Any]) -> None:
    refused: dict[str, Callable[[Any], bool]] = {
        "peft_type": lambda v: v != "LORA",
        "use_dora": bool,
        "use_bdlora": bool,
        "fan_in_fan_out": bool,
        "lora_bias": bool,
        "modules_to_save": bool,
        "layer_replication": bool,
        "bias": lambda v: v not in (None, "none"),
    }
    for key, is_refused in refused.items():
        if is_refused(config.get(key)):
            raise ModelError(f"adapter {name!r}: {key}={config.get(key)!r} is not supported here")


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA (arXiv 2312.03732)."""
    alpha = config.get("lora_alpha", rank)
    for suffix, value in (config.get("alpha_pattern") or {}).items():
        if module == suffix or module.endswith("." + suffix):
            alpha = value
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
