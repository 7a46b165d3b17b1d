"""A request as matching sees it: atoms in order, the system text beside them.

An atom is something said once: a user's words, a text or tool call of the assistant, a turn the harness
wrote. Tool results are told apart from everything else but not from each other, since clients clear, clip
and rename them. Knows the record of one exchange; knows nothing of other exchanges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from reef.recipe import NextState
from reef.sessions import harness
from reef.sessions.digest import ROOT, SIZE, canonical_arguments, digest, extend, fold, join, numberless
from reef.wire import reading
from reef.wire.exchange import Exchange, Message

USER, TEXT, CALL, TOOL, HARNESS = "user", "text", "call", "tool", "harness"


class Atom(NamedTuple):
    kind: str
    digest: bytes
    text: str
    """as it was written"""
    message: int = -1
    """index of its message in the conversation"""


TOOL_DIGEST = digest(TOOL, "")


def atoms_of(messages: Sequence[Message]) -> list[Atom]:
    """The atoms of a conversation; system text has none."""
    out: list[Atom] = []
    for i, message in enumerate(messages):
        if message.role == "assistant":
            out += reply_atoms(message, i)
        elif message.role == "tool":
            out.append(Atom(TOOL, TOOL_DIGEST, message.content, i))
        elif message.role == "user":
            words = harness.plain_words(message.content)
            if words is not None:
                out.append(Atom(USER, digest(USER, fold(words)), words, i))
                continue
            for part in harness.said(message.content):
                same = TOOL_DIGEST if part.kind == TOOL else digest(part.kind, fold(part.text))
                out.append(Atom(part.kind, same, part.text, i))
    return out


def reply_atoms(message: Message, index: int = -1) -> list[Atom]:
    """The atoms of one assistant message: its text without reasoning, then its calls."""
    text = message.content
    calls = message.tool_calls
    if not calls and text:
        calls = harness.calls_in_text(text)
        text = "" if calls else text
    out = []
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    folded = fold(text)
    if folded:
        out.append(Atom(TEXT, digest(TEXT, folded), text, index))
    for name, arguments in calls:
        said = f"{name} {canonical_arguments(arguments)}"
        out.append(Atom(CALL, digest(CALL, said), said, index))
    return out


def chains(atoms: Sequence[Atom]) -> list[bytes]:
    """The chain before each atom and after the last: `len(atoms) + 1` digests. Tool results add nothing."""
    chain = ROOT
    out = [chain]
    for atom in atoms:
        if atom.kind != TOOL:
            chain = extend(chain, atom.digest)
        out.append(chain)
    return out


class Group(NamedTuple):
    """A run of assistant atoms: one reply, as the client sends it back."""

    start: int
    end: int
    """atoms[start:end]"""

    def parts(self, atoms: Sequence[Atom]) -> Iterator[Group]:
        """The run, then the run cut at its messages, for a client that writes assistant messages of its own after
        a reply: without its last messages, longest first, then each message."""
        yield self
        ends = [i + 1 for i in range(self.start, self.end - 1) if atoms[i].message != atoms[i + 1].message]
        for end in reversed(ends):
            yield Group(self.start, end)
        until = self.end
        for start in reversed(ends):
            yield Group(start, until)
            until = start


@dataclass(slots=True)
class Transcript:
    """A request, parsed once."""

    messages: tuple[Message, ...]
    atoms: list[Atom]
    chains: list[bytes]
    groups: list[Group]
    system: str
    shape: bytes
    """of the system text without its numbers, and of the names of the tools"""
    tools: bool
    schema: bool
    """a JSON schema is asked for"""
    reply: list[Atom]
    results: list[str]
    """ids of the tool calls whose results the request ends with"""
    newest: int | None
    """index of the newest atom the user wrote, if anything after the last reply is one"""
    bare: list[Atom]
    """the reply without the beginning that the request put into its mouth"""

    @property
    def tail(self) -> list[Atom]:
        """What follows the last reply in the request."""
        return self.atoms[self.groups[-1].end if self.groups else 0 :]

    @property
    def lone(self) -> bool:
        """There is one message of the user at most."""
        kinds = [a.kind for a in self.atoms]
        return kinds.count(USER) + kinds.count(HARNESS) <= 1

    def split(self, index: int, rest: str) -> None:
        """Part a message that holds a whole conversation before `rest`, which is new."""
        self.atoms[index : index + 1] = [
            self.atoms[index],
            Atom(USER, digest(USER, fold(rest)), rest.strip(), self.atoms[index].message),
        ]
        self.chains = [*self.chains[: index + 2], *self.chains[index + 1 :]]
        self.newest = index + 1

    def rewrite(self, index: int, text: str) -> None:
        """Take back what turned out to be context around a user's words."""
        self.atoms[index] = Atom(USER, digest(USER, fold(text)), text, self.atoms[index].message)
        self.chains = chains(self.atoms)


def transcript(exchange: Exchange) -> Transcript:
    """Parse a record."""
    messages = reading.messages_of(exchange)
    reply = reading.reply_of(exchange)
    said = bare = reply_atoms(reply) if reply else []
    if messages and messages[-1].role == "assistant":
        begun = messages[-1].content
        messages = messages[:-1]
        said = reply_atoms(Message("assistant", begun + reply.content, reply.tool_calls)) if reply else []
    system = "\n".join(m.content for m in messages if m.role == "system")
    atoms = atoms_of(messages)
    groups = _groups(atoms)
    since = groups[-1].end if groups else 0
    newest = next((i for i in range(len(atoms) - 1, since - 1, -1) if atoms[i].kind == USER), None)
    names = _tool_names(exchange.request)
    return Transcript(
        messages=messages,
        atoms=atoms,
        chains=chains(atoms),
        groups=groups,
        newest=newest,
        system=system,
        shape=shape_of(system, " ".join(names)),
        tools=bool(names),
        schema=_asks_schema(exchange.request),
        reply=said,
        results=reading.result_ids_of(exchange),
        bare=bare,
    )


@lru_cache(maxsize=256)
def shape_of(system: str, tools: str) -> bytes:
    """What kind of request it is. The same long system text comes with every request of a client."""
    return join((digest("system", numberless(system)), digest("tools", tools)))


FOREIGN = 120
"""characters from which an assistant text in a tail is an answer from elsewhere, and not an acknowledgement the
client wrote"""


def next_state(tail: Sequence[Atom]) -> NextState | None:
    """What the atoms after a reply say: the user's words, which weigh most; else tool results, else the
    harness's text. The words after a client's own acknowledgements count, those after a foreign answer don't."""
    kinds = [a.kind for a in tail]
    if TEXT in kinds:
        end = next((i for i, a in enumerate(tail) if a.kind == TEXT and len(a.text) >= FOREIGN), len(tail))
        tail = tail[:end]
        start = max((i + 1 for i, a in enumerate(tail) if a.kind == TEXT), default=0)
        if any(a.kind == USER for a in tail[start:]):
            tail = tail[start:]
    for kind, role in ((USER, "user"), (TOOL, "tool"), (HARNESS, "harness")):
        told = [a.text.strip() for a in tail if a.kind == kind]
        if told:  # a command that prints nothing has a result, too
            return NextState(role, "\n\n".join(filter(None, told)))
    return None


def agreement(before: Sequence[Atom]) -> tuple[bytes, bytes]:
    """Digests of the last one and the last two atoms before a reply, tool results left out."""
    last = [a.digest for a in before[-8:] if a.kind != TOOL][-2:]
    one = last[-1] if last else bytes(SIZE)
    return one, join(last)


def strings_in_call(call: Atom) -> list[str]:
    """The texts among the arguments of a tool call, those long enough to be a task."""
    _, _, arguments = call.text.partition(" ")
    try:
        left = [json.loads(arguments)]
    except ValueError:
        return []
    out = []
    while left:
        value = left.pop()
        if isinstance(value, str) and len(value) >= 8:
            out.append(value)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return out[:8]


def _groups(atoms: Sequence[Atom]) -> list[Group]:
    out: list[Group] = []
    start = None
    for i, atom in enumerate(atoms):
        spoken = atom.kind in (TEXT, CALL)
        if spoken and start is None:
            start = i
        elif not spoken and start is not None:
            out.append(Group(start, i))
            start = None
    if start is not None:
        out.append(Group(start, len(atoms)))
    return out


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
