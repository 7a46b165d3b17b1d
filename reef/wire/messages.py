"""The Anthropic Messages dialect, requests: checked, and translated to chat messages.

Tool results become tool messages, tool uses become the assistant's calls, thinking its reasoning.
Server tools, documents and containers are refused by name. Hints for caching and bookkeeping say
nothing about the answer and end here. Answers are translated in `messages_events`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reef.errors import BadRequest, ReefError, StoreError, UpstreamError
from reef.wire import fields

_UNTRANSLATED = frozenset({
    "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", "thinking", "metadata",
    "service_tier", "output_config", "output_format", "context_management", "cache_control", "container",
    "mcp_servers", "betas", "inference_geo", "diagnostics",
})  # fmt: skip
_THINKING = ("thinking", "redacted_thinking")


def check_request(body: Any) -> dict[str, Any]:
    """The body as a dict, if it is a Messages request. Raises BadRequest naming the field."""
    body = check_prompt(body)
    fields.required(fields.whole_number(body, "max_tokens", low=1), "max_tokens")
    fields.flag(body, "stream")
    fields.sampling(body)
    fields.stops(body, "stop_sequences")
    fields.mapping(body, "metadata")
    if body.get("container"):
        fields.refuse("container", "is not supported")
    if body.get("mcp_servers"):
        fields.refuse("mcp_servers", "is not supported: give the tools themselves")
    edits = fields.objects(fields.mapping(body, "context_management") or {}, "edits", "context_management.")
    for index, edit in enumerate(edits):
        if not str(edit.get("type")).startswith("clear_thinking"):  # which takes away what no engine is sent
            fields.refuse(f"context_management.edits[{index}].type", "is not supported: send what is to be read")
    return body


def check_prompt(body: Any) -> dict[str, Any]:
    """The part of a request that makes its prompt (all that count_tokens takes)."""
    body = fields.check_body(body)
    fields.text(body, "model")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", "must be a non-empty list")
    for index, message in enumerate(fields.objects(body, "messages")):
        at = f"messages[{index}]"
        fields.required(message.get("role"), f"{at}.role")
        fields.one_of(message, "role", ("user", "assistant", "system"), f"{at}.")
        _check_blocks(message, "content", at)
    if body.get("system") is not None:
        _check_blocks(body, "system", "")
    for index, tool in enumerate(fields.objects(body, "tools")):
        if tool.get("type") not in (None, "custom"):
            fields.refuse(f"tools[{index}].type", f"{tool['type']!r} is a server tool: only custom tools work")
        fields.required(fields.text(tool, "name", f"tools[{index}]."), f"tools[{index}].name")
        fields.required(fields.mapping(tool, "input_schema", f"tools[{index}]."), f"tools[{index}].input_schema")
    choice = fields.mapping(body, "tool_choice")
    if choice is not None:
        fields.required(choice.get("type"), "tool_choice.type")
        fields.one_of(choice, "type", ("auto", "any", "tool", "none"), "tool_choice.")
        if choice["type"] == "tool":
            fields.required(fields.text(choice, "name", "tool_choice."), "tool_choice.name")
    thinking = fields.mapping(body, "thinking")
    if thinking is not None:
        fields.required(thinking.get("type"), "thinking.type")
        fields.one_of(thinking, "type", ("enabled", "disabled", "adaptive"), "thinking.")
    _check_format(body)
    return body


def _check_format(body: Mapping[str, Any]) -> None:
    for where, shape in (
        ("output_format", fields.mapping(body, "output_format")),
        ("output_config.format", fields.mapping(fields.mapping(body, "output_config") or {}, "format")),
    ):
        if shape is not None:
            fields.one_of(shape, "type", ("json_schema",), f"{where}.")
            fields.required(fields.mapping(shape, "schema", f"{where}."), f"{where}.schema")


def _check_blocks(holder: Mapping[str, Any], name: str, at: str) -> None:
    content = holder.get(name)
    path = f"{at}.{name}" if at else name
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        fields.refuse(path, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(block, dict):
            fields.refuse(where, "must be an object")
        match block.get("type"):
            case "text":
                fields.required(fields.text(block, "text", f"{where}."), f"{where}.text")
            case "image":
                _image_url(block, where)
            case "tool_use":
                for field in ("id", "name"):
                    fields.required(fields.text(block, field, f"{where}."), f"{where}.{field}")
                fields.required(fields.mapping(block, "input", f"{where}."), f"{where}.input")
            case "tool_result":
                fields.required(fields.text(block, "tool_use_id", f"{where}."), f"{where}.tool_use_id")
                if block.get("content") is not None:
                    _check_blocks(block, "content", where)
            case "thinking" | "redacted_thinking":
                fields.text(block, "thinking", f"{where}.")
            case other:
                fields.refuse(f"{where}.type", f"{other!r} is not supported")


def _image_url(block: Mapping[str, Any], at: str) -> str:
    """The image as a URL, `data:` for one that is sent along."""
    source = fields.required(fields.mapping(block, "source", f"{at}."), f"{at}.source")
    match source.get("type"):
        case "base64":
            for name in ("media_type", "data"):
                fields.required(fields.text(source, name, f"{at}.source."), f"{at}.source.{name}")
            return f"data:{source['media_type']};base64,{source['data']}"
        case "url":
            return fields.required(fields.text(source, "url", f"{at}.source."), f"{at}.source.url")
        case other:
            fields.refuse(f"{at}.source.type", f"{other!r} is not supported")


def to_chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """A checked request as chat completions."""
    sent = {name: value for name, value in request.items() if name not in _UNTRANSLATED}
    sent["messages"] = messages(request)
    if request.get("max_tokens") is not None:
        sent["max_completion_tokens"] = request["max_tokens"]
    if request.get("stop_sequences"):
        sent["stop"] = request["stop_sequences"]
    _put_tools(request, sent)
    config = request.get("output_config") or {}
    shape = config.get("format") or request.get("output_format")
    if shape:
        sent["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": shape["schema"], "strict": True},
        }
    if config.get("effort"):
        sent["reasoning_effort"] = config["effort"]
    if request.get("thinking"):
        sent["chat_template_kwargs"] = {"enable_thinking": wants_thinking(request)}
    if sent["messages"][-1]["role"] == "assistant":  # the client began the reply itself
        sent.update(continue_final_message=True, add_generation_prompt=False)
    if request.get("stream"):
        sent["stream_options"] = {"include_usage": True}
    return sent


def wants_thinking(request: Mapping[str, Any]) -> bool:
    """Whether the client asked to see the model think."""
    return (request.get("thinking") or {}).get("type") in ("enabled", "adaptive")


def _put_tools(request: Mapping[str, Any], sent: dict[str, Any]) -> None:
    if not request.get("tools"):
        return
    sent["tools"] = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
                **({"strict": tool["strict"]} if tool.get("strict") is not None else {}),
            },
        }
        for tool in request["tools"]
    ]
    choice = request.get("tool_choice")
    if choice is None:
        return
    named = {"type": "function", "function": {"name": choice.get("name")}}
    sent["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice["type"]]
    if choice.get("disable_parallel_tool_use"):
        sent["parallel_tool_calls"] = False


def messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as chat messages, the system's first."""
    out: list[dict[str, Any]] = []
    if request.get("system"):
        out.append({"role": "system", "content": _texts(request["system"])})
    for message in request["messages"]:
        content = message["content"]
        if isinstance(content, str):
            out.append({"role": message["role"], "content": content})
        elif message["role"] == "assistant":
            out.append(_assistant(content))
        else:
            out += _user(message["role"], content)
    return out


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    text = [block["text"] for block in blocks if block["type"] == "text"]
    thought = [block.get("thinking") or "" for block in blocks if block["type"] in _THINKING]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(text) if text else None}
    if any(thought):
        message["reasoning_content"] = "\n".join(thought)
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return {**message, "tool_calls": calls} if calls else message


def _user(role: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool results as messages of their own, then what the user says beside them."""
    out: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content")
            text = _content(content) if isinstance(content, list) else content or ""
            out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    said = [block for block in blocks if block["type"] != "tool_result"]
    return [*out, {"role": role, "content": _content(said)}] if said or not out else out


def _content(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """Chat content: a string where there is text only, parts where there are images."""
    if not any(block["type"] == "image" for block in blocks):
        return _texts(blocks)
    return [
        {"type": "image_url", "image_url": {"url": _image_url(block, "")}}
        if block["type"] == "image"
        else {"type": "text", "text": block.get("text") or ""}
        for block in blocks
    ]


def _texts(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for block in content if isinstance(block.get("text"), str))


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_error(error: ReefError) -> dict[str, Any]:
    """Anthropic's error object. `message` begins with the field's path where one is to blame."""
    status = error.status if isinstance(error, BadRequest | UpstreamError) else 503
    text = str(error)
    if isinstance(error, BadRequest):
        kind = _KINDS.get(status, "invalid_request_error")
        if error.param and not text.startswith(f"'{error.param}'"):
            text = f"{error.param}: {text}"
    elif isinstance(error, StoreError):
        kind = "overloaded_error"
    else:
        kind = _KINDS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}
