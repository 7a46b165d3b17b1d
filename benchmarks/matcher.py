"""Requests a second and memory of the matcher, from a hundred to a million live sessions.

    python benchmarks/matcher.py [--sessions 100 1000 4096 100000 1000000] [--messages 10 50 200] [--peer DIR]

For each number of live sessions and of messages in a request's history, the matcher is given one request a
session, and is then timed on the next request of some of them, picked at random: each must bind, or the
run fails. A million sessions run with the shortest history only. `--peer DIR` is the unpacked sdist of
reef-infra 0.0.2 (`pip download --no-deps --no-binary :all: reef-infra==0.0.2`): its session index takes
the same requests in turn with ours, up to 4,096 sessions, since it looks at every session for each request.
Times are processor milliseconds, ours and the peer's each the best of several rounds. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from reef.sessions.index import Index, expect_many
from reef.sessions.matcher import Matcher
from reef.wire.exchange import Api, Delivered, Exchange

PEER_SESSIONS = 4096
LONG_SESSIONS = 100_000
"""most sessions with a history of 50 messages or more"""
ROUNDS = 10
Message = dict[str, str]
VOCABULARY = [f"w{i:04d}" for i in range(4096)]
SYSTEM = {"role": "system", "content": "You are a helpful agent. " + "Work carefully and answer briefly. " * 20}


def words(draw: random.Random, n: int) -> str:
    bits = draw.getrandbits(12 * n)
    return " ".join(VOCABULARY[bits >> 12 * i & 4095] for i in range(n))


def history(session: int, messages: int) -> list[Message]:
    """A session's first request: `messages` in all, the user's last."""
    draw = random.Random(session)
    said = [
        {"role": ("assistant", "user")[(messages - 1 - i) % 2], "content": words(draw, 20)} for i in range(messages - 1)
    ]
    return [SYSTEM, *said]


def reply(session: int) -> str:
    return words(random.Random(-session - 1), 20)


def exchange(id: str, at: float, messages: list[Message], said: str) -> Exchange:
    return Exchange(
        id=id,
        time=at,
        started=at,
        api=Api.CHAT,
        scenario="default",
        client="c",
        headers={},
        request={"model": "m", "messages": messages},
        response={"choices": [{"message": {"role": "assistant", "content": said}}]},
        status=200,
        delivered=Delivered.FULL,
        sampled=None,
    )


def following(session: int, messages: int) -> list[Message]:
    draw = random.Random(f"next {session}")
    return [*history(session, messages), {"role": "assistant", "content": reply(session)},
            {"role": "user", "content": words(draw, 20)}]  # fmt: skip


def timed(ask: Callable[[int], bool], sessions: list[int]) -> float:
    """Processor milliseconds a request, in the best round: neighbours on the machine only ever slow one down."""
    size = len(sessions) // ROUNDS
    rounds = []
    for at in range(0, size * ROUNDS, size):
        started = time.process_time()
        bound = [ask(session) for session in sessions[at : at + size]]
        rounds.append((time.process_time() - started) / size * 1000)
        if not all(bound):
            raise SystemExit("a request that goes on from a served reply was not bound")
    return min(rounds)


def ours(sessions: int, messages: int, picked: list[int]) -> tuple[float, float]:
    """(milliseconds a request, bytes a session)."""
    process = psutil.Process()
    before = process.memory_info().rss
    matcher = Matcher(Index(capacity=10 * sessions))
    for session in range(sessions):
        matcher.observe(exchange(f"e{session}", float(session) / sessions, history(session, messages), reply(session)))
    grown = (process.memory_info().rss - before) / sessions
    requests = {s: exchange(f"n{s}", 2.0, following(s, messages), words(random.Random(s), 20)) for s in picked}
    return timed(lambda s: matcher.observe(requests[s]).binds == f"e{s}", picked), grown


def theirs(module: ModuleType, sessions: int, messages: int, picked: list[int]) -> float:
    index = module.SessionIndex(900.0)
    for session in range(sessions):
        index.observe(f"e{session}", history(session, messages), float(session) / sessions)
    requests = {s: following(s, messages) for s in picked}
    return timed(lambda s: index.observe(f"n{s}", requests[s], 2.0).binding is not None, picked)


def load_peer(folder: Path) -> ModuleType:
    """Its session module, without what its packages import around it."""
    for name, path in (("recipes", "recipes"), ("recipes.openclawrl", "recipes/openclawrl")):
        package = ModuleType(name)
        package.__path__ = [str(folder / path)]
        sys.modules[name] = package
    return importlib.import_module("recipes.openclawrl.sessions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 1000, 4096, 100_000, 1_000_000])
    parser.add_argument("--messages", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--requests", type=int, default=500, help="timed requests of each setting")
    parser.add_argument("--peer", type=Path, help="unpacked sdist of reef-infra 0.0.2")
    options = parser.parse_args()
    expect_many()  # as the learner does
    peer = load_peer(options.peer) if options.peer else None
    measured: dict[str, dict[str, Any]] = {}
    columns = ("messages", "sessions", "ms/request", "requests/s", "kB/session", "peer ms", "ratio")
    print(" ".join(f"{name:>10}" for name in columns))
    for messages in options.messages:
        for sessions in options.sessions:
            if messages > min(options.messages) and sessions > LONG_SESSIONS:
                continue
            draw = random.Random(sessions)
            picked = draw.sample(range(sessions), min(sessions, options.requests)) if sessions > 1 else [0]
            mine, size = ours(sessions, messages, picked)
            other = theirs(peer, sessions, messages, picked) if peer and sessions <= PEER_SESSIONS else None
            row = {"ms": round(mine, 4), "bytes_per_session": round(size), "peer_ms": other and round(other, 4)}
            measured[f"{messages}x{sessions}"] = row
            ratio = other / mine if other else None
            cells = [f"{mine:.3f}", f"{1000 / mine:.0f}", f"{size / 1000:.2f}"]
            cells += [f"{other:.3f}" if other else "-", f"{ratio:.1f}" if ratio else "-"]
            print(" ".join(f"{cell:>10}" for cell in (messages, sessions, *cells)), flush=True)
    short = min(options.messages)
    few, many = (measured[f"{short}x{n}"]["ms"] for n in (min(options.sessions), max(options.sessions)))
    summary: dict[str, Any] = {"growth": round(many / few, 2), "ms_most_sessions": many, "settings": measured}
    at_peer = measured.get(f"{short}x{PEER_SESSIONS}")
    if at_peer and at_peer["peer_ms"]:
        summary["times_peer_at_4096"] = round(at_peer["peer_ms"] / at_peer["ms"], 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
