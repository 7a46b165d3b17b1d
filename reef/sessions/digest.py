"""Canonical digests: what makes two pieces of a conversation the same for matching.

Insensitive to what clients rewrite (whitespace, unicode form, key order and spacing of tool arguments),
sensitive to everything else. Pure functions of text; knows no message, no index and no exchange.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from hashlib import blake2b as _blake2b

ROOT = b""
SIZE = 8
"""bytes of a digest: with a billion of them the chance of one collision is about 3 %"""
OPENING = 6
"""words by which a quoted text is found again"""
_FRESH = _blake2b(digest_size=SIZE)
"""hashes nothing itself: to copy it costs half of what a new hash with its keyword does"""
_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))
_DIGITS = str.maketrans("", "", "0123456789")
_ASCII_WORDS = "".join(chr(i) if chr(i).isalnum() else " " for i in range(128))
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\W_]+")


def fold(text: str) -> str:
    """Text with whitespace folded, NFC, zero-width characters removed."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_ZERO_WIDTH))
    return " ".join(text.split())


def numberless(text: str) -> str:
    """Folded text without its digits: the same before and after a clock moved on."""
    return fold(text).translate(_DIGITS)


def canonical_arguments(arguments: str) -> str:
    """Tool arguments with sorted keys; kept as text where they are not JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return fold(arguments)


def digest(kind: str, text: str) -> bytes:
    """`SIZE` bytes that identify a folded text within its kind."""
    state = _FRESH.copy()
    state.update(f"{kind}\0{text}".encode("utf-8", "surrogatepass"))
    return state.digest()


def join(parts: Iterable[bytes]) -> bytes:
    """One digest of several, in order."""
    state = _FRESH.copy()
    state.update(b"".join(parts))
    return state.digest()


def extend(chain: bytes, part: bytes) -> bytes:
    """The chain after one more part."""
    state = _FRESH.copy()
    state.update(chain + part)
    return state.digest()


def words(text: str) -> list[str]:
    """The words of a text, case kept; every Chinese, Japanese or Korean character is one."""
    return text.translate(_ASCII_WORDS).split() if text.isascii() else _WORD.findall(text)


def first_words(text: str, count: int) -> list[str]:
    """The first words of a text, without a look at all of a long one."""
    head = words(text[: 16 * count])
    if len(head) <= count and len(text) > 16 * count:  # its last word may be cut
        head = words(text)
    return head[:count]


def opening(said: Sequence[str]) -> bytes | None:
    """The digest of a text's first words; None if it has too few to be told from others."""
    return digest("opening", " ".join(said[:OPENING])) if len(said) >= OPENING else None


def openings(said: Sequence[str]) -> Iterable[bytes]:
    """The digest of each run of `OPENING` words, by which texts quoted inside are found."""
    for at in range(len(said) - OPENING + 1):
        yield digest("opening", " ".join(said[at : at + OPENING]))
