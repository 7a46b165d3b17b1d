"""The log-probs of an answer's tokens, taken out of the engine's JSON and read together at its end.

They are nine tenths of what an engine sends, and nothing of them goes to a client that did not ask: an event
is cut around them before it is parsed, and what was cut out is parsed once, without a dict or a string for each
of thousands of alternatives. Exact: what does not look as expected is left to the JSON parser. Knows no
record.
"""

from __future__ import annotations

from operator import itemgetter

import orjson

_START = b'"logprobs":{"content":['
_END = b"}]}]}"
"""of the last alternative, its list, the last token, the list of tokens, and the log-probs"""
_WITHOUT_NAMES = (
    (b'{"token":"token_id:', b"["),
    (b'","logprob":', b","),
    (b',"bytes":', b","),
    (b',"top_logprobs":', b","),
    (b"}", b"]"),
)
_INTEGERS = {int}
Row = tuple[tuple[int, float], ...]


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
    for name, short in _WITHOUT_NAMES:
        items = items.replace(name, short)
    if b'"' in items or b"{" in items:
        return None
    logprobs: list[float] = []
    rows: list[Row] = []
    try:
        for id, logprob, _, tops in orjson.loads(b"[%b]" % items):
            ids, values, _ = zip(*tops, strict=True) if tops else ((), (), ())
            if {*map(type, ids), type(id)} != _INTEGERS or (ids and min(ids) < 0):
                return None
            logprobs.append(float(logprob))
            row = tuple(zip(ids, map(float, values), strict=True))
            if values != tuple(sorted(values, reverse=True)):
                row = tuple(sorted(row, key=itemgetter(1), reverse=True))
            rows.append(row)
    except (ValueError, TypeError):
        return None
    return logprobs, rows
