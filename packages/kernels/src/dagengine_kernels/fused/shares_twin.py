"""Shares of work in Python, as csrc/shares.cpp has them: items of KV tiles, cut or dealt among workers.

Knows lengths and costs; not what a tile or a row is. `planner_twin` says which way a plan takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise

MANY = 8
"""Query tiles are dealt head by head where a worker gets as much as this many of the longest."""

Works = tuple[list[tuple[int, int, int]], list[int]]
"""Works (item, begin, end) and how many of them precede each worker's first [workers + 1]."""


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
