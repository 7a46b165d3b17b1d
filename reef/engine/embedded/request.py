"""A request body becomes a `Call`: every field checked, none silently ignored that would change the
answer. Fields that say nothing about generation (user, metadata, store, ...) pass.

Knows the OpenAI dialect and vLLM's additions; knows no model and no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reef.engine.embedded.sampling import Settings
from reef.engine.embedded.scheduler import Job
from reef.errors import BadRequest

_MOST_TOP = 20


class PromptReader(Protocol):
    """Turns what a client sent into token ids (fulfilled by `reef.model.ModelTokenizer`)."""

    def render(self, messages: Sequence[Any], *, tools: Sequence[Any] | None = None) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the served model can take."""

    context: int
    """prompt plus reply, tokens"""
    vocab: int
    eos: frozenset[int]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request."""

    job: Job
    model: str | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    tokens_as_ids: bool
    """token strings in log-probs are written token_id:N"""
    tools: bool = False
    """tool calls in the text become calls"""


class ContextLengthExceeded(BadRequest):
    """The prompt leaves no room for a reply."""

    code = "context_length_exceeded"


def read_chat(body: Mapping[str, Any], reader: PromptReader, bounds: Bounds) -> Call:
    """Check a chat/completions body. Raises BadRequest."""
    fields = _Fields(body)
    _refuse_unsupported(fields)
    messages = fields.get("messages", list)
    if not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a non-empty list of objects", param="messages")
    choice = fields.get("tool_choice", object)
    if choice not in (None, "none", "auto"):
        raise BadRequest("tool_choice other than 'none' or 'auto' is not supported", param="tool_choice")
    tools = fields.get("tools", list) if choice != "none" else None
    logprobs = bool(fields.get("logprobs", bool))
    top = fields.number("top_logprobs", int, 0, 0, _MOST_TOP)
    if top and not logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = "max_completion_tokens" if fields.get("max_completion_tokens", int) is not None else "max_tokens"
    prompt = reader.render(messages, tools=tools)
    return _call(fields, prompt, bounds, limit, default_limit=None, logprobs=logprobs, top=top, tools=bool(tools))


def read_tokenize(body: Mapping[str, Any], reader: PromptReader) -> list[int]:
    """The prompt ids of a tokenize body: messages as chat/completions takes them, or a text. Raises
    BadRequest."""
    fields = _Fields(body)
    if body.get("messages") is None:
        text = fields.get("prompt", str)
        if text is None:
            raise BadRequest("messages or prompt is required", param="messages")
        return reader.encode(text)
    messages = fields.get("messages", list)
    if not messages or not all(isinstance(m, dict) for m in messages):
        raise BadRequest("messages must be a non-empty list of objects", param="messages")
    return reader.render(messages, tools=fields.get("tools", list))


def read_completion(body: Mapping[str, Any], reader: PromptReader, bounds: Bounds) -> Call:
    """Check a completions body: one prompt, as text or as token ids. Raises BadRequest."""
    fields = _Fields(body)
    _refuse_unsupported(fields)
    prompt = _one_prompt(fields.get("prompt", object), reader.encode, bounds.vocab)
    asked = fields.get("logprobs", int)
    top = fields.number("logprobs", int, 0, 0, _MOST_TOP)
    return _call(fields, prompt, bounds, "max_tokens", default_limit=16, logprobs=asked is not None, top=top)


def _call(
    fields: _Fields,
    prompt: Sequence[int],
    bounds: Bounds,
    limit: str,
    *,
    default_limit: int | None,
    logprobs: bool,
    top: int,
    tools: bool = False,
) -> Call:
    room = bounds.context - len(prompt)
    if not prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens; this model's context is {bounds.context} with the reply",
            param="messages" if "messages" in fields.body else "prompt",
        )
    options = fields.get("stream_options", dict) or {}
    stop_ids = fields.get("stop_token_ids", list) or []
    if not all(type(i) is int for i in stop_ids):
        raise BadRequest("stop_token_ids must be a list of integers", param="stop_token_ids")
    settings = Settings(
        temperature=fields.number("temperature", float, 1.0, 0.0, 100.0),
        top_p=fields.number("top_p", float, 1.0, 0.0, 1.0),
        top_k=max(0, fields.number("top_k", int, 0, -1, bounds.vocab)),
        seed=fields.get("seed", int),
        top=top,
    )
    if settings.top_p == 0:
        raise BadRequest("top_p must be above 0", param="top_p")
    eos: frozenset[int] = frozenset() if fields.get("ignore_eos", bool) else bounds.eos
    return Call(
        job=Job(
            prompt=tuple(prompt),
            max_tokens=min(room, fields.number(limit, int, default_limit or room, 1, 2**31)),
            settings=settings,
            stops=_stops(fields.get("stop", object)),
            stop_ids=eos | frozenset(stop_ids),
            ends=eos - frozenset(stop_ids),
        ),
        model=fields.get("model", str),
        stream=bool(fields.get("stream", bool)),
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        return_token_ids=bool(fields.get("return_token_ids", bool)),
        tokens_as_ids=bool(fields.get("return_tokens_as_token_ids", bool)),
        tools=tools,
    )


class _Fields:
    """Typed reading of a body; null counts as absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def get(self, name: str, kind: type) -> Any:
        value = self.body.get(name)
        wrong_bool = isinstance(value, bool) and kind in (int, float)
        if value is not None and (wrong_bool or not isinstance(value, kind)):
            raise BadRequest(f"{name} must be {_NAMES[kind]}, not {type(value).__name__}", param=name)
        return value

    def number(self, name: str, kind: type, default: float, low: float, high: float) -> Any:
        value = self.get(name, kind if kind is int else _Number)
        if value is None:
            return default
        if not low <= value <= high:  # also refuses NaN
            raise BadRequest(f"{name} must be between {low:g} and {high:g}, not {value}", param=name)
        return kind(value)


class _NumberType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)


class _Number(metaclass=_NumberType):
    """Any JSON number."""


_NAMES = {
    int: "an integer",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    _Number: "a number",
}

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "n": lambda v: v != 1,
    "best_of": lambda v: v != 1,
    "echo": bool,
    "suffix": bool,
    "logit_bias": bool,
    "presence_penalty": bool,
    "frequency_penalty": bool,
    "repetition_penalty": lambda v: v != 1,
    "min_p": bool,
    "min_tokens": bool,
    "use_beam_search": bool,
    "prompt_logprobs": lambda v: True,
    "response_format": lambda v: not (isinstance(v, dict) and v.get("type") == "text"),
    "structured_outputs": bool,
    "guided_json": bool,
    "guided_regex": bool,
    "guided_choice": bool,
    "guided_grammar": bool,
    "functions": bool,
    "continue_final_message": bool,
    "include_stop_str_in_output": bool,
    "bad_words": bool,
    "allowed_token_ids": bool,
    "truncate_prompt_tokens": lambda v: True,
    "parallel_tool_calls": lambda v: v is False,
    "chat_template": bool,
    "chat_template_kwargs": lambda v: not isinstance(v, dict) or bool(v.keys() - {"enable_thinking"}),
    "add_generation_prompt": lambda v: v is False,
}
"""fields that would change the answer, and which of their values this engine can't honour;
a model without thinking has nothing to switch on or off by `enable_thinking`"""


def _refuse_unsupported(fields: _Fields) -> None:
    for name, refused in _UNSUPPORTED.items():
        value = fields.body.get(name)
        if value is not None and refused(value):
            raise BadRequest(f"{name}={value!r} is not supported by the embedded engine", param=name)


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops) or len(stops) > 16:
        raise BadRequest("stop must be a string or a list of at most 16 strings", param="stop")
    return tuple(s for s in stops if s)


def _one_prompt(prompt: object, encode: Callable[[str], list[int]], vocab: int) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return encode(prompt)
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise BadRequest("prompt must be one string or one list of token ids", param="prompt")
    if not all(0 <= i < vocab for i in prompt):
        raise BadRequest(f"prompt has token ids outside 0..{vocab - 1}", param="prompt")
    return prompt
