"""How fast the record log takes exchanges, and whether it stays so as it grows.

The floor is plain `sqlite3` writing the same bytes into the same table in batches of the same size, with
the same settings: what Reef's writer adds is rows made from exchanges, one number per row, a queue, and an
answer to each of the callers that wait. Measured at each of the sizes given (rows of about 400 bytes,
filled in by SQL): records/s of many callers, the time of one append alone, and what readers pay.

    python benchmarks/store.py --rows 1000000 10000000 --dir runs/store
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sqlalchemy import Engine, func, select, text  # noqa: E402

from reef.store.columns import to_json  # noqa: E402
from reef.store.database import Durability, open_database  # noqa: E402
from reef.store.log import LogReader, LogWriter  # noqa: E402
from reef.store.migrations import LOG  # noqa: E402
from reef.store.rows import exchange_row  # noqa: E402
from reef.store.schema import exchanges  # noqa: E402
from reef.store.writer import BATCH  # noqa: E402
from reef.wire.exchange import Exchange  # noqa: E402
from tests.records import record, sampled  # noqa: E402

COLUMNS = [c.name for c in exchanges.columns if c.name != "erased"]
FILL_STEP = 500_000
READY = 20_000


def plain_rate(
    file: Path, durability: Durability, rows: Sequence[dict[str, Any]], seconds: float
) -> tuple[float, float]:
    """(records/s, processor microseconds a record) of sqlite3 alone, a transaction per batch of ready rows."""
    file.unlink(missing_ok=True)
    open_database(f"sqlite:///{file}", LOG).dispose()
    db = sqlite3.connect(file, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
    statement = f"INSERT INTO exchanges ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
    done = 0
    started, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        batch = []
        for row in rows:
            done += 1
            batch.append([done if c == "seq" else f"{done:026d}" if c == "id" else row[c] for c in COLUMNS])
        db.execute("BEGIN IMMEDIATE")
        db.executemany(statement, batch)
        db.execute("COMMIT")
    rate, cost = done / (time.perf_counter() - started), (time.process_time() - cpu) / done
    db.close()
    return rate, cost * 1e6


def reef_rate(
    engine: Engine, make: Callable[[], Exchange], callers: int, seconds: float
) -> tuple[float, float, list[float]]:
    """(records/s, processor microseconds a record, each append's seconds) of `callers` that append at once."""
    writer = LogWriter(engine)
    times: list[float] = []
    ready = iter([make() for _ in range(READY)])  # made before: a client's request is not the store's work

    async def caller(until: float) -> None:
        while (now := time.perf_counter()) < until:
            await writer.exchange(next(ready, None) or make())
            times.append(time.perf_counter() - now)

    async def run() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(caller(started + seconds) for _ in range(callers)))
        return time.perf_counter() - started

    cpu = time.process_time()
    took = asyncio.run(run())
    cost = (time.process_time() - cpu) / len(times)
    writer.close()
    return len(times) / took, cost * 1e6, times


def fill(engine: Engine, rows: int) -> float:
    """Bring the log to `rows` exchanges; returns the seconds it took."""
    started = time.perf_counter()
    with engine.connect() as c:
        at = c.execute(select(func.max(exchanges.c.seq))).scalar() or 0
    request = to_json({"model": "m", "messages": [{"role": "user", "content": "x" * 120}]})
    response = to_json({"choices": [{"message": {"role": "assistant", "content": "y" * 60}}]})
    series = "WITH RECURSIVE s(n) AS (SELECT :low UNION ALL SELECT n + 1 FROM s WHERE n < :high) SELECT"
    name = "printf('f%025d', n)"
    if engine.dialect.name == "postgresql":
        series, name = "SELECT", "'f' || lpad(n::text, 25, '0')"
    source = "FROM s" if engine.dialect.name == "sqlite" else "FROM generate_series(:low, :high) AS g(n)"
    insert = (
        "INSERT INTO exchanges (seq, id, time, started, api, scenario, headers, request, response, status, delivered,"
        f" size) {series} n, {name}, n, n, 'chat', 'default', '{{}}', :request, :response, 200, 'full', 260 {source}"
    )
    while at < rows:
        high = min(rows, at + FILL_STEP)
        with engine.connect().execution_options(sqlite_begin="IMMEDIATE") as c, c.begin():
            c.execute(text(insert), {"low": at + 1, "high": high, "request": request, "response": response})
        at = high
        print(f"  {at} rows", file=sys.stderr, flush=True)
    return time.perf_counter() - started


def reading(engine: Engine) -> dict[str, float]:
    """Milliseconds of what readers ask for, at the log's present size."""
    reader = LogReader(engine)
    last = reader.count()
    middle = reader.tail(last // 2, 1)[0].id

    def ms(work: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1000

    return {
        "tail_ms": ms(lambda: reader.tail(last - 64, 64)),
        "get_ms": ms(lambda: reader.get(middle)),
        "count_ms": ms(reader.count),
    }


def measure(engine: Engine, make: Callable[[], Exchange], callers: int, seconds: float) -> dict[str, float]:
    reef_rate(engine, make, callers, min(1.0, seconds / 4))  # warm
    rate, cost, _ = reef_rate(engine, make, callers, seconds)
    _, _, alone = reef_rate(engine, make, 1, seconds)
    alone.sort()
    numbers = {"records_per_s": rate, "cpu_us": cost, "append_p50_ms": statistics.median(alone) * 1000}
    return {**numbers, "append_p99_ms": alone[int(len(alone) * 0.99)] * 1000, **reading(engine)}


def table(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0])
    print("  ".join(f"{n:>16}" for n in names))
    for row in rows:
        print("  ".join(f"{v:16.2f}" if isinstance(v, float) else f"{v!s:>16}" for v in row.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--dir", type=Path, default=Path("runs/store"))
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--tokens", type=int, default=0, help="sampled tokens per exchange, with 16 log-probs each")
    parser.add_argument("--callers", type=int, default=BATCH)
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--keep", action="store_true", help="leave the filled database for another run")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)

    def make() -> Exchange:
        return record("x" * 120, sampled=sampled(args.tokens) if args.tokens else None)

    result: dict[str, Any] = {"store": args.store, "tokens": args.tokens, "batch": BATCH, "callers": args.callers}
    if args.store == "postgres":
        from tests.postgres import server

        with server(args.dir.resolve() / f"pg-{time.time_ns()}") as running:
            url = running.database()
            sizes = grow(lambda d: open_database(url, LOG, durability=d), make, args)
    else:
        rows = [exchange_row(make()) for _ in range(BATCH)]
        floors: dict[str, float] = {}
        floor_cost: dict[str, float] = {}
        prices: dict[str, float] = {}
        for durability in ("process", "power"):
            floors[durability], floor_cost[durability] = plain_rate(
                args.dir / "plain.db", durability, rows, args.seconds
            )
            file = args.dir / f"{durability}.db"
            for old in args.dir.glob(f"{durability}.db*"):
                old.unlink()
            engine = open_database(f"sqlite:///{file}", LOG, durability=durability)
            numbers = measure(engine, make, args.callers, args.seconds)
            engine.dispose()
            kept = ("records_per_s", "cpu_us", "append_p50_ms", "append_p99_ms")
            prices |= {f"{durability}_{k}": numbers[k] for k in kept}
        shown = [
            {
                "durability": d,
                "plain sqlite3/s": floors[d],
                "reef/s": prices[f"{d}_records_per_s"],
                "share of floor": prices[f"{d}_records_per_s"] / floors[d],
                "plain cpu us": floor_cost[d],
                "reef cpu us": prices[f"{d}_cpu_us"],
                "append p50 ms": prices[f"{d}_append_p50_ms"],
                "append p99 ms": prices[f"{d}_append_p99_ms"],
            }
            for d in ("process", "power")
        ]
        table(shown)
        print()
        result |= {"floor_per_s": floors, **prices}
        result["share_of_floor"] = prices["process_records_per_s"] / floors["process"]
        result["floor_share_by_cpu"] = floor_cost["process"] / prices["process_cpu_us"]
        result["price_of_power"] = prices["process_records_per_s"] / prices["power_records_per_s"]
        sizes = grow(lambda d: open_database(f"sqlite:///{args.dir / 'grown.db'}", LOG, durability=d), make, args)
    table(sizes)
    result["sizes"] = sizes
    first, last = sizes[0], sizes[-1]
    result["append_p50_last_over_first"] = last["append_p50_ms"] / first["append_p50_ms"]
    result["tail_last_over_first"] = last["tail_ms"] / first["tail_ms"]
    if not args.keep:
        for old in args.dir.glob("*.db*"):
            old.unlink()
    print(json.dumps(result))
    return 0


def grow(opened: Callable[[Durability], Engine], make: Callable[[], Exchange], args: Any) -> list[dict[str, Any]]:
    """Measurements at each size, smallest first."""
    sizes = []
    engine = opened("process")
    for rows in sorted(args.rows):
        seconds = fill(engine, rows)
        sizes.append({"rows": rows, **measure(engine, make, args.callers, args.seconds), "fill_s": seconds})
    engine.dispose()
    return sizes


if __name__ == "__main__":
    sys.exit(main())
