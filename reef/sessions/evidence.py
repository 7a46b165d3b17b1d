"""Which recorded reply a request goes on from, and how sure that is.

From the strongest evidence to the weakest: the whole history; our own reply with what stood before it; our
own reply alone; a cut or clipped echo of it; text we served, quoted in a message; the user's earlier words
in order; the id of the conversation. Where two conversations are equally likely nothing is chosen. Owns
the order and the thresholds; it reads the index and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from reef.sessions.digest import OPENING, digest, first_words, fold, numberless, opening, openings, words
from reef.sessions.index import By, Index, Node, key
from reef.sessions.keys import DISTINCT, group_key, session_key, text_of, variants
from reef.sessions.ladder import KnownId
from reef.sessions.transcript import CALL, HARNESS, TEXT, USER, Atom, Group, Transcript, agreement

LOOK_BACK = 8
"""replies of a request that are looked up, newest first"""
QUOTED_WORDS = 6000
"""words of a request searched for quotes of what was served"""
SUMMARY = "summary"
"""kind of the side calls whose text stands for a conversation later on"""
_TASK = re.compile(r"\btask\b\W{1,8}", re.I)
"""what labels a sub-agent's task in a message that holds more"""


class Ask(NamedTuple):
    """A request that looks for its parent."""

    transcript: Transcript
    scope: bytes
    known: KnownId | None
    agent: str
    time: float
    previous: str | None
    """the answer it names as the one before"""


class Found(NamedTuple):
    """What the evidence says."""

    parent: Node | None
    after: int
    """atoms[after:] came after the parent's reply"""
    method: str
    score: float
    reason: str
    runner_up: Node | None = None
    ambiguous: tuple[Node, ...] = ()
    """equally likely parents"""
    quoted: tuple[Node, ...] = ()
    """exchanges whose reply is quoted in it"""
    task: Node | None = None
    """the exchange whose tool call holds its task"""
    whole: bool = False
    """that call holds all of it, and comes from another kind of request"""


class _Choice(NamedTuple):
    node: Node | None
    runner_up: Node | None = None
    tied: tuple[Node, ...] = ()


class Finder:
    def __init__(self, index: Index, *, live_s: float = 900.0) -> None:
        self._index = index
        self._live_s = live_s

    def find(self, ask: Ask) -> Found:
        named = self._named(ask)
        if named:
            return named
        called = self._by_call(ask)
        if called:
            return called
        groups = ask.transcript.groups
        for group in groups[: -LOOK_BACK - 1 : -1]:
            for part in group.parts(ask.transcript.atoms):
                anchored = self._anchored(ask, part)
                if anchored:
                    return anchored
        quoted = self._quoted(ask)
        if quoted and quoted.parent:
            return quoted
        found = self._by_user(ask) or self._by_group(ask)
        if found:
            return found._replace(quoted=quoted.quoted, task=quoted.task) if quoted else found
        if quoted:
            return quoted
        why = "its history was not served here" if groups else "opens a conversation"
        return Found(None, 0, "none", 0.0, why)

    # by id

    def _named(self, ask: Ask) -> Found | None:
        if not ask.previous:
            return None
        nodes = self._index.under(key(ask.scope, By.RESPONSE, digest("id", ask.previous)))
        if not nodes:
            return None
        reason = f"previous_response_id names the answer of {nodes[-1].id}"
        return Found(nodes[-1], 0, "known_id", 1.0, reason)

    def _by_call(self, ask: Ask) -> Found | None:
        """The request ends with results of tool calls whose ids only one reply has."""
        t = ask.transcript
        if not t.results or not t.groups:
            return None
        group = t.groups[-1]
        said = [key(ask.scope, By.REPLY, v) for v in variants(t.atoms[group.start : group.end])]
        nodes = self._index.under_any([key(ask.scope, By.CALL, digest("call", id)) for id in t.results])
        same = [n for n in nodes if any(v in n.keys for v in said)]
        if len(same) > 1:
            same = self._in_place(ask, group, same)
        if len(same) > 1:
            same = [n for n in same if not n.continued]
        if len(same) != 1:
            return None
        whole = same[0].chain == t.chain(group.end)
        reason = "it answers the tool calls of that reply, by their ids"
        return self._settle(ask, same, group, "prefix" if whole else "reply_anchor", 1.0 if whole else 0.98, reason)

    def _in_place(self, ask: Ask, group: Group, nodes: Sequence[Node]) -> list[Node]:
        """Those whose reply stood after the same atom as `group` does."""
        t = ask.transcript
        one, _ = agreement(t.atoms[: group.start])
        wanted = {key(ask.scope, By.REPLY_1, v + one) for v in variants(t.atoms[group.start : group.end])}
        return [n for n in nodes if not wanted.isdisjoint(n.keys)]

    def _by_group(self, ask: Ask) -> Found | None:
        """The newest reply under the same id and of the same kind of request, where the transcript is mute.

        Only a tag is trusted with that for any request; a harness's own id never with one that holds a single
        message of the user, since its stateless calls share it, unless the id stands for a history.
        """
        known = ask.known
        if known is None:
            return None
        nodes = [
            n for n in self._index.under(group_key(ask.scope, known.group, ask.transcript.shape)) if n.side is None
        ]
        if not nodes:
            return None
        newest = nodes[-1]
        fresh = not ask.transcript.groups and ask.transcript.lone
        if not newest.lone and (fresh or not known.is_tag):
            return None  # its client resends the history: this one opens another conversation
        if not known.is_tag and (ask.transcript.groups or (ask.transcript.lone and not known.has_history)):
            return None
        if newest.parent is None and newest.request == ask.transcript.chains[-1]:
            return Found(None, 0, "tag", 0.5, f"the same opening request as {newest.id}, asked again")
        after = ask.transcript.groups[-1].end if ask.transcript.groups else 0
        reason = f"arrived next under the same {known.rule}; the transcript could not tell"
        return Found(newest, after, "tag" if known.is_tag else "known_id", 0.8, reason)

    # by our own reply in the request

    def _anchored(self, ask: Ask, group: Group) -> Found | None:
        whole = self._index.under(key(ask.scope, By.CHAIN, ask.transcript.chain(group.end)))
        reason = "the whole history up to it is the one that ends there"
        return self._settle(ask, whole, group, "prefix", 1.0, reason) or self._echoed(ask, group)

    def _echoed(self, ask: Ask, group: Group) -> Found | None:
        """The reply is ours, though not all that stands before it."""
        t = ask.transcript
        reply = t.atoms[group.start : group.end]
        before = t.atoms[: group.start]
        place = f"message of the assistant before atom {group.end}"
        one, two = agreement(before)
        echoes = variants(reply)
        for variant in echoes:
            for by, context, score in ((By.REPLY_2, two, 0.97), (By.REPLY_1, one, 0.95)):
                nodes = self._index.under(key(ask.scope, by, variant + context))
                reason = f"the {place} is its reply, and so is what stood before"
                found = self._settle(ask, nodes, group, "reply_anchor", score, reason)
                if found:
                    return found
        said = _said(reply)
        last = next((a for a in reversed(before) if a.kind == USER), None)
        echoed = last.text if last else ""
        for variant in echoes:
            nodes = self._index.under(key(ask.scope, By.REPLY, variant))
            alike = [n for n in nodes if last and (last.digest in n.tail or wraps(n.asked, echoed))]
            reason = f"the {place} is its reply"
            if alike:
                return self._settle(ask, alike, group, "reply_anchor", 0.93, f"{reason}, after the same words")
            if nodes and len(said) >= DISTINCT and all(a.kind == TEXT for a in reply):
                return self._settle(ask, nodes, group, "reply_anchor", 0.9, reason)
            if nodes and not echoed:
                live = [n for n in nodes if not n.continued and ask.time - n.time <= self._live_s]
                if live:
                    return self._settle(ask, live, group, "reply_anchor", 0.7, f"{reason}, and short")
        return self._cut(ask, group, said) or self._inside(ask, group, reply)

    def _cut(self, ask: Ask, group: Group, said: str) -> Found | None:
        """The client holds only a part of what was served: interrupted, clipped or edited."""
        if not said:
            return None
        t = ask.transcript
        same = self._index.under(key(ask.scope, By.REQUEST, t.chain(group.start)))
        near = [n for n in same if n.answered and _near(n.said, said)]
        found = self._settle(ask, near, group, "reply_anchor", 0.85, "same request, and a cut echo of its reply")
        if found:
            return found
        first = opening(said.split(" "))
        if first is None:
            return None
        nodes = self._index.under(key(ask.scope, By.OPENING, first))
        near = [n for n in nodes if n.side is None and _near(n.said, said)]
        return self._settle(ask, near, group, "reply_anchor", 0.8, "a clipped echo of its reply")

    def _inside(self, ask: Ask, group: Group, reply: Sequence[Atom]) -> Found | None:
        """The client wrote something around the reply."""
        if group.end != ask.transcript.groups[-1].end:
            return None
        said = words(text_of(reply))
        if len(said) > QUOTED_WORDS:
            return None
        text = " ".join(said)
        hits = self._index.under_any([key(ask.scope, By.OPENING, k) for k in dict.fromkeys(openings(said))])
        inside = [n for n in hits if len(n.said) >= DISTINCT and n.said in text and n.side is None]
        return self._settle(
            ask, inside[-1:], group, "containment", 0.8, "its reply stands inside the assistant's message"
        )

    def _settle(
        self, ask: Ask, nodes: Sequence[Node], group: Group, method: str, score: float, reason: str
    ) -> Found | None:
        if not nodes:
            return None
        choice = self._choose(ask, nodes)
        if choice.tied:
            why = f"{len(choice.tied)} conversations fit equally well: {', '.join(n.id for n in choice.tied)}"
            return Found(None, group.end, method, 0.5, why, ambiguous=choice.tied)
        if choice.node is None:
            why = "the reply it goes on from belongs to a conversation with another id"
            return Found(None, group.end, method, score, why)
        if choice.node.kind == SUMMARY and score < 0.95:
            return self._after_summary(ask, choice.node, group.end, (choice.node,))
        return Found(choice.node, group.end, method, score, reason, runner_up=choice.runner_up)

    def _choose(self, ask: Ask, nodes: Sequence[Node]) -> _Choice:
        """The best of several exchanges with the same evidence for them."""
        if len(nodes) == 1 and ask.known is None:
            return _Choice(nodes[0])
        mine = ask.known.group if ask.known else None
        rule = ask.known.rule if ask.known else None
        fits = [n for n in nodes if not (mine and n.group and n.group != mine and n.group.startswith(f"{rule}:"))]
        if len(fits) < 2:
            return _Choice(fits[0] if fits else None)

        def rank(n: Node) -> tuple[bool, ...]:
            live = ask.time - n.time <= self._live_s
            return (mine is not None and n.group == mine, n.side is None, not n.continued, n.agent == ask.agent, live)

        ordered = sorted(fits, key=lambda n: (rank(n), n.seq), reverse=True)
        best = ordered[0]
        rivals = [n for n in ordered[1:] if n.session != best.session]
        tied = [n for n in rivals if rank(n) == rank(best)]
        if tied and not best.continued:
            return _Choice(None, tied=(best, *tied))
        return _Choice(best, runner_up=rivals[0] if rivals else None)

    # by what is quoted in the request

    def _quoted(self, ask: Ask) -> Found | None:
        """Text this gateway served, inside a message: a summary, a transcript, a sub-agent's task."""
        t = ask.transcript
        places = [(i, words(a.text)) for i, a in enumerate(t.atoms) if a.kind in (USER, HARNESS, TEXT)]
        said = [w for _, text in places for w in text][-QUOTED_WORDS:]
        found = list(dict.fromkeys(openings(said)))
        hits = self._index.under_any([key(ask.scope, By.OPENING, k) for k in found])
        text = " ".join(said)
        quoted = tuple(n for n in hits if n.said and n.said in text)
        task, whole = self._task(ask)
        if task:
            reason = f"its task stands in a tool call of {task.id}"
            return Found(None, 0, "none", 0.0, reason, quoted=quoted, task=task, whole=whole)
        if not quoted:
            return None
        grown = self._grown(ask, quoted)
        if grown:
            return grown
        summaries = [n for n in quoted if n.kind == SUMMARY]
        if summaries:
            return self._after_summary(ask, summaries[-1], _after(places, summaries[-1].said), quoted)
        return Found(None, 0, "none", 0.0, f"quotes {quoted[-1].id}", quoted=quoted)

    def _task(self, ask: Ask) -> tuple[Node | None, bool]:
        """The request whose tool call gave this one its task, if it is a sub-agent's, and whether all of it."""
        if ask.transcript.groups:
            return None, False
        asked = [a.text for a in ask.transcript.atoms if a.kind == USER]
        whole = [digest("whole", fold(text)) for text in asked]
        starts = [text[at:] for text in asked for at in (0, *[m.end() for m in _TASK.finditer(text)][:8])]
        begun = [first for text in starts if (first := opening(first_words(text, OPENING)))]
        for keys, all_of_it in ((whole, True), (begun, False)):
            for node in reversed(self._index.under_any([key(ask.scope, By.QUOTE, k) for k in keys])):
                if ask.time - node.time <= self._live_s and not self._asks(node, asked):
                    return node, all_of_it and node.shape != ask.transcript.shape
        return None, False

    def _asks(self, node: Node, asked: Sequence[str]) -> bool:
        """Whether a user's words are what `node` called its tool for: then they are asked again, and no task."""
        current: Node | None = node
        for _ in range(64):
            if current is None or current.words:
                break
            current = self._index.get(current.parent) if current.parent else None
        told = fold(current.words) if current else ""
        return bool(told) and any(fold(text).startswith(told) for text in asked)

    def _grown(self, ask: Ask, quoted: Sequence[Node]) -> Found | None:
        """A client that sends its conversation as one text: the last prompt, the reply, what is new."""
        t = ask.transcript
        newest = t.newest
        if newest is None or t.groups:
            return None
        text = " ".join(words(t.atoms[newest].text))
        for node in reversed(quoted):
            start = " ".join(words(node.asked[:400]))
            if node.side is None and start and text.startswith(start):
                _, _, rest = t.atoms[newest].text.rpartition(node.ending) if node.ending else ("", "", "")
                if rest.strip():
                    t.split(newest, rest)
                    reason = "the prompt is its prompt and its reply, grown"
                    return Found(node, newest + 1, "containment", 0.9, reason, quoted=tuple(quoted))
        return None

    def _after_summary(self, ask: Ask, summary: Node, after: int, quoted: tuple[Node, ...]) -> Found:
        """A request that carries a summary goes on from the newest reply of what was summarised."""
        session = self._index.under(session_key(ask.scope, summary.session))
        heads = [n for n in session if n.side is None and n.shape == ask.transcript.shape]
        heads = heads or [n for n in session if n.side is None and n.tools == ask.transcript.tools]
        if not heads:
            return Found(None, 0, "none", 0.0, f"quotes the summary {summary.id}", quoted=quoted)
        reason = f"it carries the summary {summary.id} of that conversation, whose newest reply this is"
        return Found(heads[-1], after, "containment", 0.85, reason, quoted=quoted)

    # by the user's earlier words

    def _by_user(self, ask: Ask) -> Found | None:
        t = ask.transcript
        asked = [(i, a) for i, a in enumerate(t.atoms) if a.kind == USER]
        for at in range(len(asked) - 2, -1, -1):
            place, atom = asked[at]
            known = self._index.under(key(ask.scope, By.USER, atom.digest))
            nodes = [n for n in known if n.side is None and n.answered]
            if not nodes:
                continue
            earlier = [a.digest for _, a in asked[:at]]
            depth = {n.id: self._in_order(n, earlier) for n in nodes}
            best = max(depth.values())
            if best == 0 and earlier:
                return None
            if best == 0 and len(fold(atom.text)) < DISTINCT:
                nodes = [n for n in nodes if not n.continued and ask.time - n.time <= self._live_s]
                if len(nodes) != 1:
                    return None
            choice = self._choose(ask, [n for n in nodes if depth[n.id] == best])
            if choice.tied:
                why = f"{len(choice.tied)} conversations have these words of the user"
                return Found(None, place + 1, "subsequence", 0.5, why, ambiguous=choice.tied)
            if choice.node is None:
                return None
            reason = f"{best + 1} of the user's earlier messages are its conversation's, in order"
            after = place + 1
            while after < len(t.atoms) and t.atoms[after].kind in (TEXT, CALL):
                after += 1  # what the client holds in place of the reply
            return Found(choice.node, after, "subsequence", 0.6 + 0.05 * min(best, 4), reason)
        return None

    def _in_order(self, node: Node, earlier: Sequence[bytes]) -> int:
        """How many of the earlier messages the conversation of `node` has, in order."""
        left = list(earlier)
        count = 0
        current = self._index.get(node.parent) if node.parent else None
        for _ in range(64):
            if current is None or not left:
                break
            newest = next((d for d in reversed(current.tail) if d in left), None)
            if newest is not None:
                del left[len(left) - 1 - left[::-1].index(newest) :]
                count += 1
            current = self._index.get(current.parent) if current.parent else None
        return count


def wraps(asked: str, echoed: str) -> bool:
    """Whether one is the other with something before or after it."""
    a, b = fold(asked), fold(echoed)
    if not a or not b:
        return False
    if len(a) >= DISTINCT and numberless(a) == numberless(b):
        return True  # a clock
    return a == b or (min(len(a), len(b)) >= 8 and (a.startswith(b) or a.endswith(b) or b.startswith(a)))


def _said(reply: Sequence[Atom]) -> str:
    return " ".join(words(text_of(reply)))


def _near(served: str, echo: str) -> bool:
    """Whether an echo is what was served with an end cut off, or with something added to it."""
    if not served or not echo:
        return False
    short, long = sorted((served, echo[: len(served) + 200]), key=len)
    return long.startswith(short) and len(short) >= 4


def _after(places: Sequence[tuple[int, list[str]]], said: str) -> int:
    """Index of the atom after the last one that quotes `said`."""
    return next((i + 1 for i, text in reversed(places) if said in " ".join(text)), 0)
