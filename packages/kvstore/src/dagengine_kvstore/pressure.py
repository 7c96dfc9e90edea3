"""Who makes room in both tiers, and what is brought back. Knows the policy, costs, claims and the books; the copies
themselves are `transfers.py`'s.

    page of a victim            what becomes of it
    the host has a copy         dropped at once: HOST
    recomputing is cheaper, or  dropped at once: NOWHERE
      the host takes no more
    else                        stored first; the next who needs room drops it

What can be dropped at once goes first, in the policy's order. Only if that is not enough are stores started, as many
pages as are short, and no more before these have ended: whoever needs the pages waits.

Where there is one tier, what is dropped follows an order that stands: of `lru` that of the books, of any other policy
what it answered, until more may be dropped than before (`Books.releases`), so that a step that admits many asks once.
Whoever was used meanwhile comes after all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from dagengine_kvstore.claims import Claims
from dagengine_kvstore.costs import CostModel, reload_is_cheaper
from dagengine_kvstore.errors import KVStoreError, OutOfHostPages, OutOfPages
from dagengine_kvstore.eviction import Candidate, EvictionPolicy, LeastRecentlyUsed, choose, freed_pages
from dagengine_kvstore.nodes import NodeRecord
from dagengine_kvstore.residency import PageCopy, clean_copy, copy_of
from dagengine_kvstore.tickets import Ticket
from dagengine_kvstore.tiers import Tier
from dagengine_kvstore.transfers import Transfers

if TYPE_CHECKING:
    from dagengine_kvstore.books import Books
    from dagengine_kvstore.references import Read

NextUseOf = Callable[[NodeRecord], int | None]
Pages = dict[NodeRecord, list[int]]
NO_PAGES: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What may leave the device now: `drop` at once, `store` first; pages by node, oldest node first."""

    drop: Pages
    store: Pages


@dataclass(slots=True)
class _Ranking:
    """What a policy answered when the books had counted so many releases: uids, and when each had been used last."""

    releases: int
    last_used: dict[int, int]


class Pressure:
    """
    Args:
        next_use: when somebody who waits or runs will read a node, smaller is sooner; None: nobody.
        write_back: how many pages `pump` keeps unused or fit to be dropped at once.
    """

    def __init__(
        self,
        books: Books,
        transfers: Transfers,
        claims: Claims,
        policy: EvictionPolicy,
        costs: CostModel | None,
        next_use: NextUseOf | None,
        write_back: int,
    ) -> None:
        self.claims = claims
        self.offloading: dict[NodeRecord, None] = {}
        self._books = books
        self._transfers = transfers
        self._policy = policy
        self._by_use = type(policy) is LeastRecentlyUsed
        self._costs = costs
        self._next_use = next_use
        self._write_back = write_back
        self._ranking = _Ranking(-1, {})

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """All that have not ended, lost ones too."""
        return tuple(self._transfers.tickets.tickets.values())

    def take_pages(self, node: NodeRecord, count: int, after: int | None, *, evict: bool) -> list[int]:
        """Pages for a writer of `node`; with `evict` also others', but never pages that the node itself reads.

        Raises OutOfPages. Nothing was dropped then, but stores may have been started.
        """
        self.make_room(count, node.reads, evict=evict, restoring=node if node.restoring else None)
        return self._books.pool.allocate(count, after)

    def make_room(
        self,
        count: int,
        reads: Iterable[Read],
        *,
        evict: bool,
        restoring: NodeRecord | None = None,
    ) -> None:
        """Make `count` pages unused, dropping none that `reads` read. Raises as `take_pages`.

        A node that is being restored loses its own pages, too, if they will be computed again.
        """
        pool = self._books.pool
        unused = pool.num_free + pool.num_cached
        short = count - unused
        if short <= 0:
            return
        if evict and restoring is None and not self._transfers.is_usable:
            if self._drop_in_order(reads, short):
                return
            evict = not self._by_use  # of `lru` that was all
        refused: set[NodeRecord] = set()
        while evict:
            plan = self.plan(reads=reads, refused=refused)
            if restoring is not None:
                begin = len(self._books.restores[restoring].pages)
                pages = self._pages(restoring, self._kept(reads).get(restoring, set()), begin)
                plan.drop.update({restoring: pages} if pages else {})
            chosen = self._choose(plan.drop, pool.refs, short, keep_order=restoring is None)
            if chosen is not None:
                for node in chosen:
                    self._books.evict(node, plan.drop[node])
                return
            droppable = len(freed_pages(_by_uid(plan.drop), pool.refs))
            in_vain = self._start_stores(plan.store, short - droppable - pool.num_waiting)
            if not in_vain:
                break
            refused |= in_vain
        raise OutOfPages(count, unused, pool.num_waiting, self._transfers.tickets.num_pages("store"))

    def _drop_in_order(self, reads: Iterable[Read], short: int) -> bool:
        """Drop `short` pages by the order that stands. False, and nothing is dropped, if that is not enough."""
        books = self._books
        pinned, read = books.pinned(), {read.node for read in reads}
        kept: dict[NodeRecord, set[int]] | None = None
        owned: dict[NodeRecord, list[int]] = {}
        gone: list[int] = []
        unshared = 0
        for node in books.by_use() if self._by_use else self._ranked():
            pages: list[int] = []
            if node.recomputable and not node.restoring and node not in pinned:
                if kept is None and (node.leases or node in read):
                    kept = self._kept(reads)
                pages = self._pages(node, kept.get(node, NO_PAGES) if kept else NO_PAGES)
            if not pages:
                gone.append(node.uid)
                continue
            owned[node] = pages
            unshared += sum(books.pool.refs[page] == 1 for page in pages)
            if unshared >= short:
                break
        by_uid = {node.uid: node for node in owned}
        chosen = choose(list(by_uid), _by_uid(owned), books.pool.refs, short)
        for uid in (*gone, *(chosen or ())):
            self._ranking.last_used.pop(uid, None)
        for uid in chosen or ():
            books.evict(by_uid[uid], owned[by_uid[uid]])
        return chosen is not None

    def _ranked(self) -> Iterator[NodeRecord]:
        """What the policy ranked, if that still stands, without those that were used since."""
        if self._ranking.releases == self._books.releases:
            for uid, last_used in self._ranking.last_used.items():
                node = self._books.node(uid)
                if node is not None and node.last_used == last_used:
                    yield node

    def num_droppable(self, exclude: Collection[NodeRecord], reads: Iterable[Read]) -> int:
        """Pages that evicting would free now."""
        drop = self.plan(exclude, reads).drop
        return len(freed_pages(_by_uid(drop), self._books.pool.refs))

    def plan(
        self,
        exclude: Collection[NodeRecord] = (),
        reads: Iterable[Read] = (),
        refused: Collection[NodeRecord] = (),
    ) -> Plan:
        """What may leave the device, but for `exclude` and what is read; `refused` are not stored first."""
        evictable = self._evictable(exclude, reads)
        if not self._transfers.is_usable:
            return Plan({node: pages for node, pages in evictable.items() if node.recomputable}, {})
        clean: Pages = {}
        dirty: Pages = {}
        for node, pages in evictable.items():
            self._books.copies.adopt(node)
            for index, page in enumerate(node.pages):
                if page in pages:
                    side = dirty if clean_copy(node, index) is None else clean
                    side.setdefault(node, []).append(page)
        stored = {node: pages for node, pages in dirty.items() if node not in refused}
        store = self._storable(stored)
        drop = {
            node: [*clean.get(node, ()), *(() if node in store else dirty.get(node, ()))]
            for node in evictable
            if node.recomputable and (node in clean or node not in store)
        }
        drop.update({node: pages for node, pages in clean.items() if not node.recomputable})
        return Plan(drop, store)

    def offload(self, node: NodeRecord) -> None:
        """Move a node to the host as soon as nothing needs it on the device.

        Raises OutOfHostPages if it needs room there that cannot be made.
        """
        self._transfers.forgive(node)
        dirty = self._transfers.dirty(node)
        if not self._make_host_room(len(dirty), node, force=True):
            raise OutOfHostPages(len(dirty), self._books.host.num_free)
        self.offloading[node] = None
        self._books.note("offload", node)
        self._continue_offload(node)

    def pump(self) -> None:
        """Go on with what was asked for, and store ahead what will have to go next."""
        self._books.releases += 1
        self.claims.pump()
        for node in tuple(self.offloading):
            self._continue_offload(node)
        if self._write_back:
            self._store_ahead()

    def load(self, reads: Sequence[Read], *, demand: bool) -> int:
        """Bring what the host has of `reads`; claim all that they read with `demand`.

        Returns: how many are on their way.

        Raises OutOfPages with `demand`, and nothing more is claimed then: of two who have a part each and wait for the
        other's, one lets go. Without `demand` nothing is started if there are too few unused pages.
        """
        saved = [(read.node, self.claims.save(read.node)) for read in reads if demand]
        on_way: dict[PageCopy, None] = {}
        on_host: dict[PageCopy, NodeRecord] = {}
        for read in reads:
            node, indices = read.node, self._books.holds.page_range(read.start, read.stop)
            if node in self.offloading:
                self._end_offload(node, "offload_cancelled")
            if demand:
                self.claims.ask(node, indices)
            returned = 0
            for index in indices:
                copy = copy_of(node, index)
                if node.pages[index] is not None or copy is None:
                    continue
                page = self._books.copies.device_page(copy)
                if copy.tier is Tier.LOADING:
                    on_way[copy] = None
                elif page is not None:
                    self._books.return_to_device(node, index, page)
                    returned += 1
                else:
                    on_host[copy] = node
            if returned:
                self._books.use([node])
                self._books.note("returned", node, pages=returned, tier=Tier.DEVICE)
        if not on_host:
            return len(on_way)
        try:
            self.make_room(len(on_host), reads, evict=demand)
        except OutOfPages:
            if demand:
                for node, claim in saved:
                    self.claims.put_back(node, claim)
                raise
            return len(on_way)
        return len(on_way) + self._transfers.load(next(iter(on_host.values())), list(on_host))

    def wants_reload(self, node: NodeRecord) -> bool:
        """Whether what the host has of a node is to be loaded, rather than computed again, which may be impossible."""
        missing = sum(page is None and copy_of(node, i) is not None for i, page in enumerate(node.pages))
        return missing > 0 and (not node.recomputable or reload_is_cheaper(self._costs, node, missing))

    def _continue_offload(self, node: NodeRecord) -> None:
        books, transfers = self._books, self._transfers
        if not node.held:
            self._end_offload(node, "offload_cancelled")
            return
        if transfers.gave_up(node):
            self._end_offload(node, "offload_failed")
            return
        dirty = transfers.dirty(node)
        if dirty and transfers.is_usable and self._make_host_room(len(dirty), node, force=True):
            transfers.store(node, dirty)
        if not (node.leases or node.restoring or self.claims[node] or node in books.pinned()):
            clean = {
                page
                for index, page in enumerate(node.pages)
                if page is not None and clean_copy(node, index) is not None
            }
            if clean:
                books.evict(node, clean)
        loading = any(copy is not None and copy.tier is Tier.LOADING for copy in node.copies)
        if not loading and all(page is None for page in node.pages):
            self._end_offload(node, "offloaded")

    def _end_offload(self, node: NodeRecord, kind: str) -> None:
        del self.offloading[node]
        self._books.note(kind, node)

    def _store_ahead(self) -> None:
        books = self._books
        short = self._write_back - books.pool.num_free - books.pool.num_cached
        if short <= 0:
            return
        plan = self.plan()
        short -= len(freed_pages(_by_uid(plan.drop), books.pool.refs))
        self._start_stores(plan.store, short)

    def _start_stores(self, store: Pages, short: int) -> set[NodeRecord]:
        """Store nodes in the policy's order until `short` pages are on their way, unless others are.

        Returns: who was tried in vain, if nothing could be started.
        """
        started = self._transfers.tickets.num_pages("store")
        if short <= 0 or started:
            return set()
        in_vain: set[NodeRecord] = set()
        for node in self._order(store):
            dirty = [index for index in self._transfers.dirty(node) if node.pages[index] in store[node]]
            if dirty and self._make_host_room(len(dirty), node):
                started += self._transfers.store(node, dirty)
            in_vain.add(node)
            if started >= short:
                break
        return set() if started else in_vain

    def _storable(self, dirty: Pages) -> Pages:
        """Those of these nodes that go to the host before they may be dropped."""
        worth = {
            node: pages
            for node, pages in dirty.items()
            if not self._transfers.gave_up(node)
            and (not node.recomputable or reload_is_cheaper(self._costs, node, len(pages)))
        }
        host = self._books.host
        room = host.num_free
        if sum(map(len, worth.values())) <= room:
            return worth
        there = self._on_host()
        dropped: Counter[int] = Counter()
        chosen: Pages = {}
        for node in self._order({**there, **worth}):
            if node in worth and len(worth[node]) <= room:
                chosen[node] = worth[node]
                room -= len(worth[node])
            for page in there.get(node, ()):
                dropped[page] += 1
                room += dropped[page] == host.refs[page]
        return {node: pages for node, pages in worth.items() if node in chosen}

    def _make_host_room(self, count: int, node: NodeRecord, *, force: bool = False) -> bool:
        """Make `count` host pages free, dropping what comes before `node` in the policy's order; with `force`, any."""
        books = self._books
        short = count - books.host.num_free
        if short <= 0:
            return True
        there = self._on_host()
        there.pop(node, None)
        order = self._order({**there, node: []})
        if not force:
            order = order[: order.index(node)] if node in order else []
        by_uid = {other.uid: other for other in there}
        chosen = choose([n.uid for n in order if n in there], _by_uid(there), books.host.refs, short)
        for uid in chosen or ():
            books.evict_host(by_uid[uid])
        return chosen is not None

    def _evictable(self, exclude: Collection[NodeRecord], reads: Iterable[Read]) -> Pages:
        """Pages that may leave the device: resident, under no ticket, not claimed, in no lease or read of `reads`, and
        not touched by an open step, which they would have to wait for.
        """
        books = self._books
        pinned = books.pinned()
        kept = self._kept(reads)
        found: Pages = {}
        for node in books.nodes():
            if not node.sealed or node.restoring or node in exclude or node in pinned:
                continue
            pages = self._pages(node, kept.get(node, NO_PAGES))
            if pages:
                found[node] = pages
        return found

    def _kept(self, reads: Iterable[Read]) -> dict[NodeRecord, set[int]]:
        """Indices of the pages that leases or `reads` read."""
        books = self._books
        kept: dict[NodeRecord, set[int]] = {}
        for read in chain(reads, (read for lease in books.leases for read in lease.reads)):
            kept.setdefault(read.node, set()).update(books.holds.page_range(read.start, read.stop))
        return kept

    def _pages(self, node: NodeRecord, kept: Collection[int], begin: int = 0) -> list[int]:
        """The node's device pages from index `begin` on that may leave now, but for those in `kept`."""
        pool, claimed = self._books.pool, self.claims[node]
        return [
            page
            for index, page in enumerate(node.pages)
            if page is not None
            and index >= begin
            and index not in kept
            and index not in claimed
            and pool.is_quiet(page)
            and not pool.is_moving(page)
        ]

    def _on_host(self) -> Pages:
        """Host pages that may be dropped, by node: under no ticket, not pinned, not claimed, and computable again."""
        books = self._books
        pinned = books.pinned()
        found: Pages = {}
        for node in books.nodes():
            if node.copies and node.recomputable and node not in pinned and not self.claims[node]:
                pages = [copy.host for copy in node.copies if copy is not None and copy.is_clean]
                if pages:
                    found[node] = pages
        return found

    def _choose(
        self, pages: Pages, refs: Sequence[int], short: int, *, keep_order: bool
    ) -> list[NodeRecord] | None:
        by_uid = {node.uid: node for node in pages}
        ordered = self._order(pages)
        if keep_order:
            self._ranking = _Ranking(self._books.releases, {node.uid: node.last_used for node in ordered})
        chosen = choose([node.uid for node in ordered], _by_uid(pages), refs, short)
        return None if chosen is None else [by_uid[uid] for uid in chosen]

    def _order(self, pages: Pages) -> list[NodeRecord]:
        """Nodes in the policy's order. Raises KVStoreError `plugin_broken` for an answer that is none."""
        by_uid = {node.uid: node for node in pages}
        order = list(self._policy.order([self._candidate(node, len(owned)) for node, owned in pages.items()]))
        if len(set(order)) < len(order) or not by_uid.keys() >= set(order):
            message = (
                f"eviction policy {self._policy.name!r} must give each candidate at most once, no others"
            )
            raise KVStoreError("plugin_broken", message, field="eviction")
        return [by_uid[uid] for uid in order]

    def _candidate(self, node: NodeRecord, num_pages: int) -> Candidate:
        costs = self._costs
        return Candidate(
            uid=node.uid,
            num_pages=num_pages,
            num_tokens=node.length,
            num_read=sum(read.stop - read.start for read in node.reads),
            last_used=node.last_used,
            next_use=None if self._next_use is None else self._next_use(node),
            num_clean=sum(copy is not None and copy.is_clean for copy in node.copies),
            recompute_us=None if costs is None else costs.recompute(node),
            reload_us=None if costs is None else costs.reload(num_pages),
        )


def _by_uid(pages: Pages) -> dict[int, list[int]]:
    return {node.uid: owned for node, owned in pages.items()}
