"""What words alone say of a reaction, which reply it means and what its verdict is: features, fits, shipped weights."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from recipes.openclawrl.judge.calibration import calibrate
from recipes.openclawrl.judge.grams import letters, stems
from recipes.openclawrl.judge.head import SHIPPED, Head, target_logits
from recipes.openclawrl.judge.wording import Said, Wording, fit_wording
from recipes.openclawrl.judge.words import BUCKETS, CUES, Words, cues, fit_words, hashed

THREE = [
    {"role": "user", "content": "a name for our rowing club"},
    {"role": "assistant", "content": "Oar Else"},
    {"role": "user", "content": "another"},
    {"role": "assistant", "content": "Blade Runners"},
    {"role": "user", "content": "shorter"},
    {"role": "assistant", "content": "Row"},
]
REPLIES = (1, 3, 5)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def cue(name: str, text: str) -> list[float]:
    return [row[CUES.index(name)] for row in cues(THREE, user(text), REPLIES)]


@pytest.fixture(scope="module")
def shipped() -> Words:
    tensors = load_file(SHIPPED / "weights.safetensors")
    return Words(**{name: tensors[f"words.{name}"].float() for name in Words.__slots__})


def test_words_that_only_one_reply_shares_point_at_it() -> None:
    assert cue("any own", "the blade thing made them laugh") == [0.0, 1.0, 0.0]
    assert cue("last clause", "the oar joke is old. blade it is") == [0.0, 0.5, 0.0]
    assert cue("first clause", "the blade joke is old. take the oars") == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "text", ["the second one please", "nimm die zweite", "la deuxième", "用第二个", "二番目がいい"]
)
def test_an_ordinal_fits_the_reply_it_counts(text: str) -> None:
    assert cue("ordinal", text) == [0.0, 1.0, 0.0]
    assert cue("other ordinal", text) == [1.0, 0.0, 1.0]


GOING_BACK = [
    "put back what you had before",
    "bitte zurück zur vorherigen Fassung",
    "remets la version précédente",
    "vuelve a la versión anterior",
    "volta para a versão anterior",
    "换回之前的版本",
    "さっきのに戻して",
]


@pytest.mark.parametrize("text", GOING_BACK)
def test_going_back_is_heard_in_seven_languages(text: str) -> None:
    assert cue("before", text) == [1.0, 1.0, 0.0]
    assert cue("back: previous", text) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("text", GOING_BACK)
def test_the_shipped_words_turn_to_the_earlier_reply(shipped: Words, text: str) -> None:
    def for_previous(said: str) -> float:
        logits = shipped.logits((THREE, user(said), REPLIES))
        return (logits[1] - logits[2]).item()

    assert for_previous(text) > max(0.0, for_previous("great, thanks") + 1.0)


def test_a_fit_learns_what_the_rows_say() -> None:
    rows = [(THREE, user(text), REPLIES) for text in ("keep the last", "keep the start", "the middle")]
    words = fit_words(rows, [2, 0, 1], decay=1e-6)
    assert [int(words.logits(row).argmax()) for row in rows] == [2, 0, 1]


def test_without_words_the_hidden_states_decide_alone() -> None:
    place, kind, told = torch.tensor([1.0, 2.0, 0.5]), torch.zeros(22), [[0.1, 0.0], [0.0, 0.2], [0.0, 0.0]]
    names: list[Any] = [f"k{n}" for n in range(20)]
    head = Head({}, {}, torch.tensor([1.0, 2.0]), 1.0, 0.0, {"kinds": [*names, "earlier_target", "undo_to_earlier"]})
    found = head.target(place, kind, told, (THREE, user("hm"), REPLIES))
    torch.testing.assert_close(found, target_logits(place, head.cue, REPLIES, told))


@given(st.text(), st.text())
@settings(deadline=None, max_examples=100)
def test_any_text_has_cues_and_sequences(said: str, reply: str) -> None:
    history = [*THREE[:3], {"role": "assistant", "content": reply}]
    rows = cues(history, user(said), (1, 3))
    assert all(len(row) == len(CUES) and all(0 <= value <= 1 for value in row) for row in rows)
    assert all(0 <= bucket < BUCKETS for bucket in hashed(said, 3))
    assert all(stem for stem in stems(said))


def test_a_tools_long_output_costs_little(shipped: Words) -> None:
    started = time.process_time()
    shipped.logits((THREE, {"role": "tool", "content": "line of output\n" * 200_000}, REPLIES))
    assert time.process_time() - started < 0.5


def test_the_weights_name_the_words_they_belong_to() -> None:
    import json

    from recipes.openclawrl.judge.wording import VERSION as WORDING_VERSION
    from recipes.openclawrl.judge.words import VERSION

    card = json.loads((SHIPPED / "weights.json").read_text())
    assert card["words"] == VERSION
    assert len(card["mix"]) == 4
    assert card["wording"] == WORDING_VERSION and card["wording_weight"] > 0


# --- the verdict -----------------------------------------------------------------------------------


def says(*texts: str) -> list[Said]:
    return [("a name for our club", text, "user") for text in texts]


def test_wording_learns_a_verdict_in_scripts_with_and_without_spaces() -> None:
    taught = says("no, wrong again", "nein, falsch", "不对，重来", "great, thanks", "super, danke", "很好，谢谢")
    fitted = fit_wording(taught, torch.tensor([0, 0, 0, 2, 2, 2]), rounds=20)
    guess = fitted.logits(says("that is wrong", "danke!", "谢谢你", "重来一次")).argmax(-1)
    assert guess.tolist() == [0, 2, 2, 0]


def test_wording_reads_the_request_and_the_role_too() -> None:
    taught: list[Said] = [("sort it", "done", "user"), ("delete it", "done", "user"), ("sort it", "done", "tool")]
    fitted = fit_wording(taught, torch.tensor([2, 0, 1]), rounds=30)
    assert fitted.logits(taught).argmax(-1).tolist() == [2, 0, 1]


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_text_has_letters(text: str) -> None:
    assert all(1 <= len(some) <= 5 for some in letters(text))


def test_calibration_gives_the_wording_the_weight_it_earns() -> None:
    dice = torch.Generator().manual_seed(1)
    verdicts = torch.randint(0, 3, (3000,), generator=dice)
    states = torch.randn(3000, 3, generator=dice) + torch.nn.functional.one_hot(verdicts, 3)
    noise = torch.randn(3000, 3, generator=dice)
    head = Head({}, {"verdict": (torch.zeros(3, 1), torch.zeros(3))}, torch.zeros(1), 1.0, 0.0)
    assert abs(calibrate(head, states, noise, verdicts).wording_weight) < 0.1
    of_use = calibrate(head, states, noise + torch.nn.functional.one_hot(verdicts, 3), verdicts)
    assert of_use.wording_weight > 0.5
    with_it = of_use.mixed(states, noise + torch.nn.functional.one_hot(verdicts, 3)).argmax(-1) == verdicts
    assert with_it.float().mean() > (states.argmax(-1) == verdicts).float().mean()


def test_a_head_without_wording_goes_by_hidden_states_alone() -> None:
    head = Head({}, {"verdict": (torch.eye(3), torch.zeros(3))}, torch.zeros(1), 2.0, 0.0)
    pooled = torch.tensor([[0.5, 1.0, -1.0]])
    assert torch.equal(head.probabilities(pooled, says("hm")), torch.softmax(pooled / 2, -1))


def test_the_wording_of_a_long_output_costs_little() -> None:
    fitted = Wording(torch.zeros(1 << 18, 3), torch.zeros(3))
    started = time.process_time()
    fitted.logits([("go", "line of output\n" * 200_000, "tool")])
    assert time.process_time() - started < 0.5
