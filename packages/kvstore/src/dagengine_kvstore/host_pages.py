"""Pages of the host tier. Knows reference counts and which pages are under a ticket; knows no contents.

    FREE ── take ──► MOVING ── end_move ──► LIVE ── begin_move ──► MOVING ── …
     ▲                  └── nobody refers ─┐ └── drop, last reference ─┐
     └─────────────────────────────────────┴───────────────────────────┘

A MOVING page stays so until its ticket has ended, whoever lets go of it.
"""

from __future__ import annotations

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.free_runs import FreeRuns


class HostPool:
    """`refs[page]` counts the node pages whose KV the host page holds or is to hold."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = [0] * num_pages
        self._free = FreeRuns(num_pages)
        self._moving: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_moving(self) -> int:
        return len(self._moving)

    @property
    def num_live(self) -> int:
        return self.num_pages - len(self._free) - len(self._moving)

    def is_moving(self, page: int) -> bool:
        return page in self._moving

    def take(self, count: int) -> list[int]:
        """`count` pages for a ticket to write, preferably contiguous; the caller made sure there are enough."""
        pages = self._free.take(count)
        self._moving.update(pages)
        return pages

    def share(self, page: int) -> None:
        """One more reference to a page that is taken."""
        assert page not in self._free
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One reference less; the last one frees the page unless it is under a ticket."""
        if self.refs[page] < 1:
            message = f"host page {page} is freed more often than it is referred to"
            raise KVStoreError("double_free", message, field="host_page")
        self.refs[page] -= 1
        if not self.refs[page] and page not in self._moving:
            self._free.add(page)

    def begin_move(self, page: int) -> None:
        """Put a live page under a ticket that reads it."""
        assert self.refs[page] and page not in self._moving
        self._moving.add(page)

    def end_move(self, page: int) -> None:
        """The ticket of a page is over; a page that nobody refers to is free."""
        self._moving.remove(page)
        if not self.refs[page]:
            self._free.add(page)

    def problems(self) -> list[str]:
        """Differences inside the pool's own books."""
        found: list[str] = []
        for page, refs in enumerate(self.refs):
            free, moving = page in self._free, page in self._moving
            if free + moving + (refs > 0 and not moving) != 1:
                found.append(f"host page {page}: free is {free}, moving is {moving}, with {refs} references")
        return found
