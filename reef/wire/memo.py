"""A scenario's memo in a prompt, for `policy.serve_memo`: as the engine is asked, and as the learner reads it back.

Invariant: both say the same words in the same place, so that a recorded conversation with its rules renders
to the ids that were served. Off unless asked for: weights, not memory, are what Reef learns. Pure functions;
they know no store and no dialect but chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reef.wire.exchange import Message

HEADING = "What this user has asked of replies before:"
_SYSTEM = frozenset({"system", "developer"})


def with_memo(request: Mapping[str, Any], rules: Sequence[str]) -> dict[str, Any]:
    """A chat request with the rules at the end of its system text; unchanged where there are no rules or messages."""
    messages = request.get("messages")
    if not rules or not isinstance(messages, list):
        return dict(request)
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") in _SYSTEM:
        return {**request, "messages": [{**first, "content": _ended(first.get("content"), rules)}, *messages[1:]]}
    return {**request, "messages": [{"role": "system", "content": _said(rules)}, *messages]}


def told(messages: Sequence[Message], rules: Sequence[str]) -> tuple[Message, ...]:
    """A recorded conversation as the engine was given it."""
    if not rules:
        return tuple(messages)
    first = messages[0] if messages else None
    if first is not None and first.role == "system":
        return (first._replace(content=_ended(first.content, rules)), *messages[1:])
    return (Message("system", _said(rules)), *messages)


def _said(rules: Sequence[str]) -> str:
    return "\n".join([HEADING, *(f"- {rule}" for rule in rules)])


def _ended(content: Any, rules: Sequence[str]) -> Any:
    """A system message's content, text or parts, with the rules at its end."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": _said(rules)}]
    return f"{content}\n\n{_said(rules)}" if content else _said(rules)
