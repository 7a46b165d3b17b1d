"""The Responses dialect, requests: checked, and translated to chat messages.

Items become messages: what one answer was made of (reasoning, text, calls) becomes one assistant
message again. Hosted tools, background runs and server-side prompts need a provider behind them and
are refused by name; `web_search` is only left out of what the model is offered, since clients offer it
unasked, and the answer's `tools` say so. Answers are translated in `responses_events`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reef.wire import fields

RECEIPT_PREFIX = "resp_"
"""a response's id is this and its exchange's receipt"""
_ROLES = ("assistant", "developer", "system", "user")
_UNTRANSLATED = frozenset({
    "input", "instructions", "previous_response_id", "max_output_tokens", "text", "tools", "tool_choice",
    "reasoning", "include", "store", "background", "truncation", "prompt", "conversation", "metadata",
    "max_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "stream_options", "top_logprobs", "client_metadata",
})  # fmt: skip
"""fields that have a translation of their own, or say nothing about the answer"""
_NOT_OFFERED = ("web_search",)


def check_request(body: Any) -> dict[str, Any]:
    """The body as a dict, if it is a Responses request. Raises BadRequest naming the field."""
    body = fields.check_body(body)
    given = body.get("input")
    if isinstance(given, list):
        for index, item in enumerate(fields.objects(body, "input")):
            _check_item(item, f"input[{index}]")
    elif given is not None and not isinstance(given, str):
        fields.refuse("input", "must be a string or a list of items")
    if not given and not body.get("previous_response_id"):
        fields.refuse("input", "is required")
    for name in ("model", "instructions", "previous_response_id"):
        fields.text(body, name)
    for name in ("stream", "store", "background", "parallel_tool_calls"):
        fields.flag(body, name)
    for name in ("background", "prompt", "conversation"):
        if body.get(name):
            fields.refuse(name, "is not supported: it needs a provider that keeps state of its own")
    fields.one_of(body, "truncation", ("auto", "disabled"))
    fields.whole_number(body, "max_output_tokens", low=1)
    fields.whole_number(body, "top_logprobs", low=0)
    fields.sampling(body)
    fields.stops(body, "stop")
    for index, name in enumerate(fields.array(body, "include") or []):
        if not isinstance(name, str):
            fields.refuse(f"include[{index}]", "must be a string")
    fields.mapping(body, "metadata")
    fields.text(fields.mapping(body, "reasoning") or {}, "effort", "reasoning.")
    _check_format(fields.mapping(body, "text") or {})
    _check_tools(body)
    return body


def _check_format(text: Mapping[str, Any]) -> None:
    shape = fields.mapping(text, "format", "text.")
    if shape is not None:
        fields.required(shape.get("type"), "text.format.type")
        fields.one_of(shape, "type", ("text", "json_object", "json_schema"), "text.format.")
        if shape["type"] == "json_schema":
            fields.required(fields.mapping(shape, "schema", "text.format."), "text.format.schema")


def _check_tools(body: Mapping[str, Any]) -> None:
    for index, tool in enumerate(fields.objects(body, "tools")):
        kind = fields.required(fields.text(tool, "type", f"tools[{index}]."), f"tools[{index}].type")
        if kind in ("function", "custom"):
            fields.required(fields.text(tool, "name", f"tools[{index}]."), f"tools[{index}].name")
        elif not kind.startswith(_NOT_OFFERED):
            fields.refuse(f"tools[{index}].type", f"'{kind}' is a hosted tool: only function and custom tools work")
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        fields.one_of(choice, "type", ("function", "custom"), "tool_choice.")
        fields.required(fields.text(choice, "name", "tool_choice."), "tool_choice.name")
    else:
        fields.one_of(body, "tool_choice", ("auto", "none", "required"))


def _check_item(item: Mapping[str, Any], at: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    match kind:
        case "message":
            if item.get("role") not in _ROLES:
                fields.refuse(f"{at}.role", f"must be one of {', '.join(_ROLES)}")
            _check_content(item, "content", at)
        case "function_call" | "custom_tool_call":
            for name in ("call_id", "name", "arguments" if kind == "function_call" else "input"):
                fields.required(fields.text(item, name, f"{at}."), f"{at}.{name}")
        case "function_call_output" | "custom_tool_call_output":
            fields.required(fields.text(item, "call_id", f"{at}."), f"{at}.call_id")
            _check_content(item, "output", at)
        case "reasoning":
            fields.objects(item, "content", f"{at}.")
            fields.objects(item, "summary", f"{at}.")
        case _:
            fields.refuse(f"{at}.type", f"{kind!r} is not supported")


def _check_content(item: Mapping[str, Any], name: str, at: str) -> None:
    content = item.get(name)
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        fields.refuse(f"{at}.{name}", "must be a string or a list of parts")
    for index, part in enumerate(fields.objects(item, name, f"{at}.")):
        where = f"{at}.{name}[{index}]"
        match part.get("type"):
            case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text":
                fields.required(fields.text(part, "text", f"{where}."), f"{where}.text")
            case "refusal":
                fields.required(fields.text(part, "refusal", f"{where}."), f"{where}.refusal")
            case "input_image":
                fields.required(fields.text(part, "image_url", f"{where}."), f"{where}.image_url")
            case other:
                fields.refuse(f"{where}.type", f"{other!r} is not supported")


def to_chat(request: Mapping[str, Any]) -> dict[str, Any]:
    """A checked request as chat completions. What came before a `previous_response_id` is the
    caller's to put in front of `input`."""
    sent = {name: value for name, value in request.items() if name not in _UNTRANSLATED}
    sent["messages"] = messages(request)
    if request.get("max_output_tokens") is not None:
        sent["max_completion_tokens"] = request["max_output_tokens"]
    _put_tools(request, sent)
    _put_text(request.get("text") or {}, sent)
    effort = (request.get("reasoning") or {}).get("effort")
    if effort:
        sent["reasoning_effort"] = effort
    if request.get("top_logprobs") or "message.output_text.logprobs" in (request.get("include") or ()):
        sent.update(logprobs=True, top_logprobs=request.get("top_logprobs") or 0)
    if request.get("stream"):
        sent["stream_options"] = {"include_usage": True}
    return sent


def _put_text(text: Mapping[str, Any], sent: dict[str, Any]) -> None:
    shape = text.get("format")
    if shape and shape["type"] == "json_schema":
        schema = {name: shape[name] for name in ("name", "schema", "strict", "description") if name in shape}
        sent["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", **schema}}
    elif shape and shape["type"] == "json_object":
        sent["response_format"] = {"type": "json_object"}
    if text.get("verbosity"):
        sent["verbosity"] = text["verbosity"]


def _put_tools(request: Mapping[str, Any], sent: dict[str, Any]) -> None:
    tools = [_chat_tool(tool) for tool in offered_tools(request)]
    if not tools:
        sent.pop("parallel_tool_calls", None)
        return
    sent["tools"] = tools
    choice = request.get("tool_choice")
    if isinstance(choice, dict):
        sent["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif choice is not None:
        sent["tool_choice"] = choice


def offered_tools(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools the model is offered: those the client runs itself."""
    return [tool for tool in request.get("tools") or [] if tool["type"] in ("function", "custom")]


def custom_tools(request: Mapping[str, Any]) -> frozenset[str]:
    """Names of tools that take free text instead of JSON arguments."""
    return frozenset(tool["name"] for tool in request.get("tools") or [] if tool["type"] == "custom")


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "custom":  # free text becomes the one argument of a function
        shape = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": shape}
        return {"type": "function", "function": function}
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in kept if tool.get(n) is not None}}


def messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as chat messages, instructions first."""
    out: list[dict[str, Any]] = []
    if request.get("instructions"):
        out.append({"role": "system", "content": request["instructions"]})
    given = request.get("input")
    if isinstance(given, str):
        return [*out, {"role": "user", "content": given}]
    thought = ""
    for item in given or []:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought = _texts(item.get("content") or item.get("summary") or [])
            continue
        if kind in ("function_call", "custom_tool_call"):
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant", "content": None})
            out[-1].setdefault("tool_calls", []).append(_chat_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            out.append({"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])})
        elif item["role"] == "assistant":
            text = _content(item["content"])
            if out and out[-1]["role"] == "assistant" and "tool_calls" not in out[-1]:
                out[-1]["content"] = f"{out[-1]['content']}\n{text}"  # one answer, told in two messages
            else:
                out.append({"role": "assistant", "content": text})
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            out.append({"role": role, "content": _content(item["content"])})
        if thought and out[-1]["role"] == "assistant":
            out[-1].setdefault("reasoning_content", thought)
        thought = ""
    return out


def _chat_call(item: Mapping[str, Any]) -> dict[str, Any]:
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
    else:
        arguments = item["arguments"]
    return {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": arguments}}


def _content(content: str | Sequence[Mapping[str, Any]]) -> Any:
    """Chat content: a string where there is text only, parts where there are images."""
    if isinstance(content, str):
        return content
    if not any(part["type"] == "input_image" for part in content):
        return _texts(content)
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "input_image":
            image = {"url": part["image_url"], **({"detail": part["detail"]} if part.get("detail") else {})}
            parts.append({"type": "image_url", "image_url": image})
        else:
            parts.append({"type": "text", "text": part.get("text") or part.get("refusal") or ""})
    return parts


def _texts(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)
