"""A directory of pages behind another transfer: what is stored is also written to files, and comes back by content.

    store   inner ticket ──► completion reported ──► write behind, by a thread          device ► host ► file
    load    inner ticket                                                                host ► device
    fetch   a thread reads into host pages that the caller owns                         file ► host

Knows tickets, keys and host pages; knows no device. A host page that a file is being written from is not overwritten
before its bytes were taken: a copy to it is held back until then, and if the writing has not begun it is given up. The
directory is a cache: a page that could not be written, or not read whole, is absent, and never an error of a store.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.tiers import Completion, Copy, Transfer

ABSENT = "absent"
Wanted = tuple[int, bytes, tuple[int, ...]]  # host page, key, tokens


class HostPages(Protocol):
    """The host tier's memory."""

    def page(self, page: int, /) -> memoryview:
        """The bytes of a page, not a copy. Raises KVStoreError `capacity`."""
        ...


@dataclass(frozen=True, slots=True)
class PersistentStats:
    """Counters; they only grow.

    Attributes:
        pages_written: or found there.
        pages_given_up: overwritten before they were written, too many at once, or larger than the directory.
        pages_failed: by an error of the system.
        pages_absent: of fetches that found not everything, from the first missing page on.
    """

    pages_written: int
    pages_given_up: int
    pages_failed: int
    pages_fetched: int
    pages_absent: int


@dataclass(eq=False)
class _Put:
    """One page to be written."""

    host: int
    key: bytes
    tokens: tuple[int, ...]
    base: int


@dataclass(eq=False)
class _Fetch:
    """Pages to be read. `bases` are set when all are there."""

    ticket: int
    pages: tuple[Wanted, ...]
    bases: tuple[int, ...] = ()


class PersistentTransfer:
    """A transfer that also keeps what it stores in a directory, and fetches pages from there.

    Args:
        inner: the transfer between device and host.
        host: the memory of its host pages.
        directory: its pages are as large as the host's.
        max_queued: pages that may wait to be written; of more, the oldest are given up.

    `keys`, `tokens` and `bases` of a stored Copy say what is written; a page with an empty key is not.
    """

    def __init__(
        self, inner: Transfer, host: HostPages, directory: PageDirectory, *, max_queued: int = 256
    ) -> None:
        if max_queued < 1:
            message = f"max_queued must be at least 1, not {max_queued}"
            raise KVStoreError("invalid_size", message, field="max_queued")
        self._inner, self._directory = inner, directory
        self._worker = Worker(host, directory, max_queued)
        self._stop = weakref.finalize(self, self._worker.stop)
        self._next = 1
        self._running: dict[int, tuple[int, Copy]] = {}  # by inner ticket: own ticket, copy
        self._held: dict[int, Copy] = {}  # by own ticket, in order
        self._fetching: dict[int, _Fetch] = {}
        self._fetched: dict[int, tuple[int, ...]] = {}
        self._refused: list[Completion] = []

    @property
    def name(self) -> str:
        return f"{self._inner.name}+directory"

    @property
    def num_host_pages(self) -> int:
        return self._inner.num_host_pages

    @property
    def stats(self) -> PersistentStats:
        return self._worker.stats

    def submit(self, copy: Copy) -> int:
        """As the inner transfer's. A store into a page that is being written to a file starts when it has been read."""
        for _, host in copy.pages:
            self._check_host(host)
        ticket = self._new_ticket()
        overwritten = [host for _, host in copy.pages] if copy.kind == "store" else []
        if self._worker.give_up(overwritten) and not self._waits(copy):
            try:
                self._start(ticket, copy)
            except KVStoreError:
                self._next -= 1  # nothing was started
                raise
        else:
            self._held[ticket] = copy
        return ticket

    def holds(self, key: bytes) -> bool:
        """Whether the page with this content is probably in the directory. Asks no disk."""
        return self._directory.holds(key)

    def fetch(self, pages: Sequence[Wanted]) -> int:
        """Read pages, given as (host page, key, tokens), into host pages that are under no ticket; a ticket.

        It completes with the error `absent` if one of them is not in the directory whole; then none of these host pages
        holds anything.

        Raises KVStoreError `capacity`.
        """
        for host, _, _ in pages:
            self._check_host(host)
        self._worker.give_up(
            [host for host, _, _ in pages]
        )  # one that is being read now is read before this fetch
        fetch = _Fetch(self._new_ticket(), tuple(pages))
        self._fetching[fetch.ticket] = fetch
        self._worker.fetch(fetch)
        return fetch.ticket

    def fetched(self, ticket: int) -> tuple[int, ...]:
        """Stored positions of row 0 of the pages of a fetch that completed without error, once.

        Raises KVStoreError `unknown_ticket`.
        """
        if ticket not in self._fetched:
            raise KVStoreError("unknown_ticket", f"ticket {ticket} fetched nothing", field="ticket")
        return self._fetched.pop(ticket)

    def poll(self) -> Sequence[Completion]:
        """Completions of stores, loads and fetches not reported yet; never blocks."""
        self._start_held()
        done, self._refused = self._refused, []
        for completion in self._inner.poll():
            if completion.ticket not in self._running:
                continue
            ticket, copy = self._running.pop(completion.ticket)
            done.append(Completion(ticket, completion.error))
            if copy.kind == "store" and completion.error is None:
                self._write_behind(copy)
        for fetch in self._worker.ended():
            if fetch.bases or not fetch.pages:
                self._fetched[fetch.ticket] = fetch.bases
            del self._fetching[fetch.ticket]
            done.append(Completion(fetch.ticket, None if fetch.ticket in self._fetched else ABSENT))
        return done

    def abort(self, ticket: int) -> bool:
        """As the inner transfer's. A fetch that has not begun is taken back and completes as `absent`."""
        if ticket in self._held:
            del self._held[ticket]
            self._refused.append(Completion(ticket, "aborted"))
            return True
        if ticket in self._fetching:
            return self._worker.take_back(self._fetching[ticket])
        for inner, (own, _) in self._running.items():
            if own == ticket:
                return self._inner.abort(inner)
        return True

    def close(self) -> None:
        """Write what is queued, then stop. The inner transfer is its owner's to close, afterwards."""
        self._stop()

    def _new_ticket(self) -> int:
        self._next += 1
        return self._next - 1

    def _check_host(self, page: int) -> None:
        if not 0 <= page < self.num_host_pages:
            message = f"host page {page} is not inside [0, {self.num_host_pages})"
            raise KVStoreError("capacity", message, field="pages")

    def _waits(self, copy: Copy) -> bool:
        """Whether a copy must stay behind one that is held: they share a page."""
        for other in self._held.values():
            for side in (0, 1):
                if {pair[side] for pair in copy.pages} & {pair[side] for pair in other.pages}:
                    return True
        return False

    def _start(self, ticket: int, copy: Copy) -> None:
        self._running[self._inner.submit(copy)] = ticket, copy

    def _start_held(self) -> None:
        waiting, self._held = self._held, {}
        for ticket, copy in waiting.items():
            overwritten = [host for _, host in copy.pages] if copy.kind == "store" else []
            if not self._worker.give_up(overwritten) or self._waits(copy):
                self._held[ticket] = copy
                continue
            try:
                self._start(ticket, copy)
            except KVStoreError as error:
                self._refused.append(Completion(ticket, str(error)))

    def _write_behind(self, copy: Copy) -> None:
        for (_, host), key, base, tokens in zip(copy.pages, copy.keys, copy.bases, copy.tokens, strict=False):
            if key:
                self._worker.put(_Put(host, key, tokens, base))


class Worker:
    """The thread between host pages and files. Fetches go first: somebody waits for them."""

    def __init__(self, host: HostPages, directory: PageDirectory, max_queued: int) -> None:
        self._host, self._directory, self._max_queued = host, directory, max_queued
        self._changed = threading.Condition()
        self._puts: deque[_Put] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._ended: deque[_Fetch] = deque()
        self._active: _Put | None = None
        self._stopping = False
        self._fault: BaseException | None = None
        self.stats = PersistentStats(0, 0, 0, 0, 0)
        self._thread = threading.Thread(target=self._run, name="kvstore-directory", daemon=True)
        self._thread.start()

    def put(self, put: _Put) -> None:
        with self._changed:
            self._puts.append(put)
            while len(self._puts) > self._max_queued:
                self._puts.popleft()
                self._count(pages_given_up=1)
            self._changed.notify()

    def fetch(self, fetch: _Fetch) -> None:
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify()

    def give_up(self, hosts: Collection[int]) -> bool:
        """Write none of these host pages any more; whether none of them is being read for it now."""
        if not hosts:
            return True
        with self._changed:
            kept = [put for put in self._puts if put.host not in hosts]
            self._count(pages_given_up=len(self._puts) - len(kept))
            self._puts = deque(kept)
            return self._active is None or self._active.host not in hosts

    def take_back(self, fetch: _Fetch) -> bool:
        """End a fetch that has not begun; whether it touches nothing any more."""
        with self._changed:
            if fetch in self._fetches:
                self._fetches.remove(fetch)
                self._ended.append(fetch)
            return fetch in self._ended

    def ended(self) -> list[_Fetch]:
        """Fetches that have ended since the last call. Raises what ended the thread before its time."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            ended, self._ended = list(self._ended), deque()
            return ended

    def stop(self) -> None:
        """Do what is queued, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                if isinstance(job, _Put):
                    self._write(job)
                else:
                    self._read(job)
        except BaseException as error:  # a fault of this program: whoever polls is told
            with self._changed:
                self._fault, self._active = error, None

    def _next_job(self) -> _Fetch | _Put | None:
        with self._changed:
            while not (self._fetches or self._puts or self._stopping):
                self._changed.wait()
            if self._fetches:
                return self._fetches.popleft()
            self._active = self._puts.popleft() if self._puts else None
            return self._active

    def _write(self, put: _Put) -> None:
        def consumed() -> None:
            with self._changed:
                self._active = None

        try:
            payload = self._host.page(put.host)
            done = self._directory.put(put.key, put.tokens, put.base, payload, consumed=consumed)
            counts = {"pages_written": int(done), "pages_given_up": int(not done)}
        except OSError:  # no room on the disk, or no disk
            counts = {"pages_failed": 1}
        with self._changed:
            self._count(**counts)

    def _read(self, fetch: _Fetch) -> None:
        bases: list[int] = []
        try:
            for host, key, tokens in fetch.pages:
                base = self._directory.get(key, tokens, self._host.page(host))
                if base is None:
                    break
                bases.append(base)
            absent = len(fetch.pages) - len(bases)
            counts = {"pages_absent": absent} if absent else {"pages_fetched": len(bases)}
        except (OSError, KVStoreError):  # no memory for a host page
            absent, counts = len(fetch.pages), {"pages_failed": 1}
        with self._changed:
            fetch.bases = () if absent else tuple(bases)
            self._count(**counts)
            self._ended.append(fetch)

    def _count(self, **more: int) -> None:
        now = {name: getattr(self.stats, name) + number for name, number in more.items()}
        self.stats = replace(self.stats, **now)
