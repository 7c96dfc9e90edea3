"""Physical pages. Knows reference counts, generations, fences, which content a page is registered under and which
pages are under a ticket; does not know nodes, tokens or who refers to a page.

                 allocate                drop, last reference
    FREE ───────────────────► LIVE ───────────────────────────────► WAITING   (a step may touch it)
     ▲  ▲                     │ ▲ ▲ share                            │ │ │
     │  └── drop, no content ─┘ │ └──────────────────────────────────┘ │ │
     │                          │ share                                │ │ every fence begun before
     └──── reclaim (LRU) ──── CACHED ◄───── has content ───────────────┘ │ the drop has ended
     └───────────────────────────────────── no content ──────────────────┘

    LIVE ── begin_move ──► MOVING ── end_move ──► LIVE, or as by the last drop if nobody refers to it any more
    FREE ── take_moving ─► MOVING ── land ──────► LIVE, or as by the last drop

Every page is in exactly one of the five. A MOVING page is under a transfer's ticket: whoever lets go of it, it is not
freed, cached or handed out before the ticket has ended. CACHED pages count as available: nobody refers to them, only
their content is still registered. Content is registered only after it was written for good, so a page with content may
be shared again from any state.

A step touches a page only through who reads or writes it. So an open step may touch a page that nobody refers to any
more only if a reader or a writer let go of it since the step began: `drop` and `touch` note when that was. A page that
nobody has used since then is free at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.free_runs import FreeRuns

LATER = 1 << 62
"""In place of a fence: of a step that has not begun."""


class PageState(StrEnum):
    FREE = "free"
    CACHED = "cached"
    LIVE = "live"
    WAITING = "waiting"
    MOVING = "moving"


class PagePool:
    """All pages of one arena.

    `base[page]` is the stored position of the page's row 0; `turned[page]` whether its K was turned to get there after
    it was computed elsewhere. `generation[page]` is the number that the page had among all that were handed out when it
    was the last time, so that a stale reference can be told from a new one; `handed_out` is the last such number.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self.base = array("q", [0]) * num_pages
        self.turned = [False] * num_pages
        self.generation = [0] * num_pages
        self.handed_out = 0
        self._content: list[Hashable | None] = [None] * num_pages
        self._page_of: dict[Hashable, int] = {}
        self._free = FreeRuns(num_pages)
        self._cached: dict[int, None] = {}  # least recently used first
        self._waiting: dict[int, int] = {}  # page -> newest fence at the time of the drop; ascending
        self._fences: dict[int, None] = {}  # open fences, ascending
        self._next_fence = 1
        self._touched = [0] * num_pages  # the newest fence open when a reader or writer last let go of it
        self._written = [0] * num_pages  # the same for writers only; LATER while a write is expected
        self._moving: set[int] = set()
        self.aside: set[int] = set()  # moving, and under no ticket

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_live(self) -> int:
        return sum(refs > 0 and page not in self._moving for page, refs in enumerate(self.refs))

    @property
    def num_moving(self) -> int:
        return len(self._moving)

    @property
    def num_fences(self) -> int:
        return len(self._fences)

    def state(self, page: int) -> PageState:
        if page in self._moving:
            return PageState.MOVING
        if self.refs[page]:
            return PageState.LIVE
        if page in self._waiting:
            return PageState.WAITING
        return PageState.CACHED if page in self._cached else PageState.FREE

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages with one reference each, preferably contiguous and behind page `after`.

        Takes free pages, then the least recently used cached ones; the caller made sure there are enough.
        """
        assert count <= len(self._free) + len(self._cached)
        while len(self._free) < count:
            page = next(iter(self._cached))
            del self._cached[page]
            self._forget(page)
            self._free.add(page)
        pages = self._free.take(count, after)
        self._hand_out(pages)
        return pages

    def claim(self, pages: Sequence[int]) -> None:
        """Hand out these very pages, free or cached ones, with what their rows hold; their content is forgotten."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._forget(page)
            else:
                self._free.remove(page)
        self._hand_out(pages)

    def _hand_out(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.refs[page] = 1
            self.handed_out += 1
            self.generation[page] = self.handed_out
            self.turned[page] = False

    def share(self, *pages: int) -> None:
        """One more reference to each of these pages, which are live or have registered content."""
        refs = self.refs
        for page in pages:
            if not refs[page]:
                assert self._content[page] is not None, f"page {page} has no content to share"
                self._cached.pop(page, None)
                self._waiting.pop(page, None)
            refs[page] += 1

    def touch(self, page: int, *, written: bool = False) -> None:
        """Who read or wrote a page lets go of it, while others may go on referring to it."""
        newest = next(reversed(self._fences), 0)
        if newest:
            self._touched[page] = newest
        if written and self._written[page] != LATER:
            self._written[page] = newest

    def expect_write(self, page: int) -> None:
        """A step that may not have begun writes a page that nodes refer to already."""
        self._written[page] = LATER

    @property
    def expected(self) -> set[int]:
        """Pages of which `expect_write` was told last."""
        return {page for page, fence in enumerate(self._written) if fence == LATER}

    def end_write(self, page: int) -> None:
        """Undo `expect_write`: that step has ended, or is open, or will never begin."""
        self._written[page] = next(reversed(self._fences), 0)

    def touch_all(self, runs: Iterable[Iterable[int]]) -> None:
        """`touch` for every page of some runs, which were read."""
        if self._fences:
            newest, touched = next(reversed(self._fences)), self._touched
            for run in runs:
                for page in run:
                    touched[page] = newest

    def is_written(self, page: int) -> bool:
        """Whether no open step may write a page that no writer refers to, and none is to; some may read it."""
        return self._written[page] < next(iter(self._fences), LATER)

    def is_moving(self, page: int) -> bool:
        return page in self._moving

    def begin_move(self, page: int) -> None:
        """Put a live page under a ticket that reads it."""
        assert self.refs[page] and page not in self._moving and self.is_written(page)
        self._moving.add(page)

    def take_moving(self, count: int) -> list[int]:
        """`count` pages for a ticket to write, as by `allocate`, to which nobody refers before they `land`."""
        pages = self.allocate(count)
        for page in pages:
            self.refs[page] = 0
        self._moving.update(pages)
        return pages

    def land(
        self, page: int, refs: int, base: int, content: Hashable | None, *, turned: bool = False
    ) -> None:
        """A ticket has written a page: `refs` refer to it now, and its content is known, or None."""
        self.base[page], self.turned[page] = base, turned
        self.refs[page] = refs
        if content is not None and content not in self._page_of:
            self._content[page] = content
            self._page_of[content] = page
        self.end_move(page)

    def end_move(self, page: int) -> None:
        """The ticket of a page is over; if nobody refers to the page it is freed, as by `drop`."""
        self._moving.remove(page)
        if not self.refs[page]:
            self._free_quiet(page)

    def set_aside(self, pages: Iterable[int]) -> None:
        """Nobody gets these live or waiting pages before `end_aside`, whoever lets go of them."""
        for page in pages:
            assert self.refs[page] or page in self._waiting
            self._waiting.pop(page, None)
            self._moving.add(page)
            self.aside.add(page)

    def end_aside(self, pages: Iterable[int]) -> None:
        """Nothing writes these pages any more."""
        for page in pages:
            self.aside.remove(page)
            self.end_move(page)

    def is_quiet(self, page: int) -> bool:
        """Whether no open step may touch a page that no reader and no writer refers to."""
        return not self._fences or self._touched[page] < next(iter(self._fences))

    def drop(self, page: int, *, touched: bool = True) -> None:
        """One reference less: a reader's or a writer's (`touched`), or that of a node that only kept it.

        The last one frees the page, at once or, where an open step may touch it, when every fence open now has ended.
        """
        if self.refs[page] < 1:
            raise KVStoreError("double_free", f"page {page} is freed more often than it is referred to")
        self.refs[page] -= 1
        if touched:
            self.touch(page)
        if not self.refs[page] and page not in self._moving:
            self._free_quiet(page)

    def remember(self, page: int, content: Hashable) -> None:
        """Register what a live page holds. The first page with equal content stays the registered one."""
        assert self.refs[page] and self._content[page] is None
        if content not in self._page_of:
            self._content[page] = content
            self._page_of[content] = page

    def has_content(self, page: int) -> bool:
        """Whether a page is registered under what it holds, so that others may share it."""
        return self._content[page] is not None

    def is_shareable(self, page: int, generation: int) -> bool:
        """Whether what the page held while it was of this generation can still be referred to."""
        return self.generation[page] == generation and (
            self.refs[page] > 0 or self._content[page] is not None
        )

    def content(self, page: int) -> Hashable | None:
        """What a page is registered under."""
        return self._content[page]

    def find(self, content: Hashable) -> int | None:
        return self._page_of.get(content)

    def begin_fence(self) -> int:
        fence = self._next_fence
        self._next_fence += 1
        self._fences[fence] = None
        return fence

    def check_fence(self, fence: int) -> None:
        """Raises KVStoreError `unknown_fence` for one that is not open."""
        if fence not in self._fences:
            raise KVStoreError("unknown_fence", f"fence {fence} is not open (ended twice?)", field="fence")

    def end_fence(self, fence: int) -> None:
        """Raises as `check_fence`."""
        self.check_fence(fence)
        del self._fences[fence]
        oldest = next(iter(self._fences), self._next_fence)
        done: list[int] = []
        for page, newest_at_drop in self._waiting.items():
            if newest_at_drop >= oldest:
                break
            done.append(page)
        for page in done:
            del self._waiting[page]
            self._put_back(page)

    def problems(self) -> list[str]:
        """Differences inside the pool's own books."""
        found: list[str] = []
        for page in range(self.num_pages):
            places = [
                name
                for name, inside in (
                    ("free", page in self._free),
                    ("cached", page in self._cached),
                    ("waiting", page in self._waiting),
                    ("moving", page in self._moving),
                    ("live", self.refs[page] > 0 and page not in self._moving),
                )
                if inside
            ]
            if len(places) != 1:
                found.append(f"page {page} is in {places or 'no place'}, must be in exactly one")
            content = self._content[page]
            if content is not None and self._page_of.get(content) != page:
                found.append(f"page {page}: its content is registered for page {self._page_of.get(content)}")
            if (page in self._free and content is not None) or (page in self._cached and content is None):
                found.append(f"page {page}: cached exactly if its content is registered, but it is {places}")
        if len(self._page_of) != sum(content is not None for content in self._content):
            found.append("contents are registered for pages that do not hold them")
        return found

    def _free_quiet(self, page: int) -> None:
        if self.is_quiet(page):
            self._put_back(page)
        else:
            self._waiting[page] = next(reversed(self._fences))

    def _put_back(self, page: int) -> None:
        if self._content[page] is None:
            self._free.add(page)
        else:
            self._cached[page] = None

    def _forget(self, page: int) -> None:
        content = self._content[page]
        assert content is not None
        del self._page_of[content]
        self._content[page] = None
