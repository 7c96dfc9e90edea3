"""A directory of pages behind another transfer: what is stored is also written to files, and comes back by content.

    store    inner ticket ──► reported ──► written behind, by a thread        device ► host ► file
    load     inner ticket                                                     host ► device
    recall   a thread reads, an inner ticket loads, part by part              file ► spare host pages ► device

Knows tickets, keys and host pages; knows no device. A host page that a file is being written from is not overwritten
before its bytes were taken: a copy to it is held back until then, and if the writing has not begun it is given up. The
directory is a cache: a page that could not be written, or not read whole, is absent, and never an error of a store.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.directory_worker import (
    DirectoryWorker,
    Fetch,
    HostPages,
    PersistentStats,
    Put,
    Wanted,
)
from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.tiers import Completion, Copy, Transfer


@dataclass(frozen=True, slots=True)
class Recalled:
    """The end of a recall: the first `len(bases)` of its pages are there, with these stored positions of row 0."""

    recall: int
    bases: tuple[int, ...]


@dataclass(eq=False)
class _Recall:
    number: int
    pages: tuple[Wanted, ...]
    bases: tuple[int, ...] = ()  # of pages that are on the device
    part: Fetch | None = None  # under way: first read, then loaded


class PersistentTransfer:
    """A transfer that also keeps what it stores in a directory, and recalls pages from there.

    Args:
        inner: the transfer between device and host.
        host: the memory of its host pages.
        directory: its pages are as large as the host's.
        num_spare: host pages, the inner transfer's last ones, that recalls go through and the store does not get.
        max_queued: pages that may wait to be written; of more, the oldest are given up.
        close_timeout_s: for which `close` waits for the directory.

    `keys`, `tokens` and `bases` of a stored Copy say what is written; a page with an empty key is not.

    Raises KVStoreError `invalid_size`.
    """

    def __init__(
        self,
        inner: Transfer,
        host: HostPages,
        directory: PageDirectory,
        *,
        num_spare: int = 4,
        max_queued: int = 256,
        close_timeout_s: float = 60.0,
    ) -> None:
        for field, size in (("num_spare", num_spare), ("max_queued", max_queued)):
            if size < 1:
                raise KVStoreError("invalid_size", f"{field} must be at least 1, not {size}", field=field)
        if not close_timeout_s > 0:
            message = f"close_timeout_s must be positive, not {close_timeout_s}"
            raise KVStoreError("invalid_size", message, field="close_timeout_s")
        if inner.num_host_pages < num_spare:
            message = f"num_spare is {num_spare}, and there are {inner.num_host_pages} host pages"
            raise KVStoreError("invalid_size", message, field="num_spare")
        self._inner, self._directory = inner, directory
        self._num_spare = num_spare
        self._worker = DirectoryWorker(host, directory, max_queued)
        self._stop = weakref.finalize(self, self._worker.stop, close_timeout_s)
        self._next = 1
        self._running: dict[int, tuple[int, Copy]] = {}  # by inner ticket: own ticket, copy
        self._held: dict[int, Copy] = {}  # by own ticket, in order
        self._refused: list[Completion] = []
        self._recalls: deque[_Recall] = deque()  # the first one is under way
        self._loading: int | None = None  # its inner ticket
        self._recalled: list[Recalled] = []

    @property
    def name(self) -> str:
        return f"{self._inner.name}+directory"

    @property
    def num_host_pages(self) -> int:
        return self._inner.num_host_pages - self._num_spare

    @property
    def stats(self) -> PersistentStats:
        return self._worker.stats

    def submit(self, copy: Copy) -> int:
        """As the inner transfer's. A store into a page that is being written to a file starts when it has been read."""
        for _, host in copy.pages:
            if not 0 <= host < self.num_host_pages:
                message = f"host page {host} is not inside [0, {self.num_host_pages})"
                raise KVStoreError("capacity", message, field="pages")
        if self._may_start(copy):
            self._start(self._next, copy)
        else:
            self._held[self._next] = copy
        self._next += 1
        return self._next - 1

    def poll(self) -> Sequence[Completion]:
        """Completions not reported yet; goes on with recalls. Never blocks."""
        self._start_held()
        done, self._refused = self._refused, []
        for completion in self._inner.poll():
            if completion.ticket == self._loading:
                self._loaded(completion.error)
            elif completion.ticket in self._running:
                ticket, copy = self._running.pop(completion.ticket)
                done.append(Completion(ticket, completion.error))
                if copy.kind == "store" and completion.error is None:
                    self._write_behind(copy)
        for fetch in self._worker.ended():
            self._load(fetch)
        return done

    def abort(self, ticket: int) -> bool:
        """As the inner transfer's. What is confirmed is not written to files either."""
        if ticket in self._held:
            del self._held[ticket]
            self._refused.append(Completion(ticket, "aborted"))
            return True
        for inner, (own, _) in self._running.items():
            if own == ticket:
                confirmed = self._inner.abort(inner)
                if confirmed:
                    del self._running[inner]
                return confirmed
        return True

    def holds(self, key: bytes) -> bool:
        """Whether the page with this content is probably in the directory. Asks no disk."""
        return self._directory.holds(key)

    def recall(self, pages: Sequence[Wanted]) -> int:
        """Bring pages from the directory to device pages that nobody else touches meanwhile; the recall's number.

        They come in order. At the first one that is not there whole the recall ends.
        """
        recall = _Recall(self._next, tuple(pages))
        self._next += 1
        self._recalls.append(recall)
        if self._recalls[0] is recall:
            self._read_part(recall)
        return recall.number

    def recalled(self) -> Sequence[Recalled]:
        """Recalls that have ended since the last call, as `poll` found out."""
        ended, self._recalled = self._recalled, []
        return ended

    def close(self) -> None:
        """Write what is queued, then stop. What the disk has not taken in time is given up, and logged.

        The inner transfer is its owner's to close, afterwards.
        """
        self._stop()

    def _may_start(self, copy: Copy) -> bool:
        """Whether no file is being written from a page that the copy overwrites, nor a copy of its pages is held."""
        overwritten = [host for _, host in copy.pages] if copy.kind == "store" else []
        if not self._worker.give_up(overwritten):
            return False
        sides = [set(side) for side in zip(*copy.pages, strict=True)]
        return not any(
            mine & set(theirs)
            for other in self._held.values()
            for mine, theirs in zip(sides, zip(*other.pages, strict=True), strict=False)
        )

    def _start(self, ticket: int, copy: Copy) -> None:
        self._running[self._inner.submit(copy)] = ticket, copy

    def _start_held(self) -> None:
        waiting, self._held = self._held, {}
        for ticket, copy in waiting.items():
            if not self._may_start(copy):
                self._held[ticket] = copy
                continue
            try:
                self._start(ticket, copy)
            except Exception as error:  # its submit was accepted, so that it is its completion that tells
                self._refused.append(Completion(ticket, f"{type(error).__name__}: {error}"))

    def _write_behind(self, copy: Copy) -> None:
        for (_, host), key, base, tokens in zip(copy.pages, copy.keys, copy.bases, copy.tokens, strict=False):
            if key:
                self._worker.put(Put(host, key, tokens, base))

    def _read_part(self, recall: _Recall) -> None:
        """Read as many pages into the spare ones as there are."""
        begin = len(recall.bases)
        part = recall.pages[begin : begin + self._num_spare]
        pages = tuple(replace(wanted, page=self.num_host_pages + index) for index, wanted in enumerate(part))
        recall.part = Fetch(pages)
        self._worker.fetch(recall.part)

    def _load(self, fetch: Fetch) -> None:
        """What was there of a part goes to the device."""
        recall = self._recalls[0]
        assert recall.part is fetch
        begin, found = len(recall.bases), len(fetch.bases)
        if not found:
            self._end_recall(recall)
            return
        pairs = [(recall.pages[begin + index].page, self.num_host_pages + index) for index in range(found)]
        try:
            self._loading = self._inner.submit(Copy("load", tuple(pairs)))
        except Exception:  # what cannot be loaded is computed, and counted
            self._worker.count(pages_failed=found)
            self._end_recall(recall)

    def _loaded(self, error: str | None) -> None:
        recall, self._loading = self._recalls[0], None
        assert recall.part is not None
        if error is not None:
            self._worker.count(pages_failed=len(recall.part.bases))
            self._end_recall(recall)
            return
        recall.bases += recall.part.bases
        if len(recall.part.bases) < len(recall.part.pages) or len(recall.bases) == len(recall.pages):
            self._end_recall(recall)
        else:
            self._read_part(recall)

    def _end_recall(self, recall: _Recall) -> None:
        self._recalled.append(Recalled(recall.number, recall.bases))
        self._recalls.popleft()
        if self._recalls:
            self._read_part(self._recalls[0])
