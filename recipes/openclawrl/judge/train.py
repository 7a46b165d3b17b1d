"""Trains the embedded judge: `python -m recipes.openclawrl.judge.train --model DIR`.

A low-rank adapter on the upper layers of the frozen base and linear heads learn the corpus's verdicts,
kinds of reaction and targets. The layers below the adapter run once. One run: a part of the conversations is held
out, the rest trains, the held-out part calibrates and measures. With `--work DIR` an interrupted run
goes on at the last finished epoch. Two small models of words, one for the reply that is meant and one for the
verdict, are fitted last, and `--words-only` fits them to weights that are there, in minutes. Owns the split and
the run; it knows no recipe and no service.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from recipes.openclawrl.judge.body import Body
from recipes.openclawrl.judge.calibration import calibrate, calibrate_target, measure, mix_words, targets_hit
from recipes.openclawrl.judge.corpus import KINDS, Row, corpus_bytes, groups, read_rows, rows_of, sha256
from recipes.openclawrl.judge.fit import Fit, Settings, pooled_all
from recipes.openclawrl.judge.head import SHIPPED, Head
from recipes.openclawrl.judge.prepared import Cache, Prepared
from recipes.openclawrl.judge.prompt import VERSION, shown
from recipes.openclawrl.judge.votes import VERDICTS
from recipes.openclawrl.judge.wording import VERSION as WORDING_VERSION
from recipes.openclawrl.judge.wording import fit_wording, wording_of
from recipes.openclawrl.judge.words import VERSION as WORDS_VERSION
from recipes.openclawrl.judge.words import Reaction, fit_words
from reef.errors import ModelError

_log = logging.getLogger(__name__)


def held_out(rows: Sequence[Row], share: float, seed: int) -> list[bool]:
    """Which rows are held out; rows of one conversation stay together."""
    group = groups(rows)
    names = sorted(set(group))
    random.Random(seed).shuffle(names)
    out = set(names[: round(share * len(names))])
    return [g in out for g in group]


def divided(rows: Sequence[Row], settings: Settings) -> tuple[list[Row], list[Row]]:
    """(taught, held out)."""
    apart = held_out(rows, settings.held_out, settings.seed)
    return [r for r, o in zip(rows, apart, strict=True) if not o], [r for r, o in zip(rows, apart, strict=True) if o]


def card(body: Body, settings: Settings, head: Head, corpus: bytes, measured: dict[str, Any]) -> dict[str, Any]:
    """What ships beside the weights."""
    return {
        "name": "judge-" + sha256(corpus)[:6],
        "prompt": VERSION,
        "base": {"name": body.name, "fingerprint": body.fingerprint},
        "corpus": {"sha256": sha256(corpus), "rows": len(rows_of(corpus))},
        "settings": asdict(settings),
        "kinds": list(KINDS),
        "words": WORDS_VERSION,
        "mix": list(head.mix),
        "wording": WORDING_VERSION,
        "wording_weight": round(head.wording_weight, 4),
        "temperature": round(head.temperature, 4),
        "threshold": round(head.threshold, 4),
        "held_out": measured,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train, calibrate and measure on the held-out conversations, and write the weights."""
    parser = argparse.ArgumentParser(description="Train the embedded judge and write its weights.")
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--corpus", type=Path, help="JSON lines file (default: the one shipped with the package)")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder for weights.safetensors and weights.json")
    parser.add_argument("--work", type=Path, help="folder for what an interrupted run goes on from")
    parser.add_argument("--check", type=Path, help="more labelled rows to measure")
    parser.add_argument(
        "--words-only", action="store_true", help="keep the adapter and heads in --out, fit only the models of words"
    )
    parser.add_argument("--threads", type=int, default=1)
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(given.threads)
    settings = Settings(**{name: getattr(given, name) for name in asdict(Settings())})
    corpus = given.corpus.read_bytes() if given.corpus else corpus_bytes()
    if given.words_only:
        with tempfile.TemporaryDirectory() as folder:
            reword(given.model, corpus, given.out, given.work or Path(folder), given.check)
        return
    train(given.model, corpus, settings, given.out, given.work, given.check)


def train(
    model: str | Path, corpus: bytes, settings: Settings, out: Path, work: Path | None = None, check: Path | None = None
) -> Head:
    """The whole run: weights and their card are in `out` when it returns."""
    if work is None:
        with tempfile.TemporaryDirectory() as folder:
            return train(model, corpus, settings, out, Path(folder), check)
    rows = rows_of(corpus)
    body = Body(model, settings.depth)
    work.mkdir(parents=True, exist_ok=True)
    run = sha256(repr((settings, sha256(corpus), VERSION, body.fingerprint)).encode())[:12]
    state = work / f"fit-{run}.pt"
    cache = Cache(body, settings.first, work)
    taught, _ = divided(rows, settings)
    steps = len(taught) // settings.workers // settings.batch
    fit = Fit(body, settings, steps)
    if state.exists():
        fit.resume(state)
    if fit.epoch < settings.epochs:
        data = cache.prepared(taught)
        for worker in range(settings.workers):
            torch.save([_fields(row) for row in data[worker :: settings.workers]], f"{state}-{worker}")
        del data
        state.with_suffix(".meeting").unlink(missing_ok=True)
        arguments = (model, settings, steps, state)
        if settings.workers == 1:
            _work(0, *arguments)
        else:
            spawn(_work, arguments, settings.workers)
        fit.resume(state)
    return finish(body, fit.head(), settings, corpus, cache, out, check)


def reword(model: str | Path, corpus: bytes, folder: Path, work: Path, check: Path | None = None) -> Head:
    """Fit the models of words anew for the weights in `folder`, calibrate, measure, and write them there again.
    Raises ModelError for another corpus than theirs: what it would hold out, the adapter may have been trained on."""
    body = Body(model, Head.depth_of(folder))
    head = Head.load(folder, body)
    if head.card["corpus"]["sha256"] != sha256(corpus):
        raise ModelError(f"the weights in {folder} were trained on another corpus")
    settings = Settings(**head.card["settings"])
    return finish(body, head, settings, corpus, Cache(body, settings.first, work), folder, check)


def finish(
    body: Body, trained: Head, settings: Settings, corpus: bytes, cache: Cache, out: Path, check: Path | None
) -> Head:
    """What follows the adapter's training: models of words, calibration, measures, and the weights in `out`."""
    taught, kept = divided(rows_of(corpus), settings)
    said = torch.tensor([VERDICTS.index(row.verdict) for row in taught])
    head = replace(trained, wording=fit_wording([wording_of(r.history, r.next) for r in taught], said))
    test = cache.prepared(kept)
    pooled = pooled_all(body, head, test, settings.first)
    verdicts = torch.tensor([row.verdict for row in test])
    wording = head.wording.logits([wording_of(r.history, r.next) for r in kept])
    head = calibrate(head, head.logits("verdict", pooled), wording, verdicts)
    head = calibrate_target(head, head.logits("place", pooled), test)
    head = with_words(head, pooled, taught, kept, test)
    result = _measured(head, pooled, test, kept)
    _log.info("held out: %s", result)
    if check:
        more = read_rows(check)
        checked = cache.prepared(more)
        _log.info("check: %s", _measured(head, pooled_all(body, head, checked, settings.first), checked, more))
    head = replace(head, card=card(body, settings, head, corpus, result))
    head.save(out)
    return head


def with_words(
    head: Head, pooled: Tensor, taught: Sequence[Row], kept: Sequence[Row], test: Sequence[Prepared]
) -> Head:
    """The head with a model of words fitted to `taught` and weighed by `kept`, whose rows `test` and `pooled` are."""
    several = [row for row in taught if row.target in shown(row.history) and len(shown(row.history)) > 1]
    reactions = _reactions(several)
    targets = [
        replies.index(row.target)
        for row, (_, _, replies) in zip(several, reactions, strict=True)
        if row.target is not None
    ]
    head = replace(head, words=fit_words(reactions, targets))
    return mix_words(head, head.logits("place", pooled), head.logits("kind", pooled), test, _reactions(kept))


def _reactions(rows: Sequence[Row]) -> list[Reaction]:
    return [(row.history, row.next, shown(row.history)) for row in rows]


def _work(
    worker: int,
    model: str | Path,
    settings: Settings,
    steps: int,
    state: Path,
) -> None:
    """What one worker does: all epochs over its share of the rows; the first one saves."""
    torch.set_num_threads(1)
    if settings.workers > 1:
        logging.basicConfig(level=logging.INFO if worker == 0 else logging.WARNING, format="%(message)s")
        meeting = f"file://{state.with_suffix('.meeting')}"
        dist.init_process_group("gloo", init_method=meeting, rank=worker, world_size=settings.workers)
    body = Body(model, settings.depth)
    data = [Prepared(*fields) for fields in torch.load(f"{state}-{worker}", weights_only=False)]
    fit = Fit(body, settings, steps)
    if state.exists():
        fit.resume(state)
    while fit.epoch < settings.epochs:
        fit.run(data, worker)
        if worker == 0:
            fit.save(state)
    if settings.workers > 1:
        dist.destroy_process_group()


def _measured(head: Head, pooled: Tensor, rows: Sequence[Prepared], said: Sequence[Row]) -> dict[str, Any]:
    probabilities = head.probabilities(pooled, [wording_of(row.history, row.next) for row in said])
    found = measure(head, probabilities, torch.tensor([row.verdict for row in rows]))
    place, kind = head.logits("place", pooled), head.logits("kind", pooled)
    return found | {"target": targets_hit(head, place, kind, rows, _reactions(said))}


def _fields(row: Prepared) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in Prepared.__slots__)


if __name__ == "__main__":
    main()
