"""Trains the embedded judge: `python -m recipes.openclawrl.judge.train --model DIR`.

A low-rank adapter on the middle layers of the frozen base and a linear head learn the corpus's verdicts;
a second head that only training sees learns the kind of reaction. The context pass runs once. Owns the
settings and the split by conversation; it knows no recipe and no service.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn

from recipes.openclawrl.judge.body import Adapter, Body, KeysValues, Padded
from recipes.openclawrl.judge.corpus import Row, corpus_bytes, groups, rows_of, sha256
from recipes.openclawrl.judge.head import SHIPPED, VERDICTS, Head, pool
from recipes.openclawrl.judge.prompt import VERSION, Reader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """How the shipped weights were trained."""

    first: int = 12
    """lowest layer with an adapter"""
    depth: int = 24
    """layers of the base that are used"""
    rank: int = 8
    alpha: float = 16.0
    epochs: int = 4
    """length of the learning-rate schedule"""
    stop: int = 2
    """epochs after which training ends, before the corpus is learned by heart"""
    batch: int = 16
    lr: float = 1e-3
    weight_decay: float = 0.01
    dropout: float = 0.1
    """of the pooled hidden states"""
    kind_weight: float = 0.3
    """share of the loss for the kind of reaction"""
    folds: int = 5
    """one of them is held out to calibrate and measure"""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row after the context pass: what the trained layers start from."""

    past: Tensor
    """keys and values of the trained layers, half precision [L, 2, kv heads, C, head width]"""
    h: Tensor
    """hidden states of the suffix entering the first trained layer, [S, D]"""
    verdict: int
    """index in VERDICTS"""
    kind: int


def prepare(body: Body, rows: Sequence[Row], first: int, batch: int = 16) -> list[Prepared]:
    """Run the context pass and the untrained layers over `rows`."""
    reader = Reader(body.tokenizer)
    readings = [reader.read(row.history, row.next) for row in rows]
    kinds = sorted({row.kind for row in rows})
    done: dict[int, Prepared] = {}
    order = sorted(range(len(rows)), key=lambda i: len(readings[i].context))
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        context, suffix = (Padded.of([getattr(readings[i], p) for i in chosen]) for p in ("context", "suffix"))
        with torch.inference_mode():
            past = body.context(context)
            h = body.suffix(body.embed(suffix), past[:first], context.lengths, {}, range(first))
        for j, i in enumerate(chosen):
            c, s = len(readings[i].context), len(readings[i].suffix)
            kept = torch.stack([torch.stack([k[j, :, :c], v[j, :, :c]]) for k, v in past[first:]]).half()
            done[i] = Prepared(kept, h[j, :s].clone(), VERDICTS.index(rows[i].verdict), kinds.index(rows[i].kind))
        _log.info("read %d of %d rows", len(done), len(rows))
    return [done[i] for i in range(len(rows))]


def fit(body: Body, data: Sequence[Prepared], settings: Settings) -> Head:
    """Train on `data`; temperature 1 and no threshold."""
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    adapter = _new_adapter(body, settings)
    kinds = 1 + max(row.kind for row in data)
    head = torch.nn.Linear(2 * body.width, len(VERDICTS) + kinds)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = [t for pair in adapter.values() for t in pair] + [head.weight, head.bias]
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay, betas=(0.9, 0.98))
    steps = settings.epochs * math.ceil(len(data) / settings.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda i: min(1.0, (i + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * i / steps)) / 2)
    )
    scale = settings.alpha / settings.rank
    for epoch in range(min(settings.stop, settings.epochs)):
        started, total = time.monotonic(), 0.0
        for rows in _batches(data, settings.batch):
            pooled = fn.dropout(_pooled(body, rows, adapter, settings.first, scale), settings.dropout)
            logits = head(pooled)
            verdicts, kind = logits[:, : len(VERDICTS)], logits[:, len(VERDICTS) :]
            loss = fn.cross_entropy(verdicts, torch.tensor([r.verdict for r in rows]), label_smoothing=0.05)
            loss = loss + settings.kind_weight * fn.cross_entropy(kind, torch.tensor([r.kind for r in rows]))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item() * len(rows)
        _log.info("epoch %d: loss %.3f, %.0f s", epoch + 1, total / len(data), time.monotonic() - started)
    n = len(VERDICTS)
    scaled = {name: (a.detach(), b.detach() * scale) for name, (a, b) in adapter.items()}
    return Head(scaled, head.weight.detach()[:n].clone(), head.bias.detach()[:n].clone(), 1.0, 0.0)


@torch.no_grad()
def logits_of(body: Body, head: Head, data: Sequence[Prepared], first: int) -> Tensor:
    """Verdict logits [N, 3] of prepared rows."""
    chunks = [data[i : i + 32] for i in range(0, len(data), 32)]
    pooled = torch.cat([_pooled(body, rows, head.adapter, first, 1.0) for rows in chunks])
    return fn.linear(pooled, head.weight, head.bias)


def calibrate(head: Head, logits: Tensor, verdicts: Tensor) -> Head:
    """Set bias, temperature and threshold by the logits [N, 3] that `head` gave rows it was not trained on.

    Bias and temperature minimise the log loss; the threshold maximises right minus reversed verdicts.
    """
    shift = torch.zeros(len(VERDICTS), requires_grad=True)
    heat = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([shift, heat], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = fn.cross_entropy((logits + shift) / heat.exp(), verdicts) + 0.01 * (
            shift.square().sum() + heat.square()
        )
        value.backward()
        return value

    optimiser.step(loss)
    moved, temperature = shift.detach(), heat.exp().item()
    probabilities = torch.softmax((logits + moved) / temperature, dim=-1)

    def worth(threshold: float) -> float:
        guess = _decided(probabilities, threshold)
        return ((guess == verdicts).float() - ((guess - verdicts).abs() == 2).float()).mean().item()

    threshold = max((0.34 + 0.02 * i for i in range(14)), key=worth)
    return replace(head, bias=head.bias + moved, temperature=temperature, threshold=threshold)


def metrics(head: Head, logits: Tensor, verdicts: Tensor) -> dict[str, float]:
    """Accuracy over three classes, accept against reject, and how often a verdict is the opposite of the label."""
    probabilities = head.probabilities(logits)
    guess = _decided(probabilities, head.threshold)
    clear = verdicts != VERDICTS.index(0)
    sided = (probabilities[clear][:, 2] > probabilities[clear][:, 0]) == (verdicts[clear] == 2)
    return {
        "rows": len(verdicts),
        "accuracy": round((guess == verdicts).float().mean().item(), 4),
        "accept_or_reject": round(sided.float().mean().item(), 4),
        "reversed": round(((guess - verdicts).abs() == 2).float().mean().item(), 4),
    }


def held_out(rows: Sequence[Row], folds: int, seed: int) -> list[bool]:
    """Which rows belong to the held-out fold; rows of one conversation stay together."""
    group = groups(rows)
    names = sorted(set(group))
    random.Random(seed).shuffle(names)
    out = set(names[:: max(folds, 1)]) if folds > 1 else set()
    return [g in out for g in group]


def _decided(probabilities: Tensor, threshold: float) -> Tensor:
    best, guess = probabilities.max(dim=-1)
    neutral = VERDICTS.index(0)
    return torch.where((best < threshold) & (guess != neutral), torch.full_like(guess, neutral), guess)


def _new_adapter(body: Body, settings: Settings) -> Adapter:
    adapter: Adapter = {}
    for layer in range(settings.first, settings.depth):
        for name, (out, width) in body.shapes(layer).items():
            a = torch.randn(settings.rank, width) / math.sqrt(width)
            adapter[f"{layer}.{name}"] = (a.requires_grad_(), torch.zeros(out, settings.rank).requires_grad_())
    return adapter


def _pooled(body: Body, rows: Sequence[Prepared], adapter: Adapter, first: int, scale: float) -> Tensor:
    lengths = torch.tensor([len(r.h) for r in rows])
    past_lengths = torch.tensor([r.past.shape[3] for r in rows])
    c, s = int(past_lengths.max()), int(lengths.max())
    h = torch.stack([fn.pad(r.h, (0, 0, 0, s - len(r.h))) for r in rows])
    stacked = torch.stack([fn.pad(r.past, (0, 0, 0, c - r.past.shape[3])) for r in rows], dim=2).float()
    past: KeysValues = [(layer[0], layer[1]) for layer in stacked]
    scaled = adapter if scale == 1.0 else {n: (a, b * scale) for n, (a, b) in adapter.items()}
    return pool(body.suffix(h, past, past_lengths, scaled, range(first, body.depth)), lengths)


def _batches(data: Sequence[Prepared], size: int) -> Iterator[list[Prepared]]:
    """Batches of similar length in random order, differently composed each time."""
    order = sorted(data, key=lambda r: len(r.h) * random.uniform(0.8, 1.25))
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    random.shuffle(batches)
    yield from batches


def card(body: Body, settings: Settings, head: Head, corpus: bytes, measured: dict[str, Any]) -> dict[str, Any]:
    """What ships beside the weights."""
    return {
        "name": "judge-" + sha256(corpus)[:6],
        "prompt": VERSION,
        "base": {"name": body.name, "fingerprint": body.fingerprint},
        "corpus": {"sha256": sha256(corpus), "rows": len(rows_of(corpus))},
        "settings": asdict(settings),
        "temperature": round(head.temperature, 4),
        "threshold": round(head.threshold, 4),
        "held_out": measured,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure on a held-out fold, then train on every row and write the weights."""
    parser = argparse.ArgumentParser(description="Train the embedded judge and write its weights.")
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--corpus", help="JSON lines file (default: the one shipped with the package)")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder for weights.safetensors and weights.json")
    parser.add_argument("--stop", type=int, default=Settings().stop, help="epochs to train")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(given.threads)
    settings = Settings(stop=given.stop)
    corpus = Path(given.corpus).read_bytes() if given.corpus else corpus_bytes()
    rows = rows_of(corpus)
    body = Body(given.model, settings.depth)
    data = prepare(body, rows, settings.first)
    out = held_out(rows, settings.folds, settings.seed)
    trial = fit(body, [d for d, o in zip(data, out, strict=True) if not o], settings)
    test = [d for d, o in zip(data, out, strict=True) if o]
    logits, verdicts = logits_of(body, trial, test, settings.first), torch.tensor([d.verdict for d in test])
    calibrated = calibrate(trial, logits, verdicts)
    measured = metrics(calibrated, logits + (calibrated.bias - trial.bias), verdicts)
    _log.info("held out: %s", measured)
    final = fit(body, data, settings)
    head = replace(
        calibrated, adapter=final.adapter, weight=final.weight, bias=final.bias + calibrated.bias - trial.bias
    )
    replace(head, card=card(body, settings, head, corpus, measured)).save(given.out)


if __name__ == "__main__":
    main()
