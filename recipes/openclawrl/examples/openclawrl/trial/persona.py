"""Who the user is: its problems, what it wants to see in a reply, and what it says when it doesn't.

Invariant: a persona is a pure function of (seed, session, turn) and of the reply; it never states its
wish before a reply has missed it. It knows no model, no arm and no run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from recipes.openclawrl.examples.openclawrl.student import problems, reactions, rule
from recipes.openclawrl.examples.openclawrl.student.problems import Problem


@dataclass(frozen=True, slots=True)
class Look:
    """What the user sees in one reply."""

    passes: bool
    wrong: tuple[str, ...]
    """what a complaint can be about, most visible first"""
    correct: bool
    """the problem's number is the last one in the reply; reported, never a condition"""


class Persona(Protocol):
    name: str
    max_tokens: int
    """limit of a reply that the user's client sends"""

    def problem(self, seed: int, session: int) -> Problem: ...
    def look(self, reply: str, problem: Problem, ended: bool) -> Look: ...
    def complaint(self, look: Look, degree: int, seed: int, session: int, turn: int) -> str: ...
    def thanks(self, seed: int, session: int) -> str: ...


class Notebook:
    """The example's student: hand-written homework with its calculation."""

    name = "notebook"
    max_tokens = 64

    def problem(self, seed: int, session: int) -> Problem:
        return problems.generated(seed, session)

    def look(self, reply: str, problem: Problem, ended: bool) -> Look:
        seen = rule.check(reply, problem)
        return Look(seen.passes, seen.wrong, seen.correct)

    def complaint(self, look: Look, degree: int, seed: int, session: int, turn: int) -> str:
        seen = rule.Check(look.passes, tuple(w for w in look.wrong if w != "calculation"), 0, look.correct)
        if "calculation" not in look.wrong:
            seen = rule.Check(seen.passes, seen.violations, rule.CALCULATIONS, seen.correct)
        return reactions.complaint(seen, degree, seed, session, turn)

    def thanks(self, seed: int, session: int) -> str:
        return reactions.thanks(seed, session)


class Everyday:
    """What the everyday personas share: small questions, three degrees of complaint about one thing."""

    name = "everyday"
    max_tokens = 80
    wish = ""
    complaints: tuple[tuple[str, ...], ...] = ((), (), ())

    def problem(self, seed: int, session: int) -> Problem:
        deal, place = divmod(session, len(QUESTIONS))
        asked = random.Random(f"everyday {seed} {deal}").sample(QUESTIONS, len(QUESTIONS))[place]
        things = random.Random(f"thing {seed} {session}")
        return Problem(asked.format(animal=things.choice(ANIMALS), food=things.choice(FOODS)), 0.0, asked[:24])

    def complaint(self, look: Look, degree: int, seed: int, session: int, turn: int) -> str:
        said = pick(self.complaints[min(degree, 2)], self.name, seed, session, turn)
        return f"{said} {pick(reactions.REDO, 'redo', seed, session, turn)}"

    def thanks(self, seed: int, session: int) -> str:
        return pick(THANKS, self.name, seed, session)


class Brief(Everyday):
    """A reader in a hurry: an answer that ends, of at most 25 words."""

    name = "brief"
    complaints = (
        ("That's a lot to read.", "I only have a moment.", "My eyes glaze over."),
        ("Too long.", "That is far too long for me.", "I stopped reading half way."),
        ("One or two sentences are enough.", "Keep it to twenty words.", "Just the answer in one sentence."),
    )

    def look(self, reply: str, problem: Problem, ended: bool) -> Look:
        short = ended and 0 < len(reply.split()) <= 25
        return Look(short, () if short else ("length",), False)


class Warm(Everyday):
    """Somebody who likes a kind word at the end."""

    name = "warm"
    complaints = (
        ("That sounds rather cold.", "It ends so abruptly.", "A bit dry, isn't it?"),
        ("It stops without a friendly word.", "No goodbye, nothing kind at the end?", "You sound like a leaflet."),
        (
            "Please end with a kind wish.",
            "Close with something warm, like good luck.",
            "Say something nice last.",
        ),
    )

    def look(self, reply: str, problem: Problem, ended: bool) -> Look:
        kind = ended and KIND.search(reply[-120:]) is not None
        return Look(kind, () if kind else ("closing",), False)


class Simple(Everyday):
    """A parent who reads answers aloud to a child of six: plain words in short sentences.

    No string decides: the Flesch-Kincaid grade of the whole reply must be at most 4.
    """

    name = "simple"
    complaints = (
        ("My little one looks puzzled.", "She didn't follow that.", "Hm, he asked what that means."),
        ("The words are too hard for a child.", "Those are grown-up sentences.", "That's for adults."),
        ("Use short words and short sentences.", "Say it like you would to a six year old.", "Easy words, please."),
    )

    def look(self, reply: str, problem: Problem, ended: bool) -> Look:
        easy = grade(reply) <= 4
        return Look(easy, () if easy else ("grade",), False)


def grade(text: str) -> float:
    """The Flesch-Kincaid grade; a vowel group counts as a syllable. Text without a word is hard."""
    words = re.findall(r"[A-Za-z']+", text)
    if not words:
        return 99.0
    sentences = max(1, len(re.findall(r"[.!?]+(?:\s|$)|\n+", text.strip() + " ")))
    syllables = sum(max(1, len(re.findall(r"[aeiouy]+", w.lower().removesuffix("e")))) for w in words)
    return 0.39 * len(words) / sentences + 11.8 * syllables / len(words) - 15.59


KIND = re.compile(
    r"good luck|enjoy|have (?:fun|a (?:great|nice|lovely|wonderful))|take care|hope (?:this|that|it|you)|best of luck"
    r"|all the best|happy to help|you(?:'ve| have) got this|warm(?:ly)? (?:wishes|regards)|keep (?:it )?up",
    re.I,
)
THANKS = (
    "Thanks, that's just right.",
    "Lovely, thank you.",
    "Perfect, that's how I like it.",
    "Great, thanks a lot!",
    "Thank you, exactly what I needed.",
    "Nice, that helps. Bye!",
)
ANIMALS = ("cat", "dog", "horse", "rabbit", "parrot", "goldfish", "hamster", "pony")
FOODS = ("bread", "rice", "soup", "potatoes", "pancakes", "apple pie", "noodles", "carrots")
QUESTIONS = (
    "Why does a {animal} sleep so much?",
    "What does a {animal} like to eat?",
    "How do I cook {food}?",
    "How long does {food} keep in the fridge?",
    "Why is the sky blue?",
    "How do I clean a window?",
    "What can I do on a rainy day?",
    "Where does rain come from?",
    "How do I fall asleep faster?",
    "What should I give my sister for her birthday?",
    "Is it healthy to eat {food} every day?",
    "Can a {animal} get a cold?",
    "How do I wash a wool sweater?",
    "Why do leaves fall in autumn?",
    "What is a good name for a {animal}?",
    "How do I water a cactus?",
)
PERSONAS: Mapping[str, type[Persona]] = {p.name: p for p in (Notebook, Brief, Warm, Simple)}


def pick(phrases: Sequence[str], *key: object) -> str:
    """One of the phrases, the same for the same key."""
    return random.Random(" ".join(map(str, key))).choice(phrases)
