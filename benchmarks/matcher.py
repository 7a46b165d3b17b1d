"""Requests a second and memory of the matcher, from a hundred to a million live sessions.

    python benchmarks/matcher.py [--sessions 100 1000 4096 100000 1000000] [--messages 10 50 200] [--peer DIR]

For each number of live sessions and of messages in a request's history, the matcher is given two requests a
session, one after the other opened and then gone on with in an order of its own, as sessions that live side by
side are. Then it is timed on the next request of some of them, picked at random: each must bind, or the run
fails. Messages come out of JSON, so that no two requests share a text. A million sessions run with the shortest
history only. `--peer DIR` is the unpacked sdist of
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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
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


def conversation(session: int, messages: int) -> list[Message]:
    """The first `messages` of a session: the system text, then user and assistant by turns, the user's last."""
    draw = random.Random(session)
    said = [
        {"role": ("assistant", "user")[(messages - 1 - i) % 2], "content": words(draw, 20)} for i in range(messages - 1)
    ]
    return [SYSTEM, *said]


@dataclass(frozen=True, slots=True)
class Sessions:
    """The requests of sessions that live side by side, the same whenever they are asked for."""

    count: int
    messages: int
    """of a session's second request; its third has two more, its first two less"""

    def request(self, session: int, number: int) -> list[Message]:
        """The messages of its first, second or third request, as a service gets them."""
        return orjson.loads(orjson.dumps(self._talk(session)[: self._length(number)]))

    def reply(self, session: int, number: int) -> str:
        """What is answered to that request."""
        return self._talk(session)[self._length(number)]["content"]

    def _talk(self, session: int) -> list[Message]:
        return conversation(session, self.messages + 4)

    def _length(self, number: int) -> int:
        return self.messages + 2 * (number - 2)

    def second(self) -> list[int]:
        """The order in which the sessions go on."""
        order = list(range(self.count))
        random.Random(self.count).shuffle(order)
        return order


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


def ours(live: Sessions, picked: list[int]) -> tuple[float, float]:
    """(milliseconds a request, bytes a session). In a process of its own, since memory that was freed is not given
    back."""
    expect_many()  # as the learner does
    process = psutil.Process()
    before = process.memory_info().rss
    matcher = Matcher(Index(capacity=10 * live.count))

    def asked(session: int, number: int, at: float) -> Exchange:
        return exchange(f"{number}-{session}", at, live.request(session, number), live.reply(session, number))

    for i, session in enumerate(range(live.count)):
        matcher.observe(asked(session, 1, i / live.count))
    for i, session in enumerate(live.second()):
        matcher.observe(asked(session, 2, 1 + i / live.count))
    grown = (process.memory_info().rss - before) / live.count
    requests = {session: asked(session, 3, 2.0) for session in picked}
    return timed(lambda s: matcher.observe(requests[s]).binds == f"2-{s}", picked), grown


def theirs(module: ModuleType, live: Sessions, picked: list[int]) -> float:
    index = module.SessionIndex(900.0)
    for i, session in enumerate(range(live.count)):
        index.observe(f"1-{session}", live.request(session, 1), i / live.count)
    for i, session in enumerate(live.second()):
        index.observe(f"2-{session}", live.request(session, 2), 1 + i / live.count)
    requests = {session: live.request(session, 3) for session in picked}

    def bound(session: int) -> bool:
        binding = index.observe(f"3-{session}", requests[session], 2.0).binding
        return binding is not None and binding.receipt == f"2-{session}"

    return timed(bound, picked)


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
            live = Sessions(sessions, messages)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
                mine, size = apart.submit(ours, live, picked).result()
            other = theirs(peer, live, picked) if peer and sessions <= PEER_SESSIONS else None
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
