"""`train.method: full` on a tiny real model: a step, its release, the engine that serves it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.config import load_config
from reef.engine.embedded.policy import Policy as Served
from reef.engine.embedded.policy import Row, load_policy
from reef.errors import ConfigError, ModelError
from reef.model import ModelTokenizer
from reef.releases.chain import FILES, content_hash, read_release
from reef.train.checks import GateLimits
from reef.train.full import FullPolicy
from reef.train.lora import LoraPolicy
from reef.train.policy import Policy
from reef.train.sample import Batch
from tests.test_trainer import a_job, a_trainer, four, gradient
from tests.tiny import serve_embedded, write_adapter

PROMPT, REPLY = [5, 9, 30, 7, 40], [31, 32, 33, 34]
WEIGHTS = FILES["full"][1]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> ModelTokenizer:
    torch.set_num_threads(1)
    return ModelTokenizer(tiny_model_dir)


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> FullPolicy:
    return FullPolicy.load(tiny_model_dir)


@pytest.fixture(scope="module")
def release(policy: FullPolicy, tokenizer: ModelTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a step's release; `policy` may have moved on since."""
    policy.fresh(0)
    trainer = a_trainer(policy, tokenizer, tmp_path_factory.mktemp("releases"))
    return Path(trainer.run(a_job(four(tokenizer, policy), epochs=4))["release"])


@pytest.fixture(scope="module")
def client(tiny_model_dir: Path, release: Path) -> Iterator[httpx.Client]:
    """An engine that has the release loaded as `full@1`."""
    with serve_embedded(tiny_model_dir) as url, httpx.Client(base_url=url, timeout=60) as made:
        load(made, "full@1", release).raise_for_status()
        yield made


def load(client: httpx.Client, name: str, path: Path) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def plain(model_dir: Path, dtype: torch.dtype = torch.float32, weights: Path | None = None) -> Any:
    """The model as transformers loads it, with a release's weights laid over it."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa").eval()
    if weights:
        found = model.load_state_dict(load_file(weights / WEIGHTS), strict=False)
        assert not found.unexpected_keys
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([[*PROMPT, *REPLY[:-1]]])
    return model(ids, logits_to_keep=len(REPLY)).logits[0].float()


def move(policy: Policy, size: float) -> None:
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(size * torch.randn_like(p))


# --- the policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_untrained_weights_and_the_reference_are_the_base_bit_for_bit(tiny_model_dir: Path, dtype: str) -> None:
    policy = FullPolicy.load(tiny_model_dir, dtype=dtype)
    base = logits(plain(tiny_model_dir, getattr(torch, dtype)))
    assert torch.equal(policy.logits(PROMPT, REPLY), base)
    cached = policy.reference.logits(PROMPT, REPLY)
    move(policy, 0.05)
    policy.reference.forget()
    assert torch.equal(policy.reference.logits(PROMPT, REPLY), cached)
    with policy.base(), torch.no_grad():
        assert torch.equal(policy.logits(PROMPT, REPLY), base)
    assert not torch.allclose(policy.logits(PROMPT, REPLY), base, atol=0.1)
    policy.fresh(5)
    assert torch.equal(policy.logits(PROMPT, REPLY), base)


def test_the_gradient_reaches_the_trained_weights_only(
    policy: FullPolicy, tiny_model_dir: Path, tokenizer: ModelTokenizer
) -> None:
    policy.fresh(0)
    gradient(policy, [Batch(four(tokenizer, policy), 4)])
    touched = {n for n, p in policy.model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert touched == set(policy.tensors()), "every linear layer but the head, and nothing else"
    assert len(touched) == 14 and all("_proj.weight" in n for n in touched)
    policy.model.zero_grad()
    upper = FullPolicy.load(tiny_model_dir, layers=0.5)
    assert set(upper.tensors()) == {n for n in touched if "layers.1." in n}


def test_in_bfloat16_a_small_update_is_not_rounded_away(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The base lies on bfloat16's grid. Trained weights rounded to it would be the base again nearly everywhere,
    and what this update does to a reply would be gone: 0.04 nat in float32, -0.0001 with rounded weights."""
    reply = REPLY * 5
    exact, rounded = FullPolicy.load(tiny_model_dir), FullPolicy.load(tiny_model_dir, dtype="bfloat16")

    def likely(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[range(len(reply)), reply].mean()

    before = likely(exact.logits(PROMPT, reply)), likely(rounded.logits(PROMPT, reply))
    optimizer = torch.optim.AdamW(exact.parameters(), lr=2e-5, weight_decay=0.0)
    likely(exact.logits(PROMPT, reply)).neg().backward()
    optimizer.step()
    exact.save_weights(tmp_path)
    rounded.load_weights(tmp_path)
    base = load_file(tiny_model_dir / "model.safetensors")
    unchanged = [t.bfloat16() == base[n] for n, t in exact.tensors().items()]
    assert torch.cat([u.flatten() for u in unchanged]).float().mean() > 0.9
    gain = likely(exact.logits(PROMPT, reply)) - before[0]
    assert likely(rounded.logits(PROMPT, reply)) - before[1] > 0.6 * gain > 0.02
    served = load_policy(tiny_model_dir, "bfloat16")
    plain, trained = (replies(served, adapter, reply) for adapter in (None, served.adapter("v", tmp_path)))
    assert likely(trained) - likely(plain) > 0.6 * gain


def replies(served: Served, adapter: Any, reply: list[int]) -> torch.Tensor:
    """The engine's logits before each id of a reply."""
    row = served.row(64, adapter)
    first = served.prefill(row, PROMPT, last=True)
    assert first is not None
    return torch.stack([first, *(served.decode([row], [token])[0] for token in reply[:-1])])


# --- a step and its release -----------------------------------------------------------------------


def test_a_step_moves_the_weights_and_the_release_holds_them(
    release: Path, policy: FullPolicy, tiny_model_dir: Path, tmp_path: Path
) -> None:
    found = read_release(release)
    found.verify()
    assert found.servable and found.metrics["update_norm"] > 0
    assert found.metrics["epochs"][-1]["opd"] < found.metrics["epochs"][0]["opd"]
    assert {"kl_to_base", "changed_tensors", "length_ratio"} <= {c["name"] for c in found.gate["checks"]}
    policy.load_weights(release)
    with torch.no_grad():
        assert torch.equal(policy.logits(PROMPT, REPLY), logits(plain(tiny_model_dir, weights=release)))
    policy.save_weights(tmp_path)
    assert content_hash(tmp_path) == found.content_hash
    assert b"/" not in (release / FILES["full"][0]).read_bytes(), "no path of this machine"


def test_steps_from_memory_and_from_disk_end_in_the_same_bits(
    policy: FullPolicy, tokenizer: ModelTokenizer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    samples = four(tokenizer, policy)
    hashes = []
    for name, restart in (("warm", False), ("cold", True)):
        trainer = a_trainer(policy, tokenizer, tmp_path / name)
        first = trainer.run(a_job(samples))
        if restart:
            trainer = a_trainer(FullPolicy.load(tiny_model_dir), tokenizer, tmp_path / name)
        hashes.append((first["content_hash"], trainer.run(a_job(samples, 2, 1))["content_hash"]))
    assert hashes[0] == hashes[1]


def test_a_parent_of_the_other_method_is_refused(
    policy: FullPolicy, release: Path, tokenizer: ModelTokenizer, tiny_model_dir: Path
) -> None:
    lora = LoraPolicy.load(tiny_model_dir)
    samples = four(tokenizer, lora)
    trainer = a_trainer(lora, tokenizer, release.parent.parent)
    with pytest.raises(ModelError, match=r"train\.method full, the trainer is set to lora"):
        trainer.run(a_job(samples, 2, 1))
    trainer.run(a_job(samples, 3, 0))
    with pytest.raises(ModelError, match=r"set train\.method: lora, or start over .*reef rollback 0"):
        a_trainer(policy, tokenizer, release.parent.parent).run(a_job(samples, 4, 3))
    with pytest.raises(ModelError, match="do not fit"):
        FullPolicy.load(tiny_model_dir, layers=0.5).load_weights(release)


def test_the_gate_measures_full_weights(policy: FullPolicy, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    samples = four(tokenizer, policy)
    limits = GateLimits(kl_to_base=0.1, length_ratio=50, repeated_4grams=1, missing_eos=1)
    trainer = a_trainer(policy, tokenizer, tmp_path, limits=limits)
    good, wild = trainer.run(a_job(samples, lr=1e-5)), trainer.run(a_job(samples, 2, lr=1e-2))
    assert good["status"] == "candidate" and 0 < good["metrics"]["kl_to_base"] < 0.1
    assert wild["status"] == "rejected" and "kl_to_base" in wild["gate"]["reason"]
    idle = tuple(replace(s, advantage=0.0, contexts=()) for s in samples)
    assert "changed_tensors" in trainer.run(a_job(idle, 3))["gate"]["reason"]


# --- the engine -----------------------------------------------------------------------------------


def complete(client: httpx.Client, model: str, **more: Any) -> tuple[list[int], list[float]]:
    asked = {"max_tokens": 24, "temperature": 0, "logprobs": 0, "ignore_eos": True, "return_token_ids": True, **more}
    answer = client.post("/v1/completions", json={"model": model, "prompt": PROMPT, **asked}).raise_for_status().json()
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_the_engine_serves_what_the_trainer_computed(
    client: httpx.Client, policy: FullPolicy, release: Path, tmp_path: Path
) -> None:
    policy.load_weights(release)
    ids, logprobs = complete(client, "full@1")
    with torch.no_grad():
        own = policy.logits(PROMPT, ids).log_softmax(-1)
    assert ids == own.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(logprobs), own[range(len(ids)), ids], atol=1e-4)
    base_ids, base_logprobs = complete(client, "tiny")
    assert (base_ids, base_logprobs) != (ids, logprobs)


def test_base_and_rollback_are_the_same_bits(client: httpx.Client, tiny_model_dir: Path, release: Path) -> None:
    before = complete(client, "full@1")
    with serve_embedded(tiny_model_dir) as url, httpx.Client(base_url=url, timeout=60) as untouched:
        assert complete(client, "tiny") == complete(untouched, "tiny")
    load(client, "full@2", release).raise_for_status()
    client.post("/v1/unload_lora_adapter", json={"lora_name": "full@1"}).raise_for_status()
    load(client, "full@1", release).raise_for_status()
    assert complete(client, "full@1") == complete(client, "full@2") == before


def test_rows_of_the_base_of_lora_and_of_full_weights_share_a_pass(
    tiny_model_dir: Path, release: Path, tmp_path: Path
) -> None:
    served = load_policy(tiny_model_dir, "float32")
    full = served.adapter("full", release)
    lora = served.adapter("lora", write_adapter(tiny_model_dir, tmp_path / "lora", 1))
    kinds = [None, None, lora, full, full]

    def alone(adapter: Any) -> torch.Tensor:
        return served.decode([prefilled(served, adapter)], [8])[0]

    mixed = served.decode([prefilled(served, k) for k in kinds], [8] * len(kinds))
    bare = served.decode([prefilled(served, None) for _ in kinds], [8] * len(kinds))
    assert torch.equal(mixed[:2], bare[:2]), "rows of the base keep their bits whoever shares the pass"
    for got, kind in zip(mixed, kinds, strict=True):
        assert torch.allclose(got, alone(kind), atol=1e-4)
    assert not torch.allclose(mixed[0], mixed[3], atol=1e-2)


def prefilled(served: Served, adapter: Any) -> Row:
    row = served.row(16, adapter)
    served.prefill(row, PROMPT, last=False)
    return row


def test_weights_that_do_not_fit_are_refused(client: httpx.Client, release: Path, tmp_path: Path) -> None:
    config, weights = FILES["full"]
    tensors = load_file(release / weights)
    name = next(iter(tensors))

    def refusal(changed: dict[str, torch.Tensor] | bytes, about: str | None = None) -> str:
        (tmp_path / config).write_text(about or (release / config).read_text())
        if isinstance(changed, bytes):
            (tmp_path / weights).write_bytes(changed)
        else:
            save_file(changed, tmp_path / weights)
        answer = load(client, "other", tmp_path)
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    assert f"tensor {name}" in refusal({**tensors, name: torch.zeros(3, 3)})
    assert "tensor lm_head" in refusal({"lm_head": torch.zeros(3, 3)})
    assert "not finite" in refusal({**tensors, name: torch.full_like(tensors[name], torch.nan)})
    assert "no float32 weights" in refusal({name: tensors[name].bfloat16()})
    assert "can't read" in refusal(b"broken")
    assert "format 1" in refusal(tensors, json.dumps({"reef_weights": 2}))


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_other_engines_are_refused_with_what_to_set(kind: str) -> None:
    pairs = [("train.method", "full"), ("engine.kind", kind), ("engine.url", "http://127.0.0.1:1")]
    with pytest.raises(ConfigError, match=rf"kind {kind} load LoRA .* train\.method: lora, or engine\.kind: embedded"):
        load_config(None, pairs, {})
    assert load_config(None, pairs[1:], {}).max_adapters == 32


def test_fewer_versions_are_kept_loaded_when_each_is_a_whole_model() -> None:
    full = [("train.method", "full")]
    assert load_config(None, full, {}).max_adapters == 3
    assert load_config(None, [*full, ("engine.max_adapters", "8")], {}).max_adapters == 8
