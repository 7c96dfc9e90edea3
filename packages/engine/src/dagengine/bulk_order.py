"""In which order many queries run, and which run together. Knows the pages of their fragments; runs nothing.

Order, a greedy heuristic for temporal locality: of a pool of as many pages as the budget says, filled and emptied as by
least recent use, the next query is always the one of which most fragment tokens are in the pool; where none has any
there, the one whose fragments are wanted most by others; of equal ones the first given. The order changes nothing but
what is found in the cache.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ORDERS = ("locality", "given")


def order_queries(wanted: Sequence[Mapping[Any, int]], budget: int) -> list[int]:
    """The greedy order.

    Args:
        wanted: per query the pages of each of its fragments.
        budget: pages of the pool.

    Returns:
        Indices, in O(w log w) for w wanted fragments in all.
    """
    readers: dict[Any, list[int]] = {}
    for index, fragments in enumerate(wanted):
        for fragment in fragments:
            readers.setdefault(fragment, []).append(index)
    popular = [sum((len(readers[f]) - 1) * pages for f, pages in found.items()) for found in wanted]
    there = [0] * len(wanted)
    waiting = [(0, -popular[index], index) for index in range(len(wanted))]
    heapq.heapify(waiting)
    pool: OrderedDict[Any, int] = OrderedDict()
    used, done, ordered = 0, set[int](), list[int]()

    def shift(fragment: Any, pages: int) -> None:
        for reader in readers[fragment]:
            if reader not in done:
                there[reader] += pages
                heapq.heappush(waiting, (-there[reader], -popular[reader], reader))

    while waiting:
        found, _, index = heapq.heappop(waiting)
        if index in done or -found != there[index]:
            continue
        done.add(index)
        ordered.append(index)
        for fragment, pages in wanted[index].items():
            if fragment in pool:
                pool.move_to_end(fragment)
                continue
            pool[fragment] = pages
            used += pages
            shift(fragment, pages)
        while used > budget and len(pool) > 1:
            fragment, pages = pool.popitem(last=False)
            used -= pages
            shift(fragment, -pages)
    return ordered


def windows_of(
    ordered: Sequence[int], wanted: Mapping[int, Mapping[Any, int]], budget: int, most: int
) -> Iterator[list[int]]:
    """Neighbours that run together: at most so many, and while their fragments fit; one always does."""
    chosen: list[int] = []
    pages: dict[Any, int] = {}
    for index in ordered:
        more = {**pages, **wanted[index]}
        if chosen and (len(chosen) == most or sum(more.values()) > budget):
            yield chosen
            chosen, more = [], dict(wanted[index])
        chosen.append(index)
        pages = more
    if chosen:
        yield chosen
