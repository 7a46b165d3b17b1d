"""Reef's own OpenAPI document, as `/openapi.json` serves it.

Paths and methods are those of the application's route table and dialects' constants are the dialects' own,
so the document can't name what isn't served; a served route without a description fails `document`. Only
fields that Reef reads itself are described: all others pass to the engine. Knows no handler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.routing import BaseRoute, Route

from reef.gateway.dialects import ROUTES
from reef.wire import chat
from reef.wire.exchange import Api

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_OBJECT: Schema = {"type": "object"}


def _list(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _whole(least: int, most: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _shape(required: Sequence[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _text_part(kind: str) -> Schema:
    return _shape(["type", "text"], type={"enum": [kind]}, text=_TEXT)


_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": _whole(0),
}
_STOP = _either(_TEXT, _list(_TEXT))
_CHAT_MESSAGE = _shape(
    ["role", "content"], role={"enum": list(chat.ROLES)}, content=_either(_TEXT, _list(_text_part("text")))
)
_FUNCTION = _shape(["name"], name=_TEXT, description=_TEXT, parameters=_OBJECT)
_ITEM = _shape(
    ["role", "content"],
    type={"enum": ["message"]},
    role={"enum": ["user", "assistant", "system", "developer"]},
    content=_either(_TEXT, _list(_text_part("input_text"))),
)
_RESULT = _shape(["type", "call_id", "output"], type={"enum": ["function_call_output"]}, call_id=_TEXT, output=_TEXT)
_ANTHROPIC_MESSAGE = _shape(
    ["role", "content"],
    role={"enum": ["user", "assistant"]},
    content=_either(
        _TEXT,
        _list(_text_part("text"), 1),
        _list(_shape(["type", "tool_use_id"], type={"enum": ["tool_result"]}, tool_use_id=_TEXT, content=_TEXT), 1),
    ),
)
_PROMPT: dict[str, Schema] = {
    "model": _TEXT,
    "messages": _list(_ANTHROPIC_MESSAGE, 1),
    "system": _either(_TEXT, _list(_text_part("text"))),
    "tools": _list(_shape(["name", "input_schema"], name=_TEXT, description=_TEXT, input_schema=_OBJECT)),
}

REQUESTS: Mapping[Api, Schema] = {
    Api.CHAT: _shape(
        ["messages"],
        **_SAMPLING,
        messages=_list(_CHAT_MESSAGE, 1),
        max_completion_tokens=_whole(1),
        stop=_STOP,
        tools=_list(_shape(["type", "function"], type={"enum": ["function"]}, function=_FUNCTION)),
        logprobs=_FLAG,
        top_logprobs=_whole(0, 20),
        n={"enum": [1]},
    ),
    Api.COMPLETIONS: _shape(
        ["prompt"],
        **_SAMPLING,
        prompt=_either(_TEXT, _list(_whole(0, 100_000), 1)),
        max_tokens=_whole(0),
        stop=_STOP,
    ),
    Api.RESPONSES: _shape(
        ["input"],
        **_SAMPLING,
        input=_either({"type": "string", "minLength": 1}, _list(_either(_ITEM, _RESULT), 1)),
        instructions=_TEXT,
        max_output_tokens=_whole(1),
        store=_FLAG,
        tools=_list(_shape(["type", "name"], type={"enum": ["function"]}, **_FUNCTION["properties"])),
    ),
    Api.MESSAGES: _shape(
        ["messages", "max_tokens"], **{**_SAMPLING, **_PROMPT, "max_tokens": _whole(1), "stop_sequences": _STOP}
    ),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of one route."""

    summary: str
    body: Schema | None = None


OPERATIONS: Mapping[str, Operation] = {
    **{
        path: Operation(f"An answer of the policy, {d.api.value} dialect", REQUESTS[d.api])
        for path, d in ROUTES.items()
    },
    "/v1/messages/count_tokens": Operation("Length of a prompt, in tokens", _shape(["messages"], **_PROMPT)),
    "/v1/responses/{id}": Operation("A stored response of this client"),
    "/v1/models": Operation("Names a client may use"),
    "/v1/models/{id}": Operation("One of them"),
    "/reef/report": Operation(
        "Explicit feedback on answers",
        {
            **_shape(
                ["references"],
                id=_TEXT,
                references=_list(_TEXT, 1),
                score=_NUMBER,
                feedback=_either({"type": "string", "minLength": 1}, _OBJECT),
            ),
            "anyOf": [{"required": ["score"]}, {"required": ["feedback"]}],
        },
    ),
    "/reef/status": Operation("The state of the loop in a few numbers"),
    "/reef/funnel": Operation("What became of every exchange"),
    "/reef/sessions": Operation("The newest sessions"),
    "/reef/sessions/{id}": Operation("One session: its exchanges in order, or forgetting it (admin)"),
    "/reef/turns/{receipt}": Operation("Everything known of one exchange"),
    "/reef/releases": Operation("The versions, and which are served"),
    "/reef/releases/{version}/serve": Operation("Serve a version from the next request on (admin)"),
    "/healthz": Operation("The process is alive"),
    "/readyz": Operation("The engine can answer"),
    "/openapi.json": Operation("This document"),
}


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The document of these routes. Raises KeyError for one that nobody has described."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        assert isinstance(route, Route)
        path = route.path_format
        methods = ["post"] if path in ROUTES else [m.lower() for m in route.methods or () if m != "HEAD"]
        for method in methods:
            paths.setdefault(path, {})[method] = _operation(OPERATIONS[path], list(route.param_convertors))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Reef", "version": version("reef")},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(operation: Operation, parameters: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in parameters
        ],
        "responses": {
            "200": {"description": "the answer"},
            "4XX": {"description": "what is wrong with the request, as JSON of the route's dialect"},
            "5XX": {"description": "the engine or the store can't be used now"},
        },
    }
    if operation.body is not None:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    return out
