"""One sentence with a name among random ones, who is asked for it, and when an answer is right.

    fragment 1     The lamp stands beside the house. The boat turns under the hill.
    fragment 2     The bell rests near the lake. The winner of the race is Ingrid. The cart waits behind the wall.
    question       Who is the winner of the race?
    right          answers that name Ingrid and nobody else of `NAMES`

The wording is fixed: of those tried on one small model it is the one that the model answered best over two fragments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

NAMES = (
    "Alice", "Boris", "Carmen", "Dmitri", "Elena", "Farid", "Greta", "Hassan", "Ingrid", "Jorge", "Keiko", "Liam",
    "Maria", "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Stefan", "Tara", "Umar", "Vera", "Walter", "Xenia", "Yusuf",
    "Zoe",
)  # fmt: skip
CHANCE = 1 / len(NAMES)
"""Of naming the right one by naming any one."""

NEEDLE = "The winner of the race is {}."
QUESTION = "Who is the winner of the race?"
THINGS = (
    "lamp mill train bridge garden clock boat tower kettle road window barrel cart bell ladder stove".split()
)
DOES = "stands waits rests shines turns lies stays creaks".split()
PLACES = (
    "beside the house", "under the hill", "near the lake", "behind the wall", "above the valley", "by the old gate",
    "across the river", "along the shore", "below the roof", "at the corner",
)  # fmt: skip
_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")


@dataclass(frozen=True)
class Haystack:
    """Fragments of text, one of which has the sentence with the name."""

    name: str
    fragments: tuple[str, ...]


def make_haystack(fragments: int, sentences: int, rng: Random) -> Haystack:
    """So many fragments of so many random sentences, and the needle at a random place in one of them."""
    name = rng.choice(NAMES)
    hay = [[_sentence(rng) for _ in range(sentences)] for _ in range(fragments)]
    rng.choice(hay).insert(rng.randint(0, sentences), NEEDLE.format(name))
    return Haystack(name, tuple(" ".join(found) for found in hay))


def names_in(text: str) -> frozenset[str]:
    """The names of `NAMES` that stand in a text as words."""
    return frozenset(_NAME.findall(text))


def is_right(answer: str, name: str) -> bool:
    """Whether an answer names `name` and no other of `NAMES`."""
    return names_in(answer) == {name}


def _sentence(rng: Random) -> str:
    return f"The {rng.choice(THINGS)} {rng.choice(DOES)} {rng.choice(PLACES)}."
