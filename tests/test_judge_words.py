"""Which reply a message is about, by words: the features, the fit, and what the shipped weights learned."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from recipes.openclawrl.judge.head import SHIPPED, Head, target_logits
from recipes.openclawrl.judge.words import BUCKETS, CUES, Words, cues, fit_words, sequences, stems

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
    assert all(0 <= bucket < BUCKETS for bucket in sequences(said, 3))
    assert all(stem for stem in stems(said))


def test_a_tools_long_output_costs_little(shipped: Words) -> None:
    started = time.process_time()
    shipped.logits((THREE, {"role": "tool", "content": "line of output\n" * 200_000}, REPLIES))
    assert time.process_time() - started < 0.5


def test_the_weights_name_the_words_they_belong_to() -> None:
    import json

    from recipes.openclawrl.judge.words import VERSION

    card = json.loads((SHIPPED / "weights.json").read_text())
    assert card["words"] == VERSION
    assert len(card["mix"]) == 4
