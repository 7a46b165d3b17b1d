"""The homework: two-step word problems made from a seed, or the GSM8K stream read from a file.

Invariant: `generated(seed, index)` is a pure function, the same on every machine, and its answer is
exact; every generated problem needs two operations. A problem knows no rule and no wording of the
student's other messages; the request for steps is part of it, since that is what the student sends.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reef.errors import ConfigError

STREAM = Path(__file__).with_name("stream72.json")
"""Row numbers (from 0) of the 72 problems of the published homework stream, in its order."""

REQUESTS = (
    "Please show all the steps so I can follow.",
    "Please show all the steps so I can follow.",
    "Please show all the steps one by one so I can follow.",
)
"""How the student asks, each as likely; the last makes an untrained 135M model number its steps more often."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One piece of homework."""

    text: str
    """the student's first message, whole"""
    answer: float
    name: str
    """where it comes from: the template's key or `gsm8k/<row>`"""


@dataclass(frozen=True, slots=True)
class Template:
    """A story with {name}, {he}/{He}, and the numbers {a}, {b}, {c} and {ab} = a * b."""

    name: str
    text: str
    bounds: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    """for a, b and c: the least value and the first one too large"""
    answer: Callable[[int, int, int], int]


SHE = (
    *("Ana", "Mia", "Lena", "Sara", "Nora", "Ruth", "Ines", "Clara"),
    *("Maya", "Julia", "Emma", "Dora", "Rosa", "Lily", "Vera"),
)
HE = (
    *("Tom", "Ben", "Omar", "Leo", "Ivan", "Paul", "Hugo", "Sam"),
    *("Jack", "Noah", "Adam", "Luis", "Karl", "Max", "Peter"),
)
NAMES = (*((name, "she") for name in SHE), *((name, "he") for name in HE))

TEMPLATES: tuple[Template, ...] = (
    Template(
        "bakery",
        "{name} bakes {a} rolls, sells {b} of them and then bakes {c} more. How many rolls does {he} have now?",
        ((20, 60), (5, 18), (6, 30)),
        lambda a, b, c: a - b + c,
    ),
    Template(
        "pencils",
        "{name} buys {a} boxes with {b} pencils each and gives away {c} pencils. How many pencils are left?",
        ((3, 10), (6, 13), (4, 17)),
        lambda a, b, c: a * b - c,
    ),
    Template(
        "change",
        "{name} buys {a} notebooks for ${b} each and a pen for ${c}. How much does {he} pay in total?",
        ((3, 10), (2, 9), (1, 8)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "bus",
        "A bus has {a} passengers. At the first stop {b} get off and {c} get on. How many passengers are on it now?",
        ((20, 50), (4, 16), (3, 20)),
        lambda a, b, c: a - b + c,
    ),
    Template(
        "reading",
        "{name} reads {b} pages a day for {a} days. The book has {c} more pages. How many pages does the book have?",
        ((4, 12), (8, 25), (15, 60)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "marbles",
        "{name} has {a} marbles, finds {b} more and gives {c} to a friend. How many marbles does {he} have left?",
        ((15, 50), (5, 25), (3, 15)),
        lambda a, b, c: a + b - c,
    ),
    Template(
        "eggs",
        "{name} packs {ab} eggs into cartons of {b} and sells {c} cartons. How many cartons are left?",
        ((8, 16), (4, 11), (2, 7)),
        lambda a, b, c: a - c,
    ),
    Template(
        "garden",
        "{name} plants {a} rows of {b} tulips and {c} roses. How many flowers does {he} plant?",
        ((3, 10), (5, 13), (6, 30)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "savings",
        "{name} saves ${b} a week for {a} weeks and then spends ${c}. How much money is left?",
        ((5, 13), (6, 16), (10, 28)),
        lambda a, b, c: a * b - c,
    ),
    Template(
        "library",
        "A library has {a} books. It lends out {b} and gets {c} back. How many books are in the library now?",
        ((90, 200), (20, 60), (8, 20)),
        lambda a, b, c: a - b + c,
    ),
    Template(
        "cookies",
        "{name} shares {ab} cookies equally among {b} friends. Each friend already had {c}. "
        "How many cookies does each friend have now?",
        ((3, 10), (3, 9), (2, 9)),
        lambda a, b, c: a + c,
    ),
    Template(
        "running",
        "{name} runs {b} km on each of {a} days and {c} km on Sunday. How many km does {he} run in all?",
        ((3, 7), (4, 12), (5, 19)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "stamps",
        "{name} has {a} stamps. {He} gets {b} from an uncle and {c} from an aunt. How many stamps does {he} have?",
        ((25, 90), (8, 30), (6, 25)),
        lambda a, b, c: a + b + c,
    ),
    Template(
        "chairs",
        "A hall has {a} rows of {b} chairs. {c} chairs are broken. How many chairs can be used?",
        ((6, 15), (8, 16), (5, 25)),
        lambda a, b, c: a * b - c,
    ),
    Template(
        "taxi",
        "A taxi costs ${c} plus ${b} for each km. {name} rides {a} km. How much does {he} pay?",
        ((5, 16), (2, 5), (3, 9)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "juice",
        "{name} pours {ab} ml of juice equally into {b} cups and drinks {c} ml from one. How much is left in that cup?",
        ((120, 240), (3, 7), (20, 90)),
        lambda a, b, c: a - c,
    ),
    Template(
        "farm",
        "A farmer has {a} cows and {b} sheep. He sells {c} of the animals. How many animals are left?",
        ((12, 40), (15, 50), (5, 20)),
        lambda a, b, c: a + b - c,
    ),
    Template(
        "work",
        "{name} works {a} hours for ${b} an hour and gets a tip of ${c}. How much money does {he} earn?",
        ((4, 10), (9, 19), (5, 25)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "apples",
        "{name} picks {a} apples and {b} pears and eats {c} of the fruits. How many fruits are left?",
        ((14, 40), (9, 30), (2, 9)),
        lambda a, b, c: a + b - c,
    ),
    Template(
        "tickets",
        "{a} adults pay ${b} each and a child pays ${c} for the zoo. How much do they pay together?",
        ((2, 7), (9, 19), (4, 9)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "ribbon",
        "{name} cuts {a} pieces of {b} cm from a ribbon and {c} cm remain. How long was the ribbon?",
        ((4, 10), (8, 20), (5, 30)),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "cards",
        "{name} has {a} cards and loses {b}. A friend gives {name} {c} cards. How many cards does {he} have now?",
        ((30, 80), (6, 25), (5, 20)),
        lambda a, b, c: a - b + c,
    ),
    Template(
        "teams",
        "{ab} children form teams of {b}. Then {c} more teams join. How many teams are there?",
        ((4, 12), (3, 9), (2, 8)),
        lambda a, b, c: a + c,
    ),
    Template(
        "shirts",
        "{name} pays with ${ab} for {b} shirts that all cost the same and gets no change. "
        "Each shirt was ${c} cheaper than before. What did a shirt cost before?",
        ((9, 25), (2, 6), (2, 9)),
        lambda a, b, c: a + c,
    ),
)


def generated(seed: int, index: int) -> Problem:
    """Problem `index` (from 0) of the stream `seed`. Neighbours differ: templates are dealt, not drawn."""
    deal, place = divmod(index, len(TEMPLATES))
    template = random.Random(f"deal {seed} {deal}").sample(TEMPLATES, len(TEMPLATES))[place]
    rng = random.Random(f"problem {seed} {index}")
    name, he = rng.choice(NAMES)
    a, b, c = (rng.choice(range(*bound)) for bound in template.bounds)
    story = template.text.format(name=name, he=he, He=he.capitalize(), a=a, b=b, c=c, ab=a * b)
    return Problem(f"{story} {rng.choice(REQUESTS)}", template.answer(a, b, c), template.name)


def gsm8k(path: Path) -> list[Problem]:
    """The 72 problems of the published stream from a GSM8K test split (JSON lines: question, answer).

    Raises ConfigError when the file is not that.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        picked = [(n, rows[n]) for n in json.loads(STREAM.read_text())]
        return [Problem(f"{r['question']} {REQUESTS[0]}", _solution(r["answer"]), f"gsm8k/{n}") for n, r in picked]
    except OSError as error:
        raise ConfigError(f"the GSM8K file {path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} is not the GSM8K test split (JSON lines with question and answer)") from error


def _solution(answer: str) -> float:
    found = re.search(r"####\s*\$?(-?[\d,]+(?:\.\d+)?)", answer)
    if found is None:
        raise ValueError("no '#### number' in the answer")
    return float(found.group(1).replace(",", ""))


def stream(seed: int, gsm8k_path: Path | None = None) -> Callable[[int], Problem]:
    """The run's homework as a function of the session index; the GSM8K list repeats after its end."""
    if gsm8k_path is None:
        return lambda index: generated(seed, index)
    problems = gsm8k(gsm8k_path)
    return lambda index: problems[index % len(problems)]
