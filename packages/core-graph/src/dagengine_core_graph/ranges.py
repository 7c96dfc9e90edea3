"""Ordered, disjoint lists of token instances, as ranges.

A `RangeList` is immutable and shares its prefix with the list that it extends, so a chain of a million
nodes holds a million ranges, not half of 10^12. A `Placement` grows one: it places every token instance
once. Neither knows references or graphs: an owner of tokens is anything with an id and a serial number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol


class Owner(Protocol):
    """Who the tokens of a range belong to. Compared by identity: an id may be used again, a serial never."""

    @property
    def id(self) -> Hashable: ...

    @property
    def serial(self) -> int: ...


class TokenRange(NamedTuple):
    """A non-empty run `[start, stop)` of one node's token instances."""

    node: Hashable
    start: int
    stop: int


class RangeList:
    """A persistent list: a shared prefix and one more range. `RangeList()` is the empty one.

    Attributes:
        prefix: the list before the last range; None if this list is empty.
        owner, start, stop: the last range, absent from an empty list.
        num_tokens: tokens in the whole list.
        newest: largest serial of any owner in the list, -1 if it is empty. A list whose newest owner is
            older than a node cannot hold tokens of that node.
    """

    __slots__ = ("newest", "num_tokens", "owner", "prefix", "start", "stop")

    prefix: RangeList | None
    owner: Owner
    start: int
    stop: int
    num_tokens: int
    newest: int

    def __init__(self) -> None:
        self.prefix = None
        self.num_tokens = 0
        self.newest = -1

    def extend(self, owner: Owner, start: int, stop: int) -> RangeList:
        """This list and one more non-empty range that it does not hold yet. O(1)."""
        assert start < stop
        longer = object.__new__(RangeList)
        longer.prefix = self
        longer.owner = owner
        longer.start = start
        longer.stop = stop
        longer.num_tokens = self.num_tokens + stop - start
        longer.newest = owner.serial if owner.serial > self.newest else self.newest
        return longer

    def since(self, earlier: RangeList | None = None) -> tuple[TokenRange, ...]:
        """The maximal runs of what was appended to the prefix `earlier` (None: of everything), in order."""
        runs = []
        cell = self
        while cell is not earlier and cell.prefix is not None:
            owner, start, stop = cell.owner, cell.start, cell.stop
            cell = cell.prefix
            while (
                cell is not earlier and cell.prefix is not None and cell.stop == start and cell.owner is owner
            ):
                start = cell.start
                cell = cell.prefix
            runs.append(TokenRange(owner.id, start, stop))
        runs.reverse()
        return tuple(runs)

    def __iter__(self) -> Iterator[TokenRange]:
        return iter(self.since())

    def __repr__(self) -> str:
        return f"<RangeList of {self.num_tokens} tokens>"


EMPTY = RangeList()


def claim(bounds: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Add `[start, stop)` to a set of offsets and return the parts that were not in it, ascending.

    `bounds` holds the set as the sorted ends of its maximal runs, so an even index opens a run and an odd
    one closes it:

        bounds  [2, 5, 9, 12]     ··███····███··
        claim(4, 10)              ····██████····   new: (5, 9)
        bounds  [2, 12]           ··██████████··
    """
    if not bounds or start > bounds[-1]:
        bounds += (start, stop)
        return [(start, stop)]
    i = bisect_left(bounds, start)
    j = bisect_right(bounds, stop)
    opens = [] if i % 2 else [start]
    closes = [] if j % 2 else [stop]
    ends = [*opens, *bounds[i:j], *closes]
    bounds[i:j] = opens + closes
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


class Placement:
    """Places ranges one after the other, each token instance once.

    The first list placed is taken over as it is, in O(1). Its ranges are indexed only from the end and only
    as far back as a later question needs: tokens of a node can only stand where `newest` is at least its
    serial. So what it costs to join branches is the branches, not the history that they share.

        placed    [ unread ··············· | indexed, placed ······ ]
        newest      < serial asked for       >= serial asked for
    """

    __slots__ = ("_bounds", "_known", "_unread", "placed")

    def __init__(self) -> None:
        self.placed = EMPTY
        self._unread = EMPTY
        self._bounds: dict[Owner, list[int]] = {}
        self._known: set[RangeList] = set()

    def place_list(self, source: RangeList) -> None:
        """Place every range of `source`, in its order, that is not placed yet."""
        if self.placed.prefix is None:
            self.placed = self._unread = source
            return
        new = []
        while source.prefix is not None:
            self._index(source.newest)
            if source in self._known:
                break
            self._known.add(source)
            new.append(source)
            source = source.prefix
        for cell in reversed(new):
            self.place(cell.owner, cell.start, cell.stop)

    def place(self, owner: Owner, start: int, stop: int) -> None:
        """Place the tokens `[start, stop)` of `owner` that are not placed yet; the range may be empty."""
        if start == stop:
            return
        if self._unread.newest >= owner.serial:
            self._index(owner.serial)
        bounds = self._bounds.get(owner)
        if bounds is None:
            self._bounds[owner] = [start, stop]
            self.placed = self.placed.extend(owner, start, stop)
            return
        for a, b in claim(bounds, start, stop):
            self.placed = self.placed.extend(owner, a, b)

    def _index(self, serial: int) -> None:
        cell = self._unread
        while cell.newest >= serial:
            assert cell.prefix is not None
            self._known.add(cell)
            claim(self._bounds.setdefault(cell.owner, []), cell.start, cell.stop)
            cell = cell.prefix
        self._unread = cell
