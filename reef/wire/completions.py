"""The text-completions dialect: one prompt, one continuation, on the engine's own route.

No chat template is laid around the prompt. Pure functions and one accumulator; no sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reef.wire import fields
from reef.wire.chat import check_common
from reef.wire.dialect import Dialect
from reef.wire.exchange import Api
from reef.wire.openai_errors import openai_error
from reef.wire.passthrough import PassThrough


def check_request(body: Any) -> dict[str, Any]:
    """The body as a dict, if it is a completions request. Raises BadRequest naming the field."""
    body = fields.check_body(body)
    prompt = fields.required(body.get("prompt"), "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not ids:
        fields.refuse("prompt", "must be one string or one list of token ids: one exchange records one answer")
    check_common(body)
    fields.whole_number(body, "max_tokens", low=0)
    fields.whole_number(body, "logprobs", low=0)
    if body.get("best_of") not in (None, 1):
        fields.refuse("best_of", "must be 1: one exchange records one answer")
    if body.get("echo"):
        fields.refuse("echo", "is not supported: the prompt's tokens would be taken for sampled ones")
    return body


def to_engine(request: Mapping[str, Any]) -> dict[str, Any]:
    """A completions request as the engine takes it: as it is."""
    return dict(request)


def to_chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt as a conversation of one message, for matching. Ids have no text here."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    rest = {name: value for name, value in request.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": prompt if isinstance(prompt, str) else ""}]}


class CompletionsTranslator(PassThrough):
    """Puts a completion together from its chunks."""

    def _assemble(self, chunk: Mapping[str, Any]) -> None:
        if self.response is None:
            self.response = {
                **{name: chunk.get(name) for name in ("id", "object", "created", "model")},
                "choices": [{"index": 0, "text": "", "finish_reason": None, "logprobs": None}],
            }
        if chunk.get("usage"):
            self.response["usage"] = chunk["usage"]
        for choice in chunk.get("choices") or []:
            mine = self.response["choices"][0]
            mine["text"] += choice.get("text") or ""
            for name, values in (choice.get("logprobs") or {}).items():
                if values:
                    mine["logprobs"] = mine["logprobs"] or {}
                    mine["logprobs"][name] = [*mine["logprobs"].get(name, []), *values]
            if choice.get("finish_reason"):
                mine["finish_reason"] = choice["finish_reason"]
                self.finished = True


COMPLETIONS = Dialect(Api.COMPLETIONS, "/v1/completions", check_request, to_engine, CompletionsTranslator, openai_error)
