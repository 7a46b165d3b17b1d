"""What the student says after a reply: complaints, requests to redo it, and thanks.

Invariant: a session's opening is the problem alone; wishes are only ever heard as a reaction to a
reply that broke them, and only about what that reply did. Wording is a pure function of
(seed, session, turn). Complaints come in three degrees: a first one is vague, a repeated one names
the thing, a third one says what to do instead. This module knows no problem and no rule beyond the
names of what can be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .rule import Check

COMPLAINTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "bold": (
        (
            "this shouts at me with those thick words.",
            "my notebook has no fat letters, this looks odd in it.",
            "the stars around the words get in my way.",
            "why are some words so loud?",
        ),
        (
            "there is bold text in it again and I can't write that with a pen.",
            "nobody in my class writes bold words.",
            "please leave the bold out.",
            "the bold parts look like a printed leaflet.",
        ),
        (
            "no bold at all please, just normal words.",
            "write every word the same way, nothing in bold.",
            "bold again. Plain handwriting only, please.",
            "drop the asterisks, I write this by hand.",
        ),
    ),
    "heading": (
        (
            "this reads like a textbook page with titles.",
            "I don't put titles in my homework.",
            "the title lines look strange for such a small sum.",
            "it looks like a report, not like my homework.",
        ),
        (
            "there are headings in it, I never write those.",
            "my teacher would wonder about those headings.",
            "please take the headings away.",
            "headings for two little sums are too much.",
        ),
        (
            "no headings please, just start with the working.",
            "leave every title line out and simply write the sum down.",
            "still a heading. Only sentences and sums, please.",
            "just write it like a pupil would, without any heading.",
        ),
    ),
    "bullets": (
        (
            "those dots in front of the lines look copied.",
            "I wouldn't hand that in with dashes everywhere.",
            "this looks like a shopping list.",
            "it is all chopped up into little points.",
        ),
        (
            "please not as bullet points.",
            "I don't want a list with bullets.",
            "the bullets make it look like a slide.",
            "can I have this without the bullet list?",
        ),
        (
            "no bullets, write it as normal sentences.",
            "again a list. Put it in one or two plain sentences instead.",
            "I need running text, not bullet points.",
            "write it down like you would tell it to me, without a list.",
        ),
    ),
    "numbered": (
        (
            "this looks like an instruction sheet.",
            "the numbers in front of every line confuse me.",
            "I can't hand in something that looks like a recipe.",
            "why is everything numbered? It looks printed.",
        ),
        (
            "please not as a numbered list.",
            "I don't want a 1. 2. 3. list in my notebook.",
            "the numbering has to go, my teacher will notice.",
            "can I have this without the numbered points?",
        ),
        (
            "no numbered list, write it as normal sentences.",
            "still numbered. Tell it to me in plain sentences instead.",
            "just a short text with the sums in it, no 1. and 2. in front.",
            "write it in running text like I would on paper, no numbering.",
        ),
    ),
    "steps": (
        (
            "it sounds like a manual.",
            "I don't label things like that on paper.",
            "this looks like it came out of a machine.",
            "those labels look silly in my notebook.",
        ),
        (
            "please don't write Step 1, Step 2.",
            "the step labels have to go.",
            "nobody at my school writes step and a number.",
            "I don't like the word step in front of each part.",
        ),
        (
            "no step labels, just say what you do in sentences.",
            "leave out Step 1 and so on and simply write the sums in a row.",
            "again with the steps labelled. Normal sentences, please.",
            "write what you calculate one after the other, without calling it a step.",
        ),
    ),
    "latex": (
        (
            "there are odd signs in it that I can't read.",
            "what are those backslashes?",
            "my screen shows strange code in the middle.",
            "I can't copy those symbols onto paper.",
        ),
        (
            "please no formula code, I can't read it.",
            "the backslash things and boxes have to go.",
            "boxed means nothing in my notebook.",
            "that formula code looks copied from somewhere.",
        ),
        (
            "write the sums with + and - like on paper, no code.",
            "use normal numbers and signs, nothing with a backslash.",
            "no box and no code, just the sum as I would write it.",
            "again formula code. Ordinary sums, please.",
        ),
    ),
    "table": (
        (
            "I didn't expect a grid for this.",
            "that is too fancy for homework.",
            "this looks like a spreadsheet.",
            "the boxes look out of place in my notebook.",
        ),
        (
            "please no table.",
            "I can't draw a table for every sum.",
            "the table has to go.",
            "not in a code box, please.",
        ),
        (
            "no table, just sentences with the sums.",
            "write it as plain text without the grid.",
            "again a table. Ordinary sentences, please.",
            "only text please, nothing in boxes.",
        ),
    ),
    "final": (
        (
            "the end sounds so stiff.",
            "I would never end it like that.",
            "the last line sounds like an exam key.",
            "the closing line sounds like a quiz show.",
        ),
        (
            "please don't write final answer.",
            "those words final answer look copied.",
            "I don't announce my answer like that.",
            "final answer is not something I'd write.",
        ),
        (
            "just end with the number in a sentence, no final answer line.",
            "leave the words final answer out.",
            "again final answer. Simply say how many it is.",
            "stop after the last sum, without announcing it.",
        ),
    ),
    "calculation": (
        (
            "I can't see how you get there.",
            "I don't get where the number comes from.",
            "that doesn't tell me how it is worked out.",
            "something is missing in the middle for me.",
        ),
        (
            "where is the sum? I only see words.",
            "I need to see the numbers being worked out.",
            "please show the sum itself, not only talk about it.",
            "my teacher wants to see the working with numbers.",
        ),
        (
            "write the sum out with the numbers and an equals sign.",
            "still no sum. Put it like 3 + 2 = 5, with the right numbers.",
            "I need the calculation written down, with plus or times and the result.",
            "show each sum with its result, please.",
        ),
    ),
    "correct": (
        (
            "I think the result is off.",
            "my neighbour got something else.",
            "that can't be right, can it?",
            "the number looks wrong to me.",
        ),
        (
            "the result is still wrong.",
            "I checked and it's another number.",
            "the number at the end isn't right.",
            "that doesn't match what the book says.",
        ),
        (
            "please check the sums again, the result is wrong.",
            "do the sums slowly, the number isn't right yet.",
            "again a wrong number. Work it out from the start.",
            "please compute it again carefully, the last number is wrong.",
        ),
    ),
}

OPENERS = ("", "", "", "Hmm, ", "Sorry, ", "Well, ", "Oh, ", "Wait, ")

REDO = (
    "Can you do it again?",
    "Once more, please?",
    "Could you write it again for me?",
    "Please try again.",
    "Can I have another one?",
    "Could you change that?",
    "Please write it anew.",
    "Do it over, please.",
    "Would you redo it?",
    "Can you fix that for me?",
    "Let me see it done afresh, please.",
    "Please give me a different version.",
    "Mind writing it differently?",
    "Can you solve it again that way?",
)

THANKS = (
    "Thanks, I can copy that.",
    "Great, that's how I need it. Bye!",
    "Perfect, thank you.",
    "Oh nice, that looks good. Thanks!",
    "Thank you, now I get it.",
    "Yes, like that. Thanks a lot!",
    "Cool, I'll write that down.",
    "That's good, thanks for the help.",
    "Super, my homework is done.",
    "Wonderful, thank you so much.",
    "Lovely, this one goes into my notebook.",
    "Good, I understand it now. Thanks!",
    "Exactly what I needed, thank you.",
    "Thanks, you saved my evening.",
    "Nice work, see you tomorrow.",
    "Okay great, that will do. Thank you!",
)


def complaint(check: Check, degree: int, seed: int, session: int, turn: int) -> str:
    """The student's message after a failing reply.

    `degree` counts the complaints made before in this session (0 for the first): it picks how
    concrete the wording is. At most two of the reply's faults are mentioned, since people don't
    list everything at once. `turn` is the number of the reply complained about, from 0.
    """
    rng = random.Random(f"complaint {seed} {session} {turn}")
    wrong: Sequence[str] = check.wrong or ("correct",)
    said = " ".join(_upper(_phrase(name, degree, seed, session, turn)) for name in wrong[:2])
    opener = rng.choice(OPENERS)
    return f"{opener}{_lower(said) if opener else said} {rng.choice(REDO)}"


def thanks(seed: int, session: int) -> str:
    """The student's closing message after a passing reply."""
    return random.Random(f"thanks {seed} {session}").choice(THANKS)


def _phrase(name: str, degree: int, seed: int, session: int, turn: int) -> str:
    """A wording of the degree; neighbouring turns of a session never get the same one."""
    phrases = list(COMPLAINTS[name][min(degree, 2)])
    random.Random(f"phrases {seed} {session} {name}").shuffle(phrases)
    return phrases[turn % len(phrases)]


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lower(text: str) -> str:
    return text if text.startswith(("I ", "I'")) else text[:1].lower() + text[1:]
