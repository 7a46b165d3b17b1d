"""Finding the reply that a request reacts to.

Owns the decision for each exchange: its session, the reply it answers, that reply's next state, and what
becomes of earlier decisions in its light. Invariants: deterministic in log order; a request never binds
its own reply; no reply gets two next states, unless the second is a revision that takes the first back. It
reads exchanges only; verdicts and weights are not known here, and nothing here touches a database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from reef.recipe import NextState
from reef.sessions.digest import digest, fold
from reef.sessions.evidence import Ask, Finder, Found
from reef.sessions.fate import Fate, arrival_fate
from reef.sessions.index import By, Index, Node, key
from reef.sessions.keys import ending_of, node_keys, said_of, text_of
from reef.sessions.ladder import HEADERS, KnownId, id_in_text, known_id, previous_response
from reef.sessions.reader import transcript
from reef.sessions.revisions import Reviser, Revision, starts
from reef.sessions.transcript import HARNESS, TOOL, USER, Atom, Transcript, chained, next_state
from reef.sessions.turntype import Side, Suspect, turn_type
from reef.wire.exchange import Delivered, Exchange
from reef.wire.reading import call_ids_of, response_id_of

ASKED = 4000
"""characters kept of a user's newest words, to tell them from what a client wraps around them"""


class Decision(NamedTuple):
    """What the matcher says of one exchange."""

    id: str
    session: str
    turn_type: str
    """main or side"""
    fate: Fate
    rule: str
    fate_reason: str
    binds: str | None
    """the exchange whose reply this request answers"""
    next_state: NextState | None
    method: str
    score: float
    reason: str
    firm: bool = True
    """False: may be a side branch, waits for the conversation's next request"""
    repeats: bool = False
    """the same reaction as an earlier attempt's: the reply has its next state already"""
    revisions: tuple[Revision, ...] = ()


@dataclass(slots=True)
class _Place:
    """Where a main request goes in its conversation."""

    parent: Node | None
    binds: bool
    firm: bool
    repeats: bool
    method: str
    score: float
    reason: str
    after: int
    tail: tuple[bytes, ...] = ()
    """what tells the reaction to the parent's reply from another; empty if it is not compared"""


class Matcher:
    """Feeds on exchanges in log order."""

    def __init__(
        self,
        index: Index | None = None,
        *,
        side_models: Sequence[str] = (),
        id_headers: Sequence[str] = HEADERS,
        live_s: float = 900.0,
    ) -> None:
        self.index = Index() if index is None else index
        self._finder = Finder(self.index, live_s=live_s)
        self._side_models = tuple(side_models)
        self._id_headers = tuple(id_headers)
        self._seq = 0

    def observe(self, exchange: Exchange) -> Decision:
        """Decide about the next exchange of the log, and remember it."""
        self._seq = exchange.seq or self._seq + 1
        scope = scope_of(exchange.client, exchange.scenario)
        t = transcript(exchange, self.index, scope)
        known = known_id(exchange, self._id_headers) or _told_in_text(t)
        ask = Ask(
            transcript=t,
            scope=scope,
            known=known,
            agent=f"{exchange.headers.get('user-agent')} {exchange.request.get('model')}",
            time=exchange.time,
            previous=previous_response(exchange),
        )
        found = self._finder.find(ask)
        twins = self._twins(ask)
        side = turn_type(exchange, t, found, twins, self._side_models)
        reviser = Reviser(self.index)
        sent = ""
        if isinstance(side, Side) or exchange.train_opt_out:
            place = _aside(found, side)
        else:
            sent = self._unwrap(t, found)
            reviser.recognise(found.parent)
            place = self._place(t, found, suspect=side)
        node = self._node(exchange, ask, found, place, side if isinstance(side, Side) else None)
        if sent:
            node.asked, node.bare = sent[:ASKED], node.asked
        if node.binds and place.parent is not None:
            reviser.continued(place.parent, node)
        elif place.parent is not None and node.side is None and not exchange.train_opt_out:
            reviser.child(place.parent, node)
        reviser.ambiguous(found, node)
        reviser.earlier_title(node, twins)
        self.index.add(node, node_keys(node, t, response_id_of(exchange), call_ids_of(exchange)))
        self.index.trim()
        return self._decision(exchange, node, t, found, place, side, reviser.made)

    # placing a main request

    def _place(self, t: Transcript, found: Found, *, suspect: Side | Suspect | None) -> _Place:
        parent = found.parent
        place = _Place(parent, False, suspect is None, False, found.method, found.score, found.reason, found.after)
        if parent is None:
            return place
        rest = t.atoms[found.after :]
        tail = place.tail = _tail(rest)
        children = self.index.children(parent)
        for child in children:
            if parent.failed and child.answered and not child.asked and not child.continued:
                return self._resumed(place, child)
            if child.tail == tail:
                return self._again(place, parent, child, children)
            if child.failed and not child.answered and starts(tail, child.tail):
                return self._again(place, parent, child, children)
            dropped = child.side is None and not child.failed and not child.continued
            if dropped and len(child.tail) < len(tail) and starts(tail, child.tail):
                return self._unechoed(place, t, child)
        if children and any(c.binds for c in children):
            place.binds, place.method = False, "branch"
            place.reason = f"{parent.id} was continued by {children[0].id} already: an edited message or a side branch"
            return place
        place.binds = bool(rest)
        return place

    def _again(self, place: _Place, parent: Node, child: Node, children: Sequence[Node]) -> _Place:
        """The same request as an earlier one: a retry, or the reply is generated again."""
        place.repeats = any(c.binds for c in children)
        place.binds = not place.repeats
        failed = all(c.failed for c in children if c.tail == child.tail)
        place.method = "retry" if failed else "regenerate"
        what = "an attempt that failed" if failed else "a request that was answered"
        place.reason = f"the same as {child.id}, {what}, after the reply of {parent.id}"
        return place

    def _resumed(self, place: _Place, child: Node) -> _Place:
        """The reply broke off and the harness had it continued: the client keeps both as one message."""
        place.parent, place.binds = child, True
        place.reason = f"goes on from {child.id}, which continued a reply that broke off"
        return place

    def _unechoed(self, place: _Place, t: Transcript, child: Node) -> _Place:
        """The client dropped the reply to `child`, but kept what it had asked there."""
        left = len(child.tail)
        while left and place.after < len(t.atoms):
            left -= t.atoms[place.after].kind != HARNESS
            place.after += 1
        place.parent = child
        place.tail = ()
        place.binds = any(a.kind == USER for a in t.atoms[place.after :])
        place.reason = f"goes on after {child.id}, whose reply is not sent back"
        place.score = 0.8
        return place

    # reading a request

    def _twins(self, ask: Ask) -> list[Node]:
        """Other requests with the same newest words, while this one has no history."""
        newest = ask.transcript.newest
        if ask.transcript.groups or newest is None:
            return []
        return self.index.under(key(ask.scope, By.USER, ask.transcript.atoms[newest].digest))

    def _unwrap(self, t: Transcript, found: Found) -> str:
        """Take off what the client wraps around its newest message only: the parent's newest message is now
        sent back without it, so the difference is known. Returns the message as it was, if it changes."""
        parent, newest = found.parent, t.newest
        if parent is None or newest is None or not parent.asked:
            return ""
        echo = _before(t, found.after).strip()
        asked = parent.asked.strip()
        if not echo or asked == echo or fold(asked) == fold(echo):
            return ""
        before, found_it, after = asked.partition(echo)
        bare = unframe(t.atoms[newest].text.strip(), before, after) if found_it else None
        if not bare:
            return ""
        sent = t.atoms[newest].text
        t.rewrite(newest, bare)
        return sent

    def _node(self, exchange: Exchange, ask: Ask, found: Found, place: _Place, side: Side | None) -> Node:
        t = ask.transcript
        near = found.task or (found.quoted[-1] if found.quoted else None)
        parent = place.parent or (near if side else None)
        newest = t.newest
        request = t.chains[-1]
        said = text_of(t.reply)
        tail = place.tail or _tail(t.atoms[place.after :] if place.parent is not None else t.tail)
        return Node(
            id=exchange.id,
            seq=self._seq,
            time=exchange.time,
            scope=ask.scope,
            session=_session(exchange, ask.known, parent),
            group=ask.known.group if ask.known else None,
            parent=parent.id if parent else None,
            side=side.reason if side else None,
            kind=side.kind if side else "main",
            final_side=side.final if side else False,
            answered=bool(t.reply),
            failed=exchange.response is None or exchange.status >= 400 or exchange.delivered is not Delivered.FULL,
            anchored=place.parent is not None,
            shape=t.shape,
            agent=ask.agent,
            tools=t.tools,
            opener=not t.groups,
            lone=t.lone,
            chain=chained(t.reply, request),
            request=request,
            tail=tail,
            asked=_asked(t, newest),
            bare="",
            said=said_of(said),
            ending=ending_of(said),
            binds=place.binds and not exchange.train_opt_out,
            firm=place.firm,
            sent=t.sent,
        )

    def _decision(
        self,
        exchange: Exchange,
        node: Node,
        t: Transcript,
        found: Found,
        place: _Place,
        side: Side | Suspect | None,
        revisions: Sequence[Revision],
    ) -> Decision:
        fate, rule, why = arrival_fate(exchange, side=node.side is not None, empty=not node.answered)
        answers = node.binds or (place.repeats and not exchange.train_opt_out)
        state = next_state(t.atoms[place.after :]) if answers else None
        binds = place.parent.id if answers and place.parent is not None and state is not None else None
        return Decision(
            id=exchange.id,
            session=node.session,
            turn_type="side" if node.side is not None else "main",
            fate=fate,
            rule=rule,
            fate_reason=node.side or why,
            binds=binds,
            next_state=state if binds else None,
            method=place.method,
            score=place.score,
            reason=_explained(place, found, side),
            firm=place.firm,
            repeats=place.repeats,
            revisions=tuple(revisions),
        )


def _explained(place: _Place, found: Found, side: Side | Suspect | None) -> str:
    """The evidence, the next best parent and what is waited for, in words."""
    if not found.runner_up and not isinstance(side, Suspect):
        return place.reason
    parts = [place.reason]
    if found.runner_up:
        parts.append(f"next best: {found.runner_up.id}")
    if isinstance(side, Suspect):
        parts.append(f"waits: {side.reason}")
    return "; ".join(parts)


def unframe(text: str, before: str, after: str) -> str | None:
    """`text` without what a client puts before and after its user's words, as known from an earlier message.

    Where the surroundings change from message to message, the label next to the words is what stays.
    """
    start, end = 0, len(text)
    if before:
        label = before.rsplit("\n", 1)[-1] or before.rstrip("\n").rsplit("\n", 1)[-1]
        at = text.rfind(label) if len(label.strip()) >= 3 else -1
        start = len(before) if text.startswith(before) else at + len(label) if at >= 0 else -1
    if after:
        label = after.split("\n", 1)[0] or after.lstrip("\n").split("\n", 1)[0]
        at = text.find(label, max(start, 0)) if len(label.strip()) >= 3 else -1
        end = len(text) - len(after) if text.endswith(after) else at
    bare = text[start:end].strip() if 0 <= start < end else ""
    return bare if bare and bare != text else None


def _aside(found: Found, side: Side | Suspect | None) -> _Place:
    """A request that reacts to nothing."""
    reason = side.reason if side else "it opted out of training"
    return _Place(found.parent, False, True, False, found.method, found.score, reason, found.after)


@lru_cache(maxsize=1024)
def scope_of(client: str | None, scenario: str) -> bytes:
    """Requests of one credential and one policy can belong together; no others."""
    return digest("scope", f"{client}\0{scenario}")


def _session(exchange: Exchange, known: KnownId | None, parent: Node | None) -> str:
    if known is not None:
        name = known.group
        return name if len(name) <= 64 else f"{known.rule[:40]}:{digest('session', name).hex()}"
    return parent.session if parent is not None else exchange.id


def _before(t: Transcript, end: int) -> str:
    """The user's last words before the reply that ends at atom `end`; empty if no reply does."""
    for group in reversed(t.groups):
        if group.end == end:
            return _last_words(t.atoms[: group.start])
    return ""


def _last_words(atoms: Sequence[Atom]) -> str:
    """The last of them that is the user's; empty if none is."""
    for atom in reversed(atoms):
        if atom.kind == USER:
            return atom.text
    return ""


def _told_in_text(t: Transcript) -> KnownId | None:
    for message in t.messages:
        if message.role == "user":
            return id_in_text(message.content)
    return None


def _asked(t: Transcript, newest: int | None) -> str:
    """The user's newest message; all of it where it holds a whole conversation."""
    if newest is None:
        return ""
    place = t.atoms[newest].message
    told = [a.text for a in t.atoms if a.kind == USER and a.message == place]
    return told[0][:ASKED]


def _tail(atoms: Sequence[Atom]) -> tuple[bytes, ...]:
    """What tells one reaction to a reply from another; the harness's words only where there are no others."""
    told = [a for a in atoms if a.kind != HARNESS] or atoms
    return tuple([digest(TOOL, fold(a.text)) if a.kind == TOOL else a.digest for a in told])
