"""LoRA adapters kept beside the weights, and the linear layer that applies them per row.

Invariant: rows of one adapter are contiguous in a forward pass, and rows without one are computed by
exactly the same operations as if no adapter existed. An adapter is immutable; whoever holds it may
use it, so unloading is forgetting the name. This module knows no requests and no text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from reef.errors import ModelError

_PREFIX = "base_model.model."
_FEW = 8
_WIDE = 16384
_uids = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The low-rank factors of one PEFT folder."""

    name: str
    path: str
    factors: Mapping[str, tuple[Tensor, Tensor]]
    """module name -> (A^T [in, r], scaling * B^T [r, out])"""
    uid: int = field(default_factory=_uids.__next__)
    """never reused, so that what was computed with an adapter is never taken for another's"""


@dataclass(slots=True)
class Route:
    """Which adapter each row of the running forward pass uses."""

    spans: list[tuple[Adapter, int, int]] = field(default_factory=list)
    """(adapter, first row, one past the last); rows in no span use the base"""


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for [1, rows, in], by the faster of two products.

    With few rows, or very many outputs, CPU libraries take W x^T (the long side first) up to twice as
    fast as x W^T. Which one is used depends on the shapes alone, so equal input gives equal bits.
    """
    rows, out = x.shape[1], weight.shape[0]
    if bias is None and (2 <= rows <= _FEW or (rows > _FEW and out >= _WIDE)):
        return torch.mm(weight, x[0].t()).t().contiguous().unsqueeze(0)
    return F.linear(x, weight, bias)


class RoutedLinear(nn.Module):
    """A frozen linear layer; adds the low-rank term of each span's adapter to that span's rows."""

    def __init__(self, base: nn.Linear, name: str, route: Route) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.name, self.route = name, route

    def forward(self, x: Tensor) -> Tensor:
        """x [1, rows, in] -> [1, rows, out]"""
        y = _linear(x, self.weight, self.bias)
        for adapter, start, stop in self.route.spans:
            factors = adapter.factors.get(self.name)
            if factors is not None:
                y[0, start:stop].addmm_(x[0, start:stop] @ factors[0], factors[1])
        return y


def route_linears(model: nn.Module, route: Route) -> dict[str, tuple[int, int]]:
    """Replace every linear layer by a routed one; returns module name -> (out, in)."""
    shapes = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, RoutedLinear(module, name, route))
            shapes[name] = (module.out_features, module.in_features)
    return shapes


def load_adapter(name: str, path: Path, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> Adapter:
    """Read a PEFT LoRA folder. Raises ModelError when it is none, unsupported, or of another model."""
    try:
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"adapter {name!r}: {path} is not a readable PEFT folder: {error}") from error
    _check_supported(name, config)
    factors = {}
    for key in sorted(tensors):
        module, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if part == "B.weight" and key.replace(".lora_B.", ".lora_A.") in tensors:
            continue
        b_key = key.replace(".lora_A.", ".lora_B.")
        if part != "A.weight" or module not in shapes or b_key not in tensors:
            raise ModelError(f"adapter {name!r} does not fit this model: tensor {key}")
        a, b = tensors[key].to(dtype), tensors[b_key].to(dtype)
        if (b.shape[0], a.shape[1]) != shapes[module] or a.shape[0] != b.shape[1]:
            raise ModelError(f"adapter {name!r} does not fit this model: shape of {key}")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelError(f"adapter {name!r} holds values that are not finite: {key}")
        scaling = _scaling(config, module, a.shape[0])
        factors[module] = (a.t().contiguous(), (b * scaling).t().contiguous())
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
