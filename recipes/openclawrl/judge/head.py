"""The trained part of the embedded judge: adapter, verdict head and the numbers that calibrate them.

Owns the two files that ship (`weights.safetensors`, `weights.json`) and how hidden states become a
probability for each verdict. Weights belong to one base model and one prompt layout and refuse others.
It knows no corpus and no optimiser.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as fn

from recipes.openclawrl.judge.body import Adapter, Body, Padded
from recipes.openclawrl.judge.prompt import VERSION, Reading
from reef.errors import ModelError

VERDICTS = (-1, 0, 1)
"""the classes, in the order of the head's rows"""
SHIPPED = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Head:
    """Everything training produced."""

    adapter: Adapter
    weight: Tensor
    """[3, 2 D]"""
    bias: Tensor
    """[3]"""
    temperature: float
    """divides the logits"""
    threshold: float
    """a +1 or -1 less probable than this is 0"""
    card: dict[str, Any] = field(default_factory=dict)
    """what was trained, on what, and how well it did"""

    @staticmethod
    def depth_of(folder: Path) -> int:
        """How many layers of the base the weights in `folder` need. Raises ModelError."""
        return int(_card(folder)["settings"]["depth"])

    @staticmethod
    def load(folder: Path, body: Body) -> Head:
        """Read the weights in `folder` for `body`. Raises ModelError when they belong to another base or prompt."""
        card = _card(folder)
        try:
            tensors = load_file(folder / "weights.safetensors")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the judge's weights can't be read from {folder}: {error}") from error
        if card["base"]["fingerprint"] != body.fingerprint or card["prompt"] != VERSION:
            raise ModelError(
                f"the judge's weights were trained on {card['base']['name']} with prompt {card['prompt']}, this is"
                f" {body.name} with prompt {VERSION}; train some with `python -m recipes.openclawrl.judge.train`"
            )
        names = {name.rpartition(".")[0] for name in tensors if name.endswith((".a", ".b"))}
        return Head(
            adapter={n: (tensors[f"{n}.a"].float(), tensors[f"{n}.b"].float()) for n in sorted(names)},
            weight=tensors["head.weight"].float(),
            bias=tensors["head.bias"].float(),
            temperature=card["temperature"],
            threshold=card["threshold"],
            card=card,
        )

    def save(self, folder: Path) -> None:
        """Write the two files; the tensors in half precision."""
        tensors = {f"{n}.{s}": t for n, pair in self.adapter.items() for s, t in zip("ab", pair, strict=True)}
        tensors |= {"head.weight": self.weight, "head.bias": self.bias}
        folder.mkdir(parents=True, exist_ok=True)
        packed = save({n: t.detach().half().contiguous() for n, t in tensors.items()})
        (folder / "weights.safetensors").write_bytes(packed)
        (folder / "weights.json").write_text(json.dumps(self.card, indent=1) + "\n", encoding="utf-8")

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits / self.temperature, dim=-1)

    def decide(self, probabilities: Sequence[float]) -> tuple[int, float]:
        """(verdict, its probability) of one row of probabilities in the order of `VERDICTS`."""
        best = max(range(len(VERDICTS)), key=lambda i: probabilities[i])
        if VERDICTS[best] != 0 and probabilities[best] < self.threshold:
            best = VERDICTS.index(0)
        return VERDICTS[best], probabilities[best]


def _card(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the judge's weights can't be read from {folder}: {error}") from error


def pool(h: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the suffix and its last position, each normed: [B, S, D] to [B, 2 D]."""
    h = fn.rms_norm(h, (h.shape[-1],))
    real = (torch.arange(h.shape[1])[None] < lengths[:, None]).to(h.dtype)[..., None]
    mean = (h * real).sum(1) / lengths[:, None]
    return torch.cat([mean, h[torch.arange(h.shape[0]), lengths - 1]], dim=-1)


@torch.inference_mode()
def score(body: Body, head: Head, readings: Sequence[Reading]) -> list[list[float]]:
    """Probabilities in the order of `VERDICTS` for each reading, one batch."""
    context = Padded.of([r.context for r in readings])
    suffix = Padded.of([r.suffix for r in readings])
    h = body.suffix(body.embed(suffix), body.context(context), context.lengths, head.adapter, range(body.depth))
    logits = fn.linear(pool(h, suffix.lengths), head.weight, head.bias)
    return head.probabilities(logits).tolist()
