"""Where a recorded reply can be found again.

One `Node` for each exchange, found by keys: digests of the conversation that ends in its reply, of the
request alone, of the reply with what stood before it, of its first words, of the user's words. A look-up
costs the same for ten sessions and for a million. Memory is bounded: what was longest untouched is left to
the archive, if there is one, and found there. Knows no rule of matching.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

MOST = 8
"""nodes kept under one key: the newest"""
CHILDREN = 32
"""requests remembered as reacting to one reply"""


class By(bytes, Enum):
    """What a key stands for: one letter of it."""

    CHAIN = b"c"
    """the whole conversation, reply included"""
    REQUEST = b"q"
    """the whole conversation without the reply"""
    REPLY = b"r"
    """the reply alone"""
    REPLY_1 = b"1"
    """the reply and the atom before it"""
    REPLY_2 = b"2"
    """the reply and two atoms before it"""
    OPENING = b"o"
    """the reply's first words"""
    QUOTE = b"t"
    """the first words of a text in the reply's tool calls"""
    CALL = b"k"
    """the id of a tool call in the reply"""
    USER = b"u"
    """the newest words of the user"""
    RESPONSE = b"i"
    """the answer's own id"""
    SESSION = b"s"
    """the session: its newest main exchange"""
    GROUP = b"g"
    """the known id and the shape of the request: its newest main exchange"""


@dataclass(slots=True)
class Node:
    """What matching remembers of an exchange."""

    id: str
    seq: int
    time: float
    scope: bytes
    session: str
    group: str | None
    """known id of the conversation, rule included"""
    parent: str | None
    """the exchange whose reply it answers or would answer"""
    side: str | None
    """why it is a side call"""
    kind: str
    """main, or what sort of side call"""
    final_side: bool
    """a side call even if somebody goes on from its reply"""
    answered: bool
    """a reply, whole or in part, reached the client"""
    failed: bool
    """the attempt failed or its answer was not delivered whole"""
    anchored: bool
    """`parent` is known from the request's history, not from a quote"""
    shape: bytes
    agent: str
    """user agent and model"""
    tools: bool
    opener: bool
    """the request carried no reply"""
    lone: bool
    """the request carried one message of the user at most: its client may send no history"""
    chain: bytes
    request: bytes
    tail: tuple[bytes, ...]
    """digests of the atoms after the last reply"""
    asked: str
    """the user's newest message, as sent"""
    bare: str
    """the same without what its client was found to wrap around it; empty if that is nothing"""
    said: str
    """first words of the reply"""
    ending: str
    """last characters of the reply"""
    binds: bool
    """the parent's next state is this request"""
    firm: bool
    children: list[str] = field(default_factory=list)
    continued: bool = False
    """a main request went on from its reply"""
    talked: bool = False
    """one of them with a user's words"""
    keys: tuple[bytes, ...] = ()
    sent: int | None = None
    """hash of scope and messages as they came, if `request` is their chain; means nothing in another process, so it
    is kept in memory only"""

    @property
    def words(self) -> str:
        """The user's newest words."""
        return self.bare or self.asked

    def to_json(self) -> dict[str, Any]:
        body = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sent"}
        for name in ("scope", "shape", "chain", "request"):
            body[name] = body[name].hex()
        for name in ("tail", "keys"):
            body[name] = [part.hex() for part in body[name]]
        return body

    @staticmethod
    def from_json(body: dict[str, Any]) -> Node:
        known = {f.name for f in fields(Node)} - {"sent"}  # older rows have one
        data = {k: v for k, v in body.items() if k in known}
        for name in ("scope", "shape", "chain", "request"):
            data[name] = bytes.fromhex(data[name])
        for name in ("tail", "keys"):
            data[name] = tuple(bytes.fromhex(part) for part in data[name])
        return Node(**data)


class Archive(Protocol):
    """Nodes that have left memory."""

    def load(self, id: str) -> Node | None: ...

    def find(self, keys: Sequence[bytes]) -> Sequence[str]:
        """Ids under any of the keys, the newest of each key."""
        ...


class Nowhere:
    """The archive of a matcher that lives in memory only."""

    def load(self, id: str) -> Node | None:
        return None

    def find(self, keys: Sequence[bytes]) -> Sequence[str]:
        return ()


def key(scope: bytes, by: By, value: bytes) -> bytes:
    """The key of a value within a scope (a digest): the value is a digest, too, or as short as a few."""
    return scope + by + value


def expect_many() -> None:
    """Tune this process's cycle collector for an index in memory: its nodes live long and form no cycles, and
    looking at all of them over and over costs as much as matching does."""
    gc.set_threshold(100_000, 50, 50)


class Index:
    """Nodes by id and by key, over an archive."""

    def __init__(self, archive: Archive | None = None, *, capacity: int = 200_000) -> None:
        self._archive = Nowhere() if archive is None else archive
        self._capacity = capacity
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._by: dict[bytes, tuple[str, ...]] = {}
        self._sent: dict[int, str] = {}
        """a node in memory whose request's messages came just so"""
        self._complete = archive is None
        """nothing is in the archive that is not in memory"""
        self.touched: dict[str, Node] = {}
        """new and changed since the owner last cleared it: what an archive has to be told"""

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node, keys: Iterable[bytes]) -> None:
        """Remember a node under its keys, the newest of each."""
        node.keys = tuple(dict.fromkeys(keys))
        self._insert(node)
        self.touched[node.id] = node

    def changed(self, node: Node) -> None:
        """Tell that a node's facts have changed."""
        self.touched[node.id] = node

    def get(self, id: str) -> Node | None:
        node = self._nodes.get(id)
        if node is None and not self._complete:
            node = self._archive.load(id)
            if node is not None:
                self._insert(node)
        return node

    def children(self, node: Node) -> list[Node]:
        """The requests that react to a node's reply, oldest first."""
        return [child for id in node.children if (child := self.get(id)) is not None]

    def under(self, key: bytes) -> list[Node]:
        """The newest nodes under a key, oldest first."""
        ids = self._by.get(key, ())
        if not self._complete and len(ids) < MOST:
            ids = tuple(dict.fromkeys((*self._archive.find((key,)), *ids)))
        if len(ids) == 1:  # nearly every key
            node = self.get(ids[0])
            return [] if node is None else [node]
        found = [node for id in ids if (node := self.get(id)) is not None]
        return sorted(found, key=lambda n: n.seq)[-MOST:]

    def holds(self, key: bytes) -> bool:
        """Whether a node under the key is in memory."""
        return key in self._by

    def sent(self, messages: int) -> Node | None:
        """A node in memory whose request had exactly the messages of this hash."""
        id = self._sent.get(messages)
        return None if id is None else self._nodes.get(id)

    def under_any(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes under any of many keys, oldest first."""
        ids = dict.fromkeys(id for k in keys for id in self._by.get(k, ()))
        if not self._complete and keys:
            ids |= dict.fromkeys(self._archive.find(keys))
        return sorted((n for id in ids if (n := self.get(id)) is not None), key=lambda n: n.seq)

    def also_under(self, node: Node, keys: Iterable[bytes]) -> None:
        """Find a node under more keys than it had."""
        node.keys = tuple(dict.fromkeys((*node.keys, *keys)))
        self._insert(node)
        self.changed(node)

    def drop(self, id: str) -> None:
        """Forget an exchange, here and now."""
        self.touched.pop(id, None)
        node = self._nodes.pop(id, None)
        if node is not None:
            self._unkey(node)

    def trim(self) -> None:
        """Forget what was longest untouched, down to the capacity. What the archive was not told stays."""
        while len(self._nodes) > self._capacity:
            id, node = next(iter(self._nodes.items()))
            if id in self.touched:
                return
            self._complete = self._complete and isinstance(self._archive, Nowhere)
            del self._nodes[id]
            self._unkey(node)

    def _unkey(self, node: Node) -> None:
        if node.sent is not None and self._sent.get(node.sent) == node.id:
            del self._sent[node.sent]
        for k in node.keys:
            left = tuple(i for i in self._by.get(k, ()) if i != node.id)
            if left:
                self._by[k] = left
            else:
                self._by.pop(k, None)

    def _insert(self, node: Node) -> None:
        self._nodes[node.id] = node
        if node.sent is not None:
            self._sent[node.sent] = node.id
        alone = (node.id,)  # one for all its keys: nearly every key is a single node's
        for k in node.keys:
            ids = self._by.setdefault(k, alone)
            if node.id not in ids:
                self._by[k] = (*ids, node.id)[-MOST:]
