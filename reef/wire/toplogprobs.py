"""The log-probs of an answer's tokens, taken out of the engine's JSON and read together at its end.

They are nine tenths of what an engine sends, and nothing of them goes to a client that did not ask: an event
is cut around them before it is parsed, and what was cut out is parsed once, without a dict or a string for each
of thousands of alternatives. Exact: what does not look as expected is left to the JSON parser. Knows no
record.
"""

from __future__ import annotations

import re
from itertools import chain
from operator import itemgetter
from typing import Any

import orjson

_START = b'"logprobs":{"content":['
_END = b"}]}]}"
"""of the last alternative, its list, the last token, the list of tokens, and the log-probs"""
_BYTES = re.compile(rb',"bytes":(?:\[[0-9,]*\]|null)')
"""of a token's text, which its id says already; half of the text, and most of what there is to parse"""
_WITHOUT_NAMES = (
    (b'","logprob":', b","),
    (b'{"token":"token_id:', b"["),
    (b',"top_logprobs":', b","),
    (b"}", b"]"),
)
_NUMBERS = b"0123456789+-.eE,[]"
_VALUE = itemgetter(1)
Row = list[list[Any]]
"""[id, log-prob] of each alternative of a token"""


def take_logprobs(content: bytes) -> tuple[bytes, bytes | None]:
    """The JSON with null for its log-probs, and the text of their list's items; as it is, and None, where there
    are none or more than one list. Right if the former is JSON: within a string the start would have its quotes
    escaped, and a cut that ends in one leaves an odd number of quotes."""
    start = content.find(_START)
    if start < 0:
        return content, None
    first = start + len(_START)
    end = content.find(_END, first)
    if end < 0 or content.find(_START, end) >= 0:
        return content, None
    return b'%b"logprobs":null%b' % (content[:start], content[end + len(_END) :]), content[first : end + 3]


def read_logprobs(items: bytes) -> tuple[list[float], list[Row]] | None:
    """The log-prob of each token, and its alternatives, most likely first; None unless all tokens are named by
    their ids and have log-probs as vLLM writes them."""
    text = b"".join(_BYTES.split(items))
    for name, short in _WITHOUT_NAMES:
        text = text.replace(name, short)
    if text.translate(None, _NUMBERS) or b"[-" in text:  # other names, or ids below zero
        return None
    try:
        ids, logprobs, rows = zip(*orjson.loads(b"[%b]" % text), strict=True)
        alternatives = list(chain.from_iterable(rows))
        top_ids, top_logprobs = zip(*alternatives, strict=True) if alternatives else ((), ())
    except (ValueError, TypeError):
        return None
    if {*map(type, ids), *map(type, top_ids)} != {int} or {*map(type, logprobs), *map(type, top_logprobs)} != {float}:
        return None
    for row in rows:
        row.sort(key=_VALUE, reverse=True)
    return list(logprobs), list(rows)
