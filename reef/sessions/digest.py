"""Canonical digests: what makes two messages the same for matching.

A conversation is a chain of digests; equal chains are equal histories. Insensitive to what clients
rewrite (whitespace, key order and spacing of tool arguments, unicode form), sensitive to everything
else. The system message stands beside the chain. Pure functions; knows no index and no exchange.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence

from reef.wire.exchange import Message

ROOT = b""
_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))


def fold(text: str) -> str:
    """Text with whitespace folded, NFC, zero-width characters removed."""
    return " ".join(unicodedata.normalize("NFC", text.translate(_ZERO_WIDTH)).split())


def canonical_arguments(arguments: str) -> str:
    """Tool arguments with sorted keys; kept as text where they are not JSON."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except ValueError:
        return fold(arguments)


def digest(message: Message) -> bytes:
    """16 bytes that identify a message within its role."""
    calls = [[name, canonical_arguments(arguments)] for name, arguments in message.tool_calls]
    atom = json.dumps([message.role, fold(message.content), calls], ensure_ascii=True)
    return hashlib.blake2b(atom.encode(), digest_size=16).digest()


def extend(chain: bytes, message: Message) -> bytes:
    """The chain after one more message; system messages leave it as it is."""
    if message.role == "system":
        return chain
    return hashlib.blake2b(chain + digest(message), digest_size=16).digest()


def chains(messages: Sequence[Message]) -> list[bytes]:
    """The chain after each message."""
    out = []
    chain = ROOT
    for message in messages:
        chain = extend(chain, message)
        out.append(chain)
    return out
