"""The judge: votes and their counting, the corpus, the embedded model on clear rows."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.openclawrl.judge.corpus import corpus_bytes, groups, rows_of, sha256
from recipes.openclawrl.judge.prompt import cut
from recipes.openclawrl.judge.votes import Vote, merge_hints, parse_vote, quorum, tally
from recipes.openclawrl.prm import EmbeddedPrm
from reef.errors import JudgeError
from reef.recipe import Verdict

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
    assert len({row.id for row in rows}) == len(rows)
    assert len({json.dumps([row.history, row.next]) for row in rows}) == len(rows)
    pairs: dict[str, set[int]] = {}
    for row, group in zip(rows, groups(rows), strict=True):
        if row.pair:
            pairs.setdefault(row.pair, set()).add(group)
    assert all(len(found) == 1 for found in pairs.values())
    card = json.loads(Path(completed("weights.json")).read_text())
    assert card["corpus"] == {"sha256": sha256(corpus_bytes()), "rows": len(rows)}


@given(st.lists(st.integers(0, 9)), st.integers(1, 20))
@settings(deadline=None)
def test_a_cut_keeps_both_ends(ids: list[int], limit: int) -> None:
    short = cut(ids, limit)
    assert len(short) == min(len(ids), limit)
    assert short[:1] == ids[:1]
    if limit >= 3:
        assert short[-1:] == ids[-1:]


def completed(name: str) -> Path:
    return Path(__file__).parents[1] / "recipes" / "openclawrl" / "judge" / name


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


def test_the_embedded_judge_hints_in_the_users_own_words(verdicts: list[Verdict]) -> None:
    assert verdicts[0].hint == CLEAR[0][2]
    assert verdicts[3].hint is None


def test_the_embedded_judge_refuses_a_history_without_a_reply(tmp_path: Path) -> None:
    with pytest.raises(JudgeError):
        asyncio.run(EmbeddedPrm(tmp_path).judge([{"role": "user", "content": "hi"}], NEXT))


def test_two_passes_equal_one_and_padding_changes_nothing(model_dir: str) -> None:
    """The context pass plus the suffix pass give the hidden states of the untouched base."""
    import torch
    from transformers import AutoModel

    from recipes.openclawrl.judge.body import Body, Padded

    body = Body(model_dir, depth=3)
    whole = AutoModel.from_pretrained(model_dir, dtype=torch.float32, num_hidden_layers=3)
    whole.norm = torch.nn.Identity()
    rows = [((5, 6, 7, 8, 9), (10, 11)), ((20,), (21, 22, 23, 24))]
    context, suffix = Padded.of([c for c, _ in rows]), Padded.of([s for _, s in rows])
    with torch.inference_mode():
        h = body.suffix(body.embed(suffix), body.context(context), context.lengths, {}, range(3))
        for i, (c, s) in enumerate(rows):
            expected = whole(torch.tensor([[*c, *s]])).last_hidden_state[0, len(c) :]
            torch.testing.assert_close(h[i, : len(s)], expected, atol=1e-3, rtol=1e-3)
