"""The embedded engine over HTTP, on a tiny real model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from reef.engine.embedded.prefix import CHUNK, PrefixCache, chunk_keys
from reef.engine.embedded.sampling import Settings, draw, generator
from reef.engine.embedded.text import TextStream
from reef.model import ModelTokenizer
from tests.tiny import serve_embedded, write_adapter

LONG = [10 + i % 300 for i in range(200)]


@pytest.fixture(scope="module")
def client(tiny_engine: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_engine, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def adapters(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, client: httpx.Client) -> dict[str, Path]:
    """Two adapters, loaded as `style@1` and `style@2`."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = {f"style@{seed}": write_adapter(tiny_model_dir, folder / str(seed), seed) for seed in (1, 2)}
    for name, path in paths.items():
        assert client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}).status_code == 200
    return paths


def body(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": LONG[:40],
        "max_tokens": 24,
        "seed": 5,
        "logprobs": 4,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def complete(client: httpx.Client, **more: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body(**more))
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def stream(client: httpx.Client, path: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=request | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.01)


def reference(
    model_dir: Path, prompt: list[int], tokens: list[int], tau: float = 1.0, adapter: Path | None = None
) -> torch.Tensor:
    """Log-probabilities [T, V] by one plain transformers forward."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if adapter:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0]
    return (logits[len(prompt) - 1 : -1] / tau).log_softmax(-1)


@pytest.mark.parametrize("tau", [1.0, 0.6])
def test_logprobs_are_those_of_a_plain_forward(client: httpx.Client, tiny_model_dir: Path, tau: float) -> None:
    answer = complete(client, prompt=LONG, temperature=tau)
    expected = reference(tiny_model_dir, LONG, ids_of(answer), tau)
    for position, token in enumerate(ids_of(answer)):
        assert logprobs_of(answer)[position] == pytest.approx(expected[position, token].item(), abs=1e-4)
        for name, value in answer["choices"][0]["logprobs"]["top_logprobs"][position].items():
            assert value == pytest.approx(expected[position, int(name.removeprefix("token_id:"))].item(), abs=1e-4)


def test_adapter_logprobs_are_those_of_peft(
    client: httpx.Client, tiny_model_dir: Path, adapters: dict[str, Path]
) -> None:
    answer = complete(client, model="style@1", prompt=LONG)
    expected = reference(tiny_model_dir, LONG, ids_of(answer), adapter=adapters["style@1"])
    got = torch.tensor(logprobs_of(answer))
    assert answer["model"] == "style@1"
    assert torch.allclose(got, expected[range(len(got)), ids_of(answer)], atol=1e-4)
    base = reference(tiny_model_dir, LONG, ids_of(answer))
    assert not torch.allclose(got, base[range(len(got)), ids_of(answer)], atol=1e-2)


def test_greedy_takes_the_most_likely_and_reports_temperature_one(client: httpx.Client, tiny_model_dir: Path) -> None:
    answer = complete(client, temperature=0)
    expected = reference(tiny_model_dir, LONG[:40], ids_of(answer))
    assert ids_of(answer) == expected.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(logprobs_of(answer)), expected.max(-1).values, atol=1e-4)


def test_mixed_batch_equals_each_alone(client: httpx.Client, adapters: dict[str, Path]) -> None:
    requests = [
        {"model": model, "prompt": LONG[:length], "seed": seed, "temperature": 0.8}
        for seed, (model, length) in enumerate([("tiny", 90), ("style@2", 7), ("style@1", 64), ("tiny", 130)])
    ]
    alone = [complete(client, **request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: complete(client, **request), requests))
    for one, other in zip(alone, together, strict=True):
        assert one["model"] == other["model"]
        assert ids_of(one) == ids_of(other)
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)


def test_base_is_bitwise_the_same_with_adapters_loaded(tiny_model_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tiny_model_dir, tmp_path / "a", 3)
    with serve_embedded(tiny_model_dir) as url, httpx.Client(base_url=url, timeout=60) as client:
        before = complete(client, prompt=LONG)
        client.post("/v1/load_lora_adapter", json={"lora_name": "x@1", "lora_path": str(adapter)})
        tuned = complete(client, prompt=LONG, model="x@1")
        assert logprobs_of(complete(client, prompt=LONG)) == logprobs_of(before)
        assert logprobs_of(complete(client, prompt=LONG, model="x@1")) == logprobs_of(tuned)
        client.post("/v1/unload_lora_adapter", json={"lora_name": "x@1"})
        assert logprobs_of(complete(client, prompt=LONG)) == logprobs_of(before)


def test_prefix_cache_changes_no_bit(tiny_model_dir: Path) -> None:
    def run(megabytes: int) -> list[list[float]]:
        options = {"prefix_cache_mb": megabytes}
        with serve_embedded(tiny_model_dir, **options) as url, httpx.Client(base_url=url, timeout=60) as client:
            lengths = (130, 200, 64, 65, 128, 200)
            return [logprobs_of(complete(client, prompt=LONG[:length])) for length in lengths]

    assert run(8) == run(0)


def test_prefix_cache_is_bounded_and_kept_apart() -> None:
    keys = chunk_keys(range(4 * CHUNK + 1))
    assert len(keys) == 4
    assert len(chunk_keys(range(4 * CHUNK))) == 3  # one id is always left to compute
    chunk = torch.zeros(1, 2, 1, CHUNK, 4)
    cache = PrefixCache(3 * chunk.nbytes)
    for key in keys[:3]:
        cache.put(0, key, chunk)
    assert len(cache.find(0, keys)) == 3
    assert cache.find(1, keys) == []
    cache.put(1, keys[0], chunk)
    assert cache.find(0, keys) == []  # the oldest chunk made room; a run without its start is no run
    cache.forget(0)
    assert cache.bytes == chunk.nbytes
    assert chunk_keys([5, *range(1, 2 * CHUNK)])[0] != keys[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stream_equals_whole(client: httpx.Client, path: str) -> None:
    request = body(stream_options={"include_usage": True}, stop=["e", "zz"], seed=11)
    if "chat" in path:
        del request["prompt"]
        request |= {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    whole = client.post(path, json=request).json()
    chunks = stream(client, path, request)
    choice = whole["choices"][0]
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    if "chat" in path:
        assert "".join(p["delta"].get("content", "") for p in parts) == choice["message"]["content"]
        found = [entry for p in parts if p.get("logprobs") for entry in p["logprobs"]["content"]]
        assert found == choice["logprobs"]["content"]
    else:
        assert "".join(p["text"] for p in parts) == choice["text"]
        found = [value for p in parts if p.get("logprobs") for value in p["logprobs"]["token_logprobs"]]
        assert found == choice["logprobs"]["token_logprobs"]
    assert [i for p in parts for i in p.get("token_ids", [])] == choice["token_ids"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_chat_renders_with_the_models_template(client: httpx.Client, tiny_model_dir: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]}]
    answer = client.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "return_token_ids": True}
    ).json()
    assert answer["prompt_token_ids"] == ModelTokenizer(tiny_model_dir).render([{"role": "user", "content": "hé\nllo"}])
    assert answer["model"] == "tiny"


def test_end_of_text_is_a_sampled_token_without_text(client: httpx.Client) -> None:
    first = complete(client, temperature=0, max_tokens=6)
    end = ids_of(first)[3]
    answer = complete(client, temperature=0, max_tokens=6, stop_token_ids=[end])
    at = ids_of(first).index(end)
    assert ids_of(answer) == ids_of(first)[: at + 1]
    assert len(logprobs_of(answer)) == at + 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert first["choices"][0]["finish_reason"] == "length"


def test_stop_string_cuts_text_but_keeps_ids(client: httpx.Client, tiny_model_dir: Path) -> None:
    whole = complete(client, max_tokens=40, seed=2)
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    answer = complete(client, max_tokens=40, seed=2, stop=stop)
    assert answer["choices"][0]["text"] == text[: text.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert ids_of(answer) == ids_of(whole)[: len(ids_of(answer))]
    assert stop in ModelTokenizer(tiny_model_dir).decode(ids_of(answer))


def test_pieces_never_split_characters_or_stops() -> None:
    text = "naïve 🦈 reef: 海 END tail"
    raw = text.encode()
    plain = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = [plain.push(byte) for byte in raw]
    assert "".join(pieces) + plain.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = TextStream(lambda ids: bytes(ids).decode(errors="replace"), ["ENDING", "END", "reefs"])
    given = ""
    for byte in raw:
        given += cut.push(byte)
        if cut.stopped:
            break
    assert given + cut.finish() == text[: text.index("END")]
    half = TextStream(lambda ids: bytes(ids).decode(errors="replace"), ["never"])
    assert half.push(raw[text.index("🦈")]) + half.push(110) + half.finish() == raw[6:7].decode() + "n"


def test_unfinished_character_is_shown_at_the_end() -> None:
    stream_of = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    assert [stream_of.push(b) for b in "🦈".encode()[:2]] == ["", ""]
    assert stream_of.finish() == "\ufffd"


def test_seed_repeats_and_its_absence_does_not(client: httpx.Client) -> None:
    assert ids_of(complete(client, seed=7)) == ids_of(complete(client, seed=7))
    assert ids_of(complete(client, seed=7)) != ids_of(complete(client, seed=8))
    assert ids_of(complete(client, seed=None)) != ids_of(complete(client, seed=None))


def test_cut_distributions_are_renormalised() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    nucleus = Settings(top_p=0.75, top=4)
    drawn = {draw(logits, nucleus, generator(seed)).token for seed in range(60)}
    assert drawn == {0, 1}
    assert dict(draw(logits, nucleus, generator(0)).top) == pytest.approx({0: _log(0.625), 1: _log(0.375)})
    assert dict(draw(logits, Settings(top_k=1, top=2), generator(0)).top) == pytest.approx({0: 0.0})
    assert {draw(logits, Settings(top_p=1e-6), generator(s)).token for s in range(20)} == {0}


def _log(value: float) -> float:
    return torch.tensor(value).log().item()


def test_draws_follow_the_distribution() -> None:
    logits, source = torch.tensor([0.7, 0.2, 0.1]).log(), generator(1)
    tokens = torch.tensor([draw(logits, Settings(), source).token for _ in range(4000)])
    assert torch.bincount(tokens).div(4000).tolist() == pytest.approx([0.7, 0.2, 0.1], abs=0.03)


def test_unload_during_a_stream_finishes_on_the_old_adapter(client: httpx.Client, adapters: dict[str, Path]) -> None:
    client.post("/v1/load_lora_adapter", json={"lora_name": "style@9", "lora_path": str(adapters["style@1"])})
    expected = complete(client, model="style@1", max_tokens=300)
    request = body(model="style@9", max_tokens=300, stream=True)
    got: list[int] = []
    with client.stream("POST", "/v1/completions", json=request) as response:
        lines = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        for chunk in lines:
            assert chunk["model"] == "style@9"
            if got and len(got) < 3:
                assert client.post("/v1/unload_lora_adapter", json={"lora_name": "style@9"}).status_code in (200, 404)
            got += chunk["choices"][0]["token_ids"]
    assert got == ids_of(expected)
    assert client.post("/v1/completions", json=body(model="style@9")).status_code == 404
    assert "style@9" not in [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_models_lists_base_first_then_adapters(client: httpx.Client, adapters: dict[str, Path]) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert listed[0]["id"] == "tiny" and listed[0]["parent"] is None
    assert listed[0]["max_model_len"] == 2048
    assert {m["id"]: m["parent"] for m in listed[1:]}.items() >= dict.fromkeys(adapters, "tiny").items()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_row(client: httpx.Client, tiny_engine: str, streaming: bool) -> None:
    request = body(prompt=[5], max_tokens=2000, stream=streaming)
    with httpx.Client(base_url=tiny_engine, timeout=60 if streaming else 0.3) as leaving:
        if streaming:
            with leaving.stream("POST", "/v1/completions", json=request) as response:
                next(response.iter_lines())  # it runs: a look at the count may come too late on a busy machine
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=request)
    until(lambda: client.get("/health").json()["running"] == 0, 3)
    assert complete(client, max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_more_requests_than_rows_all_finish(tiny_model_dir: Path) -> None:
    with serve_embedded(tiny_model_dir, max_batch=3) as url, httpx.Client(base_url=url, timeout=60) as client:
        alone = [complete(client, prompt=LONG[: 5 + 20 * i], seed=i) for i in range(8)]
        with ThreadPoolExecutor(8) as pool:
            crowd = list(pool.map(lambda i: complete(client, prompt=LONG[: 5 + 20 * i], seed=i), range(8)))
    assert [ids_of(a) for a in alone] == [ids_of(a) for a in crowd]


BAD = [
    ({"n": 2}, 400, "n"),
    ({"best_of": 3}, 400, "best_of"),
    ({"echo": True}, 400, "echo"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"stop": 5}, 400, "stop"),
    ({"stream": "yes"}, 400, "stream"),
    ({"seed": "x"}, 400, "seed"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ["a", "b"]}, 400, "prompt"),
    ({"prompt": [99999]}, 400, "prompt"),
    ({"prompt": [5] * 2048}, 400, "prompt"),
    ({"model": "gone@3"}, 404, "model"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD)
def test_bad_fields_are_named(client: httpx.Client, change: dict[str, Any], status: int, param: str) -> None:
    response = client.post("/v1/completions", json=body() | change)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]
    if len(change.get("prompt") or ()) == 2048:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_bad_chat_fields_are_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=good).status_code == 200
    response = client.post("/v1/chat/completions", json=good | change)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("raw", [b"{not json", b"[]", b"", b"\xff\xfe"])
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, raw: bytes) -> None:
    response = client.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


def test_bad_adapters_are_refused(
    client: httpx.Client, adapters: dict[str, Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    def load(name: str, path: Path) -> httpx.Response:
        return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})

    assert load("missing", tmp_path / "nowhere").status_code == 400
    assert "already" in load("style@1", adapters["style@1"]).json()["error"]["message"]
    assert load("tiny", adapters["style@1"]).status_code == 400
    dora = write_adapter(tiny_model_dir, tmp_path / "dora", 1)
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert "use_dora" in load("dora", dora).json()["error"]["message"]
    (dora / "adapter_config.json").write_text(json.dumps(config))
    (dora / "adapter_model.safetensors").write_bytes(b"broken")
    assert load("broken", dora).status_code == 400
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "missing"}).status_code == 404
    assert complete(client, max_tokens=2)["model"] == "tiny"


def test_an_engine_error_ends_one_request_only(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reef.engine.embedded import sampling

    real = sampling.draw

    def failing(logits: torch.Tensor, settings: Settings, source: torch.Generator | None) -> Any:
        if settings.seed == 666:
            raise RuntimeError("no such luck")
        return real(logits, settings, source)

    monkeypatch.setattr(sampling, "draw", failing)
    with serve_embedded(tiny_model_dir) as url, httpx.Client(base_url=url, timeout=60) as client:
        with ThreadPoolExecutor(2) as pool:
            good = pool.submit(complete, client, max_tokens=200)
            bad = client.post("/v1/completions", json=body(seed=666))
        assert bad.status_code == 500 and "no such luck" in bad.json()["error"]["message"]
        assert len(ids_of(good.result())) == 200
        chunks = stream(client, "/v1/completions", body(seed=666))
        assert "no such luck" in chunks[-1]["error"]["message"]
        assert client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


def test_process_says_when_ready_and_refuses_clearly(tiny_model_dir: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "reef.engine.embedded", "--model", str(tiny_model_dir), "--port"]
    process = subprocess.Popen([*command, "0", "--ready-file", str(ready)], stderr=subprocess.PIPE, text=True)
    try:
        until(ready.exists, 60)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        assert httpx.get(told["url"] + "/health").json()["status"] == "ok"
        taken = subprocess.run([*command, str(told["port"])], capture_output=True, text=True, check=False)
        assert taken.returncode == 2
        assert "can't listen" in taken.stderr and "Traceback" not in taken.stderr
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    command[command.index("--model") + 1] = str(tmp_path / "nowhere")
    missing = subprocess.run([*command, "0"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "no such folder" in missing.stderr and "Traceback" not in missing.stderr
