"""What earlier exchanges become in the light of a later one.

Owns every change to a decision that was made already: a reply is credited, a retry superseded, a side call
turns out to be a turn or the other way round. Invariant: a reply has one next state at a time; what gives
it another takes the first back. Knows the index; knows nothing of how a parent is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reef.recipe import NextState
from reef.sessions.evidence import Found
from reef.sessions.fate import Fate
from reef.sessions.harness import like_an_instruction
from reef.sessions.index import CHILDREN, By, Index, Node, key
from reef.sessions.keys import head_keys


@dataclass(frozen=True, slots=True)
class Revision:
    """What an earlier exchange is now, in the light of a later one."""

    id: str
    reason: str
    fate: Fate | None = None
    """settles its fate, if nothing else has"""
    turn_type: str | None = None
    binds: str | None = None
    """with `rebound`: the reply it answers after all"""
    next_state: NextState | None = None
    rebound: bool = False
    """its binding has changed: to `binds`, or taken back if that is None"""
    firm: bool = False
    """its binding no longer waits"""


class Reviser:
    """The revisions that one exchange gives cause for, in the order they apply."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.made: list[Revision] = []

    def recognise(self, parent: Node | None) -> None:
        """A side call that somebody talks to was a turn."""
        if parent is None or parent.side is None:
            return
        parent.side, parent.kind = None, "main"
        self._index.changed(parent)
        self._index.also_under(parent, head_keys(parent))
        self.made.append(Revision(parent.id, "a user goes on from its reply", turn_type="main", fate=Fate.OPEN))
        above = self._index.get(parent.parent) if parent.parent else None
        if above is None or not parent.asked or not parent.anchored:
            return
        children = self._index.children(above)
        if not any(c.binds for c in children):
            parent.binds = parent.firm = above.continued = True
            self.child(above, parent)
            state = NextState("user", parent.words)
            why = "a user goes on from its reply, so it was one's reaction"
            self.made.append(Revision(parent.id, why, binds=above.id, next_state=state, rebound=True, firm=True))

    def continued(self, parent: Node, node: Node) -> None:
        """`node` binds `parent`: the parent is the reply that lives on."""
        talks = bool(node.asked)
        if not parent.continued or (talks and not parent.talked):
            parent.continued, parent.talked = True, parent.talked or talks
            self.made += self._superseded(parent, node)
            self._lives(parent)
        self.child(parent, node)

    def child(self, parent: Node, node: Node) -> None:
        """`node` answers or would answer `parent`."""
        parent.children = [*parent.children[-CHILDREN:], node.id]
        self._index.changed(parent)

    def ambiguous(self, found: Found, node: Node) -> None:
        """Replies of which one is meant and nobody knows which."""
        if node.side is not None:
            return
        for lost in found.ambiguous:
            reason = f"{node.id} fits {len(found.ambiguous)} conversations equally well"
            self.made.append(Revision(lost.id, reason, fate=Fate.AMBIGUOUS))

    def earlier_title(self, node: Node, twins: Sequence[Node]) -> None:
        """A call without tools that came just before its conversation and asked about its first words."""
        if node.side is not None or not node.opener or not node.tools:
            return
        for twin in twins:
            early = twin.opener and not twin.tools and not twin.continued and twin.side is None
            if early and node.time - twin.time <= 60.0 and twin.shape != node.shape:
                twin.side = f"asked the opening words of {node.id} without its tools"
                self._index.changed(twin)
                self.made.append(Revision(twin.id, twin.side, turn_type="side", fate=Fate.SIDE_TASK))

    def _lives(self, node: Node) -> None:
        """A request goes on from `node`: its reaction to its parent counts, and not a harness's beside it. Words of
        a user who edited them later stay the reaction."""
        if node.binds and not node.firm:
            node.firm = True
            self.made.append(Revision(node.id, "its conversation goes on from it", firm=True))
        parent = self._index.get(node.parent) if node.parent else None
        if node.binds or parent is None or node.side is not None:
            return
        rivals = [c for c in self._index.children(parent) if c.id != node.id and c.binds]
        if any(c.talked or starts(node.tail, c.tail) or not like_an_instruction(c.words) for c in rivals):
            return
        for rival in rivals:
            self._put_aside(rival, f"the conversation went on from {node.id} without its message")
        state = NextState("user", node.words) if node.words else None
        if state is not None:
            node.binds = node.firm = True
            self._index.changed(node)
            why = f"the conversation goes on from it, and not from {', '.join(r.id for r in rivals) or 'another'}"
            self.made.append(Revision(node.id, why, binds=parent.id, next_state=state, rebound=True, firm=True))

    def _put_aside(self, node: Node, why: str) -> None:
        """A branch that only its harness went on with: a side call, and so is all that came of it."""
        left = [node]
        while left:
            branch = left.pop()
            left += self._index.children(branch)
            if branch.binds:
                self.made.append(Revision(branch.id, why, rebound=True))
            self.made.append(Revision(branch.id, why, turn_type="side", fate=Fate.SIDE_TASK))
            branch.binds, branch.side, branch.kind = False, why, "side"
            self._index.changed(branch)

    def _superseded(self, parent: Node, node: Node) -> list[Revision]:
        """Other replies to the request that `parent` answered: the continued one is credited."""
        out = []
        for other in self._index.under(key(parent.scope, By.REQUEST, parent.request)):
            same = other.parent == parent.parent and other.session == parent.session
            if other.id == parent.id or not same or other.continued or not other.answered or other.side:
                continue
            reason = f"asked again as {parent.id}, whose reply {node.id} goes on from"
            out.append(Revision(other.id, reason, fate=Fate.RETRY_SUPERSEDED))
        return out


def starts(tail: Sequence[bytes], start: Sequence[bytes]) -> bool:
    """Whether a reaction begins with all of another."""
    return bool(start) and tuple(tail[: len(start)]) == tuple(start)
