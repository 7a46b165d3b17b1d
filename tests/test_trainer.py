"""A step on a tiny real model: masks, teacher contexts, releases, crashes, the gate."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from recipes.openclawrl import teacher
from recipes.openclawrl.objective import REEF, Objective
from recipes.openclawrl.processor import Sizes, make_rehearsal, rehearsal
from recipes.openclawrl.sessions import demonstrations
from recipes.openclawrl.teacher import (
    HEADING,
    Demonstration,
    candidate_contexts,
    check_render,
    choose_context,
    demonstration_context,
    hint_context,
)
from reef.errors import ModelError
from reef.model import ModelTokenizer
from reef.recipe import JudgedTurn, Loss, Scorer, Turn, Verdict
from reef.releases.chain import adapter_name, content_hash, list_releases, read_release, version_folder
from reef.store.files import write_json
from reef.train import checks, gate
from reef.train.jobs import Job, pending, work
from reef.train.lora import WEIGHTS, LoraPolicy
from reef.train.policy import Policy, Reference
from reef.train.sample import Batch, Context, Sample
from reef.train.trainer import OPTIMIZER, Trainer
from reef.wire.exchange import Message, Sampled, Sampling

ASK = [{"role": "user", "content": "Tom has 12 apples and gives 5 to Ann. Please show the steps."}]
SHOWN = Demonstration("The train travels 60 miles in 2 hours.", "Its speed is 60 / 2 = 30 miles per hour.")
WIDE = checks.GateLimits(kl_to_base=50.0, length_ratio=50.0, repeated_4grams=1.0, missing_eos=1.0, held_out_drop=50.0)


class Plain:
    """The example's objective without its judge: what the trainer needs of a recipe."""

    class Config(BaseModel):
        w_opd: float = 1.0

    def __init__(self, config: Any = None, tools: Any = None) -> None:
        self.objective = replace(REEF, w_opd=config.w_opd) if config else REEF

    def active(self, sample: Sample) -> bool:
        pushed = sample.reward if sample.advantage is None else sample.advantage
        return any(sample.mask) and bool(pushed or sample.contexts)

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss:
        return teacher.loss(batch, policy, reference, self.objective)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> ModelTokenizer:
    return ModelTokenizer(tiny_model_dir)


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path) -> Policy:
    torch.set_num_threads(1)
    return LoraPolicy.load(tiny_model_dir)


def a_sample(
    tokenizer: ModelTokenizer, policy: Policy, turn: str, reward: int = 1, *, text: str = "he keeps 7"
) -> Sample:
    """A sample whose behaviour log-probs are the base's own."""
    prompt, reply = tuple(tokenizer.render(ASK)), (*tokenizer.encode(text), 2)
    logp = (policy.reference.logits(prompt, reply) / 0.7).log_softmax(-1)
    return Sample(
        turn=turn,
        version=0,
        prompt_ids=prompt,
        response_ids=reply,
        logprobs=tuple(logp.gather(-1, torch.tensor(reply)[:, None])[:, 0].tolist()),
        topk_ids=(),
        mask=(1,) * len(reply),
        tau=0.7,
        reward=reward,
        advantage=float(reward),
        contexts=(demonstration_context(tokenizer, ASK, SHOWN),),
    )


def four(tokenizer: ModelTokenizer, policy: Policy) -> tuple[Sample, ...]:
    texts = ("he keeps 7", "so he keeps 7 apples", "Thanks! no lists", "Step 1: plain sentences")
    return tuple(a_sample(tokenizer, policy, f"turn{i}", (1, -1, 1, -1)[i], text=text) for i, text in enumerate(texts))


def a_job(samples: tuple[Sample, ...], version: int = 1, parent: int = 0, **changes: Any) -> Job:
    turns = tuple(s.turn for s in samples)
    return replace(Job(f"step{version}", "default", version, parent, turns, samples, seed=7, lr=1e-3), **changes)


def write_job(steps: Path, job: Job) -> Path:
    folder = steps / job.step
    folder.mkdir(parents=True)
    data = {name: getattr(job, name) for name in Job.__slots__}
    write_json(folder / "job.json", {**data, "samples": [s.to_json() for s in job.samples]})
    return folder


def a_trainer(policy: Policy, tokenizer: ModelTokenizer, releases: Path, **options: Any) -> Trainer:
    return Trainer(policy, Plain(), tokenizer, releases, **{"limits": WIDE, **options})


def gradient(policy: Policy, batches: list[Batch], objective: Objective = REEF) -> torch.Tensor:
    policy.model.zero_grad()
    for batch in batches:
        teacher.loss(batch, policy, policy.reference, objective).total.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


# --- the policy -----------------------------------------------------------------------------------


def test_an_untrained_adapter_and_the_reference_are_the_base(tiny_model_dir: Path, policy: Policy) -> None:
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    policy.fresh(3)
    ids = torch.tensor([[5, 9, 30, 31, 32]])
    expected = base(ids).logits[0, 1:4]
    assert torch.allclose(policy.logits([5, 9], [30, 31, 32]), expected, atol=1e-5)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05)
    assert torch.allclose(policy.reference.logits([5, 9], [30, 31, 32]), expected, atol=1e-5)
    assert not torch.allclose(policy.logits([5, 9], [30, 31, 32]), expected, atol=1e-2)


def test_a_remembered_beginning_changes_no_logits(policy: Policy) -> None:
    inputs = [([5, 9, 30, 7], [31, 32]), ([5, 9, 30, 7], [31, 32]), ([5, 9, 8], [1, 2, 3]), ([5], [9, 30]), ([4], [4])]
    for prompt, reply in [*inputs, *inputs]:
        remembered = policy.reference.logits(prompt, reply)
        policy.reference.forget() if reply == [4] else None
        fresh = Reference(policy).logits(prompt, reply)
        assert remembered.shape == (len(reply), 384)
        assert torch.allclose(remembered, fresh, atol=1e-5)


def test_adapter_comes_back_from_its_folder(policy: Policy, tiny_model_dir: Path, tmp_path: Path) -> None:
    policy.fresh(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.01)
    policy.save_weights(tmp_path)
    before, first = policy.tensors(), content_hash(tmp_path)
    policy.fresh(2)
    policy.load_weights(tmp_path)
    assert all(torch.equal(t, before[n]) for n, t in policy.tensors().items())
    policy.save_weights(tmp_path)
    assert content_hash(tmp_path) == first
    with pytest.raises(ModelError, match="rank 16"):
        LoraPolicy.load(tiny_model_dir, rank=4).load_weights(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"broken")
    with pytest.raises(ModelError, match="can't read"):
        policy.load_weights(tmp_path)
    with pytest.raises(ModelError, match="can't load"):
        LoraPolicy.load(tmp_path / "absent")


# --- masks and batches ----------------------------------------------------------------------------


def test_splits_and_padding_change_no_gradient(policy: Policy, tokenizer: ModelTokenizer) -> None:
    policy.fresh(0)
    samples = four(tokenizer, policy)
    whole = gradient(policy, [Batch(samples, 4)])
    assert whole.abs().max() > 1e-4
    for size in (1, 3):
        assert torch.allclose(gradient(policy, Batch(samples, 4).micro(size)), whole, atol=1e-6)
    padded = tuple(
        replace(s, response_ids=(*s.response_ids, 0, 0), logprobs=(*s.logprobs, 0.0, 0.0), mask=(*s.mask, 0, 0))
        for s in samples
    )
    assert torch.allclose(gradient(policy, [Batch(padded, 4)]), whole, atol=1e-6)
    masked = replace(samples[0], turn="masked", mask=(0,) * len(samples[0].mask))
    assert torch.allclose(gradient(policy, [Batch((*samples, masked), 4)]), whole, atol=1e-6)


def test_the_gradient_reaches_the_adapter_only(policy: Policy, tokenizer: ModelTokenizer) -> None:
    policy.fresh(0)
    gradient(policy, [Batch(four(tokenizer, policy), 4)])
    touched = {name for name, p in policy.model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert touched and all("lora_" in name for name in touched)
    assert all("lora_" in name for name, p in policy.model.named_parameters() if p.requires_grad)


def test_an_empty_context_is_the_base_and_teaches_nothing(policy: Policy, tokenizer: ModelTokenizer) -> None:
    policy.fresh(0)
    sample = a_sample(tokenizer, policy, "t", 0)
    same = replace(sample, contexts=(Context("hint", sample.prompt_ids, ""),))
    base = policy.reference.logits(sample.prompt_ids, sample.response_ids).log_softmax(-1)
    shown = policy.reference.logits(same.contexts[0].prompt_ids, same.response_ids).log_softmax(-1)
    assert (base - shown).abs().max() < 1e-5
    assert gradient(policy, [Batch((same,), 1)]).abs().max() < 1e-4
    assert gradient(policy, [Batch((sample,), 1)]).abs().max() > 1e-3


def test_fixed_values_are_kept_between_epochs(policy: Policy, tokenizer: ModelTokenizer) -> None:
    policy.fresh(0)
    batch = Batch(four(tokenizer, policy), 4)
    gradient(policy, batch.micro(1))
    kept = {turn: batch.fixed[turn] for turn in ("turn0", "turn3")}
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.02)
    terms = teacher.loss(batch, policy, policy.reference, REEF).terms
    assert all(batch.fixed[turn] is value for turn, value in kept.items())
    assert terms["clip_fraction"] > 0


def test_the_replayed_prompt_counts_once_per_epoch(policy: Policy, tokenizer: ModelTokenizer) -> None:
    policy.fresh(0)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.02)
    replay = gate.replays(tokenizer, gate.REPLAYS)[0]
    batch = Batch(four(tokenizer, policy), 4, {"replay": replay})
    only = Objective(w_rl=0.0, beta_kl=0.0, beta_replay=0.1)
    found = [teacher.loss(m, policy, policy.reference, only).terms.get("replay", 0.0) for m in batch.micro(1)]
    assert found[0] > 0 and found[1:] == [0, 0, 0]


# --- contexts -------------------------------------------------------------------------------------


def test_contexts_are_rendered_where_they_belong(tokenizer: ModelTokenizer) -> None:
    chat = [{"role": "system", "content": "Be plain."}, *ASK, {"role": "assistant", "content": "No."}, *ASK]
    hint = hint_context(tokenizer, chat, "Write one sentence.")
    assert hint is not None and hint.kind == "hint"
    end = f"show the steps.\n\n{HEADING}\nWrite one sentence."
    changed = [*chat[:-1], {"role": "user", "content": ASK[0]["content"].replace("show the steps.", end)}]
    assert list(hint.prompt_ids) == tokenizer.render(changed)
    shown = demonstration_context(tokenizer, chat, SHOWN)
    solved = [{"role": "user", "content": SHOWN.request}, {"role": "assistant", "content": SHOWN.reply}]
    assert list(shown.prompt_ids) == tokenizer.render([chat[0], *solved, *chat[1:]])
    memo = hint_context(tokenizer, chat, "Write one sentence.", ["No lists."])
    assert memo is not None and memo.kind == "memo" and "No lists.\nWrite one" in memo.text
    assert hint_context(tokenizer, chat[:1], "Write one sentence.") is None


def test_candidates_never_show_the_attempt(tokenizer: ModelTokenizer) -> None:
    attempt = Demonstration("Another request", "Step 1: keep 7")
    synthetic = replace(SHOWN, reply="made up", synthetic=True)
    found = candidate_contexts(
        tokenizer,
        ASK,
        "Step 1: keep 7",
        demonstrations=[attempt, SHOWN, synthetic],
        hints=["Not 'Step 1: keep 7'!", "Be plain."],
    )
    assert [c.kind for c in found] == ["demonstration", "hint"]
    assert not any("keep 7" in c.text for c in found)
    cold = candidate_contexts(tokenizer, ASK, "x", demonstrations=[synthetic], memo=["No lists."])
    assert [c.kind for c in cold] == ["memo", "synthetic"]
    assert candidate_contexts(tokenizer, ASK, "x", demonstrations=[SHOWN], max_tokens=20) == ()


def test_several_accepted_replies_stand_in_one_context(tokenizer: ModelTokenizer) -> None:
    shown = [Demonstration(f"Request {i}", f"Reply {i}") for i in range(3)]
    both, rest = candidate_contexts(tokenizer, ASK, "x", demonstrations=shown, together=2)
    first = [{"role": "user", "content": "Request 1"}, {"role": "assistant", "content": "Reply 1"}]
    second = [{"role": "user", "content": "Request 0"}, {"role": "assistant", "content": "Reply 0"}]
    assert list(both.prompt_ids) == tokenizer.render([*first, *second, *ASK]), "the best stands last"
    assert rest == demonstration_context(tokenizer, ASK, shown[2])
    room = len(both.prompt_ids) - 1 + len(tokenizer.encode("x"))
    smaller = candidate_contexts(tokenizer, ASK, "x", demonstrations=shown[:2], together=2, max_tokens=room)
    assert smaller == tuple(demonstration_context(tokenizer, ASK, one) for one in shown[:2])


def test_render_check_names_the_difference(tokenizer: ModelTokenizer) -> None:
    served = tokenizer.render(ASK)
    assert check_render(tokenizer, ASK, served) is None
    reason = check_render(tokenizer, [{"role": "user", "content": "Other"}], served)
    assert reason is not None and "part at" in reason
    assert check_render(tokenizer, ASK, served[:-1]) is not None


def test_the_context_nearest_to_the_policy_is_chosen() -> None:
    torch.manual_seed(0)
    old, far = torch.randn(6, 50).log_softmax(-1), torch.randn(6, 50).log_softmax(-1)
    mask = torch.tensor([0, 1, 1, 1, 1, 1])
    given = [Context("hint", (1,) * n, "") for n in (9, 5, 4)]
    scores = dict(zip(given, (old, far, far), strict=True))
    assert choose_context(old, mask, given, scores.__getitem__, 8)[0] == 0
    assert choose_context(old, mask, given[1:], scores.__getitem__, 8)[0] == 1
    with pytest.raises(ValueError, match="no context"):
        choose_context(old, mask, [], scores.__getitem__)


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_writes_a_release_that_moved_the_policy(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    trainer = a_trainer(policy, tokenizer, tmp_path)
    result = trainer.run(a_job(four(tokenizer, policy), epochs=4))
    release = read_release(result["release"])
    release.verify()
    assert (release.version, release.parent, release.status, release.servable) == (1, 0, "candidate", True)
    assert release.turns == ("turn0", "turn1", "turn2", "turn3")
    epochs = release.metrics["epochs"]
    assert len(epochs) == 4 and epochs[-1]["opd"] < epochs[0]["opd"]
    assert epochs[0]["clip_fraction"] == 0 and epochs[0]["kappa"] == pytest.approx(1, abs=1e-3)
    assert release.metrics["update_norm"] > 0 and release.metrics["n_eff"] == 4
    assert {c["name"] for c in release.gate["checks"]} == {
        "non_finite_losses", "non_finite_tensors", "changed_tensors", "kl_to_base",
        "length_ratio", "repeated_4grams", "missing_eos",
    }  # fmt: skip
    assert not list(tmp_path.glob("*/.tmp*"))
    assert adapter_name("default", 12) == "default@12"
    with pytest.raises(ModelError, match="scenario"):
        version_folder(tmp_path, "../x", 1)


def test_steps_follow_their_parent_from_memory_and_from_disk(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """A trainer that was restarted, or that trained something else in between, ends in the same weights."""
    samples = four(tokenizer, policy)
    hashes = []
    for name, restart in (("warm", False), ("cold", True)):
        trainer = a_trainer(policy, tokenizer, tmp_path / name)
        trainer.run(a_job(samples))
        if restart:
            policy.fresh(99)
            trainer = a_trainer(policy, tokenizer, tmp_path / name)
        hashes.append(trainer.run(a_job(samples, 2, 1))["content_hash"])
        other = trainer.run(a_job(samples, 1 + len(gate.REPLAYS), 0))  # the same replayed prompt as version 1
        assert other["content_hash"] == list_releases(tmp_path / name, "default")[0].content_hash
    assert hashes[0] == hashes[1]


def test_only_the_newest_releases_keep_optimizer_state(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    trainer = a_trainer(policy, tokenizer, tmp_path)
    one = four(tokenizer, policy)[:1]
    for version in range(1, 6):
        trainer.run(a_job(one, version, version - 1, epochs=1))
    releases = list_releases(tmp_path, "default")
    assert [(r.folder / OPTIMIZER).exists() for r in releases] == [False, False, True, True, True]
    for release in releases:
        release.verify()


def test_a_kill_between_rename_and_result_reuses_the_release(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    steps, releases = tmp_path / "steps", tmp_path / "releases"
    job = a_job(four(tokenizer, policy))
    folder = write_job(steps, job)
    work(a_trainer(policy, tokenizer, releases), steps, once=True)
    first = json.loads((folder / "result.json").read_text())
    written = (releases / "default/v000001" / WEIGHTS).stat().st_mtime_ns
    (folder / "result.json").unlink()
    (releases / "default" / ".tmp-v000001-1").mkdir()
    work(a_trainer(policy, tokenizer, releases), steps, once=True)
    assert json.loads((folder / "result.json").read_text()) == first
    assert (releases / "default/v000001" / WEIGHTS).stat().st_mtime_ns == written
    assert not list(releases.glob("*/.tmp*")) and not pending(steps)
    write_job(steps, replace(job, step="other", turns=("else",)))
    work(a_trainer(policy, tokenizer, releases), steps, once=True)
    assert "other turns" in json.loads((steps / "other/result.json").read_text())["error"]


def test_broken_jobs_get_an_error_and_the_next_one_is_done(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    samples = four(tokenizer, policy)
    for name, text in (("a", "{not json"), ("b", '{"step": "b"}')):
        (steps / name).mkdir(parents=True)
        (steps / name / "job.json").write_text(text)
    no_parent = write_job(steps, a_job(samples, 9, 8))
    bad_ids = write_job(steps, a_job((replace(samples[0], prompt_ids=(99999,)),), 5))
    good = write_job(steps, a_job(samples))
    work(a_trainer(policy, tokenizer, tmp_path / "releases"), steps, once=True)
    for folder in (steps / "a", steps / "b", no_parent, bad_ids):
        assert json.loads((folder / "result.json").read_text())["error"]
    assert json.loads((good / "result.json").read_text())["status"] == "candidate"
    assert json.loads((steps / "trainer.json").read_text())["state"] == "idle"


def test_a_dry_run_reports_and_writes_nothing(policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    trainer = a_trainer(policy, tokenizer, tmp_path)
    job = a_job(four(tokenizer, policy))
    report = trainer.dry_run(job)
    json.dumps(report)
    assert not list(tmp_path.iterdir())
    assert report["after"]["opd"] < report["epochs"][0]["opd"] and report["epochs"][0]["grad_norm"] > 0
    assert report["samples"][0]["contexts"] == ["demonstration"] and report["gate"]["passed"]
    assert trainer.run(job)["metrics"]["update_norm"] == pytest.approx(report["update_norm"])


def test_the_process_trains_once_and_stops_on_sigterm(
    policy: Policy, tokenizer: ModelTokenizer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    job = a_job(four(tokenizer, policy))
    folder = write_job(tmp_path / "steps", job)
    config = tmp_path / "recipe.json"
    config.write_text('{"w_opd": 0.5}')
    command = [sys.executable, "-m", "reef.train", "--model", str(tiny_model_dir), "--steps", str(tmp_path / "steps")]
    command += ["--releases", str(tmp_path / "releases"), "--recipe", "tests.test_trainer:Plain"]
    command += ["--limits", json.dumps(asdict(WIDE))]
    command += ["--recipe-config", str(config)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while not (folder / "result.json").exists():
            assert running.poll() is None and time.monotonic() < deadline, running.communicate(timeout=5)
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 0 and "Traceback" not in errors
    result = json.loads((folder / "result.json").read_text())
    trainer = Trainer(policy, Plain(Plain.Config(w_opd=0.5)), tokenizer, tmp_path / "again", limits=WIDE)
    assert trainer.run(job)["content_hash"] == result["content_hash"]


# --- the gate -------------------------------------------------------------------------------------


class Nan(Plain):
    """A recipe whose loss is no number."""

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss:
        loss = super().loss(batch, policy, reference)
        return replace(loss, total=loss.total * math.nan)


def test_the_gate_refuses_what_is_no_number(policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    result = Trainer(policy, Nan(), tokenizer, tmp_path, limits=WIDE).run(a_job(four(tokenizer, policy)))
    assert result["status"] == "rejected" and "non_finite_losses" in result["gate"]["reason"]
    assert not read_release(result["release"]).servable
    broken = {"a": torch.tensor([math.nan]), "b": torch.zeros(1)}
    assert not gate.finite_weights(broken).passed and gate.finite_weights({"b": broken["b"]}).passed


def test_the_gate_refuses_a_hundredfold_learning_rate(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """The rewards flipped and the step a hundred times too large; the sane step passes the same limit."""
    samples = four(tokenizer, policy)
    flipped = tuple(replace(s, reward=-s.reward, advantage=-(s.advantage or 0)) for s in samples)
    trainer = a_trainer(policy, tokenizer, tmp_path, limits=checks.GateLimits(kl_to_base=0.1))
    good = trainer.run(a_job(samples, lr=6e-4))
    wild = trainer.run(a_job(flipped, 2, lr=6e-2))
    assert good["status"] == "candidate", good["gate"]
    assert wild["status"] == "rejected" and "kl_to_base" in wild["gate"]["reason"]
    after = trainer.run(a_job(samples, 3, 1))
    assert after["status"] == "candidate", "a rejected candidate must leave nothing behind"


def test_the_gate_refuses_a_step_that_changed_nothing(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    idle = tuple(replace(s, advantage=0.0, contexts=()) for s in four(tokenizer, policy))
    result = a_trainer(policy, tokenizer, tmp_path).run(a_job(idle))
    assert result["status"] == "rejected" and "changed_tensors" in result["gate"]["reason"]
    assert result["metrics"]["n_eff"] == 0


def test_one_reply_more_than_the_base_leaves_unfinished_is_allowed_whatever_the_rounding() -> None:
    base = [[1, 2]] * 2 + [[1, 3]] * 4
    passed = {c.name: c.passed for c in checks.reply_checks([[1, 2], *[[1, 3]] * 5], base, [2], WIDE, base)}
    limits = checks.GateLimits()
    assert checks.at_most("missing_eos", 5 / 6, checks.may_not_end(limits, 4 / 6, 6)).passed
    assert not checks.at_most("missing_eos", 1.0, checks.may_not_end(limits, 4 / 6, 6)).passed
    assert passed["missing_eos"]


def test_reply_checks() -> None:
    assert checks.repeated_ngrams([1, 2, 3, 4, 5]) == 0 and checks.repeated_ngrams([1, 2]) == 0
    assert checks.repeated_ngrams([1] * 8) == pytest.approx(0.8)
    assert checks.length_ratio([10, 10], [5, 5]) == checks.length_ratio([5], [10]) == 2
    assert checks.missing_eos([[1, 2], [1, 3]], [2]) == 0.5
    good, loops = [[1, 2, 3, 4, 5, 0]] * 3, [[7] * 30] * 3
    assert all(c.passed for c in checks.reply_checks(good, good, [0], checks.GateLimits()))
    failed = {c.name for c in checks.reply_checks(loops, good, [0], checks.GateLimits()) if not c.passed}
    assert failed == {"length_ratio", "repeated_4grams", "missing_eos"}
    long = [good[0], good[1], list(range(1, 12))]
    assert all(c.passed for c in checks.reply_checks(long, good, [0], checks.GateLimits()))  # one may be longer
    assert not checks.at_most("x", math.nan, 1).passed and checks.at_most("x", math.inf, 1).value is None


def test_a_broken_release_hides_no_other(policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    trainer = a_trainer(policy, tokenizer, tmp_path)
    result = trainer.run(a_job(four(tokenizer, policy)[:1], epochs=1))
    (tmp_path / "default" / "v000002").mkdir()
    (tmp_path / "default" / ".tmp-v000003-1").mkdir()
    found = list_releases(tmp_path, "default")
    assert [(r.version, r.status) for r in found] == [(1, "candidate"), (2, "broken")] and found[1].reason
    weights = Path(result["release"]) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(ModelError, match="content hash"):
        found[0].verify()
    assert list_releases(tmp_path, "nobody") == []


# --- rehearsal ------------------------------------------------------------------------------------


def accepted(tokenizer: ModelTokenizer, number: int, *, corrected: bool = False) -> JudgedTurn:
    """An accepted reply, at once or after a complaint."""
    asked = [Message("user", f"Question {number}?")]
    if corrected:
        asked += [Message("assistant", "1. a list"), Message("user", "no list please")]
    reply = tuple(tokenizer.encode(f"he keeps {number}"))
    prompt = tuple(tokenizer.render([{"role": m.role, "content": m.content} for m in asked]))
    sampled = Sampled(prompt, reply, (-1.0,) * len(reply), (), 0, Sampling(0.7))
    turn = Turn(
        f"turn{number}",
        "default",
        f"s{number}",
        tuple(asked),
        Message("assistant", f"he keeps {number}"),
        None,
        sampled,
        refused=int(corrected),
    )
    return JudgedTurn(turn, Verdict(1, 1, ((1, 1),)))


def test_a_reply_accepted_after_corrections_is_rehearsed_as_the_first_answer(tokenizer: ModelTokenizer) -> None:
    past = [accepted(tokenizer, k, corrected=True) for k in range(2)]
    sample = make_rehearsal(past[1], past, tokenizer, Sizes(200, contexts=1, together=1))
    assert sample is not None and past[1].turn.sampled is not None
    assert list(sample.prompt_ids) == tokenizer.render([{"role": "user", "content": "Question 1?"}])
    assert sample.response_ids == past[1].turn.sampled.token_ids
    assert (sample.rehearsed, sample.reward, sample.advantage) == (True, 0, 0.0)
    assert [c.text for c in sample.contexts] == ["Question 0?\n---\nhe keeps 0"]
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample
    assert make_rehearsal(past[1], past, tokenizer, Sizes(10, contexts=1, together=1)) is None


def test_what_the_gate_holds_out_is_never_rehearsed(tokenizer: ModelTokenizer) -> None:
    past = [accepted(tokenizer, k) for k in range(16)]
    chosen: set[str] = set()
    held: set[str] = set()
    for version in range(1, 20):
        found = rehearsal(past, version, tokenizer, count=2, sizes=Sizes(200, contexts=1, together=1))
        assert len(found.trained) == 2 and len(found.held_out) == 2
        chosen |= {s.turn for s in found.trained}
        held |= {s.turn for s in found.held_out}
    assert len(chosen) > 8 and not chosen & held
    assert rehearsal([], 1, tokenizer, count=2, sizes=Sizes(200, contexts=1, together=1)).trained == ()


def test_a_step_is_not_examined_on_a_reply_it_trains_itself(tokenizer: ModelTokenizer) -> None:
    past = [accepted(tokenizer, k) for k in range(16)]
    sizes = Sizes(200, contexts=1, together=1)
    held = [s.turn.removesuffix(" again") for s in rehearsal(past, 1, tokenizer, count=2, sizes=sizes).held_out]
    others = rehearsal(past, 1, tokenizer, count=2, sizes=sizes, step=held).held_out
    assert len(others) == 2 and not {s.turn.removesuffix(" again") for s in others} & set(held)


def second_question(tokenizer: ModelTokenizer, *between: Message, refused: int) -> JudgedTurn:
    """Accepted, the second reply of its session."""
    first = accepted(tokenizer, 1)
    messages = (Message("user", "Question 1?"), *between, Message("user", "And what is 3 + 4?"))
    sampled = replace(
        first.turn.sampled,  # pyright: ignore[reportArgumentType]
        prompt_ids=tuple(tokenizer.render([{"role": m.role, "content": m.content} for m in messages])),
    )
    return replace(first, turn=replace(first.turn, messages=messages, sampled=sampled, refused=refused))


def test_the_answer_to_a_second_question_is_not_taught_as_the_first_ones(tokenizer: ModelTokenizer) -> None:
    sizes = Sizes(200, contexts=1, together=1)
    moved_on = second_question(tokenizer, Message("assistant", "he keeps 1"), refused=0)
    sample = make_rehearsal(moved_on, [moved_on], tokenizer, sizes)
    assert sample is not None and moved_on.turn.sampled is not None
    assert sample.prompt_ids == moved_on.turn.sampled.prompt_ids
    assert [d.request for d in demonstrations(accepted(tokenizer, 2).turn, [moved_on], 1)] == ["And what is 3 + 4?"]
    corrected = second_question(tokenizer, Message("assistant", "he keeps 1"), refused=1)
    sample = make_rehearsal(corrected, [corrected], tokenizer, sizes)
    assert sample is not None
    assert list(sample.prompt_ids) == tokenizer.render([{"role": "user", "content": "Question 1?"}])


def test_what_rests_on_a_tools_result_is_not_taught_without_it(tokenizer: ModelTokenizer) -> None:
    looked_up = (Message("assistant", "look(1)"), Message("tool", "12"), Message("assistant", "1. twelve"))
    answer = second_question(tokenizer, *looked_up, refused=2)
    assert make_rehearsal(answer, [answer], tokenizer, Sizes(200, contexts=1, together=1)) is None
    assert demonstrations(accepted(tokenizer, 2).turn, [answer], 1) == []


def test_a_reply_that_no_sample_was_made_of_is_not_rehearsed_either(tokenizer: ModelTokenizer) -> None:
    sizes = Sizes(200, contexts=1, together=1)
    good = accepted(tokenizer, 1)
    cut = replace(good, turn=replace(good.turn, finish_reason="length"))
    assert make_rehearsal(cut, [cut], tokenizer, sizes) is None
    assert make_rehearsal(cut, [cut], tokenizer, sizes, train_truncated=True) is not None
    with_tools = replace(good, turn=replace(good.turn, tools=True))
    assert make_rehearsal(with_tools, [with_tools], tokenizer, sizes) is None
    assert good.turn.sampled is not None
    elsewhere = replace(good, turn=replace(good.turn, sampled=replace(good.turn.sampled, prompt_ids=(1, 2, 3))))
    assert make_rehearsal(elsewhere, [elsewhere], tokenizer, sizes) is None


def test_one_users_accepted_replies_are_not_shown_for_another(tokenizer: ModelTokenizer) -> None:
    ann, other = accepted(tokenizer, 1), accepted(tokenizer, 2)
    ben = replace(other, turn=replace(other.turn, scenario="ben"))
    assert demonstrations(ann.turn, [ben], 3) == []
    assert len(demonstrations(ann.turn, [other], 3)) == 1


def test_replies_accepted_at_once_are_rehearsed_before_corrected_ones(tokenizer: ModelTokenizer) -> None:
    """A corrected reply said "You've already done it. I'll do it again", and openings came to say so."""
    sizes = Sizes(200, contexts=1, together=1)
    corrected = [accepted(tokenizer, k, corrected=True) for k in range(12)]
    few = [*corrected, *(accepted(tokenizer, k) for k in range(12, 14))]
    enough = [*corrected, *(accepted(tokenizer, k) for k in range(12, 24))]

    def rehearsed(past: list[JudgedTurn]) -> set[int]:
        lots = [rehearsal(past, v, tokenizer, count=3, sizes=sizes).trained for v in range(1, 9)]
        return {int(s.turn.removeprefix("turn").removesuffix(" again")) for lot in lots for s in lot}

    assert min(rehearsed(few)) < 12 and {12, 13} & rehearsed(few)
    assert len(rehearsed(enough)) > 3 and min(rehearsed(enough)) >= 12


def test_whole_replies_are_rehearsed_before_those_that_were_cut_off(tokenizer: ModelTokenizer) -> None:
    """Four of five replies of 64 tokens were accepted though they broke off: the policy never learned to end."""
    past = [accepted(tokenizer, k) for k in range(24)]
    cut = [replace(j, turn=replace(j.turn, finish_reason="length")) if int(j.turn.id[4:]) % 3 else j for j in past]
    lots = [
        rehearsal(cut, v, tokenizer, count=3, sizes=Sizes(200, contexts=1, together=1), train_truncated=True).trained
        for v in range(1, 9)
    ]
    assert {int(s.turn.removeprefix("turn").removesuffix(" again")) % 3 for lot in lots for s in lot} == {0}


def test_the_gate_refuses_a_candidate_that_unlearns_accepted_replies(
    policy: Policy, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    liked = a_sample(tokenizer, policy, "liked", 1)
    unlearn = tuple(replace(s, reward=-1, advantage=-1.0, contexts=()) for s in (liked, replace(liked, turn="again")))
    trainer = a_trainer(policy, tokenizer, tmp_path, limits=replace(WIDE, held_out_drop=0.05))
    result = trainer.run(replace(a_job(unlearn, lr=1e-2, epochs=3), held_out=(liked,)))
    assert result["status"] == "rejected" and result["gate"]["reason"].startswith("held_out_gain")


def test_an_adapter_in_the_upper_layers_only_leaves_the_lower_ones_alone(tiny_model_dir: Path) -> None:
    upper = LoraPolicy.load(tiny_model_dir, layers=0.5)
    assert {name.split("layers.")[1][0] for name in upper.tensors()} == {"1"}
    assert len(LoraPolicy.load(tiny_model_dir).tensors()) == 2 * len(upper.tensors())
