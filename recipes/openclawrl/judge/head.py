"""The trained part of the embedded judge: adapter, heads and the numbers that calibrate them.

Owns the two files that ship (`weights.safetensors`, `weights.json`) and how hidden states become a
probability for each verdict, for each kind of reaction and for each reply. Weights belong to one base
model and one prompt layout and refuse others. It knows no corpus and no optimiser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as fn

from recipes.openclawrl.judge.attribution import features, places
from recipes.openclawrl.judge.body import Adapter, Body, KeysValues, Padded
from recipes.openclawrl.judge.prompt import VERSION, Reading
from recipes.openclawrl.judge.votes import VERDICTS
from recipes.openclawrl.judge.wording import VERSION as WORDING_VERSION
from recipes.openclawrl.judge.wording import Said, Wording, wording_of
from recipes.openclawrl.judge.words import VERSION as WORDS_VERSION
from recipes.openclawrl.judge.words import Reaction, Words
from reef.errors import ModelError

SHIPPED = Path(__file__).parent
PARTS = ("verdict", "kind", "place")
"""the linear heads on the pooled suffix"""
EARLIER = ("earlier_target", "undo_to_earlier")
"""kinds of reaction to a reply that is not the newest"""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model makes of one reaction."""

    verdict: tuple[float, ...]
    """probabilities in the order of `VERDICTS`"""
    kind: Mapping[str, float]
    target: tuple[float, ...]
    """probabilities of the shown replies, newest last"""


@dataclass(frozen=True, slots=True)
class Context:
    """Requests and replies as the model has read them, one batch."""

    past: KeysValues
    lengths: Tensor

    @staticmethod
    @torch.inference_mode()
    def of(body: Body, head: Head, readings: Sequence[Reading]) -> Context:
        rows = Padded.of([r.context for r in readings])
        return Context(body.context(rows, head.adapter), rows.lengths)

    def rows(self, chosen: Sequence[int]) -> Context:
        """The context of some rows of the batch, in any order and as often as named."""
        at = torch.tensor(chosen)
        return Context([(k[at], v[at]) for k, v in self.past], self.lengths[at])


@dataclass(frozen=True, slots=True)
class Head:
    """Everything training produced."""

    adapter: Adapter
    linear: Mapping[str, tuple[Tensor, Tensor]]
    """for each of `PARTS` weight [n, 2 D] and bias [n]"""
    cue: Tensor
    """[features], weight of each measure of what a message says of a reply"""
    temperature: float
    """divides the verdict logits of the hidden states"""
    threshold: float
    """a verdict less probable than this charges nobody"""
    card: dict[str, Any] = field(default_factory=dict)
    """what was trained, on what, and how well it did"""
    words: Words = field(default_factory=Words.none)
    """what the words alone say of the reply that is meant"""
    wording: Wording = field(default_factory=Wording.none)
    """what the wording alone says of the verdict"""
    wording_weight: float = 0.0
    """of its logits, beside those of the hidden states"""
    mix: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """of the reply that is meant: what the hidden states weigh, what the words, what the kind says for an earlier
    reply, and what speaks for an earlier one anyway"""

    @staticmethod
    def depth_of(folder: Path) -> int:
        """How many layers of the base the weights in `folder` need. Raises ModelError."""
        return int(_card(folder)["settings"]["depth"])

    @staticmethod
    def load(folder: Path, body: Body) -> Head:
        """Read the weights in `folder` for `body`. Raises ModelError when they belong to another base or prompt."""
        card = _card(folder)
        if card["base"]["fingerprint"] != body.fingerprint or card["prompt"] != VERSION:
            raise ModelError(
                f"the judge's weights were trained on {card['base']['name']} with prompt {card['prompt']}, this is"
                f" {body.name} with prompt {VERSION}; train some with `python -m recipes.openclawrl.judge.train`"
            )
        for part, own in (("words", WORDS_VERSION), ("wording", WORDING_VERSION)):
            if card.get(part, own) != own:
                raise ModelError(f"the judge's weights read {part} by {card[part]}, this is {own}")
        try:
            tensors = load_file(folder / "weights.safetensors")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the judge's weights can't be read from {folder}: {error}") from error
        names = {name.rpartition(".")[0] for name in tensors if name.endswith((".a", ".b"))}
        return Head(
            adapter={n: (tensors[f"{n}.a"].float(), tensors[f"{n}.b"].float()) for n in sorted(names)},
            linear={p: (tensors[f"{p}.weight"].float(), tensors[f"{p}.bias"].float()) for p in PARTS},
            cue=tensors["cue"].float(),
            temperature=card["temperature"],
            threshold=card["threshold"],
            card=card,
            words=Words(**{n: tensors[f"words.{n}"].float() for n in Words.__slots__})
            if "words" in card
            else Words.none(),
            wording=Wording(**{n: tensors[f"wording.{n}"].float() for n in Wording.__slots__})
            if "wording" in card
            else Wording.none(),
            wording_weight=card.get("wording_weight", 0.0),
            mix=tuple(card.get("mix", (1.0, 0.0, 0.0, 0.0))),
        )

    def save(self, folder: Path) -> None:
        """Write the two files; the tensors in half precision."""
        tensors = {f"{n}.{s}": t for n, pair in self.adapter.items() for s, t in zip("ab", pair, strict=True)}
        for part, (weight, bias) in self.linear.items():
            tensors |= {f"{part}.weight": weight, f"{part}.bias": bias}
        tensors["cue"] = self.cue
        if "words" in self.card:
            tensors |= {f"words.{name}": getattr(self.words, name) for name in Words.__slots__}
        if "wording" in self.card:
            tensors |= {f"wording.{name}": getattr(self.wording, name) for name in Wording.__slots__}
        folder.mkdir(parents=True, exist_ok=True)
        packed = save({n: t.detach().half().contiguous() for n, t in tensors.items()})
        (folder / "weights.safetensors").write_bytes(packed)
        (folder / "weights.json").write_text(json.dumps(self.card, indent=1) + "\n", encoding="utf-8")

    def logits(self, part: str, pooled: Tensor) -> Tensor:
        """Of one of `PARTS`, [B, n]."""
        return fn.linear(pooled, *self.linear[part])

    def probabilities(self, pooled: Tensor, said: Sequence[Said]) -> Tensor:
        """Of the verdicts, [B, 3]."""
        return self.mixed(self.logits("verdict", pooled), self.wording.logits(said))

    def mixed(self, states: Tensor, wording: Tensor) -> Tensor:
        """Probabilities [B, 3] by the logits of hidden states and of wording."""
        return torch.softmax(states / self.temperature + self.wording_weight * wording, dim=-1)

    def target(self, place: Tensor, kind: Tensor, cues: Sequence[Sequence[float]], said: Reaction) -> Tensor:
        """Logits of the shown replies of one reaction: `place` [3] and `kind` [n] are its heads' logits."""
        of_states, of_words, of_kind, anyway = self.mix
        replies = said[2]
        logits = of_states * target_logits(place, self.cue, replies, cues)
        if of_words:
            logits = logits + of_words * self.words.logits(said)
        earlier = torch.ones(len(replies))
        earlier[-1] = 0.0
        return logits + earlier * (of_kind * self.goes_back(kind) + anyway)

    def goes_back(self, kind: Tensor) -> float:
        """Log odds, by the kind of reaction, that an earlier reply is meant."""
        names = self.card["kinds"]
        back = [names.index(k) for k in EARLIER]
        rest = [i for i in range(len(names)) if i not in back]
        return (torch.logsumexp(kind[back], -1) - torch.logsumexp(kind[rest], -1)).item()

    def decide(self, probabilities: Sequence[float]) -> tuple[int, float]:
        """(verdict, its probability) of one row of probabilities in the order of `VERDICTS`."""
        best = max(range(len(VERDICTS)), key=lambda i: probabilities[i])
        return VERDICTS[best], probabilities[best]

    def sure(self, probability: float) -> bool:
        """Whether a verdict of this probability may charge a reply."""
        return probability >= self.threshold


def _card(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"the judge's weights can't be read from {folder}: {error}") from error


def pool(h: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the suffix and its last position, each normed: [B, S, D] to [B, 2 D]."""
    h = fn.rms_norm(h, (h.shape[-1],))
    real = (torch.arange(h.shape[1])[None] < lengths[:, None]).to(h.dtype)[..., None]
    mean = (h * real).sum(1) / lengths[:, None]
    return torch.cat([mean, h[torch.arange(h.shape[0]), lengths - 1]], dim=-1)


def target_logits(place: Tensor, cue: Tensor, replies: Sequence[int], cues: Sequence[Sequence[float]]) -> Tensor:
    """One logit for each shown reply: what the message says of its place [3], and of its words [n][features]."""
    at = torch.tensor(places(replies), dtype=place.dtype)
    return at @ place + torch.tensor(cues, dtype=place.dtype) @ cue


@torch.inference_mode()
def score(
    body: Body,
    head: Head,
    readings: Sequence[Reading],
    reactions: Sequence[tuple[Sequence[Mapping[str, str]], Mapping[str, str]]],
    context: Context,
) -> list[Scores]:
    """What the model makes of each reaction (history, next) laid out as `readings`, one batch on its `context`."""
    suffix = Padded.of([r.suffix for r in readings])
    h = body.suffix(suffix, context.past, context.lengths, head.adapter)
    pooled = pool(h, suffix.lengths)
    verdicts = head.probabilities(pooled, [wording_of(*reaction) for reaction in reactions]).tolist()
    kind = head.logits("kind", pooled)
    kinds = torch.softmax(kind, -1).tolist()
    place = head.logits("place", pooled)
    out: list[Scores] = []
    for i, (reading, (history, said)) in enumerate(zip(readings, reactions, strict=True)):
        cues = features(history, said, reading.replies)
        logits = head.target(place[i], kind[i], cues, (history, said, reading.replies))
        target = torch.softmax(logits, -1).tolist()
        named = dict(zip(head.card["kinds"], kinds[i], strict=True))
        out.append(Scores(tuple(verdicts[i]), named, tuple(target)))
    return out
