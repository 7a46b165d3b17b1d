"""The ways to ask a language model for text: chat completions, or raw generation by vLLM or SGLang.

Owns what goes over the wire and what counts as an answer; a body that is none is an `Unanswered` with the
reason. Raw generation is for reasoning models whose chat route loses the end of an answer. It knows no
votes and no retries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reef.errors import JudgeError

Kind = Literal["openai", "vllm", "sglang"]
ANSWER_BYTES = 4 << 20
"""a longer answer is not read to its end"""
CHATML = "<|im_start|>user\n$prompt<|im_end|>\n<|im_start|>assistant\n"
"""what raw generation puts around the prompt, unless prm.template says otherwise"""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "thought": {"type": "string"},
        "verdict": {"type": "integer", "enum": [-1, 0, 1]},
        **{name: {"type": ["integer", "null"]} for name in ("target", "restore")},
        **{name: {"type": ["string", "null"]} for name in ("reject", "keep", "hint", "rule")},
    },
    "required": ["thought", "verdict", "target", "restore", "reject", "keep", "hint", "rule"],
    "additionalProperties": False,
}
"""of a vote, where the server can hold the model to one"""


class Unanswered(JudgeError):
    """The response holds no text of the model; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote and what it cost."""

    text: str
    tokens: int
    """prompt and answer, 0 where the server doesn't say"""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask. `ask` makes a request body of a prompt, `read` an Answer of a response's JSON."""

    url: str
    ask: Callable[[str, bool], dict[str, Any]]
    """of the prompt, and whether the answer is to be held to SCHEMA"""
    read: Callable[[Any], Answer]


def route(
    kind: Kind, url: str, model: str, *, temperature: float, max_tokens: int, template: str | None = None
) -> Route:
    """The route of a backend at `url` (host, host/v1 or the route itself)."""
    if kind == "sglang":
        sampling = {"temperature": temperature, "max_new_tokens": max_tokens}

        def ask_sglang(prompt: str, structured: bool) -> dict[str, Any]:
            held = {"json_schema": json.dumps(SCHEMA)} if structured else {}
            return {"text": _wrapped(prompt, template), "sampling_params": {**sampling, **held}}

        return Route(address(url, "/generate", versioned=False), ask_sglang, _read_sglang)
    settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens, "stream": False}
    schema = {"type": "json_schema", "json_schema": {"name": "vote", "strict": True, "schema": SCHEMA}}

    def ask(prompt: str, structured: bool) -> dict[str, Any]:
        held: dict[str, Any] = {"response_format": schema} if structured else {}
        if kind == "vllm":
            return {**settings, "prompt": _wrapped(prompt, template)} | held
        messages = [{"role": "user", "content": prompt}]
        return {**settings, "messages": messages} | held

    if kind == "vllm":
        return Route(address(url, "/completions"), ask, lambda body: _read_choice(body, ("text",)))
    return Route(address(url, "/chat/completions"), ask, lambda body: _read_choice(body, ("message", "content")))


def decode(body: bytes, charset: str | None) -> Any:
    """The JSON of a response. Raises Unanswered when it is not text in its charset, or no JSON."""
    try:
        return json.loads(body.decode(charset or "utf-8"))
    except (ValueError, LookupError, RecursionError) as error:
        raise Unanswered(f"the answer is no JSON: {type(error).__name__}") from None


def _wrapped(prompt: str, template: str | None) -> str:
    """The prompt in its template. Whoever wrote the conversation could close the turn: its marks are broken."""
    return (template or CHATML).replace("$prompt", prompt.replace("<|", "<\u200b|").replace("[INST", "[\u200bINST"))


def address(url: str, path: str, *, versioned: bool = True) -> str:
    base = url.rstrip("/")
    if base.endswith(path):
        return base
    if not versioned:
        return base.removesuffix("/v1") + path
    return base + path if base.endswith("/v1") else f"{base}/v1{path}"


def _read_choice(body: Any, path: tuple[str, ...]) -> Answer:
    try:
        found: Any = body["choices"][0]
        for name in path:
            found = found[name]
        usage = body.get("usage") or {}
        tokens = _count(usage, "prompt_tokens") + _count(usage, "completion_tokens")
    except (LookupError, TypeError, AttributeError):
        raise Unanswered("the answer is no completion") from None
    return Answer(_text(found), tokens)


def _read_sglang(body: Any) -> Answer:
    found = body[0] if isinstance(body, list) and body else body
    if not isinstance(found, Mapping) or "text" not in found:
        raise Unanswered("the answer is no generation")
    meta = found.get("meta_info")
    usage = meta if isinstance(meta, Mapping) else {}
    return Answer(_text(found["text"]), _count(usage, "prompt_tokens") + _count(usage, "completion_tokens"))


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise Unanswered("the answer holds no text")
    return found


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value > 0 else 0
