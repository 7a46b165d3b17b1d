"""`train.method: full`: the weights of the linear layers themselves, in float32, beside the frozen base's.

The trained matrices are kept whole rather than as differences, so that a step costs what it costs in a plain
model, and a release holds exactly the numbers that were trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reef.releases.weights import read_weights, write_weights
from reef.train.policy import Policy, load_base, untouched


@dataclass(slots=True)
class Switch:
    """Which weights the layers of one model use."""

    trained: bool = True


class FullLinear(nn.Module):
    """A frozen linear layer and a trained matrix of its own in float32; `switch` says which one is used."""

    def __init__(self, base: nn.Linear, switch: Switch) -> None:
        super().__init__()
        self.frozen, self.bias = base.weight, base.bias
        self.weight = nn.Parameter(base.weight.detach().float().clone())
        self.switch = switch

    def forward(self, x: Tensor) -> Tensor:
        """x [.., in] -> [.., out]"""
        if not self.switch.trained:
            return F.linear(x, self.frozen, self.bias)
        if self.frozen.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        # rounded by itself, the matrix or its output would lose most of a small update: add both, then round
        difference = (self.weight - self.frozen.float()).to(self.frozen.dtype)
        return F.linear(torch.cat((x, x), -1), torch.cat((self.frozen, difference), 1), self.bias)


class FullPolicy(Policy):
    """A frozen base model whose linear layers have trained weights beside it, on and off."""

    method: ClassVar[str] = "full"

    def __init__(self, model: Any, name: str, layers: Mapping[str, FullLinear], switch: Switch) -> None:
        super().__init__(model, model, name)
        self._layers = dict(layers)
        self._switch = switch

    @classmethod
    def load(
        cls, model_dir: str | Path, *, layers: float = 1.0, dtype: str = "float32", device: str = "cpu"
    ) -> FullPolicy:
        """Load a base model folder (or hub name) and make every linear layer but the output head trainable;
        embeddings, norms and head stay the base's.

        `layers` below 1 trains that share of the layers only, the last ones. `dtype` is that of the frozen
        base and of the products; the trained weights are always float32. Raises ModelError.
        """
        model = load_base(model_dir, dtype, device)
        excluded, head = untouched(model, layers), model.get_output_embeddings()
        switch = Switch()
        found: dict[str, FullLinear] = {}
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear) or module is head or (excluded and re.fullmatch(excluded, name)):
                continue
            parent, _, child = name.rpartition(".")
            found[name] = FullLinear(module, switch)
            setattr(model.get_submodule(parent), child, found[name])
        return cls(model, Path(model_dir).name, found, switch)

    def named_parameters(self) -> Mapping[str, Tensor]:
        return {f"{name}.weight": layer.weight.detach() for name, layer in self._layers.items()}

    @torch.no_grad()
    def fresh(self, seed: int) -> None:
        """The base's own weights, whatever the seed."""
        for layer in self._layers.values():
            layer.weight.copy_(layer.frozen)

    @contextmanager
    def base(self) -> Iterator[None]:
        before, self._switch.trained = self._switch.trained, False
        try:
            yield
        finally:
            self._switch.trained = before

    def save_weights(self, folder: Path) -> None:
        write_weights(folder, self.tensors(copy=False), self.name)

    def _read(self, folder: Path) -> Mapping[str, Tensor]:
        return read_weights(folder)
