"""The thread between host pages and the files of a directory. Knows jobs and their order; knows no tickets.

    put      waiting ──► being read ──► written      given up while it waits: overwritten, or too many wait
    fetch    waiting ──► ended                       before any put, since somebody waits for it

What the system refuses is counted. A fault of this program ends the thread and is raised by `ended`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Protocol

from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.errors import KVStoreError

log = logging.getLogger(__name__)


class HostPages(Protocol):
    """The host tier's memory."""

    def page(self, page: int, /) -> memoryview:
        """The bytes of a page, not a copy. Raises KVStoreError `capacity`."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A page of a directory, by its content, and the page that it goes to."""

    page: int
    key: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PersistentStats:
    """Counters; they only grow.

    Attributes:
        pages_written: or found there.
        pages_given_up: overwritten before they were written, too many at once, larger than the directory, or too late
            at the end.
        pages_failed: by an error of the system.
        pages_absent: of recalls that found not everything, from the first missing page on.
    """

    pages_written: int
    pages_given_up: int
    pages_failed: int
    pages_recalled: int
    pages_absent: int


@dataclass(eq=False)
class Put:
    """One page to be written."""

    host: int
    key: bytes
    tokens: tuple[int, ...]
    base: int


@dataclass(eq=False)
class Fetch:
    """Pages to be read into host pages; `bases` of those that were there, up to the first that was not."""

    pages: tuple[Wanted, ...]
    bases: tuple[int, ...] = ()


class DirectoryWorker:
    """
    Args:
        host: pages that are read from and written to.
        max_queued: puts that may wait; of more, the oldest are given up.
    """

    def __init__(self, host: HostPages, directory: PageDirectory, max_queued: int) -> None:
        self._host, self._directory, self._max_queued = host, directory, max_queued
        self._changed = threading.Condition()
        self._puts: deque[Put] = deque()
        self._fetches: deque[Fetch] = deque()
        self._ended: deque[Fetch] = deque()
        self._active: Put | None = None
        self._stopping = False
        self._fault: BaseException | None = None
        self.stats = PersistentStats(0, 0, 0, 0, 0)
        self._thread = threading.Thread(target=self._run, name="kvstore-directory", daemon=True)
        self._thread.start()

    def put(self, put: Put) -> None:
        with self._changed:
            self._puts.append(put)
            while len(self._puts) > self._max_queued:
                self._puts.popleft()
                self._count(pages_given_up=1)
            self._changed.notify()

    def fetch(self, fetch: Fetch) -> None:
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

    def ended(self) -> list[Fetch]:
        """Fetches that have ended since the last call. Raises what ended the thread before its time."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            ended, self._ended = list(self._ended), deque()
            return ended

    def stop(self, timeout_s: float) -> None:
        """Do what is queued, then end the thread. One that has not ended in time is left behind, with what it is doing;
        what is queued is given up.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return
        with self._changed:
            left = len(self._puts)
            self._puts.clear()
            self._fetches.clear()
            self._count(pages_given_up=left)
        log.warning(
            "the directory's thread has not ended in %g s; %d pages are not written, besides the one it is at",
            timeout_s, left,
        )  # fmt: skip

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                if isinstance(job, Put):
                    self._write(job)
                else:
                    self._read(job)
        except BaseException as error:  # a fault of this program: whoever polls is told
            with self._changed:
                self._fault, self._active = error, None

    def _next_job(self) -> Fetch | Put | None:
        with self._changed:
            while not (self._fetches or self._puts or self._stopping):
                self._changed.wait()
            if self._fetches:
                return self._fetches.popleft()
            self._active = self._puts.popleft() if self._puts else None
            return self._active

    def _write(self, put: Put) -> None:
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

    def _read(self, fetch: Fetch) -> None:
        bases: list[int] = []
        failed = 0
        for wanted in fetch.pages:
            try:
                base = self._directory.get(wanted.key, wanted.tokens, self._host.page(wanted.page))
            except (OSError, KVStoreError):  # no disk, or no memory for a host page
                base, failed = None, 1
            if base is None:
                break
            bases.append(base)
        absent = len(fetch.pages) - len(bases) - failed
        with self._changed:
            fetch.bases = tuple(bases)
            self._count(pages_recalled=len(bases), pages_absent=absent, pages_failed=failed)
            self._ended.append(fetch)

    def count(self, **more: int) -> None:
        with self._changed:
            self._count(**more)

    def _count(self, **more: int) -> None:
        now = {name: getattr(self.stats, name) + number for name, number in more.items()}
        self.stats = replace(self.stats, **now)
