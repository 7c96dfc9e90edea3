"""Pages pinned for a reader. Knows what was pinned and when it is given back; the store decides if it may be.

While a lease lasts its pages stay where and what they are, even if the state that they belong to is released: a node
that is leased lets go of a page by `keep`, and then the lease refers to the page itself. So a lease costs what its
nodes are, not what their pages are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from types import TracebackType

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.nodes import Extent, NodeRecord
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
    """All pages of some reads, pinned until `release`. A context manager.

    Attributes:
        pages: per read, int32 in token order; not to be changed.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        reads: tuple[Read, ...],
        pages: tuple[array[int], ...],
        on_release: Callable[[Lease], None],
    ) -> None:
        self.reads = reads
        self.pages = pages
        self._pool = pool
        self.page_size = page_size
        self._on_release = on_release
        self._born = pool.handed_out
        self._own: dict[tuple[int, int], int] = {}  # (read, offset of the page in it) -> page
        self._reads_of: dict[NodeRecord, list[int]] = {}  # made when it is first asked for
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

    @property
    def base_of(self) -> memoryview:
        """The stored position of the first row of any page, int64, by the page's number; to be looked at now.

        Raises as `bases`.
        """
        self._check_held()
        return memoryview(self._pool.base).toreadonly()

    def keep(self, node: NodeRecord, index: int, page: int) -> int:
        """A leased node lets go of a page. Returns how many references this lease takes on it, to be counted now."""
        if not self._reads_of:
            for number, read in enumerate(self.reads):
                self._reads_of.setdefault(read.node, []).append(number)
        taken = 0
        for number in self._reads_of.get(node, ()):
            run = self.pages[number]
            offset = index - self.reads[number].start // self.page_size
            if 0 <= offset < len(run) and (number, offset) not in self._own:
                assert run[offset] == page
                self._own[number, offset] = page
                taken += 1
        return taken

    def own_pages(self) -> list[int]:
        """The pages that it refers to itself, as often as it does; the last ones of a read first."""
        return [self._own[at] for at in sorted(self._own, key=lambda at: (at[0], -at[1]))]

    def release(self) -> None:
        """Give the pages back. Raises KVStoreError `lease_released` the second time."""
        self._check_held()
        self._released = True
        self._on_release(self)

    def is_stale(self) -> bool:
        """Whether a pinned page was handed out again: never, unless the books are wrong."""
        generation, born = self._pool.generation, self._born
        return any(generation[page] > born for run in self.pages for page in run)

    def _check_held(self) -> None:
        if self._released:
            raise KVStoreError("lease_released", "this lease was released before")
