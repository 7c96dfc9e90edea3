"""Pages of a writer's next tokens from a directory, where they would otherwise be computed. Knows writers and recalls;
knows no file and no device.

    match ──► start: look up, reserve, recall ──► … pump … ──► finish: adopt what came ──► compute the rest

While a recall is under way an open step keeps the reserved pages from anybody else, even if the writer is aborted. One
that takes longer than the store's transfers may is lost: its writer computes, only its pages are kept until it ends,
and before that nothing is looked for in the directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dagengine_kvstore.directory_worker import Wanted
from dagengine_kvstore.persistent import PersistentTransfer
from dagengine_kvstore.store import KVStore
from dagengine_kvstore.writer import PageWriter


@dataclass(frozen=True, slots=True)
class Finished:
    """A writer whose recall has ended, and how many of its tokens are committed by it."""

    writer: PageWriter
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Open:
    writer: PageWriter
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    fence: int
    deadline: float  # seconds of the store's clock


class Recalls:
    """Recalls for the writers of a store whose transfer is `transfer`; `KVStore.pump` moves them on."""

    def __init__(self, store: KVStore, transfer: PersistentTransfer) -> None:
        self._store, self._transfer = store, transfer
        self._open: dict[int, _Open] = {}
        self._lost: dict[int, tuple[int, ...]] = {}  # their pages

    @property
    def num_open(self) -> int:
        """Recalls under way, without lost ones."""
        return len(self._open)

    @property
    def num_lost(self) -> int:
        return len(self._lost)

    def start(self, writer: PageWriter, tokens: Sequence[int], *, evict: bool = True) -> int:
        """Look for the writer's next tokens, whole pages of them, and begin to bring those that seem to be there.

        Until `finish` names the writer, nobody may use it but to abort it or roll it back.

        Args:
            tokens: those that need not be computed: leave out the last one if its logits are needed.
            evict: whether states may be evicted for the pages.

        Returns: how many tokens are on their way; 0: compute them. Always 0 while a recall is lost.

        Raises OutOfPages, and KVStoreError as `PageWriter.page_keys`.
        """
        keys = writer.page_keys(tokens)
        if self._lost:
            return 0
        count = next((i for i, key in enumerate(keys) if not self._transfer.holds(key)), len(keys))
        if not count:
            return 0
        size, first = writer.page_size, writer.num_tokens // writer.page_size
        writer.reserve(count * size, evict=evict)
        chosen = tuple(tokens[: count * size])
        pages = tuple(writer.pages[first : first + count])
        wanted = [
            Wanted(page, key, chosen[index * size : (index + 1) * size])
            for index, (page, key) in enumerate(zip(pages, keys, strict=False))
        ]
        number = self._transfer.recall(wanted)
        deadline = self._store.now() + self._store.transfer_timeout_s
        self._open[number] = _Open(writer, chosen, pages, self._store.begin_step(), deadline)
        return len(chosen)

    def finish(self) -> list[Finished]:
        """Writers whose recalls have ended or are lost, in order; what did not come is theirs to compute."""
        finished: list[Finished] = []
        for recalled in self._transfer.recalled():
            if recalled.recall in self._lost:
                self._store.end_aside(self._lost.pop(recalled.recall))
                continue
            recall = self._open.pop(recalled.recall)
            self._store.end_step(recall.fence)
            if _waits(recall):
                count = len(recalled.bases) * recall.writer.page_size
                recall.writer.adopt(recall.tokens[:count], recalled.bases)
                finished.append(Finished(recall.writer, count))
        now = self._store.now()
        for number, recall in tuple(self._open.items()):
            if recall.deadline <= now:
                del self._open[number]
                self._lost[number] = recall.pages
                self._store.set_aside(recall.fence, recall.pages)
                if _waits(recall):
                    recall.writer.give_back(0)
                    finished.append(Finished(recall.writer, 0))
        return finished


def _waits(recall: _Open) -> bool:
    """Whether the writer still has the pages that were reserved for the recall."""
    writer = recall.writer
    first = writer.num_tokens // writer.page_size
    return tuple(writer.pages[first : first + len(recall.pages)]) == recall.pages
