"""The three turns every client plays, and the engine's part in them.

The engine answers by what it was asked last, never by how often, so that side calls and retries of a
client change nothing. Texts differ from turn to turn, hold characters of several bytes, and the user
reacts to each reply, as the judge needs it.
"""

from __future__ import annotations

import json
from typing import Any

from tests.scripted_engine import Pieces, Script

ASKS = (
    "Tom has 12 apples and gives 5 to Ann. How many does he keep?",
    "Please write that without the bullet points.",
    "Thanks! And in German?",
)
REPLIES = (
    "• Tom starts with 12 🍎\n• He gives away 5\n• He keeps 7",
    "Tom keeps 7 apples – twelve less five.",
    "Tom behält sieben Äpfel.",
)
TOOL = "count_apples"
"""the function the first turn calls where a client offers it"""
CALL_ID = "call_7f3a91"
ARGUMENTS = {"start": 12, "given": 5}


def count_apples(start: int, given: int) -> str:
    """Count the apples that are left.

    Args:
        start: how many there were
        given: how many were given away
    """
    return f"{start - given} apples are left"


def script() -> Script:
    return Script(reply=_reply)


def _said(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content)


def _reply(body: dict[str, Any]) -> str | Pieces:
    messages = body["messages"]
    users = [n for n, m in enumerate(messages) if m["role"] == "user"]
    asked = [(n, k) for n in users for k, ask in enumerate(ASKS) if ask in _said(messages[n])]
    at, turn = asked[-1] if asked else (0, 0)
    offered = any(tool.get("function", {}).get("name") == TOOL for tool in body.get("tools") or [])
    if offered and turn == 0 and all(m["role"] != "tool" for m in messages[at:]):
        return _call()
    return REPLIES[turn]


def _call() -> Pieces:
    """A tool call in the pieces engines stream: the name first, the arguments bit by bit."""
    arguments = json.dumps(ARGUMENTS)
    function = {"name": TOOL, "arguments": ""}
    first = {"index": 0, "id": CALL_ID, "type": "function", "function": function}
    pieces: Pieces = [({"role": "assistant", "tool_calls": [first]}, f"<{TOOL}>")]
    for at in range(0, len(arguments), 7):
        part = arguments[at : at + 7]
        pieces.append(({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}, part))
    return pieces
