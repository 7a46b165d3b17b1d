"""`python -m reef.train`: the trainer as a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from reef.errors import ReefError, StoreError


def main() -> int:
    """Parse, load the model, work. Status 0 when stopped, 2 when it could not start."""
    args = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch starts its pool
    started_by = os.getppid()

    import torch
    import transformers

    from reef.model import ModelTokenizer
    from reef.recipe import load
    from reef.train.checks import GateLimits
    from reef.train.full import FullPolicy
    from reef.train.jobs import Job, work
    from reef.train.lora import LoraPolicy
    from reef.train.trainer import Trainer

    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        found = load(args.recipe)
        settings = json.loads(args.recipe_config.read_text()) if args.recipe_config else {}
        recipe = found(config=found.Config(**settings), tools=None)
        started = time.time()
        where: Any = {"layers": args.layers, "dtype": args.dtype, "device": args.device}
        if args.method == "full":
            policy = FullPolicy.load(args.model, **where)
        else:
            policy = LoraPolicy.load(args.model, rank=args.rank, alpha=args.alpha, **where)
        trainer = Trainer(
            policy, recipe, ModelTokenizer(args.model), args.releases,
            recipe_name=args.recipe, limits=GateLimits(**json.loads(args.limits)), gated=not args.no_gate,
        )  # fmt: skip
        print(f"trainer ready in {time.time() - started:.1f} s", file=sys.stderr, flush=True)
        if args.dry_run:
            job = Job.from_json(json.loads(args.dry_run.read_text()))
            print(json.dumps(trainer.dry_run(job), indent=1))
            return 0
    except (ReefError, OSError, ValueError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2
    followed = args.follow_parent
    try:
        work(trainer, args.steps, once=args.once, alive=lambda: not followed or os.getppid() == started_by)
    except StoreError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m reef.train", description="Train the jobs in a steps folder.")
    parser.add_argument("--model", required=True, help="base model folder")
    parser.add_argument("--steps", required=True, type=Path, help="folder of jobs and results")
    parser.add_argument("--releases", required=True, type=Path, help="folder the releases are written to")
    parser.add_argument("--recipe", required=True, help="entry point or module:Class")
    parser.add_argument("--recipe-config", type=Path, help="JSON file of the recipe's settings")
    parser.add_argument("--once", action="store_true", help="do the jobs that wait, then end")
    parser.add_argument("--dry-run", type=Path, metavar="JOB", help="report one job file's step, write nothing")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--method", choices=("lora", "full"), default="lora", help="what is trained (default lora)")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank")
    parser.add_argument("--alpha", type=int, default=32, help="LoRA alpha")
    parser.add_argument("--layers", type=float, default=1.0, help="share of the layers trained, the last ones")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the frozen base")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--limits", default="{}", help="gate: its limits as a JSON object")
    parser.add_argument("--no-gate", action="store_true", help="measure, but reject nothing")
    parser.add_argument("--follow-parent", action="store_true", help="end when the starting process is gone")
    return parser.parse_args()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Leave at once: an unfinished step has no result and is run again."""
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
