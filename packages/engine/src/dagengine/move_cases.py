"""Moves to time: lists of them over numbered pages. Knows the store's moves only.

The first `pages` pages hold tokens; copies go to as many behind them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dagengine_kvstore import Move

DOCUMENTS = 32


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        spare: spare pages that the plan may use.
        in_place: whether the targets are among the pages that hold tokens.
    """

    name: str
    moves: tuple[Move, ...]
    spare: int = 0
    in_place: bool = False

    @property
    def tokens(self) -> int:
        return sum(move.num_rows for move in self.moves)


def cases(pages: int, size: int, width: int, seed: int = 0) -> Iterator[Case]:
    """All cases over `pages` pages of `size` rows; no delta is 0."""
    rng = random.Random(seed)
    every = list(range(pages))
    order = rng.sample(every, pages)
    few = max(2, pages // DOCUMENTS)

    def whole(sources: list[int], target: Callable[[int], int]) -> tuple[Move, ...]:
        return tuple(
            Move(source, 0, size, target(i), 0, 1 + 37 * (i * DOCUMENTS // len(sources)))
            for i, source in enumerate(sources)
        )

    yield Case("copy, shuffled", whole(order, lambda i: pages + i))
    eighth = [order[i // 8] for i in every]
    yield Case("copy, each source to 8 targets", whole(eighth, lambda i: pages + i))
    yield Case("copy, documents packed to rows of any page", tuple(_packed(rng, pages, size)))
    yield Case("in place, K turned where it is", whole(every, lambda i: i), 0, True)
    yield Case("in place, shuffled", whole(order, lambda i: i), width, True)
    repeated = [rng.choice(every) for _ in every]
    yield Case("in place, shuffled with duplicates", whole(repeated, lambda i: i), width, True)
    yield Case("in place, one cycle", whole(order, lambda i: order[i - 1]), width, True)
    yield Case("in place, one cycle, 1 spare page", whole(order, lambda i: order[i - 1]), 1, True)
    swaps = order[: pages - pages % 2]
    yield Case("in place, pages swapped in twos", whole(swaps, lambda i: swaps[i ^ 1]), width, True)
    yield Case(
        "in place, one document's pages shuffled",
        whole(order[:few], lambda i: sorted(order[:few])[i]),
        width,
        True,
    )
    yield Case(
        "in place, one document's cycle through the host",
        whole(order[:few], lambda i: order[i - 1 if i else few - 1]),
        0,
        True,
    )


def _packed(rng: random.Random, pages: int, size: int) -> Iterator[Move]:
    """Documents that each begin a page of their own, to one dense run of rows in another order."""
    each = max(1, pages // DOCUMENTS)
    length = each * size - size // 3
    row = pages * size
    for document in rng.sample(range(pages // each), pages // each):
        done = 0
        while done < length:
            page, lo = document * each + done // size, done % size
            count = min(size - lo, size - row % size, length - done)
            yield Move(page, lo, lo + count, row // size, row % size, 1 + 37 * document)
            done, row = done + count, row + count
