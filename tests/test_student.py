"""The simulated student: problems, hidden rule, wording, sessions against a real socket, report."""

from __future__ import annotations

import asyncio
import io
import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recipes.openclawrl.examples.openclawrl.student import (
    Check,
    Control,
    LiveStatus,
    Problem,
    Reply,
    Result,
    ServiceNumbers,
    Session,
    Settings,
    View,
    adapted_at,
    agreement,
    chance_of_run,
    check,
    generated,
    reactions,
    run_control,
    run_student,
    write_report,
)
from recipes.openclawrl.examples.openclawrl.student.problems import TEMPLATES, gsm8k
from recipes.openclawrl.examples.openclawrl.student.report import rolling
from recipes.openclawrl.examples.openclawrl.student.rule import MARKUP
from recipes.openclawrl.examples.openclawrl.student.run import Event
from reef.errors import ConfigError

GOOD = "She has 4 x 6 = 24 pencils at first. Then 24 - 5 = 19, so 19 pencils are left."
NUMBERED = "1. First we multiply 4 x 6 = 24.\n2. Then we subtract 24 - 5 = 19."
TASK = Problem("...", 19, "pencils")


# --- problems -------------------------------------------------------------------------------------


def test_problems_are_the_same_each_time_and_differ_by_seed_and_index() -> None:
    stream = [generated(3, k) for k in range(200)]
    assert stream == [generated(3, k) for k in range(200)]
    assert len({p.text for p in stream}) >= 195
    assert [generated(4, k) for k in range(200)] != stream
    assert {p.name for p in stream[: len(TEMPLATES)]} == {t.name for t in TEMPLATES}, "each story once per deal"


def test_problems_are_whole_positive_and_short() -> None:
    for problem in (generated(seed, k) for seed in range(5) for k in range(100)):
        assert problem.answer > 0 and problem.answer == int(problem.answer)
        assert "{" not in problem.text and len(problem.text) < 240
        assert problem.text.endswith("so I can follow.")


def test_a_known_problem() -> None:
    pencils = next(t for t in TEMPLATES if t.name == "pencils")
    assert pencils.answer(4, 6, 5) == 19


def test_gsm8k_takes_the_72_rows_of_the_stream(tmp_path: Path) -> None:
    rows = [{"question": f"Question {n}?", "answer": f"...\n#### {n},000"} for n in range(1319)]
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    problems = gsm8k(path)
    assert len(problems) == 72
    assert problems[0].text.startswith("Question 677? ") and problems[0].answer == 677000
    assert problems[-1].name == "gsm8k/631"


@pytest.mark.parametrize("text", ["not json", '{"question": "only one row"}'])
def test_gsm8k_says_what_is_wrong_with_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not the GSM8K test split"):
        gsm8k(path)
    with pytest.raises(ConfigError, match="can't be read"):
        gsm8k(tmp_path / "missing.jsonl")


# --- rule -----------------------------------------------------------------------------------------

REPLIES: list[tuple[str, tuple[str, ...], bool]] = [
    (GOOD, (), True),
    ("4*6=24 and 24-5=19.", (), True),
    ("4 boxes x 6 pencils = 24 pencils.", (), True),
    ("He pays $7 * 6 = $42.", (), True),
    ("8 (uncle) + 7 (aunt) = 15 stamps.", (), True),
    ("1,200 + 300 = 1,500", (), True),
    ("3 times 4 = 12 rolls", (), True),
    ("Here's how it goes:\nTake 24 - 5 = 19.", (), True),
    ("5 - 2 = 3. Nice!\n\nThe step after that is 3 + 4 = 7.", (), True),
    ("It is 1.5 * 2 = 3 litres", (), True),
    ("There are 19 pencils left.", (), False),
    ("Multiply 4 by 6 and take away 5.", (), False),
    ("x = 19", (), False),
    ("The total is 4 + 6", (), False),
    ("", (), False),
    (NUMBERED, ("numbered",), True),
    ("1) 4 x 6 = 24\n2) 24 - 5 = 19", ("numbered",), True),
    ("Step 1: 4 x 6 = 24.\nStep 2: 24 - 5 = 19.", ("steps",), True),
    ("We start. Step one: 4 x 6 = 24", ("steps",), True),
    ("- 4 x 6 = 24\n- 24 - 5 = 19", ("bullets",), True),
    ("* 4 x 6 = 24", ("bullets",), True),
    ("• 4 x 6 = 24", ("bullets",), True),
    ("So **24** it is: 4 x 6 = 24.", ("bold",), True),
    ("## Solution\n4 x 6 = 24", ("heading",), True),
    ("Solution:\n4 x 6 = 24", ("heading",), True),
    ("4 x 6 = 24, so \\boxed{24}", ("latex",), True),
    ("4 x 6 = 24. The final answer is 24.", ("final",), True),
    ("| a | b |\n4 x 6 = 24", ("table",), True),
    ("**Step 1:** multiply\n1. go", ("bold", "numbered", "steps"), False),
]


@pytest.mark.parametrize(("reply", "violations", "calculates"), REPLIES)
def test_the_rule(reply: str, violations: tuple[str, ...], calculates: bool) -> None:
    seen = check(reply, TASK)
    assert seen.violations == violations
    assert seen.shows_calculation is calculates
    assert seen.passes is (not violations and calculates)


def test_the_strict_rule_wants_the_right_number_too() -> None:
    assert check(GOOD, TASK, strict=True).passes
    wrong = check(GOOD.replace("19", "18"), TASK, strict=True)
    assert not wrong.passes and not wrong.correct and wrong.wrong == ()
    assert check(GOOD.replace("19", "18"), TASK).passes


@pytest.mark.parametrize(("p", "n"), [(0.15, 36), (0.25, 36), (0.5, 12)])
def test_chance_of_run_against_simulation(p: float, n: int) -> None:
    rng = random.Random(0)
    trials = 20_000
    hits = sum(adapted_at([rng.random() < p for _ in range(n)]) is not None for _ in range(trials))
    assert chance_of_run(p, n) == pytest.approx(hits / trials, abs=0.012)


def test_chance_of_run_at_its_ends() -> None:
    assert chance_of_run(0.3, 3) == pytest.approx(0.027)
    assert chance_of_run(0.3, 2) == 0
    assert chance_of_run(1.0, 3) == 1 and chance_of_run(0.0, 50) == 0


# --- reactions ------------------------------------------------------------------------------------


def test_there_is_enough_wording_for_everything_the_rule_can_find() -> None:
    assert {*MARKUP, "calculation", "correct"} == set(reactions.COMPLAINTS)
    for degrees in reactions.COMPLAINTS.values():
        assert len({phrase for degree in degrees for phrase in degree}) >= 12
    assert len(set(reactions.REDO)) >= 12 and len(set(reactions.THANKS)) >= 12


def test_a_complaint_is_reproducible_about_the_fault_and_never_twice_the_same_running() -> None:
    bad = check(NUMBERED, TASK)
    said = [reactions.complaint(bad, turn, 1, 5, turn) for turn in range(8)]
    assert said == [reactions.complaint(bad, turn, 1, 5, turn) for turn in range(8)]
    assert all(a != b for a, b in pairwise(said))
    pools = [[p.lower() for p in degree] for degree in reactions.COMPLAINTS["numbered"]]
    for turn, text in enumerate(said):
        assert any(phrase in text.lower() for phrase in pools[min(turn, 2)]), text


def test_what_is_fine_is_not_complained_about() -> None:
    only_sums_missing = check("There are 19 pencils.", TASK)
    for turn in range(8):
        text = reactions.complaint(only_sums_missing, turn, 0, 0, turn).lower()
        assert not any(word in text for word in ("list", "bold", "numbered", "heading", "bullet"))


def test_the_opening_never_gives_the_rule_away() -> None:
    words = ("list", "bullet", "bold", "heading", "markdown", "plain", "hand", "format", "calculat", "equals", "prose")
    for problem in (generated(seed, k) for seed in range(3) for k in range(72)):
        assert not any(word in problem.text.lower() for word in words), problem.text


# --- sessions over a socket -----------------------------------------------------------------------


@dataclass
class Scripted:
    """An OpenAI-compatible server whose replies a function chooses; it keeps what it was asked."""

    reply: Callable[[dict[str, Any]], str | None]
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    url: str = ""
    busy: int = 0
    most_busy: int = 0


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict[str, Any]], str | None]], Scripted]]:
    servers: list[ThreadingHTTPServer] = []

    def start(reply: Callable[[dict[str, Any]], str | None]) -> Scripted:
        state = Scripted(reply)
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    state.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
                    number = len(state.requests)
                    state.busy += 1
                    state.most_busy = max(state.most_busy, state.busy)
                text = state.reply(body)
                with lock:
                    state.busy -= 1
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": "length" if text == NUMBERED else "stop"}
                answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                data = json.dumps(answer if text is not None else {"error": {"message": "no"}}).encode()
                self.send_response(200 if text is not None else 400)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.send_header("x-reef-agent-record-id", f"R{number}")
                self.send_header("x-reef-version", "3")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{server.server_port}/v1"
        return state

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def second_try(body: dict[str, Any]) -> str:
    """Fails first, passes after one complaint."""
    return NUMBERED if len(body["messages"]) == 1 else GOOD


def test_a_session_complains_resends_everything_and_thanks(serve: Any, tmp_path: Path) -> None:
    server = serve(second_try)
    result = asyncio.run(run_student(server.url, tmp_path, 1, 7))
    (session,) = result.sessions
    assert [r.check.passes for r in session.replies] == [False, True]
    assert session.turns == 2 and session.accepted and not session.first_reply_passes
    assert session.exchanges == 3 and session.failed_requests == 0
    assert [r.receipt for r in session.replies] == ["R1", "R2"] and session.replies[0].version == 3
    assert session.replies[0].truncated and not session.replies[1].truncated
    assert result.labels() == {"R1": False, "R2": True}
    (first, _), (_, second), (_, third) = server.requests[0], server.requests[1], server.requests[2]
    assert not any(h.startswith("x-reef") for h in first), "a plain agent sends no header of ours"
    assert [m["role"] for m in third["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert second["messages"] == third["messages"][:3]
    assert third["messages"][0]["content"] == generated(7, 0).text
    assert third["messages"][4]["content"] in reactions.THANKS and third["max_tokens"] == 8
    assert second["max_tokens"] == Settings().max_tokens
    assert len({body["seed"] for _, body in server.requests}) == 3


def test_a_session_gives_up_after_eight_replies(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda body: NUMBERED)
    (session,) = asyncio.run(run_student(server.url, tmp_path, 1, 0)).sessions
    assert session.turns == 8 == len(server.requests) and not session.accepted


def test_a_failed_request_is_counted_and_ends_its_session_only(serve: Any, tmp_path: Path) -> None:
    bad = generated(0, 1).text
    server = serve(lambda body: None if body["messages"][0]["content"] == bad else GOOD)
    result = asyncio.run(run_student(server.url, tmp_path, 3, 0))
    assert result.failed_requests == 1
    assert result.passes == [True, False, True]


def test_sessions_start_in_order_side_by_side_after_the_hook(serve: Any, tmp_path: Path) -> None:
    gate = threading.Barrier(4)

    def meet(body: dict[str, Any]) -> str:
        if len(body["messages"]) == 1:
            gate.wait(timeout=10)  # only passes when four first requests are in flight together
        return GOOD

    server = serve(meet)
    order: list[tuple[str, int]] = []

    async def before(k: int) -> None:
        order.append(("before", k))

    def on_event(event: Event) -> None:
        if event.kind == "started":
            order.append(("started", event.session))

    result = asyncio.run(run_student(server.url, tmp_path, 8, 0, parallel=4, before_session=before, on_event=on_event))
    assert [k for kind, k in order if kind == "before"] == list(range(8))
    assert [k for kind, k in order if kind == "started"] == list(range(8))
    assert all(order.index(("before", k)) < order.index(("started", k)) for k in range(8))
    assert server.most_busy == 4
    assert [s.index for s in result.sessions] == list(range(8))


def test_a_killed_run_goes_on_with_the_next_session(serve: Any, tmp_path: Path) -> None:
    server = serve(second_try)

    class Killed(Exception):
        pass

    async def die_at_three(k: int) -> None:
        if k == 3:
            raise Killed

    with pytest.raises(Killed):
        asyncio.run(run_student(server.url, tmp_path, 6, 0, parallel=1, before_session=die_at_three))
    journal = tmp_path / "sessions.jsonl"
    with journal.open("a") as file:
        file.write('{"index": 3, "repl')  # a line the kill cut off
    asked = len(server.requests)
    events: list[tuple[str, int]] = []
    result = asyncio.run(run_student(server.url, tmp_path, 6, 0, on_event=lambda e: events.append((e.kind, e.session))))
    assert len(result.sessions) == 6 and len(server.requests) == asked + 3 * 3
    assert [k for kind, k in events if kind == "resumed"] == [0, 1, 2]
    assert [k for kind, k in events if kind == "started"] == [3, 4, 5]
    again = asyncio.run(run_student(server.url, tmp_path, 6, 0))
    assert again.sessions == result.sessions and len(server.requests) == asked + 9
    assert again.seconds >= result.seconds
    with pytest.raises(ConfigError, match="another run"):
        asyncio.run(run_student(server.url, tmp_path, 6, 1))


def test_the_control_asks_the_same_first_messages_untrained(serve: Any, tmp_path: Path) -> None:
    server = serve(second_try)
    learned = asyncio.run(run_student(server.url, tmp_path, 4, 5))
    theirs = {b["messages"][0]["content"]: b["seed"] for _, b in server.requests if len(b["messages"]) == 1}
    server.requests.clear()
    control = asyncio.run(run_control(server.url, tmp_path, 10, 5))
    assert len(control.replies) == 10 == len(server.requests) and control.pass_rate == 0
    ours = {b["messages"][0]["content"]: b["seed"] for _, b in server.requests}
    assert theirs.items() <= ours.items() and learned.passes == control.passes[:4]
    for headers, body in server.requests:
        assert headers["x-reef-scenario"] == "control" and headers["x-reef-train"] == "off"
        assert len(body["messages"]) == 1
    assert asyncio.run(run_control(server.url, tmp_path, 12, 5)).replies[:10] == control.replies
    assert len(server.requests) == 12


# --- live view ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_sessions_rate_and_what_the_service_says(serve: Any, tmp_path: Path, terminal: bool) -> None:
    server, shown = serve(second_try), io.StringIO()
    answers = iter([LiveStatus(judged=5, trained=4, version=2)])

    async def status() -> LiveStatus:
        return next(answers)  # the second call fails, as a service that went away does

    async def watch() -> None:
        console = Console(file=shown, force_terminal=terminal, width=120)
        async with View(3, status, console=console, every_s=0.01) as view:
            await asyncio.sleep(0)
            await run_student(server.url, tmp_path, 3, 0, on_event=view.on_event)

    asyncio.run(watch())
    text = shown.getvalue()
    if terminal:
        assert "3/3" in text and "judged 5  trained 4  version 2" in text and "version ?" in text
    else:
        assert len(text.splitlines()) == 3 and "first reply fail  2 replies" in text and "0/3" in text


# --- report ---------------------------------------------------------------------------------------

KEYS = [
    *("sessions", "first_reply_passes", "adapted_at", "exchanges", "fates", "judged", "trained", "versions"),
    *("failed_requests", "control", "judge", "untrained_pass_rate", "seed", "seconds"),
]


def made_up(passes: list[bool]) -> Result:
    def reply(ok: bool) -> Reply:
        return Reply("", Check(ok, () if ok else ("numbered",), 1, False), "R", 1, False)

    sessions = [Session(k, "p", "t", (reply(ok),), 2, 0, 1.5) for k, ok in enumerate(passes)]
    return Result(tuple(sessions), 11, 60.0)


def test_adaptation_is_the_first_of_the_first_three_in_a_row() -> None:
    assert adapted_at([True, True, False, True, True, True, True]) == 4
    assert adapted_at([True, True, False, True, True]) is None
    assert adapted_at([]) is None


def test_rolling_share() -> None:
    assert rolling([True, False, False, True], window=2) == [1.0, 0.5, 0.0, 0.5]


def test_agreement_counts_judged_receipts_only() -> None:
    labels = {"a": True, "b": False, "c": False, "d": True}
    assert agreement(labels, {"a": 1, "b": -1, "c": 1, "other": 1}) == pytest.approx(2 / 3)
    assert agreement(labels, {"b": 0}) == 0.0
    assert agreement(labels, {}) is None


def test_the_report_has_the_fixed_keys_first_and_its_files(tmp_path: Path) -> None:
    result = made_up([False] * 8 + [True] * 4)
    control = Control(tuple(made_up([False, True] * 10).sessions[k].replies[0] for k in range(20)), 1, 5.0)
    service = ServiceNumbers(30, {"trained": 20, "no_next_state": 10}, 20, 20, 4, "scripted", 0.9)
    made = write_report(tmp_path, result, control, service)
    assert made == json.loads((tmp_path / "report.json").read_text())
    assert list(made)[: len(KEYS)] == KEYS
    assert made["sessions"] == 12 and made["adapted_at"] == 9 and made["failed_requests"] == 1
    assert made["control"] == {"first_reply_passes": [False, True] * 6, "adapted_at": None}
    assert made["judge"] == {"name": "scripted", "agreement_with_rule": 0.9}
    assert made["untrained_pass_rate"] == 0.5 and made["last_passes"]["learned"] == 4
    rows = (tmp_path / "sessions.csv").read_text().splitlines()
    assert len(rows) == 13 and rows[0].startswith("session,problem,first_reply_passes")
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
