"""What strangers and broken clients send: bodies, headers, keys. The answer is a clean 4xx in the
dialect, and the next request is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from reef.config import load_config
from reef.errors import BadRequest, ConfigError
from reef.gateway.dialects import ROUTES
from reef.releases.chain import version_folder
from reef.wire.answer import Answer, inject, sampling_of
from reef.wire.images import first_media
from tests.stack import Stack, stack

HTTP = httpx.Client(timeout=60, verify=False)  # one for all: each would load the system's certificates
ASK: list[Any] = [{"role": "user", "content": "hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "x"},
    "responses": {"input": "hello"},
    "messages": {"messages": ASK, "max_tokens": 10},
}
RAW: dict[str, bytes] = {
    "nothing": b"",
    "no json": b"not json",
    "an array": b"[1, 2]",
    "a string": b'"hello"',
    "null": b"null",
    "a lone surrogate": b'{"model": "\\ud800"}',
    "half a pair, reversed": b'{"model": "\\udc00\\ud800"}',
    "broken utf-8": b'{"model": "\xff\xfe"}',
    "a raw NUL": b'{"model": "\x00"}',
    "NaN": b'{"seed": NaN}',
    "deep": b'{"a":' * 300 + b"1" + b"}" * 300,
    "deeper than any parser": b"[" * 100_000,
    "a huge number": b'{"seed": ' + b"9" * 10_000 + b"}",
    "unfinished": b'{"messages": [',
}
JUNK: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**63, 10**30, "", "x", [], [None], {}, {"type": []}, [[]], [{}])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("hostile"), server__max_header_kb="8") as s:
        yield s


@pytest.mark.parametrize("route", GOOD)
@pytest.mark.parametrize("body", RAW.values(), ids=RAW.keys())
def test_bad_bodies_get_a_400_in_the_dialect(running: Stack, route: str, body: bytes) -> None:
    response = HTTP.post(f"{running.url}/v1/{route}", content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert ("type" in response.json()) == (route == "messages")


@pytest.mark.parametrize("route", GOOD)
def test_junk_in_any_field_is_refused_or_translated(route: str) -> None:
    """Everything a request passes before the engine sees it; only a BadRequest may come of it."""
    fields = [
        "messages", "input", "prompt", "model", "stream", "stream_options", "system", "instructions", "tools",
        "tool_choice", "temperature", "top_p", "top_k", "seed", "n", "stop", "stop_sequences", "max_tokens",
        "max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs", "response_format", "text",
        "reasoning", "thinking", "include", "metadata", "output_config", "output_format", "context_management",
        "store", "previous_response_id", "min_p", "repetition_penalty", "presence_penalty", "logit_bias",
        "return_token_ids", "parallel_tool_calls", "truncation", "background", "echo", "best_of", "guided_json",
        "return_tokens_as_token_ids", "cache_control", "mcp_servers", "container",
    ]  # fmt: skip
    kinds = ("text", "input_text", "image", "image_url", "input_image", "tool_use", "tool_result", "thinking")
    inner = ("role", "content", "tool_calls", "tool_call_id", "type", "output", "call_id", "name", "summary")
    bodies = [{**GOOD[route], name: junk} for name in fields for junk in JUNK]
    for holder, one in (("messages", {"role": "user", "content": "x"}), ("input", {"role": "user", "content": "x"})):
        bodies += [{**GOOD[route], holder: [{**one, name: junk}]} for name in inner for junk in JUNK]
        bodies += [
            {**GOOD[route], holder: [{**one, "content": [{"type": kind, name: junk}]}]}
            for kind in kinds
            for name in ("text", "source", "image_url", "id", "input", "content", "tool_use_id")
            for junk in JUNK
        ]
        bodies += [{**GOOD[route], "tools": [{"type": "function", "name": "f", n: j}]} for n in inner for j in JUNK]
    dialect = ROUTES[f"/v1/{route}"]
    for body in bodies:
        body = orjson.loads(json.dumps(body))  # as the gateway parses it
        try:
            request = dialect.check(body)
        except BadRequest:
            continue
        first_media(request)
        asked = dialect.to_engine(request)
        sent = inject(asked, model="m", top_logprobs=4, exact=True, chat=route != "completions")
        sampling_of(sent)
        dialect.translator(request, "r", Answer(asked)).keep_alive()
        orjson.dumps(sent)


@pytest.mark.parametrize("kind", [[], {}, [{"type": []}], 5, None])
def test_a_content_part_whose_type_is_no_text_is_no_fault_of_a_text_only_gateway(tmp_path: Path, kind: Any) -> None:
    with stack(tmp_path, engine__vision="false") as blind:
        asked = [{"role": "user", "content": [{"type": kind, "text": "x"}]}]
        response = HTTP.post(f"{blind.url}/v1/chat/completions", json={"messages": asked})
        assert response.status_code == 200, response.text
        image = {"type": kind, "content": [{"type": "image"}]}
        response = HTTP.post(f"{blind.url}/v1/chat/completions", json={"messages": [{**asked[0], "content": [image]}]})
        assert response.json()["error"]["param"] == "messages[0].content[0].content[0]"


def test_escaped_nul_is_text_and_survives(running: Stack) -> None:
    response = HTTP.post(f"{running.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a\0b"}]})
    assert response.json()["choices"][0]["message"]["content"] == "reply to a\0b"
    exchange = running.log.get(response.headers["x-reef-agent-record-id"])
    assert exchange is not None and exchange.request["messages"][0]["content"] == "a\0b"
    assert HTTP.get(f"{running.url}/reef/turns/%00").status_code == 404
    assert HTTP.get(f"{running.url}/v1/responses/resp_%00").status_code == 404


def test_headers_over_the_limit_get_a_431(running: Stack) -> None:
    response = HTTP.post(f"{running.url}/v1/messages", json=GOOD["messages"], headers={"x-long": "x" * 9000})
    assert response.status_code == 431
    assert response.json()["type"] == "error"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("route", GOOD)
def test_bodies_over_the_limit_get_a_413(tmp_path: Path, route: str, chunked: bool) -> None:
    with stack(tmp_path, server__max_body_mb="0.01") as small:
        body = json.dumps({**GOOD[route], "user": "x" * 20_000}).encode()
        content = (body[at : at + 999] for at in range(0, len(body), 999)) if chunked else body
        response = HTTP.post(f"{small.url}/v1/{route}", content=content)
        assert response.status_code == 413
        assert HTTP.post(f"{small.url}/v1/{route}", json=GOOD[route]).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages/nothing", "/v1/nothing", "/nothing"])
def test_unknown_routes_and_methods_answer_in_the_dialect(running: Stack, path: str) -> None:
    response = HTTP.get(f"{running.url}{path}")
    assert response.status_code == 404
    assert ("type" in response.json()) == ("messages" in path)
    assert HTTP.get(f"{running.url}/v1/messages").status_code == 405


def test_keys_come_from_the_environment_and_bind_scenario_and_name(tmp_path: Path) -> None:
    keys = "[{key: aaa, name: agent, scenario: math}, {key: bbb, name: boss, role: admin}, {key: schlüssel, name: x}]"
    environ = {"REEF_SERVER__KEYS": keys}
    assert [k.name for k in load_config(None, [], environ).server.keys] == ["agent", "boss", "x"]
    with stack(tmp_path, server__keys=keys) as running:

        def post(headers: dict[str, str], route: str = "chat/completions") -> httpx.Response:
            raw = httpx.Headers(headers, encoding="utf-8")
            return HTTP.post(f"{running.url}/v1/{route}", json=GOOD[route], headers=raw)

        for wrong in ({}, {"x-api-key": "aa"}, {"authorization": "Basic aaa"}, {"authorization": "Bearer"}):
            assert post(wrong).status_code == 401
            refused = post(wrong, "messages")
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert running.log.count() == 0
        assert post({"authorization": "bearer aaa"}).status_code == 200
        assert post({"x-api-key": "aaa", "x-reef-scenario": "math"}, "messages").status_code == 200
        assert post({"x-api-key": "schlüssel"}).status_code == 200
        assert post({"x-api-key": "aaa", "x-reef-scenario": "other"}).status_code == 403
        first, second, third = running.log.tail(0)
        assert [(e.client, e.scenario) for e in (first, second, third)] == [
            ("agent", "math"),
            ("agent", "math"),
            ("x", "default"),
        ]
        assert "schl" not in json.dumps(third.headers)
        for path in ("reef/sessions", f"reef/turns/{first.id}"):
            assert HTTP.get(f"{running.url}/{path}", headers={"x-api-key": "aaa"}).status_code == 403
        assert HTTP.get(f"{running.url}/reef/sessions", headers={"x-api-key": "bbb"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "192.168.1.2", "example.org"])
def test_without_keys_only_loopback_is_served(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.keys"):
        load_config(None, [("server.host", host)], {})


def test_a_turn_can_be_kept_out_of_training_and_models_can_be_strict(tmp_path: Path) -> None:
    with stack(tmp_path, server__models="strict") as running:
        for route, body in GOOD.items():
            url = f"{running.url}/v1/{route}"
            refused = HTTP.post(url, json={**body, "model": "gpt-9"})
            assert (refused.status_code, "does not exist" in refused.text) == (404, True)
            assert HTTP.post(url, json={**body, "model": "default"}, headers={"x-reef-train": "off"}).status_code == 200
        running.observer().step()
        assert running.fates() == {"opted_out": len(GOOD)}


@pytest.mark.parametrize("asked", [{"output_format": {"type": "json_schema"}}, {"output_config": {"format": {}}}])
def test_counting_the_tokens_of_a_format_without_a_schema_is_a_400(running: Stack, asked: dict[str, Any]) -> None:
    for path in ("/v1/messages/count_tokens", "/v1/messages"):
        response = HTTP.post(f"{running.url}{path}", json={**GOOD["messages"], **asked})
        assert response.status_code == 400 and ".schema" in response.json()["error"]["message"]
    shape = {"output_format": {"type": "json_schema", "schema": {}}}
    assert HTTP.post(f"{running.url}/v1/messages/count_tokens", json={**GOOD["messages"], **shape}).status_code == 200


def test_a_scenario_that_could_never_be_trained_is_refused_before_it_is_served(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    names = ("müller", "-x", ".x", "x" * 65, "a/b", "team.a-1_b", "_x")
    with stack(tmp_path) as running:
        answers = []
        for name in names:
            headers = {b"x-reef-scenario": name.encode("latin-1")}
            answers.append(HTTP.post(f"{running.url}/v1/chat/completions", json=body, headers=headers))
        assert [a.status_code for a in answers] == [400] * 5 + [200] * 2
        assert "no '.' or '-' in front" in answers[0].text
        assert [e.scenario for e in running.log.tail(0)] == ["team.a-1_b", "_x"]
    for name in names[-2:]:
        assert version_folder(tmp_path, name, 1).parent.name == name
    with pytest.raises(ConfigError, match=r"policy\.scenario 'mü"):
        load_config(None, [("policy.scenario", "müller")], {})
