"""Which route speaks which dialect."""

from __future__ import annotations

from collections.abc import Mapping

from reef.wire.chat import CHAT
from reef.wire.completions import COMPLETIONS
from reef.wire.dialect import Dialect
from reef.wire.messages_events import MESSAGES
from reef.wire.responses_events import RESPONSES

ROUTES: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/completions": COMPLETIONS,
}


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect errors of a request are told in: its route's, else its client's, else OpenAI's."""
    for route, dialect in ROUTES.items():
        if path == route or path.startswith(f"{route}/"):
            return dialect
    return MESSAGES if "anthropic-version" in headers else CHAT
