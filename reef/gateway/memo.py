"""Putting a scenario's memo into a served prompt, for `serve_memo`.

Off unless asked for: weights, not memory, are what Reef learns, and a prompt with the memo in it is no
measure of them. So whoever calls this tags the record. Pure; knows chat bodies only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADING = "What this user has asked of replies before:"


def with_memo(request: Mapping[str, Any], rules: Sequence[str]) -> dict[str, Any]:
    """A chat request with the rules at the end of its system text; unchanged where there are no rules or messages."""
    messages = request.get("messages")
    if not rules or not isinstance(messages, list):
        return dict(request)
    said = "\n".join([HEADING, *(f"- {rule}" for rule in rules)])
    first = messages[0] if messages else None
    if isinstance(first, Mapping) and first.get("role") == "system" and isinstance(first.get("content"), str):
        told = {**first, "content": f"{first['content']}\n\n{said}"}
        return {**request, "messages": [told, *messages[1:]]}
    return {**request, "messages": [{"role": "system", "content": said}, *messages]}
