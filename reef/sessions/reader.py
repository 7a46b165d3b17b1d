"""An exchange as matching reads it: all of it, or only its end.

A client sends its history back with every request, so nearly all of a request was read before. The messages up
to its last reply are looked up by their hash, as they were sent; where an exchange in memory was that very
request and gave that reply, its chain stands for them, and only the last few messages are taken apart. Invariant:
what is left unread changes no decision. Knows the dialects through `reading`; knows no order of evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from reef.sessions.digest import digest, join, numberless
from reef.sessions.index import By, Index, Node, key
from reef.sessions.ladder import previous_response
from reef.sessions.transcript import (
    CALL,
    CONTEXT,
    HARNESS,
    TEXT,
    TOOL,
    USER,
    Atom,
    Group,
    Transcript,
    atoms_of,
    chained,
    chains,
    groups_of,
    message_atoms,
    reply_atoms,
)
from reef.wire import reading
from reef.wire.exchange import Exchange, Message

_SPOKEN = frozenset({"user", "assistant"})
FAR = 32
"""messages before its last reply up to which a request is read backwards"""


def transcript(exchange: Exchange, index: Index, scope: bytes) -> Transcript:
    """Parse a record."""
    messages = reading.messages_of(exchange)
    reply = reading.reply_of(exchange)
    said = bare = reply_atoms(reply) if reply else []
    if messages and messages[-1].role == "assistant":
        begun = messages[-1].content
        messages = messages[:-1]
        said = reply_atoms(Message("assistant", begun + reply.content, reply.tool_calls)) if reply else []
    results = reading.result_ids_of(exchange)
    named = previous_response(exchange) is not None
    history = _history(messages, index, scope, results=bool(results), whole=named)
    atoms, groups = history.atoms, history.groups
    since = groups[-1].end if groups else 0
    system = "\n".join([m.content for m in messages if m.role == "system"])
    names = _tool_names(exchange.request)
    return Transcript(
        messages=messages,
        atoms=atoms,
        chains=history.chains,
        since=history.since,
        groups=groups,
        newest=_newest(atoms, since),
        lone=history.lone,
        sent=history.sent,
        system=system,
        shape=shape_of(system, " ".join(names)),
        tools=bool(names),
        schema=_asks_schema(exchange.request),
        reply=said,
        results=results,
        bare=bare,
    )


@lru_cache(maxsize=256)
def shape_of(system: str, tools: str) -> bytes:
    """What kind of request it is. The same long system text comes with every request of a client."""
    return join((digest("system", numberless(system)), digest("tools", tools)))


class _History(NamedTuple):
    """What a request carries: the fields of its transcript."""

    atoms: list[Atom]
    groups: list[Group]
    chains: list[bytes]
    since: int
    lone: bool
    sent: int


class _End(NamedTuple):
    """The end of a request, from a message on that stands before its last reply."""

    first: int
    """index of that message"""
    last: int
    """index of the last reply"""
    before: list[Atom]
    run: int
    """where in `before` the assistant atoms begin that are one reply with the last"""
    reply: list[Atom]
    after: list[Atom]
    enough: bool
    """no rule looks further back, if the chain of what stands there is known"""


def _history(messages: Sequence[Message], index: Index, scope: bytes, *, results: bool, whole: bool) -> _History:
    end = _end(messages, results)
    spoken = _spoken(messages[: end.last])
    before, sent = _as_sent(scope, spoken), _as_sent(scope, [*spoken, *_spoken(messages[end.last :])])
    if not whole and end.first and end.enough:
        history = _resumed(end, index.sent(before), sent)
        if history and index.holds(key(scope, By.CHAIN, history.chains[0])):
            return history
    atoms = [*atoms_of(messages[: end.first]), *end.before, *end.reply, *end.after]
    return _History(atoms, groups_of(atoms), chains(atoms), 0, _turns(atoms) <= 1, sent)


def _resumed(end: _End, known: Node | None, sent: int) -> _History | None:
    """What follows the messages of an earlier request, the last reply first."""
    if known is None:
        return None
    lone = known.lone
    if lone:
        earlier, new = _turns(end.before), _turns(end.after)
        if new and not earlier:
            return None  # the node doesn't tell whether the user had written anything
        lone = earlier + new <= 1
    stop = len(end.before) + len(end.reply)
    atoms = [*end.before, *end.reply, *end.after]
    after = chains(end.after, chained(end.reply, known.request))
    return _History(atoms, [Group(end.run, stop)], after, stop, lone, sent)


def _end(messages: Sequence[Message], results: bool) -> _End:
    """From the last reply back as far as a rule may look from there: to the words of the user that the reply
    answers, if there are new ones to compare with them, and to what tells equal replies apart."""
    last = _last_reply(messages)
    reply = message_atoms(messages[last], last) if last < len(messages) else []
    after = atoms_of(messages[last + 1 :], last + 1)
    since = [a.kind for a in (*reply, *after)]
    asks = USER in since
    first, run = last, 0
    before: list[Atom] = []
    enough = False
    while reply and not enough and first > max(last - FAR, 0):
        first -= 1
        before = [*message_atoms(messages[first], first), *before]
        kinds = [a.kind for a in before]
        run = _run(kinds)
        context = kinds[:run] if results else kinds + since
        told = len(context) - context.count(TOOL)
        enough = run > 0 and (not asks or USER in kinds[:run]) and (told >= 2 or len(context) >= CONTEXT)
    return _End(first, last, before, run, reply, after, enough)


def _last_reply(messages: Sequence[Message]) -> int:
    """Index of the last message of the assistant; their number if there is none."""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].role == "assistant":
            return i
    return len(messages)


def _run(kinds: Sequence[str]) -> int:
    """Where the run of assistant atoms begins that a reply after atoms of these kinds belongs to."""
    start = len(kinds)
    while start and kinds[start - 1] in (TEXT, CALL):
        start -= 1
    return start


def _newest(atoms: Sequence[Atom], since: int) -> int | None:
    """Index of the last atom the user wrote, from `since` on."""
    for i in range(len(atoms) - 1, since - 1, -1):
        if atoms[i].kind == USER:
            return i
    return None


def _spoken(messages: Sequence[Message]) -> list[Message]:
    """The messages a chain is made of."""
    return [m for m in messages if m.role in _SPOKEN]


def _as_sent(scope: bytes, spoken: Sequence[Message]) -> int:
    """What tells these messages, as they came and within their scope, from any others. Python's own hash: it costs a
    fraction of a digest, is as long, and is keyed anew in every process, so it is of no use in another."""
    return hash((scope, *spoken))


def _turns(atoms: Sequence[Atom]) -> int:
    """Messages in the user's name."""
    kinds = [a.kind for a in atoms]
    return kinds.count(USER) + kinds.count(HARNESS)


def _tool_names(request: Mapping[str, Any]) -> list[str]:
    names = []
    tools = request.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            function = tool.get("function")
            name = (function if isinstance(function, dict) else tool).get("name") or tool.get("type")
            names.append(str(name))
    return sorted(names)


def _asks_schema(request: Mapping[str, Any]) -> bool:
    wanted = request.get("response_format") or (request.get("text") or {})
    if isinstance(wanted, dict):
        wanted = wanted.get("format", wanted)
    return isinstance(wanted, dict) and "schema" in str(wanted.get("type", ""))
