"""Token ids in an engine's JSON, read without making an object of each byte that passes by.

A prompt's ids are by far the longest part of an answer to a long prompt, and all a gateway does with them
is to write them down again: `WrittenIds` keeps them as they came. Exact: what does not look as expected is
left to the JSON parser. Knows no answer and no record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import orjson

_PROMPT = b'"prompt_token_ids":['
NAMED = "token_id:"
_PIECE = 1 << 20
"""bytes looked at in one go, so that other threads have their turn"""


class WrittenIds(Sequence[int]):
    """Ids as a JSON list that is read when somebody looks into it."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        """`text`: a JSON list of at least one integer."""
        self.text = text

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.text.count(b",") + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return orjson.loads(self.text)[index]

    def __iter__(self) -> Iterator[int]:
        return iter(orjson.loads(self.text))


def take_prompt_ids(content: bytes) -> tuple[bytes, WrittenIds | None]:
    """The JSON with an empty list for its prompt ids, and the ids; as it is, and None, where there are none
    or more than one list. A key can't be mistaken for text: inside a string its quotes would be escaped."""
    start = content.find(_PROMPT)
    if start < 0:
        return content, None
    start += len(_PROMPT) - 1
    end = content.find(b"]", start) + 1
    if end == 0 or content.find(_PROMPT, end) >= 0:
        return content, None
    if not _integers(content, start + 1, end - 1):
        return content, None
    return b"%b[]%b" % (content[:start], content[end:]), WrittenIds(b"".join(_pieces(content, start, end)))


def _pieces(content: bytes, start: int, end: int, overlap: int = 0) -> Iterator[bytes]:
    return (content[at : min(at + _PIECE + overlap, end)] for at in range(start, end, _PIECE))


def _integers(content: bytes, start: int, end: int) -> bool:
    """Whether there are digits with single commas between them."""
    if not content[start : start + 1].isdigit() or not content[end - 1 : end].isdigit():
        return False
    pieces = _pieces(content, start, end, overlap=1)  # two commas may stand on an edge
    return not any(b",," in piece or piece.translate(None, b"0123456789,") for piece in pieces)


def named_ids(tokens: Sequence[str]) -> list[int | None]:
    """The ids of tokens named by them (`token_id:17`), None for any other token."""
    digits = ("\n" + "\n".join(tokens)).split("\n" + NAMED)
    if len(digits) == len(tokens) + 1 and "".join(digits).isdigit():
        try:
            return list(map(int, digits[1:]))
        except ValueError:
            pass  # one of them is empty
    return [_named_id(token) for token in tokens]


def _named_id(token: str) -> int | None:
    digits = token.removeprefix(NAMED)
    return int(digits) if digits != token and digits.isdigit() else None
