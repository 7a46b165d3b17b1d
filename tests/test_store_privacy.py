"""What people may ask of a store: to forget, to keep secrets out, to send nothing elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from reef.errors import ConfigError
from reef.learner.erasing import Erasing
from reef.learner.steps import Steps, StepSettings
from reef.learner.turns import Turns
from reef.recipe import JudgedTurn, Rehearsal, Rule
from reef.sessions.fate import Fate
from reef.store.database import open_database
from reef.store.forget import ERASED_FROM, FORGOTTEN, erase_in_log
from reef.store.log import LogReader, LogWriter
from reef.store.migrations import LEARN, LOG
from reef.store.redact import Redactor, luhn
from reef.store.transactions import writing
from reef.train.sample import Sample
from reef.wire.traffic import read_traffic
from tests.records import record, sampled
from tests.reports_recipe import Config
from tests.rule_recipe import RuleJudge
from tests.scripted_engine import Script, scripted_app
from tests.sockets import serving
from tests.stack import Stack, stack

ROOT = Path(__file__).parent.parent
SECRET = "Zephyrine-Quillfeather"


def talk(s: Stack, opener: str, reaction: str) -> list[str]:
    reply, first = s.ask([{"role": "user", "content": opener}])
    history = [{"role": "user", "content": opener}, {"role": "assistant", "content": reply}]
    return [first, s.ask([*history, {"role": "user", "content": reaction}])[1]]


def everything_stored(s: Stack, urls: tuple[str, str]) -> str:
    """All that the databases and their files hold, and every file of the store's folder."""
    found = b"".join(f.read_bytes() for f in s.dir.rglob("*") if f.is_file()).decode("latin-1")
    for url, schema in zip(urls, (LOG, LEARN), strict=True):
        engine = open_database(url, schema)
        if engine.dialect.name == "postgresql":
            with engine.connect() as c:
                for name in c.execute(text("select tablename from pg_tables where schemaname = 'public'")).scalars():
                    found += str(c.execute(text(f'select * from "{name}"')).all())
        engine.dispose()
    return found


def test_a_forgotten_session_leaves_no_words_and_the_answer_says_who_learned(
    urls: tuple[str, str], tmp_path: Path
) -> None:
    with stack(tmp_path, store__log=urls[0], store__learn=urls[1]) as s:
        secret = talk(s, f"call me {SECRET}", f"thanks, {SECRET} it is")
        other = talk(s, "hello", "thanks")
        httpx.post(f"{s.url}/reef/report", json={"id": "r", "references": secret, "score": 1, "feedback": SECRET})
        s.observer().step()
        recipe = RuleJudge(Config(batch_size=2))
        s.judge_all(recipe)
        steps = Steps(s.log, s.learn, Turns(s.log, s.learn), recipe, s.dir / "steps", StepSettings(2, 8, 1e-3, 1, 0, 2))
        (step,) = steps.form()
        release(s, steps, step.id)
        session = s.views.turn(secret[0])["matching"]["session"]
        assert SECRET in everything_stored(s, urls)

        stop = threading.Event()
        engine = open_database(urls[1], LEARN)
        learner = threading.Thread(target=follow, args=(Erasing(s.log, s.learn, engine, s.dir / "steps"), stop))
        learner.start()
        answer = httpx.delete(f"{s.url}/reef/sessions/{session}", timeout=60).raise_for_status().json()
        stop.set()
        learner.join()
        engine.dispose()

        assert answer["exchanges"] == 2
        assert answer["erased"]["learn"] is True
        assert [(r["scenario"], r["version"], r["status"]) for r in answer["releases"]] == [("default", 1, "released")]
        assert set(answer["releases"][0]["turns"]) == set(secret) & set(step.turns)
        for n in range(20):  # other connections of this test may hold the write-ahead log for a moment
            if SECRET not in everything_stored(s, urls) or n == 19:
                break
            httpx.delete(f"{s.url}/reef/sessions/{session}", timeout=60)
            Erasing(s.log, s.learn, s.views._learn, s.dir / "steps").step()
        assert SECRET not in everything_stored(s, urls)
        assert s.learn.fate(secret[0]) is Fate.TRAINED  # final: the weights have learned from it
        assert s.log.get(other[0]) is not None and s.log.get(other[0]).request["messages"]  # type: ignore[union-attr]
        assert sum(s.fates().values()) == s.log.count() == 4
        assert httpx.delete(f"{s.url}/reef/sessions/nobody").status_code == 404
        again = s.observer()
        assert again.step() == 0


def follow(erasing: Erasing, stop: threading.Event) -> None:
    while not stop.is_set():
        erasing.step()
        time.sleep(0.05)


def release(s: Stack, steps: Steps, step: str, status: str = "candidate") -> None:
    """What a trainer leaves behind."""
    job = json.loads((s.dir / "steps" / step / "job.json").read_text())
    folder = s.dir / "releases" / job["scenario"] / f"v{job['version']:06d}"
    folder.mkdir(parents=True)
    about = {k: job[k] for k in ("scenario", "version", "parent", "turns")}
    about |= {"content_hash": "0", "metrics": {}, "gate": {}, "status": status}
    (folder / "release.json").write_text(json.dumps(about))
    (s.dir / "steps" / step / "result.json").write_text(json.dumps({"release": str(folder)}))
    assert steps.collect() == 1


class Rehearses(RuleJudge):
    """Repeats every accepted turn in later steps, and examines them on it."""

    def rehearse(self, past: Sequence[JudgedTurn], version: int, step: Collection[str]) -> Rehearsal:
        made = [self.sample(j.turn, j.verdict, past) for j in past]
        again = tuple(replace(m, turn=f"{m.turn} again", rehearsed=True) for m in made if isinstance(m, Sample))
        return Rehearsal(again, again)


def rehearsed(s: Stack) -> tuple[Steps, str, list[str]]:
    """The receipt of a trained turn, and the running steps of another turn of its scenario and of another scenario."""
    recipe = Rehearses(Config(batch_size=1))
    steps = Steps(s.log, s.learn, Turns(s.log, s.learn), recipe, s.dir / "steps", StepSettings(1, 8, 1e-3, 1, 0, 2))
    secret, _ = talk(s, SECRET, "thanks")
    s.observer().step()
    s.judge_all(recipe)
    (first,) = steps.form()
    release(s, steps, first.id)
    with s.learn.begin() as c:
        s.learn.steps.published(c, "default", 1)
    talk(s, "hello", "no")
    reply, _ = s.ask([{"role": "user", "content": "hi"}], **{"x-reef-scenario": "other"})
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}]
    s.ask([*history, {"role": "user", "content": "thanks"}], **{"x-reef-scenario": "other"})
    s.observer().step()
    s.judge_all(recipe)
    second, other = sorted(steps.form(), key=lambda step: step.scenario)
    assert secret not in second.turns and other.scenario == "other"
    return steps, secret, [second.id, other.id]


def forget(s: Stack, turn: str) -> None:
    """What the gateway does, without waiting for the learner."""
    with writing(s.views._log) as c:
        erase_in_log(c, [turn], FORGOTTEN)


def held(s: Stack, step: str) -> int:
    """Samples in an ended step's job."""
    job = json.loads((s.dir / "steps" / "ended" / step / "job.json").read_text())
    return len(job["samples"]) + len(job["held_out"])


def test_a_forgotten_turn_stays_in_no_job_that_rehearsed_it(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        steps, secret, (second, other) = rehearsed(s)
        assert f"{secret} again" in (s.dir / "steps" / second / "job.json").read_text()
        release(s, steps, second, "rejected")
        release(s, steps, other)
        erasing = Erasing(s.log, s.learn, s.views._learn, s.dir / "steps")
        assert erasing.step() == 0 and held(s, second) == 3
        forget(s, secret)
        assert erasing.step() == 1
        assert held(s, second) == 0
        assert held(s, other) == 3  # no word of it came from that session


def test_a_job_without_sources_is_emptied_by_any_erasure(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        steps, secret, (_, other) = rehearsed(s)
        file = s.dir / "steps" / other / "job.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "sources"}))
        release(s, steps, other)
        erasing = Erasing(s.log, s.learn, s.views._learn, s.dir / "steps")
        assert erasing.step() == 0 and held(s, other) == 3
        forget(s, secret)
        assert erasing.step() == 1 and held(s, other) == 0


def test_a_job_that_ended_as_the_learner_was_killed_is_emptied_at_the_next_start(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        steps, secret, (second, other) = rehearsed(s)
        forget(s, secret)
        Erasing(s.log, s.learn, s.views._learn, s.dir / "steps").step()
        release(s, steps, second)
        assert held(s, second) == 3
        Erasing(s.log, s.learn, s.views._learn, s.dir / "steps").step()
        assert held(s, second) == 0
        release(s, steps, other)
        assert held(s, other) == 3


def test_a_job_of_a_running_step_is_emptied_once_it_has_ended(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        steps, secret, (second, _) = rehearsed(s)
        forget(s, secret)
        erasing = Erasing(s.log, s.learn, s.views._learn, s.dir / "steps")
        assert erasing.step() == 1
        release(s, steps, second)
        assert held(s, second) == 3
        assert erasing.step() == 0 and held(s, second) == 0


def test_a_learner_killed_before_its_recipe_forgot_has_it_forget_again(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        first, _ = talk(s, SECRET, "thanks")
        s.observer().step()
        forget(s, first)
        engine, dropped = s.views._learn, list[str]()

        def killed(turns: Sequence[str]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Erasing(s.log, s.learn, engine, s.dir / "steps", [killed]).step()
        assert Erasing(s.log, s.learn, engine, s.dir / "steps", [dropped.extend]).step() == 1
        assert first in dropped


def test_dead_rows_of_every_table_with_words_are_vacuumed() -> None:
    assert {"match_nodes", "memo_rules"} <= set(ERASED_FROM)


def test_a_job_names_the_turn_that_a_memo_rule_in_its_words_came_from(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        with s.learn.begin() as c:
            s.learn.memo.set(c, "other", [Rule(f"call me {SECRET}", turn="told"), Rule("be brief")], "test")
        _, secret, (second, other) = rehearsed(s)
        jobs = [json.loads((s.dir / "steps" / step / "job.json").read_text()) for step in (second, other)]
        assert [set(job["sources"]) for job in jobs] == [{*jobs[0]["turns"], secret}, {*jobs[1]["turns"], "told"}]


def test_a_turn_forgotten_before_it_is_trained_is_never_trained(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        first, second = talk(s, SECRET, "thanks")
        s.observer().step()
        recipe = RuleJudge(Config(batch_size=1))
        s.judge_all(recipe)
        assert s.learn.fate(first) is Fate.JUDGED
        httpx.delete(f"{s.url}/reef/sessions/{first}", timeout=60).raise_for_status()
        Erasing(s.log, s.learn, s.views._learn, s.dir / "steps").step()
        assert {s.learn.fate(first), s.learn.fate(second)} == {Fate.OPTED_OUT}
        steps = Steps(s.log, s.learn, Turns(s.log, s.learn), recipe, s.dir / "steps", StepSettings(1, 8, 1e-3, 1, 0, 2))
        assert steps.form() == []


def test_an_exchange_forgotten_before_the_learner_read_it_is_opted_out(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        first, _ = talk(s, "hello", "thanks")
        s.observer().step()
        _, late = talk(s, "hello again", "thanks")
        with writing(s.views._log) as c:
            erase_in_log(c, [first, late], "forgotten")
        s.observer().step()
        assert s.learn.fate(late) is Fate.OPTED_OUT


def test_an_opted_out_reply_is_not_charged_for_what_is_said_later(tmp_path: Path) -> None:
    from reef.recipe import Turn, Verdict

    class Blames(RuleJudge):
        async def judge(self, turn: Turn) -> Verdict:
            return Verdict(-1, 1, ((1, -1), (3, -1)), judge="blames both")

    with stack(tmp_path) as s:
        reply, private = s.ask([{"role": "user", "content": "hi"}], **{"x-reef-train": "off"})
        history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}]
        reply, open_ = s.ask([*history, {"role": "user", "content": "no"}])
        history += [{"role": "user", "content": "no"}, {"role": "assistant", "content": reply}]
        s.ask([*history, {"role": "user", "content": "both were wrong"}])
        s.observer().step()
        s.judge_all(Blames(Config()))
        assert s.learn.fate(open_) is Fate.JUDGED
        assert s.learn.fate(private) is Fate.OPTED_OUT


@pytest.mark.parametrize(
    ("pattern", "words", "left"),
    [
        ("emails", "write to ann.o'hara+x@mail.example.co.uk, please", "write to ann.o'[redacted:email], please"),
        ("emails", "the @property decorator, user@localhost, a@b", None),
        ("keys", "key sk-proj-abcdefghijklmnop1234 here", "key [redacted:key] here"),
        ("keys", "AKIAIOSFODNN7EXAMPLE ghp_" + "a1" * 18, "[redacted:key] [redacted:key]"),
        ("keys", "authorization: Bearer abcdef0123456789abcdef", "authorization: Bearer [redacted:key]"),
        (
            "keys",
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nend",
            "[redacted:key]\nend",
        ),
        ("keys", "risk-assessment-of-the-whole-thing, task-1, sk-learn", None),
        ("cards", "card 4111 1111 1111 1111 ok", "card [redacted:card] ok"),
        ("cards", "5500-0000-0000-0004", "[redacted:card]"),
        ("cards", "4111 1111 1111 1112 and 1234567890123456 and 0000000000000000", None),
    ],
)
def test_secrets_are_found_and_what_only_looks_like_one_is_left(pattern: str, words: str, left: str | None) -> None:
    assert Redactor((pattern,)).text(words) == (words if left is None else left)  # type: ignore[arg-type]


def test_redacting_takes_time_in_proportion_to_the_text() -> None:
    redactor = Redactor(("keys", "emails", "cards"))
    hard = ("a" * 300_000, "1 " * 150_000, "a.b-" * 75_000 + "@", "-----BEGIN " + "A" * 300_000, "eyJ" + "a" * 300_000)
    for words in hard:
        started = time.process_time()
        redactor.text(words)
        assert time.process_time() - started < 5, words[:20]


def test_luhn_knows_a_card_number() -> None:
    assert luhn("4111111111111111") and luhn("378282246310005")
    assert not luhn("4111111111111112") and not luhn("411111")


def test_a_pattern_that_is_no_expression_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"redact_patterns.*mine"):
        Redactor((), {"mine": "("})


def test_what_is_redacted_is_never_stored_and_trains_nothing_but_still_matches(tmp_path: Path) -> None:
    settings = {"store__redact": "[emails, cards]", "store__redact_patterns": "{name: Quill\\w+}"}
    with stack(tmp_path, **settings) as s:  # pyright: ignore[reportArgumentType]
        first, second = talk(s, "I am ann@example.org, Quillfeather, 4111111111111111", "thanks")
        httpx.post(f"{s.url}/reef/report", json={"references": [first], "feedback": "from bob@example.org"})
        stored = s.log.get(first)
        assert stored is not None and stored.sampled is None
        assert stored.headers["x-reef-redacted"] == "card, email, name"
        observer = s.observer()
        observer.step()
        assert s.views.turn(second)["matching"]["session"] == first  # the resent history is redacted alike
        assert s.learn.fate(first) is Fate.MISSING_LOGPROBS
        held = everything_stored(s, (f"sqlite:///{s.dir}/log.db", f"sqlite:///{s.dir}/learn.db"))
        assert not [w for w in ("ann@example", "bob@example", "Quillfeather", "411111") if w in held]


def test_an_exchange_without_secrets_is_stored_as_it_is() -> None:
    exchange = record("nothing here", sampled=sampled(3))
    assert Redactor(("keys", "emails", "cards")).exchange(exchange) is exchange


def test_export_writes_the_log_whole_of_either_store(urls: tuple[str, str], tmp_path: Path) -> None:
    engine = open_database(urls[0], LOG)
    open_database(urls[1], LEARN).dispose()
    writer = LogWriter(engine)
    for n in range(5):
        asyncio.run(writer.exchange(record(f"{n} é \ud83d", sampled=sampled(2))))
    writer.close()
    (tmp_path / "data" / "run").mkdir(parents=True, exist_ok=True)
    stores = {"dir": str(tmp_path / "data"), "log": urls[0], "learn": urls[1]}
    (tmp_path / "data" / "run" / "config.json").write_text(json.dumps({"store": stores}))
    code = "from reef.cli import main; main()"
    command = [sys.executable, "-c", code, "export", "--store", str(tmp_path / "data")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    file = tmp_path / "t.jsonl"
    file.write_bytes(done.stdout)
    assert list(read_traffic(file)) == LogReader(engine).tail(0)
    engine.dispose()


GUARD = """
import os, sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        target = args[1] if event != "socket.getaddrinfo" else args[:2]
        with open(os.environ["REEF_TEST_SOCKETS"], "a") as file:
            file.write(repr((event, target, sys.argv[:3])) + "\\n")
sys.addaudithook(hook)
"""


def test_nothing_connects_anywhere_but_to_configured_urls(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    seen = tmp_path / "sockets"
    seen.write_text("")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'guard'}:{ROOT}", "REEF_TEST_SOCKETS": str(seen)}
    with serving(scripted_app(Script())) as engine:
        settings: dict[str, Any] = {
            "server": {"port": 0},
            "store": {"dir": str(tmp_path / "data")},
            "engine": {"kind": "vllm", "url": engine},
            "policy": {"model": str(tiny_model_dir)},
            "recipe": {"name": "tests.rule_recipe:RuleJudge", "batch_size": 1},
            "gate": {"enabled": False},
        }
        (tmp_path / "serve.yaml").write_text(json.dumps(settings))
        code = "from reef.cli import main; main()"
        command = [sys.executable, "-c", code, "serve", "-c", str(tmp_path / "serve.yaml"), "--json"]
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            about = ""
            while not about.rstrip().endswith("\n}") and (line := process.stdout.readline()):
                about += line
            url = json.loads(about)["url"]
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 1}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
            body["messages"] += [reply, {"role": "user", "content": "thanks"}]
            httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
            deadline = time.monotonic() + 120
            while not httpx.get(f"{url}/reef/releases").json()["served"] and time.monotonic() < deadline:
                time.sleep(0.2)
            assert httpx.get(f"{url}/reef/releases").json()["served"] == {"default": 1}  # the whole way was gone
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    allowed = {(httpx.URL(u).host, httpx.URL(u).port) for u in (engine, url)}
    events = [eval(line) for line in seen.read_text().splitlines()]
    assert events, "the guard saw nothing at all"
    assert [e for e in events if tuple(e[1][:2]) not in allowed] == []
