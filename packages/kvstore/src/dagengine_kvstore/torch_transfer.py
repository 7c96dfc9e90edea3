"""Moves pages of a TorchArena to host memory and back. Knows tickets and their order; `CudaCopies` knows streams.

    submit ──► waiting ──► issued ──► ended on the device ──► reported by poll, once
                  │ an earlier ticket over one of its pages is not issued yet, or the store rate is used up

A store reads a page behind everything that was queued on the compute stream at its submit. Of two tickets over one
device page or one host page the later one runs behind the earlier one, whatever their directions. A load waits for no
compute: its device pages must be such that no open step touches them.

On a CPU the order is the same and a copy is done when it is issued; the next `poll` reports it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.extents import Numbers
from dagengine_kvstore.host_arena import CHUNK_BYTES, HostArena
from dagengine_kvstore.tiers import Completion, Copy
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_kvstore.torch_copies import Copies, CpuCopies, Direction, Mark, page_rows

PACED_BYTES = 64 << 20
BURST_S = 0.05
MANY_PAGES = 1024  # to mark them takes less than to sort them
BACKGROUND_BYTES_PER_S = 10e9
"""A rate of stores that leaves running steps nearly all of the GPU's bandwidth, and of the host's time."""


@dataclass(eq=False)
class _Ticket:
    number: int
    kind: Direction
    pages: Numbers  # [2, num_pages]: device pages, host pages
    mark: Mark | None  # of the compute stream at the submit of a store
    after: list[_Ticket]
    issued: int = 0  # pages
    end: Mark | None = None  # of the last pages issued
    error: str | None = None

    @property
    def is_issued(self) -> bool:
        return self.error is not None or self.issued == self.pages.shape[1]

    @property
    def is_done(self) -> bool:
        return self.is_issued and (self.end is None or self.end.query())


class TorchTransfer:
    """The transfer of a TorchArena, on the arena's device.

    Args:
        arena: the device's pages.
        num_host_pages: of the host tier; memory is mapped, and pinned for a GPU, in chunks as pages are first used.
        chunk_bytes: of such a chunk.
        store_bytes_per_s: stores are issued no faster, in parts of 64 MiB or of what is due, by `submit` and `poll`, so
            that they leave bandwidth to running steps; None: all at once. Loads are never held back.
        copies: makes what copies, from the arena and the host pages; None: CpuCopies, or CudaCopies as it is.
        clock: seconds, for `store_bytes_per_s`.

    Raises:
        KVStoreError `invalid_size`; for a GPU `device_error` where the CUDA driver or Triton is missing.
    """

    name = "torch"

    def __init__(
        self,
        arena: TorchArena,
        num_host_pages: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        store_bytes_per_s: float | None = None,
        copies: Callable[[TorchArena, HostArena], Copies] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if store_bytes_per_s is not None and not store_bytes_per_s > 0:
            message = f"store_bytes_per_s must be positive, not {store_bytes_per_s}"
            raise KVStoreError("invalid_size", message, field="store_bytes_per_s")
        self.host = HostArena(num_host_pages, arena.page_bytes, chunk_bytes=chunk_bytes)
        self._copies = (copies or _copies_of(arena))(arena, self.host)
        self._num_device_pages = arena.num_pages
        self._clock, self._rate = clock, store_bytes_per_s
        self._paid_until = clock()  # stores issued so far take the link until then, at their rate
        self._part = max(1, PACED_BYTES // arena.page_bytes)
        self._queues: dict[Direction, deque[_Ticket]] = {"store": deque(), "load": deque()}
        self._open: dict[int, _Ticket] = {}
        # The number of the last ticket over each device page, and over each host page; 0: none.
        self._newest = (np.zeros(arena.num_pages, np.int64), np.zeros(num_host_pages, np.int64))
        self._next = 1
        self._skipped: dict[int, list[_Ticket]] = {}  # by an aborted ticket's number: what it waited for
        self._closed = False
        self._close_copies = weakref.finalize(self, self._copies.close)

    @property
    def num_host_pages(self) -> int:
        return self.host.num_pages

    def submit(self, copy: Copy) -> int:
        """Start a copy; its ticket. A fault of the device is its completion's error.

        Raises:
            KVStoreError `capacity` for a page that is not there, `invalid_pages` for one that comes twice,
            `transfer_closed`.
        """
        if self._closed:
            raise KVStoreError("transfer_closed", "this transfer was closed")
        mark = self._copies.mark() if copy.kind == "store" else None
        pages = self._rows(copy)
        ticket = _Ticket(self._next, copy.kind, pages, mark, self._before(pages))
        self._next += 1
        self._open[ticket.number] = ticket
        if self._rate is not None and copy.kind == "store" and not self._queues["store"]:
            self._paid_until = max(self._paid_until, self._clock())  # nothing is saved up while nothing waits
        self._queues[copy.kind].append(ticket)
        try:
            self._issue()
        finally:  # only later tickets look at it, so the device begins first
            for newest, side in zip(self._newest, pages, strict=True):
                newest[side] = ticket.number
        return ticket.number

    def poll(self) -> Sequence[Completion]:
        """Completions not reported yet. Issues what has become possible; never blocks."""
        if any(self._queues.values()):
            self._issue()
        done = [ticket for ticket in self._open.values() if ticket.is_done]
        for ticket in done:
            del self._open[ticket.number]
            ticket.after.clear()
        if self._skipped:
            self._skipped = {
                number: left for number, left in self._skipped.items() if any(map(self._is_open, left))
            }
        return tuple(Completion(ticket.number, ticket.error) for ticket in done)

    def abort(self, ticket: int) -> bool:
        """Whether this ticket touches none of its pages from now on. What is not issued is not copied any more, and its
        completion has an error; what is issued runs to its end.
        """
        found = self._open.get(ticket)
        if found is None:
            return True
        if not found.is_issued:
            self._queues[found.kind].remove(found)
            found.error = "aborted"
            if found.end is None:
                self._skip(found)
        return found.is_done

    def close(self) -> None:
        """Wait for what is issued, drop what is not, give the pinned memory up. `poll` still reports what is open."""
        self._closed = True
        for queue in self._queues.values():
            for ticket in queue:
                ticket.error = "the transfer was closed"
            queue.clear()
        self._close_copies()

    def _rows(self, copy: Copy) -> Numbers:
        """The pages of a copy that can be submitted, in the order of the host's."""
        pages = page_rows(copy.pages)
        if not copy.pages:
            return pages
        for side, (low, high, twice), limit in (
            ("device", _span(pages[0], self._num_device_pages), self._num_device_pages),
            ("host", _span_of_ordered(pages[1]), self.num_host_pages),
        ):
            if low < 0 or high >= limit:
                message = f"{side} pages {low} to {high} are not inside [0, {limit})"
                raise KVStoreError("capacity", message, field="pages")
            if twice:
                raise KVStoreError("invalid_pages", f"a {side} page comes twice in one copy", field="pages")
        return pages

    def _before(self, pages: Numbers) -> list[_Ticket]:
        """The last tickets over these pages, as far as they are open."""
        if not self._open:
            return []
        oldest = min([next(iter(self._open)), *self._skipped])
        found: dict[_Ticket, None] = {}
        for newest, side in zip(self._newest, pages, strict=True):
            last = newest[side]
            last = last[last >= oldest]
            for number in np.unique(last).tolist() if len(last) else ():
                one = self._open.get(number)
                found.update(dict.fromkeys(self._skipped.get(number, () if one is None else (one,))))
        return [ticket for ticket in found if self._is_open(ticket)]

    def _is_open(self, ticket: _Ticket) -> bool:
        return ticket.number in self._open

    def _skip(self, ticket: _Ticket) -> None:
        """Who would run behind this ticket, of which nothing was issued, runs behind what it has waited for."""
        instead = self._skipped[ticket.number] = list(ticket.after)
        for waits in (*(other.after for other in self._open.values()), *self._skipped.values()):
            if ticket in waits:
                waits.remove(ticket)
                waits.extend(one for one in instead if one not in waits)

    def _issue(self) -> None:
        """Issue what no earlier ticket over its pages and no rate holds back: stores in order, loads as they can."""
        progress = True
        while progress:
            progress = False
            for queue in self._queues.values():
                for ticket in tuple(queue):
                    while not ticket.is_issued and self._may_issue(ticket):
                        self._issue_part(ticket)
                        progress = True
                    if ticket.is_issued:
                        queue.remove(ticket)
                    elif ticket.kind == "store":
                        break

    def _may_issue(self, ticket: _Ticket) -> bool:
        if not all(before.is_issued for before in ticket.after):
            return False
        return ticket.kind == "load" or self._rate is None or self._paid_until <= self._clock()

    def _issue_part(self, ticket: _Ticket) -> None:
        pages = ticket.pages[:, ticket.issued :]
        if ticket.kind == "store" and self._rate is not None:
            since = max(self._paid_until, self._clock() - BURST_S)
            due = int((self._clock() - since) * self._rate / self.host.page_bytes)
            pages = pages[:, : max(due, self._part)]
            self._paid_until = since + pages.shape[1] * self.host.page_bytes / self._rate
        after = [before.end for before in ticket.after if before.end is not None]
        if ticket.mark is not None:
            after.append(ticket.mark)
        try:
            ticket.end = self._copies.issue(ticket.kind, pages, after)
        except (KVStoreError, RuntimeError, OSError) as error:  # no memory, or a fault of the device
            self._copies.wait()
            ticket.error = f"{type(error).__name__}: {error}"
            return
        ticket.issued += pages.shape[1]


def _span_of_ordered(pages: Numbers) -> tuple[int, int, bool]:
    """The least and the greatest of these pages, and whether one comes twice."""
    return pages.item(0), pages.item(-1), bool(np.count_nonzero(pages[1:] == pages[:-1]))


def _span(pages: Numbers, limit: int) -> tuple[int, int, bool]:
    """As `_span_of_ordered`, in any order; whether one comes twice is told if all are inside [0, limit)."""
    if len(pages) < max(MANY_PAGES, limit // 64):
        return _span_of_ordered(np.sort(pages))
    low, high = int(np.minimum.reduce(pages)), int(np.maximum.reduce(pages))
    if low < 0 or high >= limit:
        return low, high, False
    seen = np.zeros(limit, np.bool_)
    seen[pages] = True
    return low, high, bool(np.count_nonzero(seen) < len(pages))


def _copies_of(arena: TorchArena) -> Callable[[TorchArena, HostArena], Copies]:
    if arena.layer(0).device.type != "cuda":
        return CpuCopies
    try:
        from dagengine_kvstore.cuda_copies import CudaCopies
    except ImportError as error:
        raise KVStoreError("device_error", f"copies on a GPU need Triton: {error}") from error
    return CudaCopies
