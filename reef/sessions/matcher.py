"""Finding the reply that a request reacts to.

Owns the decision for each exchange: its session, the reply it answers, that reply's next state, and
what becomes of replies it replaces. Invariants: deterministic in log order; a request never binds its
own reply; no reply gets two next states. It reads exchanges only; verdicts and weights are not known
here, and nothing here touches a database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reef.recipe import NextState
from reef.sessions.digest import ROOT, chains, extend
from reef.sessions.fate import Fate, arrival_fate
from reef.sessions.index import Index, Node
from reef.sessions.ladder import known_id, marked_side
from reef.wire.chat import messages_of, reply_of
from reef.wire.exchange import Exchange, Message


@dataclass(frozen=True, slots=True)
class Replaced:
    """An earlier exchange whose fate this request settles."""

    id: str
    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
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
    replaced: tuple[Replaced, ...] = ()


def next_state(messages: Sequence[Message], after: int) -> NextState | None:
    """What follows message `after`: all tool results, or the user's words, which weigh most."""
    following = messages[after + 1 :]
    users = [m.content for m in following if m.role == "user" and m.content.strip()]
    if users:
        return NextState("user", "\n\n".join(users))
    tools = [m.content for m in following if m.role == "tool"]
    return NextState("tool", "\n\n".join(tools)) if tools else None


@dataclass(frozen=True, slots=True)
class _Found:
    parent: Node | None
    session: str | None
    next: NextState | None
    method: str
    score: float
    reason: str
    replaced: tuple[Replaced, ...] = ()


class Matcher:
    """Feeds on exchanges in log order."""

    def __init__(self, index: Index | None = None, *, side_models: tuple[str, ...] = ()) -> None:
        self._index = index or Index()
        self._side_models = side_models

    def observe(self, exchange: Exchange) -> Decision:
        """Decide about the next exchange of the log, and remember it."""
        scope = (exchange.client, exchange.headers.get("user-agent"), exchange.scenario)
        messages = messages_of(exchange.request)
        known = known_id(exchange)
        tag = known.value if known else None
        side = marked_side(exchange, self._side_models)
        found = self._find(scope, tag, messages)
        fate, rule, why = arrival_fate(exchange, side=side is not None)
        session = found.session or (f"tag:{tag}" if tag else exchange.id)
        chain_of_request = chains(messages)[-1] if messages else ROOT
        reply = reply_of(exchange.response)
        node = Node(
            id=exchange.id,
            session=session,
            time=exchange.time,
            chain=extend(chain_of_request, reply) if reply else chain_of_request,
            request_chain=chain_of_request,
            parent=found.parent.id if found.parent else None,
            answered=reply is not None and side is None,
        )
        counts = side is None and not exchange.train_opt_out  # an opted-out text judges nobody
        binds = found.parent if counts else None
        replaced = found.replaced if counts else ()
        if counts and fate is Fate.OPEN:
            replaced += self._superseded(scope, node)
        if binds is not None:
            binds.children.append(exchange.id)
        self._index.add(scope, tag, node)
        return Decision(
            id=exchange.id,
            session=session,
            turn_type="side" if side else "main",
            fate=fate,
            rule=rule,
            fate_reason=side or why,
            binds=binds.id if binds else None,
            next_state=found.next if binds else None,
            method=found.method,
            score=found.score,
            reason=found.reason,
            replaced=replaced,
        )

    def _find(self, scope: tuple[str | None, ...], tag: str | None, messages: Sequence[Message]) -> _Found:
        last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=None)
        if last is not None:
            by_prefix = self._by_prefix(scope, messages, last)
            if by_prefix is not None:
                return by_prefix
        if tag is not None:
            return self._by_tag(scope, tag, messages, last)
        why = "opens a conversation" if last is None else "its history was not served here"
        return _Found(None, None, None, "none", 0.0, why)

    def _by_prefix(self, scope: tuple[str | None, ...], messages: Sequence[Message], last: int) -> _Found | None:
        candidates = self._index.ending_in(scope, chains(messages)[last])
        if not candidates:
            return None
        following = next_state(messages, last)
        free = [c for c in candidates if not c.children]
        if len({c.session for c in free}) > 1:
            reason = f"{len(free)} conversations have this very history"
            lost = tuple(Replaced(c.id, Fate.AMBIGUOUS, reason) for c in free)
            return _Found(None, None, None, "ambiguous", 0.5, reason, lost)
        if free:
            rest = tuple(
                Replaced(c.id, Fate.RETRY_SUPERSEDED, f"the same reply was continued as {free[-1].id}")
                for c in free[:-1]
            )
            reason = f"its first {last + 1} messages are the conversation that ends in this reply"
            return _Found(free[-1], free[-1].session, following, "prefix", 1.0, reason, rest)
        parent = candidates[-1]
        reason = f"{parent.id} was continued by {parent.children[0]} already: a retry or an edited message"
        return _Found(None, parent.session, None, "branch", 1.0, reason)

    def _by_tag(self, scope: tuple[str | None, ...], tag: str, messages: Sequence[Message], last: int | None) -> _Found:
        newest = self._index.newest_of(scope, tag)
        if newest is None:
            return _Found(None, None, None, "tag", 1.0, "first request under this tag")
        if newest.children:
            return _Found(None, newest.session, None, "tag", 0.5, f"{newest.id} was continued already")
        following = next_state(messages, last if last is not None else -1)
        reason = "arrived next under the same tag; the transcript could not tell"
        return _Found(newest, newest.session, following, "tag", 0.8, reason)

    def _superseded(self, scope: tuple[str | None, ...], node: Node) -> tuple[Replaced, ...]:
        """Earlier attempts at the very same request that nobody continued: retries of one turn.

        An opener only counts as a retry when its attempt failed, since two people may well begin
        with the same words.
        """
        earlier = [n for n in self._index.asked(scope, node.request_chain) if not n.children]
        same = [n for n in earlier if n.session == node.session]
        return tuple(
            Replaced(n.id, Fate.RETRY_SUPERSEDED, f"asked again as {node.id}, which replaces it")
            for n in same
            if n.answered
        )
