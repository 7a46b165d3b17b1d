"""From the log to verdicts and steps, stepped by hand: bindings, judging, batches, staleness, funnel."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from reef.cli.learning import preview_job, settings_for
from reef.config import load_config
from reef.errors import JudgeError
from reef.learner.judging import Judging
from reef.learner.loop import GatewayAdmin, Learner
from reef.learner.steps import Steps, StepSettings
from reef.learner.turns import Turns
from reef.recipe import Turn, Verdict
from reef.releases.chain import FILES, content_hash
from reef.sessions.fate import Fate
from reef.store.schema import releases
from tests.reports_recipe import Config, ReportsOnly
from tests.stack import Stack, stack

THANKS = "thanks, that is right"


class Rule(ReportsOnly):
    """Judges by whether the reaction thanks; counts what it is asked."""

    asked: list[str]

    def __init__(self) -> None:
        super().__init__(Config())
        self.asked = []
        self.down = False

    async def judge(self, turn: Turn) -> Verdict | None:
        self.asked.append(turn.id)
        if self.down:
            raise JudgeError("the judge is down")
        if turn.next is None:
            return await super().judge(turn)
        index = sum(m.role != "system" for m in turn.messages)
        if turn.next.text == "hm":
            return Verdict(0, None, judge="rule")
        if turn.next.text == "meh":  # refused, but too unsure to charge anybody
            return Verdict(-1, index, (), judge="rule")
        value = 1 if "thanks" in turn.next.text else -1
        return Verdict(value, index, ((index, value),), judge="rule")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as s:
        yield s


def talk(s: Stack, opener: str, *reactions: str, **headers: str) -> list[str]:
    """A conversation that resends its history; returns the receipts."""
    messages = [{"role": "user", "content": opener}]
    receipts = []
    for reaction in [*reactions, None]:
        reply, receipt = s.ask(messages, **headers)
        receipts.append(receipt)
        if reaction is not None:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": reaction}]
    return receipts


def steps_for(s: Stack, recipe: Rule, batch_size: int = 4, staleness: int = 8, **more: Any) -> Steps:
    settings = StepSettings(batch_size, staleness, 1e-3, 1, 0, 2, **more)
    return Steps(s.log, s.learn, Turns(s.log, s.learn), recipe, s.dir / "steps", settings)


def judged_turns(s: Stack, n: int) -> Rule:
    """n conversations whose first reply was accepted; returns the judge."""
    for k in range(n):
        talk(s, f"question {k}", THANKS)
    s.observer().step()
    recipe = Rule()
    s.judge_all(recipe)
    return recipe


def add_up(s: Stack) -> bool:
    funnel = s.views.funnel()
    return sum(funnel["fates"].values()) + funnel["unread"] == funnel["exchanges"] == s.log.tail(0, 9999)[-1].seq


def test_a_plain_client_three_turns_long_has_its_first_two_turns_judged(running: Stack) -> None:
    first, second, third = talk(running, "2+2?", "no, in words", THANKS)
    running.observer().step()
    running.judge_all(Rule())
    assert [running.learn.fate(r) for r in (first, second, third)] == [Fate.JUDGED, Fate.JUDGED, Fate.OPEN]
    verdicts = [running.learn.verdict_on(r) for r in (first, second)]
    assert [v.verdict for v in verdicts if v] == [-1, 1]
    assert add_up(running)


def test_seventeen_turns_make_four_batches_of_four_and_one_waits(running: Stack) -> None:
    recipe = judged_turns(running, 17)
    assert running.fates()["judged"] == 17
    steps = steps_for(running, recipe)
    turns: list[str] = []
    for version in range(1, 5):
        (step,) = steps.form()
        assert (step.version, len(step.turns)) == (version, 4)
        assert steps.form() == []  # one at a time
        turns += step.turns
        finish(running, steps, step.id)
    assert steps.form() == []
    assert len(set(turns)) == 16
    assert (running.fates()["trained"], running.fates()["judged"]) == (16, 1)
    assert add_up(running)


def test_reef_train_takes_the_settings_and_databases_of_the_stores_own_service(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    learn = f"sqlite:///{tmp_path}/elsewhere.db"
    with stack(tmp_path, store__learn=learn) as s:
        judged_turns(s, 3)
        settings = {"store.learn": learn, "recipe.name": "tests.reports_recipe:ReportsOnly", "train.lr": "0.25"}
        run = {**load_config(None, [*settings.items()], {}).model_dump(mode="json"), "model_dir": str(tiny_model_dir)}
        (s.dir / "run").mkdir()
        (s.dir / "run" / "config.json").write_text(json.dumps(run))
        found = settings_for(s.dir, None)
        assert (found.store.dir, found.policy.model) == (s.dir, str(tiny_model_dir))
        job = json.loads(preview_job(found, tmp_path / "scratch", None).read_text())
        assert (job["lr"], len(job["samples"])) == (0.25, 2)
        (tmp_path / "serve.yaml").write_text("train: {epochs: 7}")
        other = settings_for(s.dir, tmp_path / "serve.yaml")
        assert (other.train.epochs, other.recipe_name, other.store.learn) == (7, "openclawrl", learn)


def adapter_files(folder: Path) -> str:
    """Write what stands for an adapter; returns its content hash."""
    for name in FILES["lora"]:
        (folder / name).write_text("{}")
    return content_hash(folder)


def finish(s: Stack, steps: Steps, step: str, status: str = "candidate") -> None:
    """Write the release a trainer would have written, and take it in as served."""
    job = json.loads((s.dir / "steps" / step / "job.json").read_text())
    folder = s.dir / "releases" / job["scenario"] / f"v{job['version']:06d}"
    folder.mkdir(parents=True)
    checks = [{"name": "kl_to_base", "value": 0.5, "limit": 0.1, "passed": status == "candidate"}]
    release = {
        "scenario": job["scenario"],
        "version": job["version"],
        "parent": job["parent"],
        "turns": job["turns"],
        "content_hash": adapter_files(folder),
        "metrics": {},
        "gate": {"passed": status == "candidate", "checks": checks},
        "status": status,
    }
    (folder / "release.json").write_text(json.dumps(release))
    (s.dir / "steps" / step / "result.json").write_text(json.dumps({"release": str(folder), "seconds": 1.0}))
    assert steps.collect() == 1
    for row in s.learn.steps.unpublished():
        with s.learn.begin() as c:
            s.learn.steps.published(c, row.scenario, row.version)


def test_a_step_names_its_turns_before_it_runs_and_is_written_again_after_a_crash(running: Stack) -> None:
    recipe = judged_turns(running, 4)
    steps = steps_for(running, recipe)
    (step,) = steps.form()
    job = running.dir / "steps" / step.id / "job.json"
    before = json.loads(job.read_text())
    job.unlink()  # the learner died between its transaction and the job file
    steps_for(running, recipe).form()
    assert json.loads(job.read_text()) == before
    assert len(running.learn.steps.running()) == 1


def test_a_failing_step_is_tried_again_and_then_lets_its_turns_go_with_the_reason(running: Stack) -> None:
    recipe = judged_turns(running, 4)
    steps = steps_for(running, recipe)
    (step,) = steps.form()
    result = running.dir / "steps" / step.id / "result.json"
    for _ in range(2):
        result.write_text('{"error": "loss exploded"}')
        steps.collect()
    assert running.fates()["gate_rejected"] == 4
    history = running.views.turn(step.turns[0])["fates"]
    assert history[-1]["reason"] == "loss exploded"


def test_turns_of_a_rejected_release_are_not_trained(running: Stack) -> None:
    recipe = judged_turns(running, 4)
    steps = steps_for(running, recipe)
    (step,) = steps.form()
    finish(running, steps, step.id, status="rejected")
    assert running.fates()["gate_rejected"] == 4
    assert "kl_to_base" in running.views.turn(step.turns[0])["fates"][-1]["reason"]
    assert running.learn.steps.unpublished() == []


def report(s: Stack, receipt: str, score: int) -> None:
    body = {"id": f"on {receipt}", "references": [receipt], "score": score}
    assert httpx.post(f"{s.url}/reef/report", json=body).json()["recorded"]
    s.observer().step()


class Reports(Rule):
    """A report outweighs the reaction."""

    async def judge(self, turn: Turn) -> Verdict | None:
        return await ReportsOnly.judge(self, turn) or await super().judge(turn)


def test_a_rejected_step_takes_no_turn_along_that_was_reported_while_it_ran(running: Stack) -> None:
    recipe = judged_turns(running, 4)
    steps = steps_for(running, recipe)
    (step,) = steps.form()
    queued, judged, *others = step.turns
    report(running, judged, -1)
    running.judge_all(Reports())
    report(running, queued, -1)
    finish(running, steps, step.id, status="rejected")
    assert [running.learn.fate(t) for t in (queued, judged)] == [Fate.QUEUED, Fate.JUDGED]
    assert [running.learn.fate(t) for t in others] == [Fate.GATE_REJECTED] * 2
    running.judge_all(Reports())
    (again,) = steps_for(running, recipe, batch_size=2).form()
    assert set(again.turns) == {queued, judged}


def test_a_verdict_that_changed_while_its_turn_was_trained_is_noted(running: Stack) -> None:
    recipe = judged_turns(running, 4)
    steps = steps_for(running, recipe)
    (step,) = steps.form()
    report(running, step.turns[0], -1)
    report(running, step.turns[1], 1)
    running.judge_all(Reports())
    finish(running, steps, step.id)
    assert [running.learn.fate(t) for t in step.turns] == [Fate.TRAINED] * 4
    notes = [[f["rule"] for f in running.views.turn(t)["fates"]].count("contradicted") for t in step.turns]
    assert notes == [1, 0, 0, 0]


def test_a_judge_that_is_down_makes_nothing_neutral(running: Stack) -> None:
    first, _ = talk(running, "2+2?", THANKS)
    running.observer().step()
    recipe = Rule()
    recipe.down = True
    running.judge_all(recipe)
    assert running.learn.fate(first) is Fate.QUEUED
    assert running.views.turn(first)["fates"][-1]["rule"] == "judge_retry"
    recipe.down = False
    running.judge_all(recipe)
    assert running.learn.fate(first) is Fate.JUDGED


def test_neutral_reactions_train_nothing(running: Stack) -> None:
    first, _ = talk(running, "2+2?", "hm")
    running.observer().step()
    running.judge_all(Rule())
    assert running.learn.fate(first) is Fate.NEUTRAL


def test_a_turn_knows_how_many_replies_before_it_were_refused(running: Stack) -> None:
    corrected = talk(running, "an answer", "no list", "meh", THANKS)
    moved_on = talk(running, "one question", THANKS + ", and another", "no list", THANKS)
    running.observer().step()
    running.judge_all(Rule())
    turns = Turns(running.log, running.learn)
    built = [[turn.refused for id in ids if (turn := turns.build(id))] for ids in (corrected, moved_on)]
    assert built == [[0, 1, 2, 0], [0, 0, 1, 0]]


def test_opted_out_and_side_calls_never_reach_the_judge(running: Stack) -> None:
    talk(running, "secret", THANKS, **{"x-reef-train": "off"})
    talk(running, "a title please", THANKS, **{"x-reef-tag-turn-type": "side"})
    running.observer().step()
    recipe = Rule()
    running.judge_all(recipe)
    assert recipe.asked == []
    assert running.fates() == {"opted_out": 2, "side_task": 2}
    assert add_up(running)


def test_an_untrainable_setting_says_so_instead_of_being_judged(running: Stack) -> None:
    client = running.client()
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], temperature=0)
    text = reply.choices[0].message.content
    running.ask(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": text or ""},
            {"role": "user", "content": THANKS},
        ]
    )
    running.observer().step()
    assert running.fates() == {"unsupported_sampling": 1, "open": 1}


def test_an_engine_without_logprobs_ends_as_missing_logprobs(running: Stack) -> None:
    running.script.exact = False
    talk(running, "hi", THANKS)
    running.observer().step()
    assert running.fates() == {"missing_logprobs": 1, "open": 1}


def test_a_session_nobody_continues_ends_and_a_late_reply_reopens_it(running: Stack) -> None:
    (only,) = talk(running, "2+2?")
    observer = running.observer(ttl=10)
    observer.step()
    assert observer.expire(time.time() + 5) == 0
    assert observer.expire(time.time() + 11) == 1
    assert running.learn.fate(only) is Fate.NO_NEXT_STATE
    running.ask(
        [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "reply to 2+2?"},
            {"role": "user", "content": THANKS},
        ]
    )
    observer.step()
    assert running.learn.fate(only) is Fate.QUEUED


def test_the_observer_continues_at_its_cursor_after_a_restart(running: Stack) -> None:
    first, _ = talk(running, "2+2?", THANKS)
    running.observer().step()
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "reply to 2+2?"}]
    messages += [{"role": "user", "content": THANKS}, {"role": "assistant", "content": f"reply to {THANKS}"}]
    running.ask([*messages, {"role": "user", "content": "next one"}])
    again = running.observer()
    assert again.step() == 1
    assert running.fates() == {"queued": 2, "open": 1}
    assert again.step() == 0
    assert running.views.turn(first)["matching"]["session"] == first


def test_a_report_queues_its_turn_once_and_needs_no_next_state(running: Stack) -> None:
    (only,) = talk(running, "2+2?")
    body = {"id": "r1", "references": [only], "score": -1}
    answers = [httpx.post(f"{running.url}/reef/report", json=body).json() for _ in range(2)]
    assert [a["recorded"] for a in answers] == [True, False]
    running.observer().step()
    assert running.learn.fate(only) is Fate.QUEUED
    running.judge_all(ReportsOnly(Config()))
    row = running.learn.verdict_on(only)
    assert row is not None and row.verdict == -1


def test_a_report_of_words_alone_is_taken_and_the_document_allows_it(running: Stack) -> None:
    (only,) = talk(running, "2+2?")
    said = {"references": [only], "feedback": "too long"}
    assert httpx.post(f"{running.url}/reef/report", json=said).json()["recorded"] is True
    assert httpx.post(f"{running.url}/reef/report", json={"references": [only]}).status_code == 400
    operation = httpx.get(f"{running.url}/openapi.json").json()["paths"]["/reef/report"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["references"]
    assert schema["anyOf"] == [{"required": ["score"]}, {"required": ["feedback"]}]


def test_stale_turns_are_refused_with_the_reason(running: Stack) -> None:
    recipe = judged_turns(running, 4)
    folder = running.dir / "releases" / "default" / "v000003"
    folder.mkdir(parents=True)
    hash = adapter_files(folder)
    manifest = {"scenario": "default", "version": 3, "parent": 2, "turns": [], "content_hash": hash, "metrics": {}}
    (folder / "release.json").write_text(json.dumps({**manifest, "gate": {}, "status": "candidate"}))
    assert httpx.post(f"{running.url}/reef/releases/3/serve").status_code == 200
    assert steps_for(running, recipe, staleness=2).form() == []
    assert running.fates()["stale"] == 4


def released(s: Stack, scenario: str, version: int = 1) -> Path:
    """A release that passed its gate and is not served yet; returns its folder."""
    folder = s.dir / "releases" / scenario / f"v{version:06d}"
    folder.mkdir(parents=True)
    manifest = {
        "scenario": scenario,
        "version": version,
        "parent": version - 1,
        "turns": [],
        "metrics": {},
        "gate": {"passed": True, "checks": []},
    }
    hash = adapter_files(folder)
    (folder / "release.json").write_text(json.dumps({**manifest, "content_hash": hash, "status": "candidate"}))
    row = {**manifest, "path": str(folder), "hash": hash, "status": "released", "step": f"{scenario} {version}"}
    with s.learn.begin() as c:
        s.learn.steps.add_release(c, row)
    return folder


def learn_until(s: Stack, until: Callable[[], bool], at_most_s: float = 10.0) -> None:
    """Run a learner without a trainer until something has happened, or for so long."""

    async def run() -> None:
        stop = asyncio.Event()
        judging = Judging(s.learn, Turns(s.log, s.learn), Rule(), concurrency=1)
        learner = Learner(s.log, s.learn, s.observer(), judging, None, GatewayAdmin(s.url))
        task = asyncio.create_task(learner.run(stop, tick_s=0.01))
        deadline = time.monotonic() + at_most_s
        while time.monotonic() < deadline and not until():
            await asyncio.sleep(0.02)
        stop.set()
        await task

    asyncio.run(run())


def test_a_damaged_release_keeps_only_its_own_scenario_waiting(running: Stack) -> None:
    (released(running, "damaged") / FILES["lora"][1]).write_text("cut off")
    released(running, "damaged", 2)
    released(running, "whole", 3)
    with running.learn.begin() as c:
        c.execute(update(releases).where(releases.c.scenario == "whole").values(parent=0))
    learn_until(running, lambda: running.log.served() == {"whole": 3})
    assert running.log.served() == {"whole": 3}
    waiting = [(r.scenario, r.version) for r in running.learn.steps.unpublished()]
    assert waiting == [("damaged", 1), ("damaged", 2)], "the later one is not held while the earlier one waits"
