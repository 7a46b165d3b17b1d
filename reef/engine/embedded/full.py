"""Full weights of a release: the trained layers' own matrices in place of the base's.

In float32 a layer's rows are multiplied by the trained matrix alone, as the trainer did. In bfloat16 its
difference to the base is multiplied beside the base: rounded to the base's own grid, most of a small update
would vanish, while the difference keeps eight bits of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from reef.engine.embedded.adapter import Adapter, Change, RoutedLinear, linear
from reef.errors import ModelError
from reef.releases.weights import read_weights

_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """x W'^T instead of x W^T."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None
    whole: ClassVar[bool] = True

    def apply(self, x: Tensor, y: Tensor) -> None:
        y.copy_(linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """x W^T + x (W' - W)^T."""

    weight: Tensor
    """W' - W, [out, in]"""
    whole: ClassVar[bool] = False

    def apply(self, x: Tensor, y: Tensor) -> None:
        y.add_(linear(x, self.weight, None))


def load_full(name: str, path: Path, linears: Mapping[str, RoutedLinear], dtype: torch.dtype) -> Adapter:
    """Read a folder of full weights. Raises ModelError when it is none, or of another model."""
    changes: dict[str, Change] = {}
    for key, tensor in read_weights(path).items():
        base = linears.get(key.removesuffix(_SUFFIX)) if key.endswith(_SUFFIX) else None
        if base is None or tensor.shape != base.weight.shape:
            raise ModelError(f"weights {name!r} do not fit this model: tensor {key}")
        if not tensor.isfinite().all():
            raise ModelError(f"weights {name!r} hold values that are not finite: {key}")
        if dtype == torch.float32:
            changes[base.name] = Replacement(tensor.clone(), base.bias)  # what was read lies in the file
        else:
            changes[base.name] = Difference((tensor - base.weight.float()).to(dtype))
    return Adapter(name, str(path), changes)
