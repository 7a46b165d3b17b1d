"""The keys under which an exchange is found again.

Owns what of a request and its reply goes into the index, so that writing and looking up can't differ. Knows
digests and atoms; it knows no order of evidence and no thresholds but the length that makes a text distinct.
"""

from __future__ import annotations

from collections.abc import Sequence

from reef.sessions.digest import OPENING, digest, extend, first_words, fold, join, opening, words
from reef.sessions.index import By, Node, key
from reef.sessions.transcript import CALL, TEXT, Atom, Transcript, agreement, strings_in_call

DISTINCT = 24
"""characters from which a text is taken to be unlike any other"""
SAID_WORDS = 32
"""words of a reply kept to recognise it in a quote or a cut echo"""


def node_keys(node: Node, t: Transcript, response: str | None, calls: Sequence[str]) -> list[bytes]:
    """The keys under which an exchange is found again."""
    scope = node.scope
    out = [key(scope, By.REQUEST, node.request)]
    newest = t.newest
    if newest is not None:
        out.append(key(scope, By.USER, t.atoms[newest].digest))
    if not t.reply:
        return out
    out.append(key(scope, By.CHAIN, node.chain))
    one, two = agreement(t.atoms)
    echoes = variants(t.reply)
    if t.bare is not t.reply:
        echoes += variants(t.bare)
    for variant in dict.fromkeys(echoes):
        out.append(key(scope, By.REPLY, variant))
        out.append(key(scope, By.REPLY_1, variant + one))
        out.append(key(scope, By.REPLY_2, variant + two))
    first = opening(node.said.split(" ", OPENING))
    if first:
        out.append(key(scope, By.OPENING, first))
    for id in calls:
        out.append(key(scope, By.CALL, digest("call", id)))
    for atom in t.reply:
        if atom.kind == CALL:
            for text in strings_in_call(atom):
                out.append(key(scope, By.QUOTE, digest("whole", fold(text))))
                quote = opening(words(text)) if len(text) >= DISTINCT else None
                if quote:
                    out.append(key(scope, By.QUOTE, quote))
    if response:
        out.append(key(scope, By.RESPONSE, digest("id", response)))
    return out if node.side is not None else out + head_keys(node)


def head_keys(node: Node) -> list[bytes]:
    """The keys under which a main exchange is its session's newest."""
    head = [session_key(node.scope, node.session)]
    if node.group:
        head.append(group_key(node.scope, node.group, node.shape))
    return head


def session_key(scope: bytes, session: str) -> bytes:
    return key(scope, By.SESSION, session.encode("utf-8", "surrogatepass"))


def group_key(scope: bytes, group: str, shape: bytes) -> bytes:
    """Of the newest main exchange with a known id (its rule included) and of one shape."""
    return key(scope, By.GROUP, extend(digest("group", group), shape))


def variants(reply: Sequence[Atom]) -> list[bytes]:
    """A reply whole, its calls alone, its text alone: clients drop one or the other."""
    if len(reply) == 1:
        return [reply[0].digest]
    whole = join([a.digest for a in reply])
    calls = [a.digest for a in reply if a.kind == CALL]
    texts = [a.digest for a in reply if a.kind == TEXT]
    out = [whole]
    if calls and texts:
        out += [join(calls), join(texts)]
    if len(calls) > 1:
        out += [join(sorted(calls)), join(calls[-1:])]
    return out


def said_of(text: str) -> str:
    """The first words of a reply's text."""
    return " ".join(first_words(text, SAID_WORDS))


def ending_of(text: str) -> str:
    """The last characters of a reply's text, to find where it ends in a longer one."""
    text = text.rstrip()
    return text[-48:] if len(text) >= 8 else ""


def text_of(reply: Sequence[Atom]) -> str:
    return " ".join([a.text for a in reply if a.kind == TEXT])
