"""`python -m recipes.openclawrl.examples.openclawrl.study`: the study, run by run, and its page.

Runs that are finished are skipped, one that was stopped goes on at its last round; so the same command
may be given again at any time, and two may run side by side on different runs.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from pathlib import Path

from recipes.openclawrl.examples.openclawrl.trial.arms import ARMS, Arm, changed
from recipes.openclawrl.examples.openclawrl.trial.persona import PERSONAS

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "study"


def main() -> int:
    args = _arguments()
    if args.command == "report":
        from recipes.openclawrl.examples.openclawrl.trial.page import write_page

        write_page(args.results, args.docs)
        return 0
    for seed in _numbers(args.seeds):
        for arm in args.arms.split(","):
            for persona in args.personas.split(","):
                _one(persona, changed(ARMS[arm], args.tag, args.set), seed, args)
    return 0


def _one(persona: str, arm: Arm, seed: int, args: argparse.Namespace) -> None:
    """Do one run unless it is done or somebody else does it."""
    from recipes.openclawrl.examples.openclawrl.trial.results import name_of, write_run
    from recipes.openclawrl.examples.openclawrl.trial.run import Run
    from reef.model import resolve

    name = name_of(persona, arm, seed, args.sessions)
    if (args.results / f"{name}.csv").exists():
        return
    folder = args.work / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        import torch

        torch.set_num_threads(1)
        started = time.time()

        def tell(line: str) -> None:
            print(f"{name} {line}", file=sys.stderr, flush=True)

        run = Run(arm, PERSONAS[persona](), seed, args.sessions, folder, resolve(args.model), tell=tell)
        state = run.go(args.trained)
        row = write_run(args.results, run, state)
        print(f"{name} done in {time.time() - started:.0f} s: {row}", flush=True)


def _numbers(text: str) -> list[int]:
    """`0-4,7` as numbers."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do the runs that are missing")
    run.add_argument("--arms", default="a,e,f,g", help=f"of {', '.join(ARMS)}")
    run.add_argument("--seeds", default="0-4", help="for example 0-4,7")
    run.add_argument("--personas", default="notebook", help=f"of {', '.join(PERSONAS)}")
    run.add_argument("--sessions", type=int, default=36)
    run.add_argument("--trained", type=int, help="end early once so many turns are trained (the soak)")
    run.add_argument("--tag", default="x", help="name of the settings given with --set")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting of the arms")
    run.add_argument("--model", default="default", help="the policy's model, as in serve.yaml")
    run.add_argument("--results", type=Path, default=RESULTS, help="where the rows go")
    run.add_argument("--work", type=Path, default=Path("runs/study"), help="where unfinished runs are kept")
    report = commands.add_parser("report", help="figures and page from the rows")
    report.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--docs", type=Path, default=Path("docs"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
