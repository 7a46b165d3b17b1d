"""Adapters kept beside the weights, and the linear layer that applies them per row.

Invariant: rows of one adapter are contiguous in a forward pass, and rows without one are computed by
exactly the same operations as if no adapter existed. An adapter is immutable; whoever holds it may
use it, so unloading is forgetting the name. This module knows no files, no requests and no text.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

_FEW = 8
_WIDE = 16384
_uids = itertools.count(1)


class Change(Protocol):
    """What an adapter does to one linear layer."""

    whole: ClassVar[bool]
    """whether the base's product is overwritten, and so need not be computed"""

    def apply(self, x: Tensor, y: Tensor) -> None:
        """x [rows, in]; y [rows, out] holds the base's output and gets the adapter's."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One version's changes to the linear layers."""

    name: str
    path: str
    changes: Mapping[str, Change]
    """by module name; a layer without one is the base's"""
    uid: int = field(default_factory=_uids.__next__)
    """never reused, so that what was computed with an adapter is never taken for another's"""


@dataclass(slots=True)
class Route:
    """Which adapter each row of the running forward pass uses."""

    spans: list[tuple[Adapter, int, int]] = field(default_factory=list)
    """(adapter, first row, one past the last); rows in no span use the base"""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for [rows, in], by the faster of two products.

    With few rows, or very many outputs, CPU libraries take W x^T (the long side first) up to twice as
    fast as x W^T. Which one is used depends on the shapes alone, so equal input gives equal bits.
    """
    rows, out = x.shape[0], weight.shape[0]
    if bias is None and (2 <= rows <= _FEW or (rows > _FEW and out >= _WIDE)):
        return weight.mm(x.t()).t().contiguous()
    return F.linear(x, weight, bias)


class RoutedLinear(nn.Module):
    """A frozen linear layer; applies each span's adapter to that span's rows."""

    def __init__(self, base: nn.Linear, name: str, route: Route) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.name, self.route = name, route

    def forward(self, x: Tensor) -> Tensor:
        """x [1, rows, in] -> [1, rows, out]"""
        rows = x[0]
        changes = [
            (change, start, stop)
            for adapter, start, stop in self.route.spans
            if (change := adapter.changes.get(self.name)) is not None
        ]
        if len(changes) == 1 and changes[0][0].whole and changes[0][1:] == (0, len(rows)):
            y = rows.new_empty(len(rows), self.weight.shape[0])
        else:
            y = linear(rows, self.weight, self.bias)
        for change, start, stop in changes:
            change.apply(rows[start:stop], y[start:stop])
        return y.unsqueeze(0)


def route_linears(model: nn.Module, route: Route) -> dict[str, RoutedLinear]:
    """Replace every linear layer by a routed one; returns them by module name."""
    routed = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            routed[name] = RoutedLinear(module, name, route)
            setattr(model.get_submodule(parent), child, routed[name])
    return routed
