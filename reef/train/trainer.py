"""One training step: from a stored job to a gated release.

A release is a folder that appears by one rename. Invariant: a kill at any moment leaves either no
release or a complete one, and the same job from the same parent ends in the same weights. It knows
no queue, no database, no engine and no learning method beyond `recipe.loss`.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reef.errors import ModelError
from reef.recipe import Loss, Scorer, Tokenizer
from reef.releases.chain import MANIFEST, content_hash, list_releases, read_release, version_folder
from reef.store.files import dumps, fsync
from reef.train import gate
from reef.train.checks import CANARIES, CANARY_TOKENS, GateLimits, Verdict, reply_checks
from reef.train.jobs import Job
from reef.train.policy import Policy
from reef.train.sample import Batch, Sample

OPTIMIZER = "optimizer.safetensors"
REMEMBERED = 64
"""versions whose replies to the canaries are kept in memory"""
KEPT_OPTIMIZERS = 3
"""newest releases that keep their optimizer state (twice the size of their weights)"""


class LossFunction(Protocol):
    """The part of a recipe that trains."""

    def active(self, sample: Sample) -> bool: ...

    def loss(self, batch: Batch, policy: Scorer, reference: Scorer) -> Loss: ...


class Trainer:
    """A policy, an optimizer and the version they stand at."""

    def __init__(
        self,
        policy: Policy,
        recipe: LossFunction,
        tokenizer: Tokenizer,
        releases: Path,
        *,
        recipe_name: str = "",
        limits: GateLimits | None = None,
        gated: bool = True,
    ) -> None:
        self.policy = policy
        self.recipe = recipe
        self.releases = releases
        self.recipe_name = recipe_name
        self.limits = limits or GateLimits()
        self.gated = gated
        self.probes = gate.replays(tokenizer)
        self.replays = gate.replays(tokenizer, gate.REPLAYS)
        self._canaries = [tokenizer.render([{"role": "user", "content": text}]) for text in CANARIES]
        self._base: list[Tensor] | None = None
        self._said: dict[tuple[str, int], list[list[int]]] = {}
        """replies to the canaries by version; 0 is the base"""
        self._optimizer = self._new_optimizer()
        self._at: tuple[str, int] | None = None

    def run(self, job: Job) -> dict[str, Any]:
        """Train, gate and write the release; returns the result. A release that an interrupted run
        of the same step left behind is kept and returned.

        Raises ReefError when the job can't be done, OSError when the disk refuses.
        """
        target = version_folder(self.releases, job.scenario, job.version)
        if not target.exists():
            started = time.time()
            metrics, verdict = self._step(job)
            self._write(job, target, metrics, verdict, started)
            self._prune(job)
        return _result(job, target)

    def dry_run(self, job: Job) -> dict[str, Any]:
        """Do the whole step in memory and report it: what would be trained, each epoch's terms, the
        terms afterwards, how far the weights would move, the gate's answer. Writes nothing."""
        started = time.time()
        batch = self._batch(job)
        metrics, verdict = self._step(job, batch)
        with torch.no_grad():
            after = self._accumulate(batch, backward=False)
        self._at = None
        return {
            "step": job.step,
            "scenario": job.scenario,
            "parent": job.parent,
            "version": job.version,
            "samples": [_describe(s) for s in job.samples],
            **metrics,
            "after": after,
            "gate": verdict.to_json(),
            "seconds": time.time() - started,
        }

    # --- one step ---

    def _batch(self, job: Job) -> Batch:
        replay = self.replays[job.version % len(self.replays)]
        return Batch(job.samples, sum(self.recipe.active(s) for s in job.samples), {"replay": replay})

    def _step(self, job: Job, batch: Batch | None = None) -> tuple[dict[str, Any], Verdict]:
        self._stand_at(job)
        self._at = None
        self.policy.reference.forget()
        started, worked = time.time(), time.process_time()
        before = self.policy.tensors()
        current = self._replies(job.scenario, job.parent)
        liked = gate.mean_logprob(self.policy, job.held_out)
        gate_seconds, gate_cpu = time.time() - started, time.process_time() - worked
        batch = batch or self._batch(job)
        epochs = self._train(job, batch)
        after = self.policy.tensors(copy=False)
        started, worked = time.time(), time.process_time()
        verdict = self._gate(job, before, after, epochs, current, liked)
        moved = math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in after))
        metrics = {
            "epochs": epochs,
            "n_eff": batch.n_eff,
            "lr": job.lr,
            "trained_tokens": sum(sum(s.mask) for s in job.samples),
            "update_norm": moved,
            "weight_norm": math.sqrt(sum(float(t.square().sum()) for t in after.values())),
            "kl_to_base": next((c.value for c in verdict.checks if c.name == "kl_to_base"), None),
            "train_seconds": sum(e["seconds"] for e in epochs),
            "gate_seconds": gate_seconds + time.time() - started,
            "gate_cpu_seconds": gate_cpu + time.process_time() - worked,
        }
        return metrics, verdict

    def _train(self, job: Job, batch: Batch) -> list[dict[str, Any]]:
        for group in self._optimizer.param_groups:
            group["lr"] = job.lr
        records: list[dict[str, Any]] = []
        for _ in range(job.epochs):
            started, worked = time.time(), time.process_time()
            self._optimizer.zero_grad(set_to_none=True)
            terms = self._accumulate(batch, backward=True)
            norm = float(torch.nn.utils.clip_grad_norm_(list(self.policy.parameters()), 1.0))
            tokens = sum(s.tokens for s in batch.samples)
            spent = {"seconds": time.time() - started, "cpu_seconds": time.process_time() - worked}
            records.append({**terms, "grad_norm": norm, "tokens": tokens, **spent})
            if not (math.isfinite(norm) and math.isfinite(terms["loss"])):
                break  # stepping would only spread it over every weight; the gate refuses the candidate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # as large as the weights: let the gate have the room
        return records

    def _accumulate(self, batch: Batch, *, backward: bool) -> dict[str, float]:
        """The step's loss and terms: shares of micro-batches add up."""
        sums = {"loss": 0.0}
        for micro in batch.micro(1):
            loss = self.recipe.loss(micro, self.policy, self.policy.reference)
            if backward and loss.total.requires_grad:
                loss.total.backward()
            sums["loss"] += float(loss.total.detach())
            for name, value in loss.terms.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def _gate(
        self,
        job: Job,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        epochs: Iterable[Mapping[str, Any]],
        current: list[list[int]],
        liked: float,
    ) -> Verdict:
        """Weights first: a candidate that is not finite is asked nothing."""
        numbers = [x for e in epochs for x in (e["loss"], e["grad_norm"])]
        checks = [gate.finite_losses(numbers), gate.finite_weights(after), gate.changed_tensors(before, after)]
        if not all(check.passed for check in checks):
            return Verdict(tuple(checks))
        if self._base is None:
            self._base = gate.base_logprobs(self.policy.reference, self.probes)
        checks.append(gate.kl_to_base(self.policy, self.probes, self._base, self.limits.kl_to_base))
        if job.held_out:
            now = gate.mean_logprob(self.policy, job.held_out)
            checks.append(gate.held_out(liked, now, self.limits.held_out_drop))
        self._said.pop((job.scenario, job.version), None)
        replies = self._replies(job.scenario, job.version)
        checks += reply_checks(replies, current, self.policy.eos, self.limits, self._replies(job.scenario, 0))
        return Verdict(tuple(checks))

    def _replies(self, scenario: str, version: int) -> list[list[int]]:
        """The greedy replies to the canaries under the weights as they stand (0: under the base)."""
        key = (scenario, version) if version else ("", 0)
        if key not in self._said:
            if version:
                self._said[key] = self.policy.greedy(self._canaries, CANARY_TOKENS)
            else:
                with self.policy.base():
                    self._said[key] = self.policy.greedy(self._canaries, CANARY_TOKENS)
            while len(self._said) > REMEMBERED:
                self._said.pop(next(k for k in self._said if k[1]))
        return self._said[key]

    # --- where the weights stand ---

    def _stand_at(self, job: Job) -> None:
        """Bring weights and optimizer to the job's parent, from memory if they are there already."""
        if self._at == (job.scenario, job.parent) and job.parent:
            return
        self._optimizer = self._new_optimizer()
        if job.parent == 0:
            self.policy.fresh(job.seed)
            return
        folder = version_folder(self.releases, job.scenario, job.parent)
        read_release(folder).verify()
        self.policy.load_weights(folder)
        if (folder / OPTIMIZER).exists():
            self._restore_optimizer(load_file(folder / OPTIMIZER))

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.policy.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        state = self._optimizer.state_dict()["state"]
        return {
            f"{i}.{key}": value.detach().cpu().contiguous()
            for i, entry in state.items()
            for key, value in entry.items()
        }

    def _restore_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    # --- releases ---

    def _write(self, job: Job, target: Path, metrics: Mapping[str, Any], verdict: Verdict, started: float) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.parent / f".tmp-{target.name}-{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            self.policy.save_weights(scratch)
            save_file(self._optimizer_tensors(), scratch / OPTIMIZER)
            manifest = {
                "scenario": job.scenario,
                "version": job.version,
                "parent": job.parent,
                "step": job.step,
                "content_hash": content_hash(scratch),
                "turns": list(job.turns),
                "metrics": metrics,
                "gate": verdict.to_json(),
                "status": "candidate" if verdict.passed or not self.gated else "rejected",
                "created": time.time(),
                "seconds": time.time() - started,
                "recipe": self.recipe_name,
                "seed": job.seed,
            }
            (scratch / MANIFEST).write_text(dumps(manifest))
            for file in scratch.iterdir():
                fsync(file)
            fsync(scratch)
            scratch.rename(target)
            fsync(target.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise OSError(f"can't write {target}: {error}") from error
        self._at = (job.scenario, job.version)

    def _prune(self, job: Job) -> None:
        """Drop old optimizer states; training from such a release starts with fresh moments."""
        for release in list_releases(self.releases, job.scenario)[:-KEPT_OPTIMIZERS]:
            if release.version != job.parent:
                (release.folder / OPTIMIZER).unlink(missing_ok=True)


def _result(job: Job, target: Path) -> dict[str, Any]:
    release = read_release(target)
    if (release.turns, release.parent) != (job.turns, job.parent):
        raise ModelError(f"{target} exists and was trained from other turns")
    return {
        "release": str(target),
        "status": release.status,
        "content_hash": release.content_hash,
        "gate": release.gate,
        "metrics": release.metrics,
        "seconds": release.seconds,
    }


def _describe(sample: Sample) -> dict[str, Any]:
    return {
        "turn": sample.turn,
        "version": sample.version,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "prompt_tokens": len(sample.prompt_ids),
        "trained_tokens": sum(sample.mask),
        "contexts": [c.kind for c in sample.contexts],
    }
