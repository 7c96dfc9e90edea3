"""Pages pinned for a reader. Knows what was pinned and when it is given back; the store decides if it may be.

A lease refers to its pages itself: while it lasts they stay where and what they are, even if the state that
they belong to is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import TracebackType

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.nodes import Extent
from dagengine_kvstore.pages import PagePool
from dagengine_kvstore.references import Read


def page_extents(pool: PagePool, pages: Sequence[int], page_size: int, start: int, stop: int) -> list[Extent]:
    """Extents of tokens [start, stop) of a node, where `pages[0]` is the page that `start` lies in.

    The stored position is the page's own: a page reused from an equal node keeps the base it was computed at.
    """
    extents: list[Extent] = []
    first = start // page_size
    while start < stop:
        index = start // page_size
        page = pages[index - first]
        lo = start - index * page_size
        hi = min(stop - index * page_size, page_size)
        extents.append(Extent(page, lo, hi, pool.base[page] + lo))
        start = index * page_size + hi
    return extents


class Lease:
    """All pages of some reads, pinned until `release`. A context manager."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        reads: tuple[Read, ...],
        pages: tuple[tuple[int, ...], ...],
        on_release: Callable[[Lease], None],
    ) -> None:
        self.reads = reads
        self.pages = pages
        self._pool = pool
        self.page_size = page_size
        self._on_release = on_release
        self._generations = self._count_generations()
        self._released = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            self.release()

    def extents(self, index: int) -> list[Extent]:
        """(page, lo, hi, stored) of read `index`, in token order; `stored` is the position of row lo.

        Raises KVStoreError `lease_released` after the release.
        """
        self._check_held()
        read = self.reads[index]
        return page_extents(self._pool, self.pages[index], self.page_size, read.start, read.stop)

    def bases(self, index: int) -> list[int]:
        """The stored positions of the first rows of read `index`'s pages, in token order, whether it reads them or not.

        Raises KVStoreError `lease_released` after the release.
        """
        self._check_held()
        base = self._pool.base
        return [base[page] for page in self.pages[index]]

    def all_bases(self) -> Iterator[int]:
        """`bases` of all reads, one after the other. Raises as `bases`."""
        self._check_held()
        return map(self._pool.base.__getitem__, chain.from_iterable(self.pages))

    def release(self) -> None:
        """Give the pages back. Raises KVStoreError `lease_released` the second time."""
        self._check_held()
        self._released = True
        self._on_release(self)

    def is_stale(self) -> bool:
        """Whether a pinned page was handed out again: never, unless the books are wrong."""
        return self._count_generations() != self._generations

    def _count_generations(self) -> list[int]:
        return list(map(self._pool.generation.__getitem__, chain.from_iterable(self.pages)))

    def _check_held(self) -> None:
        if self._released:
            raise KVStoreError("lease_released", "this lease was released before")
