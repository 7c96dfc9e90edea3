"""Shares of work in Python, as csrc/shares.cpp has them: items of KV tiles, cut or dealt among workers.

Knows lengths and costs; not what a tile or a row is. `planner_twin` says which way a plan takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise, zip_longest

MANY = 8
"""Query tiles are dealt head by head where a worker gets as much as this many of the longest."""

STRETCH = 16
"""KV tiles that a worker who keeps step with two teams walks of one before it goes on with the other."""

PAIR = 2
"""Teams that share a worker for their light tiles, which cost half."""

Works = tuple[list[tuple[int, int, int]], list[int]]
"""Works (item, begin, end) and how many of them precede each worker's first [workers + 1]."""


@dataclass(frozen=True)
class Costs:
    """What pieces of items cost, in KV tiles or, where there are light ones, in halves of them.

    Attributes:
        lengths: KV tiles by item.
        turns: by item what its changes of run cost, in KV tiles: turns[item][k] those at KV tiles 1 .. k.
        light: by item whether its KV tiles cost 1.
        unit: the cost of another KV tile, 1 or 2.
        work_cost: what starting a work costs, in KV tiles.
    """

    lengths: Sequence[int]
    turns: Sequence[Sequence[int]]
    light: Sequence[bool]
    unit: int
    work_cost: int

    @property
    def work(self) -> int:
        """Of starting a work."""
        return self.unit * self.work_cost

    def tile(self, item: int) -> int:
        """Of a KV tile of an item."""
        return 1 if self.light[item] else self.unit

    def of(self, item: int, begin: int, end: int) -> int:
        """Of a work."""
        turns = self.turns[item][end - 1] - self.turns[item][begin]
        return self.work + (end - begin) * self.tile(item) + self.unit * turns

    def of_all(self) -> list[int]:
        """By item, of the whole of it."""
        return [self.of(item, 0, length) for item, length in enumerate(self.lengths)]


def deal(items: Sequence[int], lengths: Sequence[int], costs: Sequence[int], workers: int) -> Works:
    """Whole items in this order, each to the worker that has least so far (the first of those)."""
    dealt: list[list[int]] = [[] for _ in range(workers)]
    loads = [(0, worker) for worker in range(workers)]
    for item in items:
        load, worker = heappop(loads)
        dealt[worker].append(item)
        heappush(loads, (load + costs[item], worker))
    works = [(item, 0, lengths[item]) for one in dealt for item in one]
    return works, [0, *accumulate(map(len, dealt))]


def makespan(shares: Works, costs: Costs) -> int:
    """The largest cost of a share."""
    works, indptr = shares
    found = [costs.of(*work) for work in works]
    return max(sum(found[first:last]) for first, last in pairwise(indptr))


def cut(costs: Costs, workers: int, min_chunk: int) -> Works:
    """Cut items, in order, into equal shares for the workers: the smallest bound that no share exceeds is looked for."""
    low = max(-(-sum(costs.of_all()) // workers), 1)
    step = 1
    high = low
    while (found := _shares(costs, workers, min_chunk, high)) is None:
        low = high + 1
        high += step
        step *= 2
    best = found
    while low < high:
        middle = (low + high) // 2
        found = _shares(costs, workers, min_chunk, middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    return best


def _shares(costs: Costs, workers: int, min_chunk: int, bound: int) -> Works | None:
    """Shares of cost at most `bound`, each filled as far as it goes; None if the workers do not suffice."""
    works: list[tuple[int, int, int]] = []
    firsts = [0]
    room = bound
    for item, length in enumerate(costs.lengths):
        largest = (bound - costs.work) // costs.tile(item)
        begin = 0
        while begin < length:
            left = length - begin
            cost = costs.of(item, begin, length)
            if room >= cost:
                works.append((item, begin, length))
                room -= cost
                break
            piece = min(_affordable(costs, item, begin, room), left - min_chunk)
            if piece >= min_chunk:
                # What stays must be divisible into pieces that are neither too small nor too large.
                more = -(-(left - piece) // largest)
                piece = min(piece, left - more * min_chunk)
            if piece >= min_chunk:
                works.append((item, begin, begin + piece))
                begin += piece
            elif room == bound:
                return None
            if len(firsts) == workers:
                return None
            firsts.append(len(works))
            room = bound
    return works, firsts + [len(works)] * (workers + 1 - len(firsts))


def _affordable(costs: Costs, item: int, begin: int, room: int) -> int:
    """How many KV tiles from `begin` on are a work that costs at most `room`."""
    ends = range(begin + 1, costs.lengths[item] + 1)
    return bisect_right(ends, room, key=lambda end: costs.of(item, begin, end))


def alternate(
    first: Sequence[tuple[int, int, int]], second: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """The works of one worker who is to keep step with two teams: stretches of one and of the other in turns."""
    turns = zip_longest(_stretches(first), _stretches(second))
    return [stretch for pair in turns for stretch in pair if stretch is not None]


def _stretches(works: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Works cut into equal pieces of at least STRETCH KV tiles, where they are as long."""
    cut = []
    for item, begin, end in works:
        length, count = end - begin, max((end - begin) // STRETCH, 1)
        cut += [(item, begin + length * i // count, begin + length * (i + 1) // count) for i in range(count)]
    return cut
