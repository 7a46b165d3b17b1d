"""A training step against the bare forward and backward pass over the same tokens.

Four turns of 300 tokens are trained by the real recipe and trainer for one epoch: teacher, anchors, replayed
prompt, optimizer and loss included; the gate and writing the release are told apart. The bare pass is the
same model with the same weights to train, its log-probs of the same replies, and `backward`. Prints a table and, as
its last line, one JSON object. Knows no service.

    python benchmarks/train.py [--tokens 300] [--turns 4] [--layers 1.0] [--method lora]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import warnings
from pathlib import Path

import torch

from recipes.openclawrl.recipe import Config, OpenClawRL
from reef.model import ModelTokenizer, resolve
from reef.train.full import FullPolicy
from reef.train.jobs import Job
from reef.train.lora import LoraPolicy
from reef.train.policy import Policy
from reef.train.sample import Context, Sample
from reef.train.trainer import Trainer

REPLY = 100
"""trained tokens of each turn; the rest is its prompt"""
WORDS = "Ann has twelve boxes with nine pencils each and gives fifteen of them to a friend so how many are left now "


def a_turn(tokenizer: ModelTokenizer, number: int, tokens: int) -> Sample:
    """A turn of exactly `tokens` ids, with a demonstration in front of it for the teacher."""
    words = tokenizer.encode(f"{number} {WORDS * 40}")
    prompt = (*tokenizer.render([{"role": "user", "content": "Homework."}]), *words)[: tokens - REPLY]
    reply = tuple(words[:REPLY])
    shown = (*tokenizer.render([{"role": "user", "content": WORDS}]), *words[:64], *prompt)
    return Sample(
        turn=f"turn{number}",
        version=0,
        prompt_ids=tuple(prompt),
        response_ids=reply,
        logprobs=(-1.0,) * REPLY,
        topk_ids=(),
        mask=(1,) * REPLY,
        tau=0.7,
        reward=1 if number % 2 else -1,
        advantage=1.0 if number % 2 else -0.25,
        contexts=(Context("demonstration", tuple(shown), ""),),
    )


def bare(policy: Policy, samples: list[Sample]) -> float:
    """Processor seconds of forward and backward over the samples."""
    started = time.process_time()
    for sample in samples:
        logp = policy.logits(sample.prompt_ids, sample.response_ids).log_softmax(-1)
        logp.gather(-1, torch.tensor(sample.response_ids).unsqueeze(-1)).mean().backward()
    spent = time.process_time() - started
    for parameter in policy.parameters():
        parameter.grad = None
    return spent


def peak_mb() -> int:
    """The most memory this process has held so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step against the bare pass.")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--layers", type=float, default=1.0)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--lr", type=float, help="default: 6e-4 for lora, 1e-5 for full")
    parser.add_argument("--model", default="default")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = resolve(args.model)
    tokenizer = ModelTokenizer(model)
    method = {"lora": LoraPolicy, "full": FullPolicy}[args.method]
    policy = method.load(model, layers=args.layers)
    lr = args.lr or {"lora": 6e-4, "full": 1e-5}[args.method]
    loaded = peak_mb()
    samples = [a_turn(tokenizer, k, args.tokens) for k in range(args.turns)]
    bare(policy, samples[:1])  # the first pass pays for memory
    passes = bare(policy, samples)
    recipe = OpenClawRL(Config(use_hints=False), None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(policy, recipe, tokenizer, Path(folder))
        started = time.process_time()
        job = Job("bench", "default", 1, 0, tuple(s.turn for s in samples), tuple(samples), lr=lr, epochs=1)
        result = trainer.run(job)
        whole = time.process_time() - started
        more = trainer.run(Job("more", "default", 2, 1, ("more",), tuple(samples), lr=lr, epochs=2))
        release = sum(f.stat().st_size for f in Path(result["release"]).iterdir())
    epochs = [e["cpu_seconds"] for e in more["metrics"]["epochs"]]
    first = result["metrics"]["epochs"][0]["cpu_seconds"]
    row = {
        "method": args.method,
        "lr": lr,
        "tokens": args.tokens * args.turns,
        "layers": args.layers,
        "bare_s": round(passes, 2),
        "first_epoch_s": round(first, 2),
        "later_epoch_s": round(epochs[1], 2),
        "gate_s": round(result["metrics"]["gate_cpu_seconds"], 2),
        "whole_step_s": round(whole, 2),
        "step_ratio": round(first / passes, 2),
        "later_epoch_ratio": round(epochs[1] / passes, 2),
        "whole_step_ratio": round(whole / passes, 2),
        "loaded_mb": loaded,
        "peak_mb": peak_mb(),
        "release_mb": round(release / 2**20),
        "kl_to_base": more["metrics"]["kl_to_base"],
        "gate": more["status"],
    }
    for name, value in row.items():
        print(f"{name:18} {value}")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
