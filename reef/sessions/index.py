"""Where a reply can be found again: by the chain of the conversation that ends in it.

Owns the in-memory matching state: one `Node` per recorded reply, reachable by chain within a scope and
by tag. A request's cost depends on its own messages, never on the number of live sessions. Knows no
database; it is rebuilt from the log at start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Node:
    """A recorded reply that a later request may continue."""

    id: str
    session: str
    time: float
    chain: bytes
    """of the request's messages and the reply"""
    request_chain: bytes
    parent: str | None
    answered: bool
    """a usable reply was delivered in full"""
    children: list[str] = field(default_factory=list)


class Index:
    """Replies by chain and by tag, oldest forgotten first once there are `capacity` of them."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._by_chain: dict[tuple[Hashable, bytes], list[str]] = {}
        self._by_request: dict[tuple[Hashable, bytes], list[str]] = {}
        self._newest_of: dict[tuple[Hashable, str], str] = {}
        self._keys: dict[str, tuple[Hashable, str | None]] = {}

    def add(self, scope: Hashable, tag: str | None, node: Node) -> None:
        self._nodes[node.id] = node
        self._keys[node.id] = (scope, tag)
        if node.answered:
            self._by_chain.setdefault((scope, node.chain), []).append(node.id)
            if tag is not None:
                self._newest_of[scope, tag] = node.id
        self._by_request.setdefault((scope, node.request_chain), []).append(node.id)
        while len(self._nodes) > self._capacity:
            self._forget(next(iter(self._nodes)))

    def node(self, id: str) -> Node | None:
        return self._nodes.get(id)

    def ending_in(self, scope: Hashable, chain: bytes) -> list[Node]:
        """Replies whose conversation has this chain, oldest first."""
        return [self._nodes[i] for i in self._by_chain.get((scope, chain), ())]

    def asked(self, scope: Hashable, request_chain: bytes) -> list[Node]:
        """Exchanges with this very conversation as their request, oldest first."""
        return [self._nodes[i] for i in self._by_request.get((scope, request_chain), ())]

    def newest_of(self, scope: Hashable, tag: str) -> Node | None:
        """The last answered reply under a tag."""
        id = self._newest_of.get((scope, tag))
        return self._nodes.get(id) if id else None

    def _forget(self, id: str) -> None:
        node = self._nodes.pop(id)
        scope, tag = self._keys.pop(id)
        for table, chain in ((self._by_chain, node.chain), (self._by_request, node.request_chain)):
            ids = table.get((scope, chain))
            if ids and id in ids:
                ids.remove(id)
                if not ids:
                    del table[scope, chain]
        if tag is not None and self._newest_of.get((scope, tag)) == id:
            del self._newest_of[scope, tag]
