"""What waiting sequences read and the host has: whether it is loaded or computed again, and when.

Knows reads, tiers and claims; the scheduler says who is first, and makes room. One at a time loads on demand, the first
that waits; others prefetch, once each, into pages that nobody uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from dagengine_kvstore import KVStore, NodeRecord, NotResident, Read, Tier, page_tier

from .sequence import Sequence
from .stats import EngineStats

LOOK_AHEAD = 8


class Loading:
    """
    Attributes:
        owner: on whose behalf pages are claimed, if anybody's.
    """

    def __init__(self, store: KVStore, stats: EngineStats) -> None:
        self.owner: Sequence | None = None
        self._store, self._stats = store, stats
        self._claimed: tuple[Read, ...] = ()

    def wants(self, owner: Sequence, node: NodeRecord) -> bool:
        """Whether what the host has of a node is loaded for `owner`; asked for the first time, costs decide."""
        wanted = owner.reload.get(node.uid)
        if wanted is None:
            wanted = owner.reload[node.uid] = self._store.wants_reload(node)
            self._stats.reloads_chosen += wanted
            self._stats.recomputes_chosen += not wanted
        return wanted

    def divide(
        self, owner: Sequence, reads: SequenceOf[Read], missing: NotResident
    ) -> tuple[list[Read], list[NodeRecord]]:
        """The reads to be loaded, with those that are to stay resident meanwhile; none where nothing is loaded.
        And the nodes to be computed again, afterwards.
        """
        loaded = [node for node in missing.on_host if node in missing.loading or self.wants(owner, node)]
        computed = [node for node in missing.nodes if node not in loaded]
        return [read for read in reads if loaded and read.node not in computed], computed

    def load(self, owner: Sequence, reads: SequenceOf[Read]) -> int:
        """Start to load, or go on: to be asked again in each step until all of it is leased.

        Returns: pages on their way. Raises OutOfPages.
        """
        if self.owner is not owner:
            self.end()
        self.owner = owner
        self._claimed = tuple(dict.fromkeys((*self._claimed, *reads)))
        on_way = self._store.load(reads)
        self._await(owner, reads)
        return on_way

    def out_of_reach(self, owner: Sequence, reads: SequenceOf[Read]) -> bool:
        """Whether part of `reads` cannot be computed again, and loading it failed too often for `owner`, or is lost."""
        store = self._store
        for read in reads:
            if read.node.recomputable:
                continue
            failed = store.failed_loads(read)
            if (
                store.is_lost(read)
                or failed - owner.failed_loads.setdefault(read, failed) >= store.max_failures
            ):
                return True
        return False

    def end(self) -> bool:
        """Claim nothing any more. Returns whether anything was claimed."""
        claimed, self._claimed, self.owner = self._claimed, (), None
        self._store.unclaim(claimed)
        return bool(claimed)

    def prefetch(self, waiting: Iterable[Sequence], spare: int) -> None:
        """Load what the next of `waiting` read into unused pages, but for `spare` of them."""
        for sequence, _ in zip(waiting, range(LOOK_AHEAD), strict=False):
            unused = self._store.num_unused - spare
            if sequence.prefetch_pages is None or unused < sequence.prefetch_pages or unused <= 0:
                continue
            reads = [r for r in sequence.reads if _host_pages(r, self._store.page_size)]
            reads = [read for read in reads if self._store.wants_reload(read.node)]
            pages = {(r.node.uid, i) for r in reads for i in _host_pages(r, self._store.page_size)}
            if len(pages) > unused:
                sequence.prefetch_pages = len(pages)
                continue
            sequence.prefetch_pages = None
            if reads:
                self._stats.prefetches += self._store.prefetch(reads) > 0
                self._await(sequence, reads)

    def _await(self, owner: Sequence, reads: SequenceOf[Read]) -> None:
        """Remember what is on its way for `owner`."""
        for read in reads:
            pages = [
                i for i in _host_pages(read, self._store.page_size) if page_tier(read.node, i) is Tier.LOADING
            ]
            if pages:
                owner.awaited.setdefault(read.node.uid, set()).update(pages)


def _host_pages(read: Read, page_size: int) -> list[int]:
    """Indices of the pages of a read that are on the host, or on their way from there."""
    span = range(read.start // page_size, -(-read.stop // page_size))
    return [
        i for i in span if read.node.pages[i] is None and page_tier(read.node, i) in (Tier.HOST, Tier.LOADING)
    ]
