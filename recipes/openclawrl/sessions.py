"""What this method reads of a session: the judged history, and which accepted replies teach.

Pure functions of turns; they know no tokenizer, no model and no database.
"""

from __future__ import annotations

from collections.abc import Sequence

from recipes.openclawrl.teacher import Demonstration
from reef.recipe import JudgedTurn, Turn
from reef.wire.exchange import Message, conversation


def opens(turn: Turn) -> bool:
    """Whether its reply is its session's first."""
    return not any(m.role == "assistant" for m in turn.messages)


def lacks(turn: Turn) -> tuple[bool, bool]:
    """What keeps an accepted reply from showing what an opening should get, the worst first, so that the order of
    these tuples is the order in which replies teach: whether its token limit cut it off (it teaches to ramble), and
    whether it was accepted after a correction (it may speak to that, which the request alone does not hold)."""
    return turn.finish_reason == "length", not opens(turn)


def judged_history(turn: Turn) -> list[dict[str, str]]:
    """The conversation up to and including the reply, as the judge reads it; ends with the reply."""
    return conversation([*turn.messages, turn.reply])


def asked(turn: Turn) -> Sequence[Message]:
    """The conversation up to the request that the reply finally answers: the user's first message after the last
    earlier reply that was not refused. Empty where that is none of a user's, or where a tool was called since: what
    the reply says may come from its result."""
    replies = [i for i, m in enumerate(turn.messages) if m.role == "assistant"]
    since = len(replies) - turn.refused
    start = replies[since - 1] + 1 if since > 0 else 0
    request = next((i for i in range(start, len(turn.messages)) if turn.messages[i].role == "user"), None)
    if request is None or any(m.role == "tool" for m in turn.messages[start:]):
        return ()
    return turn.messages[: request + 1]


def demonstrations(turn: Turn, past: Sequence[JudgedTurn], limit: int, *, best: bool = True) -> list[Demonstration]:
    """Accepted replies to show the teacher, best first, at most `limit`.

    One from the same session comes first: it may solve this very request. Then those of other sessions, the newest
    first, with `best` those that lack least (`lacks`) before them. A reply accepted after corrections is shown as the
    answer to the request they were about, so that the example reads as if it had been right at once.
    """
    accepted = [
        j.turn
        for j in reversed(past)
        if j.verdict.verdict > 0 and j.turn.id != turn.id and j.turn.scenario == turn.scenario
    ]
    same = [t for t in accepted if t.session == turn.session]
    others = [t for t in accepted if t.session != turn.session]
    if best:
        others.sort(key=lacks)
    shown: dict[str, Demonstration] = {}
    for candidate in [*same, *others]:
        reply = candidate.reply.content.strip()
        if reply and reply not in shown and (messages := asked(candidate)):
            shown[reply] = Demonstration(messages[-1].content, reply)
    return list(shown.values())[:limit]
