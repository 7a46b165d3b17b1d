"""Which of several replies a message is about, by words alone: a small linear model over hashed word sequences.

It knows, in the corpus's languages, how people speak of the newest, the previous and the first reply, what
requests are revisions of an earlier answer, and how much the words that only one exchange shares with the
message weigh. Owns its features (trained weights belong to them: `VERSION`) and its fit. No language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as fn

from recipes.openclawrl.judge.attribution import ROLES, places
from recipes.openclawrl.judge.grams import READ_CHARS, WORD, Bags, buckets, dense, mean_of, plain, sequences, stems
from recipes.openclawrl.judge.phrases import clauses
from recipes.openclawrl.judge.prompt import SHOWN_REPLIES, asked_before

VERSION = "w1"
BUCKETS = 4096
"""of word sequences; different ones may share a bucket"""
CUES = (
    "own", "asked", "any own", "any asked", "stems", "all", "number", "last clause", "first clause",
    "newest own", "newest asked", "newest stems", "newest last clause", "newest first clause", "shorter",
    "before", "before: previous", "back", "back: previous", "first: first", "ordinal", "other ordinal", "now: newest",
)  # fmt: skip
"""measures of one reply, 0..1: what only this reply or its request shares with the message, then the same of the
newest reply alone, whether an earlier reply is shorter than the newest, and how words of `PLACES` fit its place"""

PLACES = {
    "before": "before earlier previous prior former original old older had used"
    " vorher vorig davor zuvor ursprung alte fruher avant precedent ancien"
    " antes anterior previ antig 之前 刚才 剛才 上一 原来 前面 先前 前一 前の さっき 以前 元の 先ほど 前回 もとの",
    "back": "back revert restore undo return rollback again zuruck wieder revenir reviens revien retour remets remet"
    " reprend volver vuelv volvamos regres restaur recuper volta volte voltar retom desfa"
    " 换回 恢复 改回 回到 还是 还原 戻 もどし",
    "now": "now latest newest current jetzt neue aktuell letzte maintenant nouveau nouvelle dernier ahora nuev ultim"
    " agora nova novo 现在 这个 最后 最新 今の 今回 これ",
}
"""beginnings of words, in seven languages, by which people speak of replies' places; what they weigh is fitted"""
ORDINALS = (
    "first 1st erste anfang beginn premier premiere debut primer principio inicio primeir comeco"
    " 第一 最初 一开始 はじめ 1つ目",
    "second 2nd zweite deuxieme segund 第二 二番目 2つ目",
    "third 3rd dritte troisieme tercer terceir 第三 三番目 3つ目",
)
"""the same for the first replies of a conversation, in their order"""

Reaction = tuple[Sequence[Mapping[str, str]], Mapping[str, str], Sequence[int]]
"""history, next message, indices of the replies that may be meant"""


@dataclass(frozen=True, slots=True)
class Words:
    """The fitted model."""

    said: Tensor
    """[BUCKETS, ROLES] what a word sequence of the message says of a reply's place"""
    asked: Tensor
    """[BUCKETS] what one of the newest reply's request says for the newest"""
    place: Tensor
    """[ROLES]"""
    cue: Tensor
    """[CUES]"""

    @staticmethod
    def none() -> Words:
        """A model that says nothing."""
        return Words(
            torch.zeros(BUCKETS, len(ROLES)), torch.zeros(BUCKETS), torch.zeros(len(ROLES)), torch.zeros(len(CUES))
        )

    def logits(self, reaction: Reaction) -> Tensor:
        """One for each reply that may be meant."""
        history, said, replies = reaction
        place = self.place + mean_of(self.said, hashed(said["content"], 3))
        newest = mean_of(self.asked[:, None], hashed(asked_before(history, replies[-1]), 2))
        place = place + torch.cat([newest, torch.zeros(len(ROLES) - 1)])
        return torch.tensor(places(replies)) @ place + torch.tensor(cues(history, said, replies)) @ self.cue


def fit_words(
    reactions: Sequence[Reaction], targets: Sequence[int], *, earlier: float = 2.5, decay: float = 1e-4
) -> Words:
    """Fit to `targets`, positions among each reaction's replies. A row whose target is not the newest reply counts
    `earlier` times, since such rows are the fewer and a wrong charge costs the same either way."""
    said = Bags.of([hashed(next["content"], 3) for _, next, _ in reactions])
    asked = Bags.of([hashed(asked_before(history, replies[-1]), 2) for history, _, replies in reactions])
    at = torch.zeros(len(reactions), SHOWN_REPLIES, len(ROLES))
    measured = torch.zeros(len(reactions), SHOWN_REPLIES, len(CUES))
    absent = torch.full((len(reactions), SHOWN_REPLIES), -1e9)
    for i, (history, next, replies) in enumerate(reactions):
        at[i, : len(replies)] = torch.tensor(places(replies))
        measured[i, : len(replies)] = torch.tensor(cues(history, next, replies))
        absent[i, : len(replies)] = 0.0
    meant = torch.tensor(targets)
    weight = torch.tensor([earlier if t < len(r) - 1 else 1.0 for t, (_, _, r) in zip(targets, reactions, strict=True)])
    words = Words.none()
    fitted = [t.requires_grad_() for t in (words.said, words.asked, words.place, words.cue)]
    optimiser = torch.optim.LBFGS(fitted, max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        place = words.place + said.means(words.said)
        place = place + fn.pad(asked.means(words.asked[:, None]), (0, len(ROLES) - 1))
        logits = (at * place[:, None]).sum(-1) + measured @ words.cue + absent
        miss = (fn.cross_entropy(logits, meant, reduction="none") * weight).sum() / weight.sum()
        value = (
            miss + decay * (words.said.square().sum() + words.asked.square().sum()) + 3e-4 * words.cue.square().sum()
        )
        value.backward()
        return value

    optimiser.step(loss)
    return Words(*(t.detach() for t in fitted))


def hashed(text: str, longest: int) -> list[int]:
    """Buckets of the text's word sequences."""
    return buckets(sequences(text, longest), BUCKETS)


def cues(history: Sequence[Mapping[str, str]], next: Mapping[str, str], replies: Sequence[int]) -> list[list[float]]:
    """`CUES` of each reply."""
    text = next["content"][:READ_CHARS]
    said = stems(text)
    parts = clauses(text) or [text]
    first, last = stems(parts[0]), stems(parts[-1])
    own = [stems(history[i]["content"]) for i in replies]
    asked = [stems(asked_before(history, i)) for i in replies]
    both = [a | b for a, b in zip(own, asked, strict=True)]
    of_all = _weight(said) + 1
    out: list[list[float]] = []
    for k in range(len(replies)):
        others = frozenset().union(*both[:k], *both[k + 1 :])
        mine, requested = (said & own[k]) - others, (said & asked[k]) - others
        named = mine | requested
        row = [
            _weight(mine) / of_all,
            _weight(requested) / of_all,
            float(bool(mine)),
            float(bool(requested)),
            min(_weight(named), 3) / 3,
            _weight(said & both[k]) / of_all,
            float(any(stem.isdigit() for stem in mine)),
            min(_weight(named & last), 2) / 2,
            min(_weight(named & first), 2) / 2,
        ]
        out.append(row)
    newest = len(replies) - 1
    told = {name: _speaks(text, begin) for name, begin in _PLACES.items()}
    ordinals = [_speaks(text, begin) for begin in _ORDINALS]
    rank = sum(message["role"] == "assistant" for message in history[: replies[0]])
    for k, row in enumerate(out):
        earlier, previous = float(k < newest), float(k == newest - 1)
        again = [row[0], row[1], row[4], row[7], row[8]] if k == newest else [0.0] * 5
        shorter = len(history[replies[k]]["content"]) < len(history[replies[newest]]["content"])
        mine = ordinals[rank + k] if rank + k < len(ordinals) else 0.0
        out[k] = [
            *row,
            *again,
            float(shorter),
            told["before"] * earlier,
            told["before"] * previous,
            told["back"] * earlier,
            told["back"] * previous,
            ordinals[0] * earlier * float(rank + k == 0),
            mine * earlier,
            max(0.0, max(ordinals) - mine),
            told["now"] * (1 - earlier),
        ]
    return out


def _speaks(text: str, begin: tuple[str, ...]) -> float:
    """1.0 if a word of the text begins so; of scripts without spaces, if it stands anywhere."""
    said = plain(text)
    words = WORD.findall(said)
    return float(any((dense(b) and b in said) or any(w.startswith(b) for w in words) for b in begin))


def _weight(some: frozenset[str]) -> float:
    """Short stems say less."""
    return sum(1.0 if dense(s) or s.isdigit() else {3: 0.5, 4: 0.8}.get(len(s), 1.0) for s in some)


_PLACES = {name: tuple(plain(said).split()) for name, said in PLACES.items()}
_ORDINALS = tuple(tuple(plain(said).split()) for said in ORDINALS)
