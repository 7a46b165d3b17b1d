"""The memo: rules gathered, merged, displaced, bounded, kept in the learn database, changed by hand, and read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from typer.testing import CliRunner

from recipes.openclawrl.memo import add, alike, contradicts, rendered
from reef.cli.app import build
from reef.recipe import Rule, Turn, Verdict
from reef.sessions.fate import Fate
from reef.store.database import open_database
from reef.store.learn import LearnStore
from reef.store.migrations import LEARN, migrate
from reef.wire.memo import HEADING, with_memo
from tests.reports_recipe import Config, ReportsOnly
from tests.stack import Stack, stack


def words(rule: str) -> int:
    return len(rule.split())


def memo_of(*texts: str, tokens: int = 256) -> tuple[str, ...]:
    rules: tuple[Rule, ...] = ()
    for n, said in enumerate(texts):
        rules = add(rules, Rule(said, f"t{n}", float(n)), tokens=tokens, count=words)
    return tuple(rule.text for rule in rules)


def test_rules_accumulate_oldest_first() -> None:
    assert memo_of("Use metric units.", "Sign as Jo.") == ("Use metric units.", "Sign as Jo.")


def test_a_rule_said_again_is_one_rule_seen_twice_and_the_newest() -> None:
    rules: tuple[Rule, ...] = ()
    for n, said in enumerate(["Write plain sentences.", "Sign as Jo.", "write plain  sentences"]):
        rules = add(rules, Rule(said, f"t{n}", float(n)), count=words)
    assert [(r.text, r.seen, r.time) for r in rules] == [("Sign as Jo.", 1, 1.0), ("Write plain sentences.", 2, 2.0)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Write the points as a short list.", "Write it as plain running sentences."),
        ("Keep answers short.", "Give detailed answers."),
        ("Use metric units.", "Use imperial units."),
        ("Answer in English.", "Answer in German."),
        ("Write in the first person.", "Write in the third person."),
        ("Use emojis in titles.", "Do not use emojis in titles."),
        ("Be formal.", "Use a casual voice."),
    ],
)
def test_the_newest_contradiction_wins(old: str, new: str) -> None:
    assert memo_of(old, "Sign as Jo.", new) == ("Sign as Jo.", new)
    assert memo_of(new, "Sign as Jo.", old) == ("Sign as Jo.", old)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Keep answers short.", "Use metric units."),
        ("Answer in English.", "Keep answers short."),
        ("Write the steps as a list.", "Use imperial units."),
    ],
)
def test_rules_on_different_matters_stand_together(a: str, b: str) -> None:
    assert not contradicts(a, b)
    assert not alike(a, b)


def test_the_oldest_rules_are_forgotten_beyond_the_budget_and_a_persons_own_last() -> None:
    assert memo_of("Sign as Jo.", "Use metric units.", "Quote prices in euros.", tokens=7) == (
        "Use metric units.",
        "Quote prices in euros.",
    )
    own = (Rule("Sign as Jo.", None, 0.0), Rule("Use metric units.", "t1", 1.0))
    kept = add(own, Rule("Quote prices in euros.", "t2", 2.0), tokens=7, count=words)
    assert [rule.text for rule in kept] == ["Sign as Jo.", "Quote prices in euros."]


@given(st.lists(st.text(max_size=40)), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_any_rules_stay_within_the_budget_without_repetition(texts: list[str], tokens: int) -> None:
    kept = memo_of(*texts, tokens=tokens)
    assert sum(words(rule) for rule in kept) <= tokens
    assert len({rule.casefold() for rule in kept}) == len(kept)
    assert not any(contradicts(a, b) for n, a in enumerate(kept) for b in kept[n + 1 :])


def test_what_is_rendered_is_one_rule_a_line() -> None:
    assert rendered(["Sign as Jo.", "Use metric units."]) == "- Sign as Jo.\n- Use metric units."
    assert rendered([]) == ""


@pytest.fixture
def learn(tmp_path: Path) -> LearnStore:
    return LearnStore(open_database(f"sqlite:///{tmp_path}/learn.db", LEARN))


def store(learn: LearnStore, *rules: Rule, why: str = "test") -> None:
    with learn.begin() as c:
        learn.memo.set(c, "default", rules, why)


def test_the_store_keeps_a_memo_for_each_scenario_and_what_became_of_old_rules(learn: LearnStore) -> None:
    first, second = Rule("Be brief.", "t1", 1.0), Rule("Sign as Jo.", "t2", 2.0)
    store(learn, first, second)
    assert learn.memo.of("default") == (first, second)
    assert learn.memo.of("other") == ()
    again = Rule("Be brief.", "t3", 3.0, seen=2)
    store(learn, again, why="displaced by the verdict on t3")
    assert learn.memo.of("default") == (again,)
    gone = [(row.text, row.why) for row in learn.memo.history("default") if row.dropped]
    assert gone == [("Sign as Jo.", "displaced by the verdict on t3")]


def test_a_store_from_before_the_memo_is_migrated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/learn.db"
    engine = open_database(url, LEARN)
    with engine.begin() as c:
        c.execute(text("DROP TABLE memo_rules"))
        c.execute(text("ALTER TABLE turn_reports DROP COLUMN seq"))
        c.execute(text("INSERT INTO turn_reports (report, turn, score) VALUES ('r1', 't1', 1.0)"))
        c.execute(text("UPDATE reef_schema SET version = 1"))
    migrate(engine, LEARN)
    kept = LearnStore(engine)
    store(kept, Rule("Be brief.", "t1", 1.0))
    assert kept.memo.of("default") == (Rule("Be brief.", "t1", 1.0),)
    assert [report.id for report in kept.reports_on("t1")] == ["r1"]


def reef(*arguments: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(build(), ["memo", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_the_memo_of_a_store_with_a_database_elsewhere_is_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/elsewhere.db"
    store(LearnStore(open_database(url, LEARN)), Rule("Be brief.", "t1", 1.0))
    (tmp_path / "data" / "run").mkdir(parents=True)
    (tmp_path / "data" / "run" / "config.json").write_text(json.dumps({"store": {"learn": url}}))
    assert [line["text"] for line in reef("--store", str(tmp_path / "data"))] == ["Be brief."]


def test_the_memo_is_shown_and_changed_from_the_command_line(tmp_path: Path) -> None:
    learn = LearnStore(open_database(f"sqlite:///{tmp_path}/learn.db", LEARN))
    store(learn, Rule("Be brief.", "t1", 1.0), Rule("Sign as Jo.", "t2", 2.0))
    at = ("--store", str(tmp_path))
    assert [(line["number"], line["text"]) for line in reef(*at)] == [(1, "Be brief."), (2, "Sign as Jo.")]
    assert [line["text"] for line in reef(*at, "--drop", "1", "--add", "Use metric units.")] == [
        "Sign as Jo.",
        "Use metric units.",
    ]
    assert learn.memo.of("default")[1].turn is None
    assert [line["text"] for line in reef(*at, "--history") if line["dropped"]] == ["Be brief."]
    assert reef(*at, "--scenario", "other") == []


class Remembering(ReportsOnly):
    """Refuses every reply and finds a rule in each reaction."""

    def __init__(self) -> None:
        super().__init__(Config())
        self.read: list[tuple[str, ...]] = []

    async def judge(self, turn: Turn) -> Verdict | None:
        if turn.next is None:
            return await super().judge(turn)
        self.read.append(turn.memo)
        return Verdict(-1, 1, ((1, -1),), rule=turn.next.text, judge="rule")

    def remember(self, rules: Sequence[Rule], turn: Turn, verdict: Verdict) -> Sequence[Rule]:
        return add(rules, Rule(verdict.rule or "", turn.id, 1.0), count=words) if verdict.rule else rules


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Stack]:
    with stack(tmp_path) as s:
        yield s


def react(s: Stack, opener: str, reaction: str) -> str:
    """A reply and the reaction to it; returns the reply's receipt."""
    asked = [{"role": "user", "content": opener}]
    reply, receipt = s.ask(asked)
    s.ask([*asked, {"role": "assistant", "content": reply}, {"role": "user", "content": reaction}])
    s.observer().step()
    return receipt


def test_what_a_verdict_finds_is_read_with_the_next_turn(running: Stack) -> None:
    recipe = Remembering()
    first = react(running, "hello", "Use metric units.")
    running.judge_all(recipe)
    react(running, "good morning", "Use imperial units.")
    running.judge_all(recipe)
    assert recipe.read == [(), ("Use metric units.",)]
    assert [rule.text for rule in running.learn.memo.of("default")] == ["Use imperial units."]
    assert next(row.turn for row in running.learn.memo.history("default")) == first


def test_a_recipe_without_a_memo_leaves_none(running: Stack) -> None:
    react(running, "hello", "Use metric units.")
    running.judge_all(ReportsOnly(Config()))
    assert running.learn.memo.of("default") == ()


def train(s: Stack, turn: str) -> None:
    with s.learn.begin() as c:
        s.learn.set_fate(c, turn, Fate.TRAINED, "step", "in version 1", version=1)


def test_a_later_verdict_on_a_trained_turn_is_noted_and_not_trained(running: Stack) -> None:
    turn = react(running, "hello", "fine")
    with running.learn.begin() as c:
        running.learn.add_verdict(c, turn, None, turn, 1, Verdict(1, 1, ((1, 1),), judge="rule"))
    train(running, turn)
    with running.learn.begin() as c:
        assert not running.learn.contradict(c, turn, 1, "rule")
        assert running.learn.contradict(c, turn, -1, "rule")
        running.learn.add_verdict(c, turn, None, turn, -1, Verdict(-1, 1, ((1, -1),), judge="rule"))
    assert running.learn.fate(turn) is Fate.TRAINED
    history = running.views.turn(turn)["fates"]
    assert (history[-1]["rule"], history[-1]["fate"]) == ("contradicted", "trained")
    assert "trained as +1, now -1" in history[-1]["reason"]


def test_a_reply_refused_after_it_was_accepted_is_no_longer_a_demonstration(running: Stack) -> None:
    turn = react(running, "hello", "fine")
    with running.learn.begin() as c:
        running.learn.add_verdict(c, turn, None, turn, 1, Verdict(1, 1, ((1, 1),)))
    assert [row.charged for row in running.learn.accepted("default", 9)] == [turn]
    with running.learn.begin() as c:
        running.learn.add_verdict(c, turn, None, turn, -1, Verdict(-1, 1, ((1, -1),)))
    assert running.learn.accepted("default", 9) == []


def report(s: Stack, id: str, score: float | None, turn: str, feedback: str | None = None) -> None:
    import httpx

    body = {"id": id, "references": [turn], "score": score, "feedback": feedback}
    answer = httpx.post(f"{s.url}/reef/report", json={k: v for k, v in body.items() if v is not None})
    assert answer.status_code < 300, answer.text
    s.observer().step()


def test_a_report_on_a_trained_turn_changes_its_verdict_and_trains_nothing(running: Stack) -> None:
    turn = react(running, "hello", "fine")
    with running.learn.begin() as c:
        running.learn.add_verdict(c, turn, None, turn, 1, Verdict(1, 1, ((1, 1),)))
    train(running, turn)
    report(running, "r1", -1.0, turn)
    report(running, "r1", -1.0, turn)  # the same report again
    assert running.learn.fate(turn) is Fate.TRAINED
    assert [f["rule"] for f in running.views.turn(turn)["fates"]].count("contradicted") == 1
    newest = running.learn.verdict_on(turn)
    assert newest is not None
    assert (newest.verdict, newest.judge) == (-1, "report")


def test_the_newest_report_counts_whatever_its_id(running: Stack) -> None:
    turn = react(running, "hello", "fine")
    report(running, "z-first", 1.0, turn)
    report(running, "a-second", -1.0, turn)
    running.judge_all(ReportsOnly(Config()))
    newest = running.learn.verdict_on(turn)
    assert newest is not None
    assert newest.verdict == -1


def test_a_served_memo_ends_the_system_text() -> None:
    user = {"role": "user", "content": "hi"}
    rules = ["Be brief.", "Sign as Jo."]
    told = with_memo({"model": "m", "messages": [{"role": "system", "content": "You help."}, user]}, rules)
    assert told["messages"][0]["content"] == f"You help.\n\n{HEADING}\n- Be brief.\n- Sign as Jo."
    assert told["messages"][1] == user
    assert [m["role"] for m in with_memo({"messages": [user]}, rules)["messages"]] == ["system", "user"]
    assert with_memo({"messages": [user]}, []) == {"messages": [user]}
    assert with_memo({"prompt": "hi"}, rules) == {"prompt": "hi"}
