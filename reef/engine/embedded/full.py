"""Full weights of a release: the trained layers' own matrices in place of the base's.

In float32 a layer's rows are multiplied by the trained matrix W', as in the trainer. A bfloat16 base lies on
a grid on which most of a small update would vanish, from the weights as from a rounded output. So base and
difference stand side by side there, [W | W' - W], and one product adds both before it rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from reef.engine.embedded.adapter import Adapter, RoutedLinear, linear
from reef.errors import ModelError
from reef.releases.weights import read_weights

_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """The product with a layer's trained weights."""

    weight: Tensor
    """W' [out, in], or [W | W' - W] [out, 2 in]"""
    bias: Tensor | None
    whole: ClassVar[bool] = True

    def apply(self, x: Tensor, y: Tensor) -> None:
        both = self.weight.shape[1] > x.shape[1]
        y.copy_(linear(torch.cat((x, x), 1) if both else x, self.weight, self.bias))


def load_full(name: str, path: Path, linears: Mapping[str, RoutedLinear], dtype: torch.dtype) -> Adapter:
    """Read a folder of full weights. Raises ModelError when it is none, or of another model."""
    changes = {}
    for key, tensor in read_weights(path).items():
        base = linears.get(key.removesuffix(_SUFFIX)) if key.endswith(_SUFFIX) else None
        if base is None or tensor.shape != base.weight.shape:
            raise ModelError(f"weights {name!r} do not fit this model: tensor {key}")
        if not tensor.isfinite().all():
            raise ModelError(f"weights {name!r} hold values that are not finite: {key}")
        if dtype == torch.float32:
            weight = tensor.clone()  # what was read lies in the file
        else:
            weight = torch.cat((base.weight, (tensor - base.weight.float()).to(dtype)), 1)
        changes[base.name] = Replacement(weight, base.bias)
    return Adapter(name, str(path), changes)
