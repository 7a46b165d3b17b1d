"""Token ids become text piece by piece, and stop strings end it.

Invariant: the pieces joined are the text of all ids at once, cut before the first stop string;
no piece ends inside a character or inside what may become a stop string.
It knows no model and no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of one answer as it grows."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self._anchor = 0
        """decoding starts here: ids before it no longer influence what follows"""
        self._read = 0
        """ids before it are in `_pending` or were given out"""
        self._pending = ""
        self.stopped: str | None = None
        """the stop string that ended the text"""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain. Sets `stopped` at a stop string."""
        self._ids.append(token)
        self._take(final=False)
        return self._release()

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped:
            return ""
        self._take(final=True)
        text = self._release()
        rest, self._pending = self._pending, ""
        return text if self.stopped else text + rest

    def _take(self, *, final: bool) -> None:
        before = self._decode(self._ids[self._anchor : self._read])
        now = self._decode(self._ids[self._anchor :])
        # U+FFFD at the end: bytes of a character whose other tokens are still to come
        if final or (len(now) > len(before) and not now.endswith("\ufffd")):
            self._pending += now[len(before) :]
            self._anchor, self._read = self._read, len(self._ids)

    def _release(self) -> str:
        found = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:
            cut, self.stopped = min(found)
        else:
            cut = len(self._pending) - self._held()
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def _held(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
