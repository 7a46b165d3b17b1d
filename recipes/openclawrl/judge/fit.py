"""The training run: settings, steps, and what measures the result.

A step is one batch of each worker; workers hold rows of their own and share gradients, so their weights stay
equal. An epoch is the smallest resumable part. It knows no corpus, no file format of the weights and no split.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as fn
from torch.nn.utils.rnn import pad_sequence

from recipes.openclawrl.judge.attribution import FEATURES, ROLES
from recipes.openclawrl.judge.body import Adapter, Body
from recipes.openclawrl.judge.corpus import KINDS
from recipes.openclawrl.judge.head import PARTS, Head, pool, target_logits
from recipes.openclawrl.judge.prepared import Prepared
from recipes.openclawrl.judge.votes import VERDICTS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the shipped weights were trained."""

    first: int = 10
    """lowest layer with an adapter"""
    depth: int = 18
    """layers of the base that are used"""
    rank: int = 16
    alpha: float = 32.0
    epochs: int = 1
    batch: int = 16
    """rows of each worker in a step"""
    workers: int = 2
    """processes of one thread, 2 GiB each"""
    lr: float = 1e-3
    weight_decay: float = 0.01
    dropout: float = 0.1
    """of the pooled hidden states"""
    smoothing: float = 0.05
    """of the verdict labels"""
    kind_weight: float = 0.3
    target_weight: float = 0.3
    """of the losses for the kind of reaction and the reply that is meant"""
    average: float = 0.99
    """decay, per step, of the running average of the weights, which is what is kept"""
    held_out: float = 0.08
    """share of the conversations that calibrates and measures"""
    seed: int = 1


class Fit:
    """A training run over prepared rows, as one of `workers` equal ones (a process group must stand if several)."""

    def __init__(self, body: Body, settings: Settings, steps: int) -> None:
        """`steps` of one epoch; the learning rate falls over all epochs."""
        random.seed(settings.seed)
        torch.manual_seed(settings.seed)
        self._body, self._settings = body, settings
        self._steps_of_epoch = steps
        self.epoch = 0
        self._adapter = _new_adapter(body, settings)
        sizes = (len(VERDICTS), len(KINDS), len(ROLES))
        self._linear = {
            part: (torch.zeros(n, 2 * body.width).requires_grad_(), torch.zeros(n).requires_grad_())
            for part, n in zip(PARTS, sizes, strict=True)
        }
        self._cue = torch.zeros(len(FEATURES)).requires_grad_()
        pairs = [*self._adapter.values(), *self._linear.values()]
        weights = [t for pair in pairs for t in pair]
        self._parameters = [*weights, self._cue]
        self._average = [p.detach().clone() for p in self._parameters]
        self._optimiser = torch.optim.AdamW(
            [
                {"params": weights, "lr": settings.lr, "weight_decay": settings.weight_decay},
                {"params": [self._cue], "lr": 30 * settings.lr, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
        )
        total = settings.epochs * steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimiser,
            lambda i: min(1.0, (i + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(i / total, 1.0))) / 2),
        )
        self._steps = 0

    def run(self, data: Sequence[Prepared], worker: int = 0) -> None:
        """One epoch over this worker's rows."""
        random.seed(f"{self._settings.seed} {self.epoch} {worker}")
        torch.manual_seed(random.getrandbits(32))
        started, total = time.monotonic(), 0.0
        for n, rows in zip(range(self._steps_of_epoch), _batches(data, self._settings.batch), strict=False):
            total += self._step(rows)
            if n % 20 == 19:
                _log.info(
                    "epoch %d, step %d, loss %.3f, %.0f s",
                    self.epoch + 1,
                    n + 1,
                    total / (n + 1),
                    time.monotonic() - started,
                )
        self.epoch += 1

    def _step(self, rows: Sequence[Prepared]) -> float:
        loss = self._loss(rows)
        self._optimiser.zero_grad()
        loss.backward()
        _share([p.grad for p in self._parameters if p.grad is not None], self._settings.workers)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimiser.step()
        self._schedule.step()
        self._steps += 1
        decay = min(self._settings.average, self._steps / (self._steps + 10))
        for mean, now in zip(self._average, self._parameters, strict=True):
            mean.lerp_(now.detach(), 1 - decay)
        return loss.item()

    def _loss(self, rows: Sequence[Prepared]) -> Tensor:
        settings = self._settings
        pooled = pooled_of(self._body, rows, self._adapter, settings.first, settings.alpha / settings.rank)
        pooled = fn.dropout(pooled, settings.dropout)
        verdict, kind, place = (fn.linear(pooled, *self._linear[part]) for part in PARTS)
        said = torch.tensor([r.verdict for r in rows])
        loss = fn.cross_entropy(verdict, said, label_smoothing=settings.smoothing)
        loss = loss + settings.kind_weight * fn.cross_entropy(kind, torch.tensor([r.kind for r in rows]))
        loss = loss + 0.0 * (place.sum() + self._cue.sum())  # a gradient for each worker, whatever its rows
        for i, row in enumerate(rows):
            if row.target is not None:
                logits = target_logits(place[i], self._cue, row.replies, row.cues)
                miss = fn.cross_entropy(logits[None], torch.tensor([row.target]))
                loss = loss + settings.target_weight * miss / len(rows)
        return loss

    def head(self, *, averaged: bool = True) -> Head:
        """What training has come to; temperature 1 and no threshold."""
        source = self._average if averaged else [p.detach() for p in self._parameters]
        flat = iter([t.clone() for t in source])
        scale = self._settings.alpha / self._settings.rank
        adapter = {name: (next(flat), next(flat) * scale) for name in self._adapter}
        linear = {part: (next(flat), next(flat)) for part in PARTS}
        return Head(adapter, linear, next(flat), 1.0, 0.0, {"kinds": list(KINDS)})

    def save(self, file: Path) -> None:
        """Write all that the next epoch depends on; whole or not at all."""
        state = {
            "epoch": self.epoch,
            "steps": self._steps,
            "parameters": [p.detach() for p in self._parameters],
            "average": self._average,
            "optimiser": self._optimiser.state_dict(),
            "schedule": self._schedule.state_dict(),
        }
        torch.save(state, file.with_suffix(".part"))
        os.replace(file.with_suffix(".part"), file)

    def resume(self, file: Path) -> None:
        """Go on after the epoch that was saved last."""
        state = torch.load(file)
        self.epoch, self._steps, self._average = state["epoch"], state["steps"], state["average"]
        with torch.no_grad():
            for p, kept in zip(self._parameters, state["parameters"], strict=True):
                p.copy_(kept)
        self._optimiser.load_state_dict(state["optimiser"])
        self._schedule.load_state_dict(state["schedule"])


@torch.no_grad()
def pooled_all(body: Body, head: Head, data: Sequence[Prepared], first: int) -> Tensor:
    """Pooled suffixes [N, 2 D] of prepared rows."""
    chunks = [data[i : i + 32] for i in range(0, len(data), 32)]
    return torch.cat([pooled_of(body, c, head.adapter, first, 1.0) for c in chunks])


def pooled_of(body: Body, rows: Sequence[Prepared], adapter: Adapter, first: int, scale: float) -> Tensor:
    """Pooled suffix [B, 2 D] of prepared rows under `adapter`, whose B parts still lack the factor `scale`."""
    width = max(len(r.h) for r in rows)
    h = torch.stack([fn.pad(r.h, (0, 0, 0, width - len(r.h))) for r in rows]).float()
    scaled = adapter if scale == 1.0 else {n: (a, b * scale) for n, (a, b) in adapter.items()}
    out = body.whole(h, scaled, range(first, body.depth))
    said = [out[i, r.context : len(r.h)] for i, r in enumerate(rows)]
    return pool(pad_sequence(said, batch_first=True), torch.tensor([len(one) for one in said]))


def _share(gradients: Sequence[Tensor], workers: int) -> None:
    """Make every worker's gradients their mean."""
    if workers == 1:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    at = 0
    for g in gradients:
        g.copy_(flat[at : at + g.numel()].view_as(g) / workers)
        at += g.numel()


def _new_adapter(body: Body, settings: Settings) -> Adapter:
    adapter: Adapter = {}
    for layer in range(settings.first, settings.depth):
        for name, (out, width) in body.shapes(layer).items():
            a = torch.randn(settings.rank, width) / math.sqrt(width)
            adapter[f"{layer}.{name}"] = (a.requires_grad_(), torch.zeros(out, settings.rank).requires_grad_())
    return adapter


def _batches(data: Sequence[Prepared], size: int) -> Iterator[list[Prepared]]:
    """Batches of similar length in random order, differently composed each time."""
    order = sorted(data, key=lambda r: len(r.h) * random.uniform(0.8, 1.25))
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    random.shuffle(batches)
    yield from batches
