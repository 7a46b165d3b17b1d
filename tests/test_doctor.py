"""`reef doctor`: what it says of the judge and of lost turns, by the pure findings and on a real store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from typer.testing import CliRunner

from reef.cli.app import build
from reef.config import load_config
from reef.errors import JudgeError
from reef.learner.judging import Judging
from reef.learner.turns import Turns
from reef.observe.doctor import findings
from reef.recipe import Turn, Verdict
from reef.service import read_run_config
from tests.reports_recipe import Config, ReportsOnly
from tests.stack import Stack, stack

EMBEDDED = load_config(None, [], {})
LLM = load_config(None, [("prm.backend", "openai"), ("prm.url", "http://judge/v1"), ("prm.model", "m")], {})


def test_an_embedded_judge_is_named_with_what_is_better_and_an_llm_is_not() -> None:
    (note,) = findings(EMBEDDED, {}, unsure=3)
    assert (note.about, note.level) == ("prm", "note")
    assert "an LLM judge is better" in note.do
    assert "too unsure of 3" in note.said
    assert findings(LLM, {}) == []


def test_a_way_of_losing_many_turns_is_a_problem_and_comes_first() -> None:
    found = findings(EMBEDDED, {"unsupported_sampling": 6, "trained": 4, "open": 90, "ambiguous": 1})
    assert [(f.about, f.level) for f in found] == [("unsupported_sampling", "problem"), ("prm", "note")]
    assert "policy.sampling: train" in found[0].do
    assert found[0].said == "6 of 11 finished turns end so"


def test_turns_that_opted_out_hide_no_way_of_losing_the_others() -> None:
    found = findings(LLM, {"too_long": 3, "trained": 1, "opted_out": 96})
    assert [f.said for f in found] == ["3 of 4 finished turns end so"]


def test_a_served_memo_is_noted() -> None:
    config = load_config(None, [("policy.serve_memo", "true"), ("prm.backend", "openai"), ("prm.url", "u")], {})
    assert [f.about for f in findings(config, {})] == ["policy"]


def test_keys_with_which_the_learner_cannot_publish_are_a_problem() -> None:
    def about(keys: str) -> list[str]:
        settings = [("server.keys", keys), ("prm.backend", "openai"), ("prm.url", "u")]
        return [f.said for f in findings(load_config(None, settings, {}), {})]

    bound = "{key: b, name: b, role: admin, scenario: math}"
    assert "no key has the role admin" in about("[{key: a, name: a}]")[0]
    assert "scenario math only" in about(f"[{{key: a, name: a}}, {bound}]")[0]
    assert about(f"[{{key: c, name: c, role: admin}}, {bound}]") == []


class Unsure(ReportsOnly):
    async def judge(self, turn: Turn) -> Verdict | None:
        return Verdict(-1, 1, (), confidence=0.41, judge="small")


class Silent(ReportsOnly):
    async def judge(self, turn: Turn) -> Verdict | None:
        raise JudgeError("it says nothing")


def react(s: Stack, opener: str) -> str:
    asked = [{"role": "user", "content": opener}]
    reply, receipt = s.ask(asked)
    s.ask([*asked, {"role": "assistant", "content": reply}, {"role": "user", "content": "hm"}])
    s.observer().step()
    return receipt


def doctor(s: Stack) -> list[dict[str, str]]:
    done = CliRunner().invoke(build(), ["doctor", "--store", str(s.dir), "--json"], catch_exceptions=False)
    return json.loads(done.output)


def test_an_unsure_verdict_charges_nobody_and_says_so(tmp_path: Path) -> None:
    with stack(tmp_path) as s:
        turn = react(s, "hello")
        s.judge_all(Unsure(Config()))
        newest = s.views.turn(turn)["fates"][-1]
        assert (newest["fate"], newest["reason"]) == ("neutral", "small is too unsure to charge anybody (-1, 41%)")
        assert "too unsure of 1 to charge" in doctor(s)[0]["said"]


def test_turns_without_a_verdict_are_a_problem_with_the_reason(tmp_path: Path) -> None:
    async def once(s: Stack) -> None:
        judging = Judging(s.learn, Turns(s.log, s.learn), Silent(Config()), concurrency=4)
        judging.step()
        await asyncio.gather(*judging._running.values())

    with stack(tmp_path) as s:
        react(s, "hello")
        asyncio.run(once(s))
        first = doctor(s)[0]
        assert first["level"] == "problem"
        assert first["said"] == "1 turns wait for a verdict, the last because: it says nothing"


def test_the_doctor_reads_the_configuration_that_runs(tmp_path: Path, tiny_model_dir: Path) -> None:
    with stack(tmp_path) as s:
        run = s.dir / "run"
        run.mkdir()
        file = run / "config.json"
        file.write_text(json.dumps({**LLM.model_dump(mode="json"), "model_dir": str(tiny_model_dir)}))
        assert read_run_config(file)[0] == LLM
        assert doctor(s) == []
