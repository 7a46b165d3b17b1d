"""Known ids: which header or field, if any, names the conversation of a request.

A ladder: the first rung that is there decides. Each rung is an id that its sender really keeps per
conversation; ids that name a person, a request or a content are not on it. An id names a group of
requests, not a chain: transcripts are still matched inside it. The rule that fired is part of the answer,
so that it can be recorded. Knows no index.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef.wire.exchange import Exchange

TAG = "x-reef-tag-session"
PARENT_HEADERS = ("x-parent-session-id", "x-openai-subagent", "x-codex-parent-thread-id")
HEADERS = (
    "x-session-id",  # opencode
    "x-claude-code-session-id",
    "session-id",  # codex
    "session_id",  # codex before 0.100, pi
    "x-openwebui-chat-id",
    "x-librechat-conversation-id",
    "x-litellm-session-id",
    "helicone-session-id",
    "langfuse_session_id",
    "langfuse-session-id",
)
FIELDS = ("conversation", "litellm_session_id", "session_id", "metadata.session_id", "prompt_cache_key")
_PLACES = [(field, *field.partition(".")[::2]) for field in FIELDS]
"""each field with the name it stands under and, if it is nested, the name in there"""
_NAMES = frozenset({name for _, name, _ in _PLACES})
"""where an id can stand in a body, `metadata` among them"""
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.I)
_CLAUDE_USER = re.compile(rf"session[_-]({_UUID.pattern})", re.I)
_OPENCLAW = re.compile(rf"\| sessionId=({_UUID.pattern}) \|")


@dataclass(frozen=True, slots=True)
class KnownId:
    rule: str
    value: str

    @property
    def group(self) -> str:
        return f"{self.rule}:{self.value}"

    @property
    def is_tag(self) -> bool:
        """Set on purpose for Reef, so that it may decide where the transcript can't."""
        return self.rule == "tag"

    @property
    def has_history(self) -> bool:
        """The server keeps the history under it, so that its requests carry what is new only."""
        return self.rule == "conversation"


def known_id(exchange: Exchange, headers: Sequence[str] = HEADERS) -> KnownId | None:
    """The conversation a request says it belongs to. `headers` are the rungs below the tag."""
    given = exchange.headers
    tag = given.get(TAG)
    if tag:
        return KnownId("tag", tag)
    for name in headers:
        value = given.get(name)
        if value:
            return KnownId(name, value)
    return _from_body(exchange.request)


def previous_response(exchange: Exchange) -> str | None:
    """The answer a Responses request names as the one it follows."""
    value = exchange.request.get("previous_response_id")
    return value if isinstance(value, str) and value else None


def subagent_of(exchange: Exchange) -> str | None:
    """Why a request is a sub-agent's by its own headers; None if it doesn't say so."""
    for name in PARENT_HEADERS:
        if exchange.headers.get(name):
            return f"its header {name} names it a sub-agent's"
    return None


def _from_body(request: Mapping[str, Any]) -> KnownId | None:
    if _NAMES.isdisjoint(request):
        return None
    for field, name, inner in _PLACES:
        value: Any = request.get(name)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        if isinstance(value, dict):
            value = value.get("id")
        if not isinstance(value, str) or not value:
            continue
        if field == "prompt_cache_key" and not _UUID.fullmatch(value):
            continue  # often a hash of the content, the same in different conversations
        return KnownId(field, value)
    metadata = request.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _CLAUDE_USER.search(user) if isinstance(user, str) else None
    if found:
        return KnownId("metadata.user_id", found[1])
    return None


def id_in_text(text: str) -> KnownId | None:
    """A session id that a harness wrote into a first message."""
    found = _OPENCLAW.search(text[-2000:]) if "sessionId=" in text else None
    return KnownId("sessionId", found[1]) if found else None
