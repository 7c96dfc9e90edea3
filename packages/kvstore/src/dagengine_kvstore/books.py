"""The store's books: every page, node, hold, writer, lease and name that exists, and the changes that touch
several of them at once. Users call KVStore; writers and the audit work on this.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.events import EventLog
from dagengine_kvstore.holds import Hold, HoldTable
from dagengine_kvstore.host_pages import HostPool
from dagengine_kvstore.leases import Lease
from dagengine_kvstore.nodes import NodeRecord, NodeStatus
from dagengine_kvstore.pages import PagePool
from dagengine_kvstore.pins import pinned_nodes
from dagengine_kvstore.references import Read
from dagengine_kvstore.residency import CopyTable, clean_copy, copy_of, node_tier
from dagengine_kvstore.reuse import ContentTable
from dagengine_kvstore.states import Handle, HandleTable
from dagengine_kvstore.tiers import Tier

if TYPE_CHECKING:
    from dagengine_kvstore.pressure import Pressure
    from dagengine_kvstore.writer import RestoreWriter, Writer


SPARE_USES = 1024
"""How many nodes that nobody can reach are left in the order of use before it is cleared of them."""

_uid = attrgetter("uid")


class Books:
    """
    Attributes:
        pressure: finds pages when there are too few; set by who makes the books, since each needs the other.
        releases: counts what may let more pages leave the device than before, or others first.
    """

    pressure: Pressure

    def __init__(
        self,
        num_pages: int,
        num_host_pages: int,
        page_size: int,
        clock: Callable[[], float],
        handles: HandleTable,
        max_events: int,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.host = HostPool(num_host_pages)
        self.copies = CopyTable(self.pool, self.host)
        self.contents = ContentTable()
        self.holds = HoldTable(page_size, self.drop_page)
        self.handles = handles
        self.events = EventLog(max_events)
        self.anonymous: dict[NodeRecord, dict[int, list[Hold]]] = {}
        self.writers: dict[NodeRecord, Writer] = {}
        self.restores: dict[NodeRecord, RestoreWriter] = {}
        self.leases: dict[Lease, None] = {}
        self.tokens_written = 0
        self.tokens_reused = 0
        self.tokens_recalled = 0
        self.releases = 0
        self.evictions = 0
        self.host_evictions = 0
        self._nodes: weakref.WeakValueDictionary[int, NodeRecord] = weakref.WeakValueDictionary()
        self._clock = clock
        self._uses = 0
        # Uids in the order of use, of all sealed nodes that have pages; also of some that have none any more.
        self._used: dict[int, None] = {}

    def nodes(self) -> list[NodeRecord]:
        """All nodes that somebody can still reach, oldest first."""
        return sorted(self._nodes.values(), key=lambda node: node.uid)

    def node(self, uid: int) -> NodeRecord | None:
        """The node of this number, if somebody can still reach it."""
        return self._nodes.get(uid)

    def add_node(self, node: NodeRecord) -> None:
        self._nodes[node.uid] = node

    def now(self) -> float:
        """Seconds of the store's clock."""
        return self._clock()

    def tier(self, node: NodeRecord) -> Tier:
        """Where the least available of a sealed node's held pages is. NOWHERE if nothing holds it."""
        return node_tier(node, self.holds.covered_pages(node)) if node.held else Tier.NOWHERE

    def by_use(self) -> Iterator[NodeRecord]:
        """Sealed nodes that have pages, the one used longest ago first; of those used together the youngest first,
        since it depends on the older ones. Nothing is used until whoever asks has seen enough, or all.
        """
        gone: list[int] = []
        try:
            for uid in self._used:
                node = self._nodes.get(uid)
                if node is None or not any(page is not None for page in node.pages):
                    gone.append(uid)  # pages come with a use
                else:
                    yield node
        finally:
            for uid in gone:
                del self._used[uid]

    def use(self, nodes: Iterable[NodeRecord]) -> None:
        """Nodes are used, together. The time of a use is a count, so that eviction does not depend on the clock."""
        self._uses += 1
        for node in sorted(nodes, key=_uid, reverse=True):
            node.last_used = self._uses
            self._used.pop(node.uid, None)
            self._used[node.uid] = None
        if len(self._used) > 2 * len(self._nodes) + SPARE_USES:
            self._used = {uid: None for uid in self._used if uid in self._nodes}

    def note(
        self,
        kind: str,
        node: NodeRecord,
        *,
        handle: str | None = None,
        tokens: int | None = None,
        pages: int | None = None,
        tier: Tier | None = None,
    ) -> None:
        now = self._clock()
        self.events.record(now, kind, node=node.uid, handle=handle, tokens=tokens, pages=pages, tier=tier)

    def pinned(self) -> set[NodeRecord]:
        """Nodes under a pinned handle: its own and all that it passes on."""
        return pinned_nodes(handle.hold for handle in self.handles.pinned)

    def evict(self, node: NodeRecord, pages: Collection[int]) -> int:
        """Let these of a node's pages leave the device. Returns their number."""
        indices = [index for index, page in enumerate(node.pages) if page is not None and page in pages]
        self.copies.adopt(node)
        kept = sum(clean_copy(node, index) is not None for index in indices)
        for index in reversed(indices):
            self.leave_device(node, index)
        self.evictions += bool(indices)
        if kept:
            self.note("evict", node, pages=kept, tier=Tier.HOST)
        if kept < len(indices) or not indices:
            self.note("evict", node, pages=len(indices) - kept, tier=Tier.NOWHERE)
        return len(indices)

    def evict_host(self, node: NodeRecord) -> int:
        """Drop what the host has of a node, without what is under a ticket. Returns the number of its pages."""
        indices = [i for i, copy in enumerate(node.copies) if copy is not None and copy.is_clean]
        lost = sum(node.pages[index] is None for index in indices)
        for index in indices:
            self.copies.detach(node, index)
        self.host_evictions += bool(indices)
        for pages, tier in ((lost, Tier.NOWHERE), (len(indices) - lost, Tier.DEVICE)):
            if pages:
                self.note("host_evict", node, pages=pages, tier=tier)
        return len(indices)

    def leave_device(self, node: NodeRecord, index: int) -> None:
        """A node refers to its device page no more; its copy stays."""
        page, copy = node.pages[index], copy_of(node, index)
        assert page is not None
        self._keep_leased(node, index, page)
        node.set_page(index, None)
        self.pool.drop(page, touched=False)
        if copy is not None and copy.ticket is None:
            self.copies.settle(copy)

    def return_to_device(self, node: NodeRecord, index: int, page: int) -> None:
        """A node refers again to the device page that still has its copy's bytes."""
        copy = copy_of(node, index)
        assert copy is not None and node.pages[index] is None
        self.pool.share(page)
        node.set_page(index, page)
        if copy.tier is Tier.HOST:
            copy.to(Tier.DEVICE)

    def drop_page(self, node: NodeRecord, index: int) -> None:
        """Nothing covers a node's page any more: it goes, wherever it is."""
        if node.pages[index] is not None:
            self.leave_device(node, index)
        if copy_of(node, index) is not None:
            self.copies.detach(node, index)

    def hold(self, node: NodeRecord, at: int) -> None:
        hold = self.holds.hold(node, 0, at, passed=True)
        self.anonymous.setdefault(node, {}).setdefault(at, []).append(hold)

    def unhold(self, node: NodeRecord, at: int) -> None:
        by_length = self.anonymous.get(node, {})
        holds = by_length.get(at)
        if not holds:
            raise KVStoreError("not_held", f"node {node.uid} has no anonymous hold at {at}", field="node")
        hold = holds.pop()
        if not holds:
            del by_length[at]
            if not by_length:
                del self.anonymous[node]
        self.holds.release(hold)

    def seal(self, writer: Writer, spans: Mapping[str, tuple[int, int]]) -> None:
        self.releases += 1
        node = writer.node
        del self.writers[node]
        for page in writer.pages:
            self.pool.touch(page, written=True)
        if node.sealed:
            node.spans = MappingProxyType(dict(spans))
            self.end_early(writer)
            for page in reversed(writer.pages):
                self.pool.drop(page)
        else:
            self._make_readable(writer, spans)
        writer.pages = []
        self.holds.release(node.root, *writer.digested)

    def seal_early(self, writer: Writer, spans: Mapping[str, tuple[int, int]]) -> Lease:
        """The node is sealed while its writer goes on, under a lease that is to be released when the writer ends."""
        node = writer.node
        self.pool.share(*writer.pages)
        for page in writer.pages[writer.num_committed // self.page_size :]:
            self.pool.expect_write(page)
        self._make_readable(writer, spans)
        run = node.run()
        assert run is not None
        return self.lease((Read(node, 0, node.length),), (run,))

    def end_early(self, writer: Writer) -> None:
        """What was expected by `seal_early` to be written is, or never will be."""
        for page in writer.pages:
            self.pool.end_write(page)

    def _make_readable(self, writer: Writer, spans: Mapping[str, tuple[int, int]]) -> None:
        """The node is sealed, refers to the writer's pages, and is held once."""
        node = writer.node
        node.status = NodeStatus.SEALED
        node.set_tokens(node.tokens, writer.num_unknown)
        node.spans = MappingProxyType(dict(spans))
        node.set_pages(writer.pages)
        self.use([node])
        self.hold(node, node.length)
        self.note("seal", node, tokens=node.length, pages=len(node.pages))

    def abort(self, writer: Writer) -> None:
        """The writer has given its pages back. A node that was sealed early loses its own, too."""
        node = writer.node
        del self.writers[node]
        for index in reversed(range(len(node.pages))):
            self.drop_page(node, index)
        node.status = NodeStatus.ABORTED
        self.holds.release(node.root, *writer.digested)
        self.note("abort", node)

    def finish_restore(self, writer: RestoreWriter) -> None:
        """The writer's pages become the node's; what nothing else holds goes with the writer's hold."""
        node = writer.node
        replaced = node.pages[: len(writer.pages)]
        for index, old in enumerate(replaced):
            if old is not None and old != writer.pages[index]:
                self._keep_leased(node, index, old)
        for index, page in enumerate(writer.pages):
            copy = copy_of(node, index)
            if copy is not None and self.copies.device_page(copy) != page:
                self.copies.detach(node, index)
            elif copy is not None and copy.tier is Tier.HOST:
                copy.to(Tier.DEVICE)
            node.set_page(index, page)
            self.pool.touch(page, written=True)
        writer.pages = []
        for old in reversed(replaced):
            if old is not None:
                self.pool.drop(old)
        self.use([node])
        self._end_restore(writer, "restored")

    def abort_restore(self, writer: RestoreWriter) -> None:
        self._end_restore(writer, "restore_aborted")

    def end_handle(self, handle: Handle, kind: str) -> None:
        self.releases += 1
        self.handles.remove(handle)
        self.note(kind, handle.node, handle=handle.id)
        self.holds.release(handle.hold)

    def lease(self, reads: tuple[Read, ...], runs: tuple[array[int], ...]) -> Lease:
        """Pin the pages of sealed nodes' tokens, per read."""
        lease = Lease(self.pool, self.page_size, reads, runs, self.end_lease)
        self.enter_lease(lease)
        return lease

    def enter_lease(self, lease: Lease) -> None:
        self.leases[lease] = None
        for node, _, _, _ in lease.reads:
            node.leases[lease] = node.leases.get(lease, 0) + 1

    def remove_lease(self, lease: Lease) -> None:
        del self.leases[lease]
        for node, _, _, _ in lease.reads:
            node.leases.pop(lease, None)

    def end_lease(self, lease: Lease) -> None:
        self.releases += 1
        self.remove_lease(lease)
        self.pool.touch_all(lease.pages)
        for page in lease.own_pages():
            self.pool.drop(page)

    def _keep_leased(self, node: NodeRecord, index: int, page: int) -> None:
        """A node lets go of a page: the leases that read it there refer to it themselves from now on."""
        for lease in node.leases:
            for _ in range(lease.keep(node, index, page)):
                self.pool.share(page)

    def _end_restore(self, writer: RestoreWriter, kind: str) -> None:
        self.releases += 1
        del self.restores[writer.node]
        writer.node.restoring = False
        self.note(kind, writer.node)
        self.holds.release(*writer.holds)
