"""Rows of the corpus after the layers below the adapter, which training needs only once, and their files.

The base model below the adapter is frozen: what the trained layers start from is a function of the row alone.
It knows no adapter, no loss and no split.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recipes.openclawrl.judge.attribution import features
from recipes.openclawrl.judge.body import Body, Padded
from recipes.openclawrl.judge.corpus import KINDS, Row, sha256
from recipes.openclawrl.judge.prompt import VERSION, Reader
from recipes.openclawrl.judge.votes import VERDICTS

_log = logging.getLogger(__name__)

CACHED_TOGETHER = 256
"""rows prepared between two writes"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row after the layers below the adapter: what the trained ones start from."""

    h: Tensor
    """hidden states of context and suffix entering the first trained layer, half precision [C + S, D]"""
    context: int
    """how many of them are the context's"""
    verdict: int
    """index in VERDICTS"""
    kind: int
    """index in KINDS; -1 in rows that are only measured"""
    replies: tuple[int, ...]
    cues: tuple[tuple[float, ...], ...]
    """FEATURES of each shown reply"""
    target: int | None
    """position in `replies` of the reply meant; None when none is, or there is only one"""


def prepare(body: Body, rows: Sequence[Row], first: int, batch: int = 16) -> list[Prepared]:
    """Run the untrained layers over `rows`."""
    reader = Reader(body.tokenizer)
    readings = [reader.read(row.history, row.next) for row in rows]
    done: dict[int, Prepared] = {}
    order = sorted(range(len(rows)), key=lambda i: readings[i].tokens)
    started = time.monotonic()
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        h = body.lower(Padded.of([(*readings[i].context, *readings[i].suffix) for i in chosen]), first)
        for j, i in enumerate(chosen):
            row, shown = rows[i], readings[i].replies
            bound = len(shown) > 1 and row.target in shown
            done[i] = Prepared(
                h=h[j, : readings[i].tokens].half(),
                context=len(readings[i].context),
                verdict=VERDICTS.index(row.verdict),
                kind=KINDS.index(row.kind) if row.kind in KINDS else -1,
                replies=shown,
                cues=tuple(tuple(f) for f in features(row.history, row.next, shown)),
                target=shown.index(row.target) if bound and row.target is not None else None,
            )
        if at // batch % 20 == 0:
            _log.info("read %d of %d rows, %.0f s", len(done), len(rows), time.monotonic() - started)
    return [done[i] for i in range(len(rows))]


class Cache:
    """Prepared rows in the files of a folder, so that an interrupted or repeated run reads no row twice."""

    def __init__(self, body: Body, first: int, work: Path) -> None:
        self._body, self._first = body, first
        self._folder = work / f"prepared-{VERSION}-{first}-{body.depth}-{body.fingerprint}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[str, Prepared] = {}
        for file in sorted(self._folder.glob("*.pt")):
            held = torch.load(file, weights_only=False)
            self._rows |= {key: Prepared(*fields) for key, fields in held.items()}

    def prepared(self, rows: Sequence[Row]) -> list[Prepared]:
        """Each row prepared, those not in the files by the model."""
        keys = [sha256(repr((row.history, row.next, row.verdict, row.target, row.kind)).encode()) for row in rows]
        lacking = list({k: row for k, row in zip(keys, rows, strict=True) if k not in self._rows}.items())
        for at in range(0, len(lacking), CACHED_TOGETHER):
            part = lacking[at : at + CACHED_TOGETHER]
            made = dict(
                zip([k for k, _ in part], prepare(self._body, [row for _, row in part], self._first), strict=True)
            )
            self._rows |= made
            self._save(part[0][0], made)
        return [self._rows[key] for key in keys]

    def _save(self, name: str, made: dict[str, Prepared]) -> None:
        file = self._folder / f"{name[:16]}.pt"
        torch.save({k: tuple(getattr(p, f) for f in Prepared.__slots__) for k, p in made.items()}, f"{file}.part")
        os.replace(f"{file}.part", file)
