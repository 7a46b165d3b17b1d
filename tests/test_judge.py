"""The judge: votes and their counting, the corpus, the embedded model on clear rows."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.openclawrl.judge.attribution import charges, features, places
from recipes.openclawrl.judge.corpus import (
    KINDS,
    LANGUAGES,
    corpus_bytes,
    groups,
    merge,
    near_duplicates,
    rows_of,
    sha256,
)
from recipes.openclawrl.judge.phrases import clauses, instruction, phrases
from recipes.openclawrl.judge.prompt import cut
from recipes.openclawrl.judge.style import contrast
from recipes.openclawrl.judge.votes import Vote, merge_hints, parse_vote, quorum, tally
from recipes.openclawrl.prm import EmbeddedPrm
from recipes.openclawrl.recipe import Config, OpenClawRL
from reef.errors import JudgeError
from reef.learner.turns import charge_as_verdict
from reef.recipe import Report, Turn, Verdict
from reef.wire.exchange import Message

SHIPPED = Path(__file__).parents[1] / "recipes" / "openclawrl" / "judge"
NEXT = {"role": "user", "content": "please write that as one plain sentence instead"}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"verdict": 1}', 1),
        ('Sure: ```json\n{"verdict": "-1", "target": 1}\n```', -1),
        ('{"verdict": -1.0} hm, no: {"verdict": 0}', 0),
        ('{"answer": {"verdict": 1}}', 1),
        (r"so \boxed{-1}", -1),
        (r"\boxed{ 1 }", 1),
        (r"\boxed{1} no, \boxed{\text{0}}", 0),
        ("1.0", 1),
        (" −1 ", -1),
        ("+1", 1),
        ('<think>{"verdict": 1} or not</think>\n{"verdict": -1}', -1),
        ("<think>\\boxed{1}</think> 0", 0),
    ],
)
def test_a_vote_is_read_in_each_form(text: str, verdict: int) -> None:
    vote = parse_vote(text)
    assert vote is not None
    assert vote.verdict == verdict


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I think it was accepted.",
        '{"verdict": -1, "target": 3, "rej',
        '{"verdict": true}',
        '{"verdict": 2}',
        '{"verdict": 0.5}',
        '{"verdict": null}',
        r"\boxed{maybe}",
        '<think>perhaps {"verdict": 1}',
        "1 or -1",
        "NaN",
        "{" * 5000,
    ],
)
def test_what_holds_no_vote_is_none(text: str) -> None:
    assert parse_vote(text) is None


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_vote_or_none(text: str) -> None:
    vote = parse_vote(text)
    assert vote is None or vote.verdict in (-1, 0, 1)


@given(st.text(alphabet=st.characters(exclude_characters="{}<>\\")), st.sampled_from([-1, 0, 1]))
@settings(deadline=None)
def test_prose_around_the_object_changes_nothing(prose: str, verdict: int) -> None:
    assert parse_vote(f"{prose}{json.dumps({'verdict': verdict, 'target': 3})}{prose}") == Vote(verdict, target=3)


votes = st.lists(
    st.none()
    | st.builds(Vote, st.sampled_from([-1, 0, 1]), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))
)


@given(votes, st.integers(1, 7), st.lists(st.integers(0, 9), min_size=1))
@settings(deadline=None)
def test_counting_obeys_quorum_plurality_and_ties(cast: list[Vote | None], m: int, replies: list[int]) -> None:
    common = tally(cast, m, replies)
    said = [v.verdict for v in cast if v is not None]
    assert (common is None) == (len(said) < quorum(m))
    if common is None:
        return
    most = max(said.count(v) for v in (-1, 0, 1))
    leaders = [v for v in (-1, 0, 1) if said.count(v) == most]
    assert common.verdict == (leaders[0] if len(leaders) == 1 else 0)
    assert (common.target is None) == (common.verdict == 0) == (common.charges == ())
    assert all(index in replies for index, _ in common.charges)
    assert len({index for index, _ in common.charges}) == len(common.charges)


def test_two_of_three_is_the_quorum() -> None:
    assert [quorum(m) for m in (1, 2, 3, 4, 5, 6, 9)] == [1, 2, 2, 3, 4, 4, 6]


def test_the_target_is_the_winners_most_named_reply() -> None:
    common = tally([Vote(-1, 1), Vote(-1, 1), Vote(-1, 3), Vote(1, 3)], 4, [1, 3])
    assert common is not None
    assert (common.verdict, common.target, common.charges, common.share) == (-1, 1, ((1, -1),), 0.75)


def test_an_index_that_is_no_reply_means_the_last() -> None:
    common = tally([Vote(1, 0), Vote(1, 99)], 3, [1, 3])
    assert common is not None
    assert common.charges == ((3, 1),)


def test_going_back_charges_the_newest_and_credits_the_wanted_one() -> None:
    common = tally([Vote(-1, 5, 1), Vote(-1, 5, 1), Vote(-1, 5, None)], 3, [1, 3, 5])
    assert common is not None
    assert (common.target, common.charges) == (1, ((5, -1), (1, 1)))


def test_hints_are_merged_cut_and_sorted() -> None:
    long = "x" * 401
    given_hints = [
        "Write plain prose.",
        "write  plain\nprose",
        "too short",
        None,
        long,
        "Use one short sentence only.",
        "y" * 400,
    ]
    assert merge_hints(given_hints) == ("Write plain prose.", "Use one short sentence only.", "y" * 400)
    assert merge_hints(given_hints, 1) == ("Write plain prose.",)


def test_the_corpus_is_well_formed_and_the_weights_are_its() -> None:
    rows = rows_of(corpus_bytes())
    assert len(rows) >= 2000
    assert len({row.id for row in rows}) == len(rows)
    assert len({json.dumps([row.history, row.next]) for row in rows}) == len(rows)
    assert {row.kind for row in rows} == set(KINDS)
    assert {row.lang for row in rows} == set(LANGUAGES)
    pairs: dict[str, set[int]] = {}
    for row, group in zip(rows, groups(rows), strict=True):
        if row.pair:
            pairs.setdefault(row.pair, set()).add(group)
    assert all(len(found) == 1 for found in pairs.values())
    card = json.loads((SHIPPED / "weights.json").read_text())
    assert card["corpus"] == {"sha256": sha256(corpus_bytes()), "rows": len(rows)}


def test_the_corpus_repeats_itself_in_fewer_than_one_row_of_a_hundred() -> None:
    rows = rows_of(corpus_bytes())
    assert len({i for pair in near_duplicates(rows) for i in pair}) < len(rows) / 100


def shingles(text: str, words: int = 5) -> set[tuple[str, ...]]:
    said = re.findall(r"[a-z']+", text.lower())
    return {tuple(said[i : i + words]) for i in range(len(said) - words + 1)}


def test_no_wording_of_the_examples_student_occurs_in_the_corpus() -> None:
    """Else the example would be judged by heart."""
    folder = SHIPPED.parent / "examples" / "openclawrl" / "student"
    said: set[tuple[str, ...]] = set()
    for name in ("reactions.py", "problems.py"):
        tree = ast.parse((folder / name).read_text())
        notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in notes]
        said |= set().union(*(shingles(text) for text in texts if isinstance(text, str)))
    assert len(said) > 300
    found = {
        " ".join(words)
        for row in rows_of(corpus_bytes())
        for message in (*row.history, row.next)
        for words in shingles(message["content"]) & said
    }
    assert found == set()


def line(**changes: Any) -> dict[str, Any]:
    row = {
        "history": [{"role": "user", "content": "a tea?"}, {"role": "assistant", "content": "Sencha."}],
        "next": {"role": "user", "content": "lovely"},
        "verdict": 1,
        "target": 1,
        "kind": "accept_explicit",
        "lang": "en",
    }
    return row | changes


def test_merging_continues_ids_keeps_pairs_apart_and_drops_repetitions() -> None:
    old = merge([], [line(pair="x"), line(next={"role": "user", "content": "yuck"}, verdict=-1, pair="x")])
    new = merge(old, [line(), line(next={"role": "user", "content": "mm"}, pair="x")])
    assert [row["id"] for row in new] == ["c0001", "c0002", "c0003"]
    assert new[0]["pair"] == new[1]["pair"] != new[2]["pair"]


@pytest.mark.parametrize(
    "broken",
    [
        {"verdict": 2},
        {"verdict": 0},
        {"target": None},
        {"target": 0},
        {"target": 9},
        {"kind": "praise"},
        {"lang": "xx"},
        {"history": [{"role": "user", "content": "a tea?"}]},
        {"next": {"role": "robot", "content": "lovely"}},
        {"next": {"role": "user", "content": " "}},
    ],
)
def test_a_row_that_breaks_the_rules_is_not_merged(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="c0001"):
        merge([], [line(**broken)])


TITLES = [
    {"role": "user", "content": "a title for my essay on river ice"},
    {"role": "assistant", "content": "When Rivers Hold Still"},
    {"role": "user", "content": "more academic"},
    {"role": "assistant", "content": "Fluvial Cryogenics"},
]


@pytest.mark.parametrize(
    ("said", "best"),
    [("I keep coming back to 'when rivers hold still'", 1), ("cryogenics sounds cold, nice", 3)],
)
def test_words_of_a_message_point_at_the_reply_that_has_them(said: str, best: int) -> None:
    own = [f[0] for f in features(TITLES, {"role": "user", "content": said}, [1, 3])]
    assert own.index(max(own)) == [1, 3].index(best)
    assert max(own) > 0


def test_places_of_replies() -> None:
    assert places([1]) == [[1.0, 0.0, 0.0]]
    assert places([1, 3]) == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert places([1, 3, 5]) == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_charges_follow_from_verdict_target_and_going_back() -> None:
    assert charges(0, 1, 3, False) == ()
    assert charges(-1, 1, 3, False) == ((1, -1),)
    assert charges(-1, 1, 3, True) == ((3, -1), (1, 1))
    assert charges(1, 1, 3, True) == ((1, 1),)


LIST = "1. Boil water.\n2. Add tea.\n3. Wait."
PROSE = "Boil water, add the tea and wait."


def test_a_style_contrast_is_one_positive_sentence() -> None:
    assert contrast([LIST], [PROSE, "Heat the oven and bake it."]) == "Write it as plain running sentences."
    assert contrast([PROSE], [LIST, LIST]) == "Write the points as a short list."
    assert contrast(["word " * 80], ["word " * 21]) == "Answer in about 20 words."
    assert contrast(["Yes."], ["word " * 40]) == "Answer at more length, in about 40 words."
    assert contrast([PROSE], [PROSE]) is None
    assert contrast([], [PROSE]) is None
    assert contrast([PROSE], []) is None


@given(st.lists(st.text(max_size=80)), st.lists(st.text(max_size=80)))
@settings(max_examples=100, deadline=None)
def test_no_contrast_is_negative(refused: list[str], accepted: list[str]) -> None:
    said = contrast(refused, accepted)
    assert said is None or not re.search(r"\b(no|not|don't|never|without|avoid)\b", said)


def test_a_message_is_cut_into_clauses_and_the_refusing_one_instructs() -> None:
    parts = clauses("Great steps, but drop the bullets. Keep it this short!")
    assert parts == ["Great steps", "but drop the bullets.", "Keep it this short!"]
    assert phrases(parts, [0.1, 0.9, 0.2], [0.8, 0.1, 0.5]) == ("drop the bullets", "steps")
    assert phrases(parts, [0.1, 0.5, 0.2], [0.2, 0.1, 0.5]) == (None, None)
    assert instruction(parts, [0.1, 0.9, 0.2]) == "Drop the bullets"
    assert instruction(["no"], [1.0]) is None
    assert instruction([], []) is None


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_has_clauses_and_an_instruction_or_none(text: str) -> None:
    parts = clauses(text)
    said = instruction(parts, [0.7] * len(parts))
    assert said is None or 10 < len(said) <= 400


@given(st.lists(st.integers(0, 9)), st.integers(1, 20))
@settings(deadline=None)
def test_a_cut_keeps_both_ends(ids: list[int], limit: int) -> None:
    short = cut(ids, limit)
    assert len(short) == min(len(ids), limit)
    assert short[:1] == ids[:1]
    if limit >= 3:
        assert short[-1:] == ids[-1:]


@pytest.fixture(scope="module")
def model_dir() -> str:
    """The base model's folder, from REEF_TEST_MODEL or the cache."""
    given_dir = os.environ.get("REEF_TEST_MODEL")
    if given_dir:
        return given_dir
    try:
        from reef.model import resolve

        return str(resolve("default"))
    except Exception as error:  # no network, no pip: whatever the reason, there is no model
        pytest.skip(f"no base model: {error}")


LISTED = "### Step 1: Add the apples\n3 + 4 = 7\n\n### Step 2: Take away 2\n7 - 2 = 5\n\n**Final answer:** 5 apples"
PLAIN = "Tom has 3 apples and buys 4, so 3 + 4 = 7. He gives away 2, so 7 - 2 = 5 apples are left."
ASKED = "Tom has 3 apples, buys 4 and gives away 2. How many are left? Please show all the steps."
CLEAR = [
    (LISTED, "user", "Can you write that as normal sentences, without the headings and the step numbers?", -1),
    (LISTED, "user", "This looks like a printed worksheet. Please redo it the way I'd write it myself.", -1),
    (LISTED, "user", "That's not what I asked for, do it again without the bold.", -1),
    (PLAIN, "user", "Great, that's exactly what I needed, thank you!", 1),
    (PLAIN, "user", "Perfect, copying that into my notebook.", 1),
]


@pytest.fixture(scope="module")
def verdicts(model_dir: str) -> list[Verdict]:
    async def run() -> list[Verdict]:
        prm = EmbeddedPrm(model_dir)
        asked = [
            ([{"role": "user", "content": ASKED}, {"role": "assistant", "content": r}], role, t)
            for r, role, t, _ in CLEAR
        ]
        try:
            return await asyncio.gather(*(prm.judge(h, {"role": role, "content": t}) for h, role, t in asked))
        finally:
            await prm.aclose()

    return asyncio.run(run())


def test_the_embedded_judge_reads_clear_reactions(verdicts: list[Verdict]) -> None:
    assert [v.verdict for v in verdicts] == [row[3] for row in CLEAR]
    assert all(v.charges == ((1, v.verdict),) and v.target == 1 for v in verdicts)
    assert all(v.judge.startswith("embedded:judge-") for v in verdicts)


def test_the_embedded_judge_says_what_to_write_instead_of_a_refused_form(verdicts: list[Verdict]) -> None:
    assert verdicts[0].hint
    assert verdicts[3].hint is None
    assert all(v.tokens > 0 and v.seconds > 0 for v in verdicts)


def test_the_embedded_judge_refuses_a_history_without_a_reply(tmp_path: Path) -> None:
    with pytest.raises(JudgeError):
        asyncio.run(EmbeddedPrm(tmp_path).judge([{"role": "user", "content": "hi"}], NEXT))


def test_two_passes_equal_one_and_padding_changes_nothing(model_dir: str) -> None:
    """The context pass plus the suffix pass give the hidden states of the untouched base, and with an adapter those
    of one pass over all of it."""
    import torch
    from transformers import AutoModel

    from recipes.openclawrl.judge.body import Body, Padded

    body = Body(model_dir, depth=3)
    whole = AutoModel.from_pretrained(model_dir, dtype=torch.float32, num_hidden_layers=3)
    whole.norm = torch.nn.Identity()
    rows = [((5, 6, 7, 8, 9), (10, 11)), ((20,), (21, 22, 23, 24))]
    context, suffix = Padded.of([c for c, _ in rows]), Padded.of([s for _, s in rows])
    with torch.inference_mode():
        h = body.suffix(suffix, body.context(context, {}), context.lengths, {})
        for i, (c, s) in enumerate(rows):
            expected = whole(torch.tensor([[*c, *s]])).last_hidden_state[0, len(c) :]
            torch.testing.assert_close(h[i, : len(s)], expected, atol=1e-3, rtol=1e-3)
    adapter = {
        f"{layer}.{name}": (torch.randn(2, width) / 20, torch.randn(out, 2) / 20)
        for layer in (1, 2)
        for name, (out, width) in body.shapes(layer).items()
    }
    with torch.inference_mode():
        adapted = body.suffix(suffix, body.context(context, adapter), context.lengths, adapter)
        together = body.whole(body.lower(Padded.of([(*c, *s) for c, s in rows]), 1), adapter, range(1, 3))
    assert (adapted - h).abs().max() > 0.01
    for i, (c, s) in enumerate(rows):
        expected = together[i, len(c) : len(c) + len(s)]
        torch.testing.assert_close(adapted[i, : len(s)], expected, atol=1e-3, rtol=1e-3)


# --- explicit feedback ----------------------------------------------------------------------------


def reported(*reports: Report) -> Verdict | None:
    """What the recipe makes of reports on a reply; words go to a judge that refuses all of them."""

    class Refusing:
        async def judge(self, history: Any, next: Any, *, memo: str = "") -> Verdict:
            return Verdict(-1, len(history) - 1, hint=next["content"], judge="words")

    recipe = OpenClawRL(Config())
    recipe._prm = Refusing()
    asked = (Message("user", "a name for the boat"),)
    turn = Turn("t", "default", "s", asked, Message("assistant", "Oar Else"), None, None, reports=reports)
    return asyncio.run(recipe.judge(turn))


def test_the_newest_report_counts_whether_it_has_a_score_or_words() -> None:
    score, words = Report("1", 1.0, None), Report("2", None, "too silly for the club")
    newest = reported(score, words)
    assert newest is not None and (newest.verdict, newest.judge) == (-1, "words")
    newest = reported(words, score)
    assert newest is not None and (newest.verdict, newest.judge) == (1, "report")


def test_a_reports_words_are_a_hint_where_it_refuses_and_one_line() -> None:
    refused = reported(Report("1", -1.0, "Please:\nno puns in it"))
    praised = reported(Report("1", 1.0, "Perfect, exactly what I wanted"))
    assert refused is not None and refused.hint == "Please: no puns in it"
    assert praised is not None and praised.hint is None


def test_a_reply_that_is_wanted_back_has_no_hint_to_go_back() -> None:
    body = {"verdict": -1, "target": 1, "charges": [[3, -1], [1, 1]], "hint": "Go back to the first version."}
    assert charge_as_verdict(SimpleNamespace(body=body, verdict=1)).hint is None
    assert charge_as_verdict(SimpleNamespace(body=body, verdict=-1)).hint == "Go back to the first version."
