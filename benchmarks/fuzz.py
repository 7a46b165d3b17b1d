"""Fuzzes the gateway on a real socket with a SQLite log: odd requests and chopped streams.

    python benchmarks/fuzz.py [--requests 20000] [--seed 1] [--out FILE]

One in ten requests is a stream that arrives chopped or ends too early (hypothesis); the others are made by
schemathesis from Reef's own OpenAPI document, each sent with `--mutants` mutants, `--concurrent` at a time.
Checked: no 5xx but for an engine that broke off, no answer later than 30 s, errors as JSON in the route's
dialect, exactly one record for each request the engine was asked for, and a learner that reads all of it.

Exits with 1 if anything was wrong; `--out` then gets each failure with its request, as JSON lines. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.chopped_streams import PATHS, chop, chopping  # noqa: E402
from tests.fuzz_cases import Case, generated  # noqa: E402
from tests.fuzzing import Failure, Fuzzing, fuzzing  # noqa: E402

CHOPPED_SHARE = 10


def odd_requests(folder: Path, wanted: int, mutants: int, start: int, concurrent: int) -> Fuzzing:
    """The run, at its end."""
    with fuzzing(folder, start) as run:
        document = httpx.get(f"{run.reef.url}/openapi.json").json()
        bodies = sum("requestBody" in o for operations in document["paths"].values() for o in operations.values())
        began = time.perf_counter()
        cases = generated(document, max(1, round(wanted / bodies / (2 + 1.5 * mutants))), start)
        print(f"{len(cases)} cases from the document in {time.perf_counter() - began:.0f} s", flush=True)
        began = time.perf_counter()
        run.send_all(cases, concurrent)
        while run.requests < wanted:
            run.send_all((m for case in cases for m in run.mutator.mutants(case, mutants)), concurrent)
        print(f"{run.requests} requests in {time.perf_counter() - began:.0f} s", flush=True)
        run.check_records()
        run.check_learner()
        return run


def chopped_streams(folder: Path, wanted: int, start: int) -> tuple[int, int, list[Failure]]:
    """(streams, of these broken off by the engine, failures)."""
    failures = []
    with chopping(folder) as chopped:
        for path in PATHS:
            try:
                chop(chopped, path, -(-wanted // len(PATHS)), start)
            except AssertionError as error:
                failures.append(Failure(f"a chopped stream of {path}: {error}"))
        return chopped.requests, chopped.broken_off, failures


def shown(case: Case | None) -> dict[str, object]:
    if case is None:
        return {}
    about = {"method": case.method, "target": case.target, "headers": dict(case.headers)}
    return {**about, "body": case.body.decode("latin-1")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="of both kinds together, at least")
    parser.add_argument("--mutants", type=int, default=24, help="of each valid case, a third of that of each other")
    parser.add_argument("--concurrent", type=int, default=8, help="requests in flight")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="failures and the requests that showed them")
    options = parser.parse_args()
    streams = options.requests // CHOPPED_SHARE
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "odd").mkdir()
        run = odd_requests(
            Path(folder) / "odd", options.requests - streams, options.mutants, options.seed, options.concurrent
        )
        (Path(folder) / "chopped").mkdir()
        sent, broken, failures = chopped_streams(Path(folder) / "chopped", streams, options.seed)
    failures = [*run.failures, *failures]
    print(f"{sent} chopped streams, {broken} of them ended too early")
    for route in sorted({route for route, _ in run.statuses}):
        by_status = sorted((status, count) for (other, status), count in run.statuses.items() if other == route)
        print(f"  {route:32} " + "  ".join(f"{status}: {count}" for status, count in by_status))
    for why, count in Counter(failure.why for failure in failures).most_common(20):
        print(f"FAILED {count} times: {why}")
    seconds, case = run.slowest
    if case is not None:
        print(f"the slowest answer took {seconds:.2f} s: {case.method} {case.target[:80]} {case.body[:200]!r}")
    if options.out:
        options.out.write_text("".join(json.dumps({"why": f.why, **shown(f.case)}) + "\n" for f in failures))
    total: Counter[int] = Counter()
    for (_, status), count in run.statuses.items():
        total[status] += count
    result = {
        "requests": run.requests + sent,
        "statuses": dict(sorted(total.items())),
        "records": len(run.receipts) + sent,
        "slowest_s": round(seconds, 2),
        "unsendable": run.unsendable,
        "failures": len(failures),
    }
    print(json.dumps(result))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
