"""A set of page ids that gives out neighbours. Knows runs of ids; not what pages are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush

SPARE = 16
"""Starts of runs that are gone, of one length, beyond as many as there are of runs."""


class FreeRuns:
    """Page ids kept as maximal runs.

    Taking or adding a page takes O(log n) steps for n runs, and moving O(n) list entries by one place.
    """

    def __init__(self, num_pages: int) -> None:
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # end of run (exclusive) -> its start
        self._count = 0
        self._lengths: list[int] = []  # that some run has, ascending
        self._number: dict[int, int] = {}  # of runs, by length
        self._by_length: dict[int, list[int]] = {}  # heaps of starts, some of them of runs that are gone
        if num_pages:
            self._starts.append(0)
            self._set(0, num_pages)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        index = bisect_right(self._starts, page) - 1
        return index >= 0 and page < self._starts[index] + self._length[self._starts[index]]

    def add(self, page: int) -> None:
        """Put one page back and merge it with its neighbours."""
        start, length = page, 1
        left = self._start_of.get(page)
        if left is None:
            insort(self._starts, page)
        else:
            start = left
            length += self._unset(left)
        if page + 1 in self._length:
            del self._starts[bisect_left(self._starts, page + 1)]
            length += self._unset(page + 1)
        self._set(start, length)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages: first those right behind `after`, then the smallest run that is long enough, or the longest
        ones until one is; of equal ones the first.
        """
        assert count <= self._count
        pages: list[int] = []
        if after is not None and after + 1 in self._length:
            pages += self._cut(after + 1, count)
        while len(pages) < count:
            missing = count - len(pages)
            index = bisect_left(self._lengths, missing)
            length = self._lengths[index] if index < len(self._lengths) else self._lengths[-1]
            pages += self._cut(self._first(length), missing)
        return pages

    def remove(self, page: int) -> None:
        """Take this very page, which is in the set."""
        assert page in self
        start = self._starts[bisect_right(self._starts, page) - 1]
        self._cut(start, page + 1 - start)
        if start < page:
            insort(self._starts, start)
            self._set(start, page - start)

    def _cut(self, start: int, count: int) -> range:
        """The first pages of a run, `count` or all there are."""
        length = self._unset(start)
        count = min(count, length)
        index = bisect_left(self._starts, start)
        if count == length:
            del self._starts[index]
        else:
            self._starts[index] = start + count
            self._set(start + count, length - count)
        return range(start, start + count)

    def _first(self, length: int) -> int:
        """The lowest start of the runs of a length that some run has."""
        heap = self._by_length[length]
        while self._length.get(heap[0]) != length:
            heappop(heap)
        return heap[0]

    def _set(self, start: int, length: int) -> None:
        """A run begins, of which `_starts` knows already."""
        self._length[start] = length
        self._start_of[start + length] = start
        self._count += length
        number = self._number[length] = self._number.get(length, 0) + 1
        if number == 1:
            insort(self._lengths, length)
            self._by_length[length] = [start]
            return
        heap = self._by_length[length]
        heappush(heap, start)
        if len(heap) > 2 * number + SPARE:
            heap[:] = {start for start in heap if self._length.get(start) == length}
            heapify(heap)

    def _unset(self, start: int) -> int:
        """A run ends; its length."""
        length = self._length.pop(start)
        del self._start_of[start + length]
        self._count -= length
        self._number[length] -= 1
        if not self._number[length]:
            del self._number[length], self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length
