"""A text as a bag of features: its words, their sequences and their letters, alike in every language and script.

Owns how a text is normalised and divided; trained weights belong to that, so that the versions of those who train
on it change with it. Knows no label and no model.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as fn

WORD = re.compile(r"[^\W_]+")
READ_CHARS = 4000
"""of each text; a tool's result may be long"""
_STEM = 5
_SPACE = re.compile(r"\s+")


def words_of(text: str) -> list[str]:
    """The text's words in order, without accents and case; of scripts without spaces, its characters."""
    return [part for word in WORD.findall(plain(text)) for part in (word if dense(word) else (word,))]


def sequences(text: str, longest: int) -> set[str]:
    """The text's sequences of one to `longest` words, its ends marked."""
    words = ["^", *words_of(text), "$"]
    return {" ".join(words[i : i + n]) for n in range(1, longest + 1) for i in range(len(words) - n + 1)}


def letters(text: str) -> set[str]:
    """The text's sequences of three to five letters, the space between words one of them; of one to three, where a
    script has no spaces."""
    marked = f"^{_SPACE.sub(' ', plain(text))}$"
    return {marked[i : i + n] for n in ((1, 2, 3) if dense(marked) else (3, 4, 5)) for i in range(len(marked) - n + 1)}


def buckets(features: Iterable[str], count: int) -> list[int]:
    """Where hashed features fall in a table of `count` rows; different ones may share a row."""
    return sorted({crc32(feature.encode()) % count for feature in features})


def stems(text: str) -> frozenset[str]:
    """Beginnings of the words of `text` without accents; of scripts without spaces, pairs of characters."""
    out: set[str] = set()
    for word in WORD.findall(plain(text)):
        if dense(word):
            out |= {word[i : i + 2] for i in range(len(word) - 1)} or {word}
        elif len(word) >= 3 or word.isdigit():
            out.add(word[:_STEM])
    return frozenset(out)


def plain(text: str) -> str:
    """The beginning of the text, without accents and case."""
    return "".join(
        c for c in unicodedata.normalize("NFKD", text[:READ_CHARS].casefold()) if not unicodedata.combining(c)
    )


def dense(word: str) -> bool:
    """Whether it is of a script without spaces."""
    return any("\u3040" <= c <= "\u9fff" for c in word)


def mean_of(table: Tensor, rows: Sequence[int]) -> Tensor:
    """Sum of some rows of a table [R, n], over the root of their number: [n]."""
    return table[list(rows)].sum(0) / max(len(rows), 1) ** 0.5


@dataclass(frozen=True, slots=True)
class Bags:
    """The buckets of many texts, for a fit."""

    flat: Tensor
    starts: Tensor
    roots: Tensor

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Bags:
        lengths = torch.tensor([len(row) for row in rows])
        flat = torch.tensor([bucket for row in rows for bucket in row], dtype=torch.long)
        return Bags(flat, lengths.cumsum(0) - lengths, lengths.clamp_min(1).float().sqrt())

    def means(self, table: Tensor) -> Tensor:
        """`mean_of` each text, [N, n]; gradients reach the table."""
        return fn.embedding_bag(self.flat, table, self.starts, mode="sum") / self.roots[:, None]
