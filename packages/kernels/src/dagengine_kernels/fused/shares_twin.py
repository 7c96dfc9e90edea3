"""Shares of work in Python, as csrc/shares.cpp has them: items of KV tiles, cut or dealt among workers.

Knows lengths, costs and which query tiles read the same; not what a KV tile or a row is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, groupby, pairwise

from dagengine_kernels.fused.plan import PlanParameters

MANY = 8
"""Query tiles are dealt head by head where a worker gets as much as this many of the longest."""

Works = tuple[list[tuple[int, int, int]], list[int]]
"""Works (item, begin, end) and how many of them precede each worker's first [workers + 1]."""


@dataclass(frozen=True)
class Item:
    """What one query tile walks for one kv head.

    Attributes:
        begin, end: KV tiles.
        walk: where the walk begins that it is of.
        kin: the first of the query tiles, one behind the other, that read what this one reads.
    """

    begin: int
    end: int
    walk: int
    kin: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def share(items: Sequence[Item], turns: Sequence[int], workers: int, parameters: PlanParameters) -> Works:
    """Items, of each query tile one for every kv head, among the workers.

    What is walked by one query tile alone is cut into equal shares, one after another. Query tiles that are kin
    should read the same KV tiles at the same time, so that these come from memory once: where there are enough
    of them they are dealt whole (the longest first; one head after another where each worker gets many); else
    all that are kin are cut alike. Neither where that would be much less even.

    Args:
        turns: what the changes of run up to each KV tile cost.
    """
    heads, chunk, cost = parameters.num_kv_heads, parameters.min_chunk, parameters.work_cost
    lengths = [item.length for item in items]
    own_turns = [_turns(turns, item) for item in items]
    streamed = cut(lengths, workers, chunk, cost, own_turns)
    tiles = len(items) // heads
    groups = [list(group) for _, group in groupby(range(tiles), key=lambda tile: items[tile * heads].kin)]
    if len(groups) == tiles:
        return streamed
    costs = [length + cost + own_turns[item][-1] for item, length in enumerate(lengths)]
    by_head = MANY * max(costs) * workers <= sum(costs)
    order = sorted(
        range(len(items)),
        key=lambda i: (
            (i % heads, items[i].walk, -lengths[i], i)
            if by_head
            else (-lengths[i], i % heads, items[i].walk, i)
        ),
    )
    allowed = 11 * makespan(streamed, own_turns, cost)
    whole = deal(order, lengths, costs, workers)
    if 10 * makespan(whole, own_turns, cost) <= allowed:
        return whole
    width = len(groups[0])
    if all(len(group) == width for group in groups) and width <= workers:
        alike = cut_alike(items, groups, turns, workers, parameters)
        if 10 * makespan(alike, own_turns, cost) <= allowed:
            return alike
    return streamed


def cut_alike(
    items: Sequence[Item],
    groups: Sequence[Sequence[int]],
    turns: Sequence[int],
    workers: int,
    parameters: PlanParameters,
) -> Works:
    """The longest walk of each group of query tiles cut among teams of as many workers as the group has tiles."""
    heads, width = parameters.num_kv_heads, len(groups[0])
    walked = []
    for group in groups:
        walks = [items[tile * heads] for tile in group]
        longest = max(walks, key=lambda item: item.end - item.walk)
        first = min(item.begin - item.walk for item in walks)
        walked += [Item(longest.walk + first, longest.end, longest.walk, longest.kin)] * heads
    teams = workers // width
    pieces, indptr = cut(
        [item.length for item in walked],
        teams,
        parameters.min_chunk,
        parameters.work_cost,
        [_turns(turns, item) for item in walked],
    )
    works, counts = [], [0]
    for team in range(teams):
        for member in range(width):
            for which, begin, end in pieces[indptr[team] : indptr[team + 1]]:
                item = groups[which // heads][member] * heads + which % heads
                mine, whole = items[item], walked[which]
                skipped = (mine.begin - mine.walk) - (whole.begin - whole.walk)
                low, high = max(begin - skipped, 0), min(end - skipped, mine.length)
                if low < high:
                    works.append((item, low, high))
            counts.append(len(works))
    return works, counts + [len(works)] * (workers + 1 - len(counts))


def _turns(turns: Sequence[int], item: Item) -> list[int]:
    """Those of an item, from its begin on."""
    return [turn - turns[item.begin] for turn in turns[item.begin : item.end]]


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


def makespan(shares: Works, turns: Sequence[Sequence[int]], work_cost: int) -> int:
    """The largest cost of a share."""
    works, indptr = shares
    costs = []
    for item, begin, end in works:
        costs.append(end - begin + work_cost + turns[item][end - 1] - turns[item][begin])
    return max(sum(costs[first:last]) for first, last in pairwise(indptr))


def cut(
    lengths: Sequence[int],
    workers: int,
    min_chunk: int,
    work_cost: int,
    turns: Sequence[Sequence[int]] | None = None,
) -> Works:
    """Cut items of so many KV tiles each, in order, into equal shares for the workers.

    A share costs its KV tiles, `work_cost` per work and what its changes of run cost: turns[item][k] for those at
    KV tiles 1 .. k. The smallest bound that no share exceeds is searched for.

    Returns:
        works (item, begin, end) and how many of them precede each worker's first [workers + 1].
    """
    turns = turns or [[0] * length for length in lengths]
    total = sum(lengths) + work_cost * len(lengths) + sum(item[-1] for item in turns)
    low = max(-(-total // workers), 1)
    step = 1
    high = low
    while (found := _shares(lengths, turns, workers, min_chunk, work_cost, high)) is None:
        low = high + 1
        high += step
        step *= 2
    best = found
    while low < high:
        middle = (low + high) // 2
        found = _shares(lengths, turns, workers, min_chunk, work_cost, middle)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    return best


def _shares(
    lengths: Sequence[int],
    turns: Sequence[Sequence[int]],
    workers: int,
    min_chunk: int,
    work_cost: int,
    bound: int,
) -> Works | None:
    """Shares of cost at most `bound`, each filled as far as it goes; None if the workers do not suffice."""
    works: list[tuple[int, int, int]] = []
    firsts = [0]
    room = bound
    for item, length in enumerate(lengths):
        begin = 0
        while begin < length:
            left = length - begin
            cost = work_cost + left + turns[item][-1] - turns[item][begin]
            if room >= cost:
                works.append((item, begin, length))
                room -= cost
                break
            piece = min(_affordable(turns[item], begin, room - work_cost), left - min_chunk)
            if piece >= min_chunk:
                # What stays must be divisible into pieces that are neither too small nor too large.
                more = -(-(left - piece) // (bound - work_cost))
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


def _affordable(turns: Sequence[int], begin: int, room: int) -> int:
    """How many KV tiles from `begin` on cost at most `room`."""
    costs = range(begin, len(turns))
    return bisect_right(costs, room, key=lambda k: k + 1 - begin + turns[k] - turns[begin])
