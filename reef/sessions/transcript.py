"""A request as matching sees it: atoms in order, the system text beside them.

An atom is something said once: a user's words, a text or tool call of the assistant, a turn the harness
wrote. Tool results are told apart from everything else but not from each other, since clients clear, clip
and rename them. Knows messages; knows no record and no other request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reef.recipe import NextState
from reef.sessions import harness
from reef.sessions.digest import ROOT, canonical_arguments, digest, extend, fold
from reef.wire.exchange import Message

USER, TEXT, CALL, TOOL, HARNESS = "user", "text", "call", "tool", "harness"


class Atom(NamedTuple):
    kind: str
    digest: bytes
    text: str
    """as it was written"""
    message: int = -1
    """index of its message in the conversation"""


TOOL_DIGEST = digest(TOOL, "")
CONTEXT = 8
"""atoms before a reply that are looked at to tell it from an equal one"""


def atoms_of(messages: Sequence[Message], first: int = 0) -> list[Atom]:
    """The atoms of a conversation, or of a part of it that begins with message `first`; system text has none."""
    out: list[Atom] = []
    for i, message in enumerate(messages, first):
        out += message_atoms(message, i)
    return out


def message_atoms(message: Message, index: int) -> list[Atom]:
    """The atoms of one message of a conversation."""
    role, content = message.role, message.content
    if role == "assistant":
        return reply_atoms(message, index)
    if role == "tool":
        return [Atom(TOOL, TOOL_DIGEST, content, index)]
    if role != "user":
        return []
    words = harness.plain_words(content)
    if words is not None:
        return [Atom(USER, digest(USER, fold(words)), words, index)]
    out = []
    for part in harness.said(content):
        same = TOOL_DIGEST if part.kind == TOOL else digest(part.kind, fold(part.text))
        out.append(Atom(part.kind, same, part.text, index))
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


def chained(atoms: Sequence[Atom], chain: bytes) -> bytes:
    """The chain after all of the atoms: the last of `chains`."""
    for atom in atoms:
        if atom.kind != TOOL:
            chain = extend(chain, atom.digest)
    return chain


def chains(atoms: Sequence[Atom], chain: bytes = ROOT) -> list[bytes]:
    """The chain before each atom and after the last: `len(atoms) + 1` digests. Tool results add nothing."""
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
    """A request, parsed once. Of a history that is known already only the end is here."""

    messages: tuple[Message, ...]
    atoms: list[Atom]
    chains: list[bytes]
    """before each atom from `since` on, and after the last"""
    since: int
    groups: list[Group]
    """the last of them only, where the beginning is not here"""
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
    lone: bool
    """there is one message of the user at most"""
    sent: int | None
    """hash of scope and messages as they came; None once the atoms are no longer theirs"""

    @property
    def tail(self) -> list[Atom]:
        """What follows the last reply in the request."""
        return self.atoms[self.groups[-1].end if self.groups else 0 :]

    def chain(self, at: int) -> bytes:
        """The chain before an atom, or after the last."""
        if at < self.since:
            raise ValueError(f"atom {at} stands in the part of a request that was not read")
        return self.chains[at - self.since]

    def split(self, index: int, rest: str) -> None:
        """Part a message that holds a whole conversation before `rest`, which is new."""
        self.atoms[index : index + 1] = [
            self.atoms[index],
            Atom(USER, digest(USER, fold(rest)), rest.strip(), self.atoms[index].message),
        ]
        after = index + 1 - self.since
        self.chains = [*self.chains[: after + 1], *self.chains[after:]]
        self.newest = index + 1
        self.lone, self.sent = False, None

    def rewrite(self, index: int, text: str) -> None:
        """Take back what turned out to be context around a user's words."""
        self.atoms[index] = Atom(USER, digest(USER, fold(text)), text, self.atoms[index].message)
        self.chains = chains(self.atoms[self.since :], self.chains[0])
        self.sent = None


FOREIGN = 120
"""characters from which an assistant text in a tail is an answer from elsewhere, and not an acknowledgement the
client wrote"""


_REACTIONS = ((USER, "user"), (TOOL, "tool"), (HARNESS, "harness"))
"""kinds of atoms that are a reaction, the weightiest first, and who speaks in each"""


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
    for kind, role in _REACTIONS:
        told = [a.text.strip() for a in tail if a.kind == kind]
        if told:  # a command that prints nothing has a result, too
            return NextState(role, "\n\n".join(filter(None, told)))
    return None


def agreement(before: Sequence[Atom]) -> tuple[bytes, bytes]:
    """The digests of the last one and of the last two atoms before a reply, tool results left out."""
    last = [a.digest for a in before[-CONTEXT:] if a.kind != TOOL][-2:]
    return (last[-1] if last else b""), b"".join(last)


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


def groups_of(atoms: Sequence[Atom]) -> list[Group]:
    """The runs of assistant atoms, in order."""
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
