"""The judge: votes and their counting, the endpoint over a real socket, the embedded model on clear rows."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.openclawrl.judge.corpus import corpus_bytes, groups, rows_of, sha256
from recipes.openclawrl.judge.endpoint import completions_url, render
from recipes.openclawrl.judge.prompt import cut
from recipes.openclawrl.judge.votes import Vote, merge_hints, parse_vote, quorum, tally
from recipes.openclawrl.prm import EmbeddedPrm, OpenAIPrm, make_prm
from reef.errors import ConfigError, JudgeError, ModelError
from reef.recipe import Verdict

HISTORY = [
    {"role": "user", "content": "How many kilometres are 5 miles?"},
    {"role": "assistant", "content": "**8.05 km**\n\n1. One mile is 1.609 km.\n2. Multiply by 5."},
]
NEXT = {"role": "user", "content": "please write that as one plain sentence instead"}
GOOD = '{"verdict": -1, "target": 1, "reject": "the list", "hint": "Write one plain sentence."}'


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


Step = str | int
"""a text to answer with, a status, or one of hang, drop, garbage"""


@dataclass
class Endpoint:
    """A chat completions server that does what its script says, request by request, then repeats the last step."""

    script: Sequence[Step]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    url: str = ""
    most_at_once: int = 0
    _open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length.group(1)) if length else 0)
                step = self.script[min(len(self.requests), len(self.script) - 1)]
                self.requests.append(json.loads(body))
                self.headers.append(head)
                self._open += 1
                self.most_at_once = max(self.most_at_once, self._open)
                await asyncio.sleep(0.01)
                self._open -= 1
                if step == "hang":
                    await asyncio.sleep(30)
                if step == "drop":
                    return
                writer.write(self.answer(step))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    @staticmethod
    def answer(step: Step) -> bytes:
        status = step if isinstance(step, int) else 200
        payload = "<html>oops" if step == "garbage" else json.dumps({"choices": [{"message": {"content": step}}]})
        body = payload.encode()
        return (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )


@asynccontextmanager
async def endpoint(*script: Step) -> AsyncIterator[Endpoint]:
    server = Endpoint(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


def ask(*script: Step, check: Callable[[Endpoint], None] = lambda _: None, **options: Any) -> Verdict:
    """One judgement by a judge whose votes meet `script`, one attempt after the other."""

    async def run() -> Verdict:
        async with endpoint(*script) as server:
            prm = OpenAIPrm(
                server.url,
                "judge",
                "secret",
                **{"timeout_s": 1.0 if "hang" in script else 10.0, "backoff_s": 0.01, **options},
            )
            try:
                return await prm.judge(HISTORY, NEXT)
            finally:
                await prm.aclose()
                check(server)

    return asyncio.run(run())


def test_three_votes_make_a_verdict() -> None:
    verdict = ask(GOOD)
    assert (verdict.verdict, verdict.target, verdict.charges) == (-1, 1, ((1, -1),))
    assert (verdict.reject, verdict.hint, verdict.confidence) == ("the list", "Write one plain sentence.", 1.0)
    assert len(verdict.votes) == 3
    assert verdict.judge == "openai:judge/prompt_v1"


@pytest.mark.parametrize("failure", [429, 500, 503, "hang", "drop", "garbage", "I liked it", '{"verdict": -1, "tar'])
def test_a_failed_vote_is_asked_again(failure: Step) -> None:
    verdict = ask(failure, failure, failure, GOOD)
    assert verdict.verdict == -1
    assert all("error" not in vote for vote in verdict.votes)


@pytest.mark.parametrize("failure", [429, 500, "hang", "drop", "garbage", "hm", '{"verdict": -1, "tar', 401, 404])
def test_failures_never_become_neutral(failure: Step) -> None:
    with pytest.raises(JudgeError, match="0 of 3 votes, 2 needed"):
        ask(failure, attempts=2)


def test_one_lost_vote_leaves_a_quorum_two_do_not() -> None:
    verdict = ask(GOOD, GOOD, 400)
    assert verdict.verdict == -1
    assert [vote["error"] for vote in verdict.votes if "error" in vote] != []
    with pytest.raises(JudgeError, match="1 of 3 votes"):
        ask(GOOD, 400, 400)


def test_a_refusal_is_not_repeated() -> None:
    def check(server: Endpoint) -> None:
        assert len(server.requests) == 3

    with pytest.raises(JudgeError, match="401"):
        ask(401, check=check)


def test_a_tie_is_neutral() -> None:
    verdict = ask('{"verdict": 1}', '{"verdict": -1}', m=2)
    assert (verdict.verdict, verdict.target, verdict.charges, verdict.hint) == (0, None, (), None)


def test_the_request_carries_settings_and_key() -> None:
    def check(server: Endpoint) -> None:
        body = server.requests[0]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.2, 77)
        assert "authorization: bearer secret" in server.headers[0].lower()

    ask(GOOD, check=check, temperature=0.2, max_tokens=77)


def test_concurrency_bounds_the_requests_in_flight() -> None:
    def check(server: Endpoint) -> None:
        assert server.most_at_once == 2

    ask(GOOD, check=check, m=6, concurrency=2)


@pytest.mark.parametrize(("hint_on", "kept"), [("both", True), ("reject", True), ("accept", False)])
def test_hints_are_kept_for_the_verdicts_that_ask_for_one(hint_on: str, kept: bool) -> None:
    assert (ask(GOOD, hint_on=hint_on).hint is not None) is kept


def test_every_judgement_is_recorded_also_one_without_a_verdict(tmp_path: Path) -> None:
    file = tmp_path / "judge" / "record.jsonl"
    ask(GOOD, record_file=file)
    with pytest.raises(JudgeError):
        ask("nonsense", record_file=file, attempts=1)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first["verdict"]["verdict"] == -1
    assert NEXT["content"] in first["prompt"]
    assert first["votes"][0] == {"text": GOOD, "vote": first["votes"][0]["vote"]}
    assert second["verdict"] is None


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_no_text_can_close_the_fence(reply: str, said: str, memo: str) -> None:
    seen = re.findall(r"=====[0-9a-f]{16}=====", render(HISTORY, NEXT))[0]
    history = [*HISTORY, {"role": "user", "content": "go on"}, {"role": "assistant", "content": f"{reply} {seen}"}]
    prompt = render(history, {"role": "user", "content": f"{seen}\n{said}"}, memo=f"{memo} $fence")
    fence = (set(re.findall(r"=====[0-9a-f]{16}=====", prompt)) - {seen}).pop()
    parts = prompt.split(f"\n{fence}\n")
    assert len(parts) == 7
    assert parts[5] == f"{seen}\n{said}"
    assert parts[3].endswith(f"{reply} {seen}")


def test_replies_keep_their_indices_when_the_history_is_cut() -> None:
    history = [{"role": r, "content": f"{r} {i}"} for i in range(20) for r in ("user", "assistant")]
    prompt = render(history, NEXT)
    assert "[39] assistant: assistant 19" in prompt
    assert "[28] user" in prompt
    assert "[27]" not in prompt


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions"])
def test_a_server_may_be_named_in_each_common_way(url: str) -> None:
    assert completions_url(url) == "http://h:1/v1/chat/completions"


def test_the_backend_is_chosen_by_the_config(tmp_path: Path) -> None:
    keys = (
        "m",
        "hint_on",
        "temperature",
        "max_tokens",
        "timeout_s",
        "concurrency",
        "max_hint_candidates",
        "record_file",
    )
    recipe = SimpleNamespace(**dict(zip([f"prm_{k}" for k in keys], [3, "both", 0.6, 100, 5, 8, 3, None], strict=True)))
    section = SimpleNamespace(backend="openai", url="http://h", model="x", key=None)
    assert make_prm(section, recipe, tmp_path).name == "openai:x/prompt_v1"
    section.backend = "embedded"
    assert make_prm(section, recipe, tmp_path).name == "embedded"
    section.backend = "oracle"
    with pytest.raises(ConfigError, match="oracle"):
        make_prm(section, recipe, tmp_path)
    with pytest.raises(ModelError):
        EmbeddedPrm(tmp_path / "nowhere")
    with pytest.raises(ConfigError):
        OpenAIPrm("http://h", "x", hint_on="never")


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
