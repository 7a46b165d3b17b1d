"""Keys and values of prompt chunks computed before, so that a resent history isn't computed again.

Invariant: a chunk is stored under its adapter and *all* ids up to its end, and only if it was
computed alone with the fixed chunk size; computing it again would give the same bits, so a hit never
changes a log-probability. Used by the scheduler's thread only. It knows no model.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

CHUNK = 64
"""tokens per prefill chunk: prompts are cut at multiples of it"""


class PrefixCache:
    """Least recently used chunks, at most `limit_bytes` in all."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._chunks: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()

    def find(self, uid: int, keys: Sequence[bytes]) -> list[Tensor]:
        """The longest stored run of leading chunks, each [layers, 2, kv_heads, CHUNK, head_dim]."""
        found = []
        for key in keys:
            chunk = self._chunks.get((uid, key))
            if chunk is None:
                break
            self._chunks.move_to_end((uid, key))
            found.append(chunk)
        return found

    def put(self, uid: int, key: bytes, chunk: Tensor) -> None:
        if chunk.nbytes > self.limit_bytes or (uid, key) in self._chunks:
            return
        self._chunks[uid, key] = chunk.clone()
        self.bytes += chunk.nbytes
        while self.bytes > self.limit_bytes:
            self.bytes -= self._chunks.popitem(last=False)[1].nbytes

    def forget(self, uid: int) -> None:
        """Drop everything computed with an adapter."""
        for key in [key for key in self._chunks if key[0] == uid]:
            self.bytes -= self._chunks.pop(key).nbytes


def chunk_keys(ids: Sequence[int]) -> list[bytes]:
    """One key for each whole chunk that ends before the last id: a hash of all ids up to its end."""
    running, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, (len(ids) - 1) // CHUNK * CHUNK, CHUNK):
        running.update(array("q", ids[start : start + CHUNK]).tobytes())
        keys.append(running.digest())
    return keys
