"""Reef's gateway against direct access, a bare proxy on the same stack, LiteLLM and reef-infra.

    python benchmarks/gateway.py [--seconds 1] [--rounds 3] [--others DIR] [--soak 100000] [--only reef-process bare]

One canned engine on loopback (`canned.py`), every contender a process of its own, all measured in one run
in rounds that take turns, since neighbours on the machine only ever slow one of them down. Reef returns to
the client what the others return, and beside that asks the engine for token ids, log-probs and the top 16,
reads them and has them durable before the last byte; `reef-process` and `reef-power` are its two durability
settings. The client, the engine and what is measured share the machine's cores.

1. closed loop: requests/s, p50, p99 and median time to the first byte at each concurrency, body and mode;
   of the rounds the one with the most requests a second counts; `cpu` is processor time a request of the
   answering process, the number to read on a machine that is busy with other work
2. open loop: latency added over direct access at `--rate` requests a second
3. a 20 MB body while small requests run: the longest time one of them was held up
4. `--soak N`: resident memory of Reef over N requests

`--others DIR` also measures LiteLLM and reef-infra from virtual environments in DIR, made there if missing.
The last line is one JSON object: `reef_over_*` are requests/s divided (above 1: Reef is faster), smallest and
geometric mean over the closed loop's rows; times are milliseconds, memory MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import contenders
import load
import psutil
from contenders import Contender
from load import Samples, Timed, quantile

PATH = "/v1/chat/completions"
DIRECT = "direct"
REEF = ("reef-process", "reef-power")
BIG = 20_000_000
WARM_UP = 20
Cell = tuple[int, bool, int]
"""body bytes, streamed, concurrent clients"""


@dataclass(frozen=True, slots=True)
class Plan:
    seconds: float
    rounds: int
    concurrency: Sequence[int]
    sizes: Sequence[int]
    rate: float
    open_seconds: float


def request(size: int, stream: bool) -> bytes:
    return load.post(PATH, load.chat_request(size, stream=stream))


async def warm_up(urls: dict[str, str]) -> None:
    """Every contender answers both kinds of request once it has opened connections and imported modules."""
    for name, url in urls.items():
        for stream in (False, True):
            if not (await load.closed_loop(url, request(1000, stream), 4, 30, count=WARM_UP)).latencies:
                raise SystemExit(f"{name} gave no good answer")


async def closed(urls: dict[str, str], pids: dict[str, int], plan: Plan) -> dict[Cell, dict[str, Samples]]:
    cells: list[Cell] = [(s, stream, c) for s in plan.sizes for stream in (False, True) for c in plan.concurrency]
    results: dict[Cell, dict[str, Samples]] = {}
    columns = [f"{name:>8}" for name in ("req/s", "p50 ms", "p99 ms", "first ms", "cpu ms")]
    print(f"{'body':>8} {'mode':>6} {'conc':>4}  {'':14} {' '.join(columns)} failed")
    for cell in cells:
        size, stream, concurrent = cell
        best: dict[str, Samples] = {}
        for _ in range(plan.rounds):
            for name, url in urls.items():
                process = psutil.Process(pids[name])
                used = sum(process.cpu_times()[:2])
                samples = await load.closed_loop(url, request(size, stream), concurrent, plan.seconds)
                samples.cpu = sum(process.cpu_times()[:2]) - used
                if name not in best or samples.rate > best[name].rate:
                    best[name] = samples
        results[cell] = best
        for name, s in best.items():
            p50, p99 = quantile(s.latencies, 0.5) * 1e3, quantile(s.latencies, 0.99) * 1e3
            print(
                f"{size:>8} {'stream' if stream else 'whole':>6} {concurrent:>4}  {name:14} {s.rate:>8.1f} "
                f"{p50:>8.2f} {p99:>8.2f} {quantile(s.first_bytes, 0.5) * 1e3:>8.2f} "
                f"{s.cpu / max(1, len(s.latencies)) * 1e3:>8.2f} {s.failed:>6}",
                flush=True,
            )
    return results


def rate_ratios(results: dict[Cell, dict[str, Samples]], ours: str, other: str) -> list[float]:
    return [row[ours].rate / row[other].rate for row in results.values() if other in row and row[other].latencies]


async def opened(urls: dict[str, str], plan: Plan, stream: bool) -> dict[str, list[float]]:
    """Latencies at the fixed rate, by contender, over all rounds."""
    seen: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(plan.rounds):
        for name, url in urls.items():
            seen[name] += (await load.open_loop(url, request(1000, stream), plan.rate, plan.open_seconds)).latencies
    print(f"\n{plan.rate:g} requests/s, 1 kB, {'streamed' if stream else 'whole'}; added is over direct access")
    for name, values in seen.items():
        p50, p99 = (quantile(values, q) * 1e3 for q in (0.5, 0.99))
        added = [(quantile(values, q) - quantile(seen[DIRECT], q)) * 1e3 for q in (0.5, 0.99)]
        print(f"  {name:14} p50 {p50:7.2f}  p99 {p99:7.2f}   added p50 {added[0]:7.2f}  p99 {added[1]:7.2f}  ms")
    return seen


async def big_body(url: str) -> tuple[float, float, float]:
    """(longest latency of small requests without and with 20 MB bodies beside them, seconds of one such body)."""
    small, big = request(1000, False), request(BIG, False)
    await load.one(url, big)  # the engine has yet to make its answer, which takes it a second
    quiet = await load.open_loop(url, small, 50, 4)
    loaded: Timed
    loaded, took = await asyncio.gather(load.open_loop(url, small, 50, 6), _some(url, big))
    return max(quiet.latencies), max(loaded.latencies), statistics.median(took)


async def _some(url: str, big: bytes) -> list[float]:
    took = []
    for _ in range(3):
        await asyncio.sleep(0.7)
        took.append(await load.one(url, big))
    return took


async def soak(contender: Contender, requests: int) -> tuple[list[float], int]:
    """(resident MiB after each tenth, failed requests)."""
    process = psutil.Process(contender.pid)
    failed, sizes = 0, []
    print(f"\nsoak of {contender.name}: {requests} requests, one in two streamed, 16 at a time")
    for tenth in range(10):
        for stream in (False, True):
            got = await load.closed_loop(contender.url, request(1000, stream), 16, 1e9, count=requests // 20)
            failed += got.failed
        sizes.append(process.memory_info().rss / 2**20)
        print(f"  {(tenth + 1) * requests // 10:>8} requests: {sizes[-1]:7.1f} MiB", flush=True)
    return sizes, failed


def start(stack: ExitStack, folder: Path, options: argparse.Namespace) -> tuple[Contender, list[Contender]]:
    """The engine and the contenders that are there."""
    engine = stack.enter_context(contenders.engine(folder, "--tokens", str(options.tokens)))
    planned = [contenders.bare_proxy(folder, engine.url)]
    planned += [contenders.reef(folder, engine.url, name.removeprefix("reef-")) for name in REEF]
    if options.others:
        contenders.install(options.others)
        planned.append(contenders.litellm(folder, engine.url, options.others.resolve()))
        planned.append(contenders.reef_infra(folder, engine.url, options.others.resolve()))
    else:
        print("litellm and reef-infra are left out: name a folder for them with --others")
    running = []
    for contender in planned:
        if options.only and contender.name not in options.only:
            continue
        try:
            running.append(stack.enter_context(contender))
        except (RuntimeError, OSError) as error:
            print(f"{contender.name} is left out: {error}")
    return engine, running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each closed-loop measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000], help="body bytes")
    parser.add_argument("--rate", type=float, default=200.0, help="requests/s of the open loop")
    parser.add_argument("--open-seconds", type=float, default=5.0, help="of each open-loop measurement")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the canned reply")
    parser.add_argument("--others", type=Path, help="folder with (or for) the environments of LiteLLM and reef-infra")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these contenders only")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="requests of the memory test")
    options = parser.parse_args()
    plan = Plan(options.seconds, options.rounds, options.concurrency, options.sizes, options.rate, options.open_seconds)
    ratios: dict[str, float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine, running = start(stack, folder, options)
        by_name = {c.name: c for c in running}
        urls = {DIRECT: engine.url, **{c.name: c.url for c in running}}
        pids = {DIRECT: engine.pid, **{c.name: c.pid for c in running}}
        asyncio.run(warm_up(urls))
        results = asyncio.run(closed(urls, pids, plan))
        for ours in [name for name in REEF if name in urls]:
            for other in [name for name in urls if name not in REEF and name != DIRECT]:
                values = rate_ratios(results, ours, other)
                key = f"{ours.replace('-', '_')}_over_{other.replace('-', '_')}"
                ratios |= {f"{key}_min": min(values), f"{key}_mean": statistics.geometric_mean(values)}
        fast = {n: u for n, u in urls.items() if n not in ("litellm", "reef-infra") or can_keep_up(results, n, plan)}
        for name in urls.keys() - fast.keys():
            print(f"\n{name} can't serve {plan.rate:g} requests/s and is left out of the open loop", end="")
        for stream in (False, True):
            seen = asyncio.run(opened(fast, plan, stream))
            for name in fast.keys() - {DIRECT}:
                for q in (50, 99):
                    added = (quantile(seen[name], q / 100) - quantile(seen[DIRECT], q / 100)) * 1e3
                    ratios[f"{name.replace('-', '_')}_added_p{q}_{'stream' if stream else 'whole'}_ms"] = added
        for name in [n for n in ("bare", *REEF) if n in urls]:
            quiet, loaded, took = asyncio.run(big_body(urls[name]))
            ratios[f"{name.replace('-', '_')}_big_body_delay_ms"] = max(0.0, loaded - quiet) * 1e3
            print(
                f"20 MB body, {name}: others wait {loaded * 1e3:.1f} ms at most ({quiet * 1e3:.1f} without it); "
                f"it takes {took:.2f} s"
            )
        if options.soak and REEF[0] in by_name:
            sizes, failed = asyncio.run(soak(by_name[REEF[0]], options.soak))
            ratios |= {"soak_mib_first_tenth": sizes[0], "soak_mib_last": sizes[-1], "soak_failed": failed}
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


def can_keep_up(results: dict[Cell, dict[str, Samples]], name: str, plan: Plan) -> bool:
    small = [row[name].rate for (size, _, _), row in results.items() if size == min(plan.sizes)]
    return bool(small) and min(max(small), small[-1]) > 1.25 * plan.rate


if __name__ == "__main__":
    main()
