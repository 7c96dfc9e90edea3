"""The store's books: every page, node, hold, writer, lease and name that exists, and the changes that touch
several of them at once. Users call KVStore; writers and the audit work on this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from dagengine_kvstore.errors import KVStoreError, OutOfPages
from dagengine_kvstore.events import EventLog
from dagengine_kvstore.eviction import Candidate, EvictionPolicy, choose, freed_pages
from dagengine_kvstore.holds import Hold, HoldTable
from dagengine_kvstore.nodes import NodeRecord, NodeStatus
from dagengine_kvstore.pages import PagePool
from dagengine_kvstore.reuse import ContentTable
from dagengine_kvstore.states import Handle, HandleTable

if TYPE_CHECKING:
    from dagengine_kvstore.leases import Lease
    from dagengine_kvstore.references import Read
    from dagengine_kvstore.writer import RestoreWriter, Writer


class Books:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        clock: Callable[[], float],
        policy: EvictionPolicy,
        handles: HandleTable,
        max_events: int,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.contents = ContentTable()
        self.holds = HoldTable(page_size, lambda page: self.pool.drop(page, touched=False))
        self.handles = handles
        self.events = EventLog(max_events)
        self.anonymous: dict[NodeRecord, dict[int, list[Hold]]] = {}
        self.writers: dict[NodeRecord, Writer] = {}
        self.restores: dict[NodeRecord, RestoreWriter] = {}
        self.leases: dict[Lease, None] = {}
        self.tokens_written = 0
        self.tokens_reused = 0
        self.evictions = 0
        self._nodes: weakref.WeakValueDictionary[int, NodeRecord] = weakref.WeakValueDictionary()
        self._clock = clock
        self._policy = policy
        self._uses = 0

    def nodes(self) -> list[NodeRecord]:
        """All nodes that somebody can still reach, oldest first."""
        return sorted(self._nodes.values(), key=lambda node: node.uid)

    def add_node(self, node: NodeRecord) -> None:
        self._nodes[node.uid] = node

    def next_use(self) -> int:
        """The time of a use: a count, so that eviction does not depend on the clock."""
        self._uses += 1
        return self._uses

    def note(
        self,
        kind: str,
        node: NodeRecord,
        *,
        handle: str | None = None,
        tokens: int | None = None,
        pages: int | None = None,
    ) -> None:
        self.events.record(self._clock(), kind, node=node.uid, handle=handle, tokens=tokens, pages=pages)

    def take_pages(self, node: NodeRecord, count: int, after: int | None, *, evict: bool = True) -> list[int]:
        """Pages for a writer of `node`; with `evict` also others', but never pages that the node itself reads.

        Raises OutOfPages before anything changed.
        """
        short = count - self.pool.num_free - self.pool.num_cached
        if short > 0:
            chosen = self._choose_victims(short, node.reads) if evict else None
            if chosen is None:
                available = self.pool.num_free + self.pool.num_cached
                raise OutOfPages(count, available, self.pool.num_waiting)
            for victim, pages in chosen:
                self.evict(victim, pages)
        return self.pool.allocate(count, after)

    def evictable(
        self, exclude: Collection[NodeRecord] = (), reads: Iterable[Read] = ()
    ) -> dict[int, tuple[NodeRecord, list[int]]]:
        """Nodes that may be dropped, by uid, with the pages that may: resident, in no lease or read of `reads`, and
        not touched by an open step, which they would have to wait for.
        """
        pinned = self.pinned()
        kept: dict[NodeRecord, set[int]] = {}
        for read in chain(reads, (read for lease in self.leases for read in lease.reads)):
            kept.setdefault(read.node, set()).update(self.holds.page_range(read.start, read.stop))
        found: dict[int, tuple[NodeRecord, list[int]]] = {}
        for node in self.nodes():
            if (
                not node.sealed
                or node.restoring
                or node in exclude
                or node in pinned
                or not node.recomputable
            ):
                continue
            keep = kept.get(node, ())
            pages = [
                page
                for index, page in enumerate(node.pages)
                if page is not None and index not in keep and self.pool.is_quiet(page)
            ]
            if pages:
                found[node.uid] = node, pages
        return found

    def num_evictable_pages(self, exclude: Collection[NodeRecord], reads: Iterable[Read] = ()) -> int:
        """Pages that evicting would free now."""
        owned = {uid: pages for uid, (_, pages) in self.evictable(exclude, reads).items()}
        return len(freed_pages(owned, self.pool.refs))

    def pinned(self) -> set[NodeRecord]:
        """Nodes under a pinned handle: its own and all that it passes on."""
        stack = [handle.hold for handle in self.handles if handle.pinned]
        seen = set(stack)
        nodes: set[NodeRecord] = set()
        while stack:
            hold = stack.pop()
            if hold.node is not None and hold.start < hold.stop:
                nodes.add(hold.node)
            below = [other for other in hold.below if other not in seen]
            seen.update(below)
            stack.extend(below)
        return nodes

    def evict(self, node: NodeRecord, pages: Collection[int]) -> int:
        """Drop these of a node's pages. Returns their number."""
        dropped = [
            (index, page) for index, page in enumerate(node.pages) if page is not None and page in pages
        ]
        for index, page in reversed(dropped):
            node.pages[index] = None
            self.pool.drop(page, touched=False)
        self.evictions += bool(dropped)
        self.note("evict", node, pages=len(dropped))
        return len(dropped)

    def hold(self, node: NodeRecord, at: int) -> None:
        hold = self.holds.hold(node, 0, at, passed=True)
        self.anonymous.setdefault(node, {}).setdefault(at, []).append(hold)

    def unhold(self, node: NodeRecord, at: int) -> None:
        holds = self.anonymous.get(node, {}).get(at)
        if not holds:
            raise KVStoreError("not_held", f"node {node.uid} has no anonymous hold at {at}", field="node")
        hold = holds.pop()
        if not holds:
            del self.anonymous[node][at]
            if not self.anonymous[node]:
                del self.anonymous[node]
        self.holds.release(hold)

    def seal(self, writer: Writer, spans: Mapping[str, tuple[int, int]]) -> None:
        node = writer.node
        del self.writers[node]
        node.status = NodeStatus.SEALED
        node.tokens = tuple(node.tokens)
        node.spans = MappingProxyType(dict(spans))
        node.pages = list(writer.pages)
        for page in writer.pages:
            self.pool.touch(page)
        node.last_used = self.next_use()
        writer.pages = []
        self.hold(node, node.length)
        self.holds.release(node.root, *writer.digested)
        self.note("seal", node, tokens=node.length, pages=len(node.pages))

    def abort(self, writer: Writer) -> None:
        node = writer.node
        del self.writers[node]
        node.status = NodeStatus.ABORTED
        self.holds.release(node.root, *writer.digested)
        self.note("abort", node)

    def finish_restore(self, writer: RestoreWriter) -> None:
        """The writer's pages become the node's; what nothing else holds goes with the writer's hold."""
        node = writer.node
        replaced = node.pages[: len(writer.pages)]
        node.pages[: len(writer.pages)] = writer.pages
        for written in writer.pages:
            self.pool.touch(written)
        writer.pages = []
        for page in reversed(replaced):
            if page is not None:
                self.pool.drop(page)
        node.last_used = self.next_use()
        self._end_restore(writer, "restored")

    def abort_restore(self, writer: RestoreWriter) -> None:
        self._end_restore(writer, "restore_aborted")

    def end_handle(self, handle: Handle, kind: str) -> None:
        self.handles.remove(handle)
        self.note(kind, handle.node, handle=handle.id)
        self.holds.release(handle.hold)

    def end_lease(self, lease: Lease) -> None:
        del self.leases[lease]
        for read, run in zip(lease.reads, lease.pages, strict=True):
            read.node.leases -= 1
            for page in reversed(run):
                self.pool.drop(page)

    def _end_restore(self, writer: RestoreWriter, kind: str) -> None:
        del self.restores[writer.node]
        writer.node.restoring = False
        self.note(kind, writer.node)
        self.holds.release(*writer.holds)

    def _choose_victims(self, short: int, reads: Iterable[Read]) -> list[tuple[NodeRecord, list[int]]] | None:
        evictable = self.evictable(reads=reads)
        candidates = [
            Candidate(
                uid=uid,
                num_pages=len(pages),
                num_tokens=node.length,
                num_read=sum(read.stop - read.start for read in node.reads),
                last_used=node.last_used,
            )
            for uid, (node, pages) in evictable.items()
        ]
        order = list(self._policy.order(candidates))
        if len(set(order)) < len(order) or not evictable.keys() >= set(order):
            message = (
                f"eviction policy {self._policy.name!r} must give each candidate at most once, no others"
            )
            raise KVStoreError("plugin_broken", message, field="eviction")
        owned = {uid: pages for uid, (_, pages) in evictable.items()}
        chosen = choose(order, owned, self.pool.refs, short)
        return None if chosen is None else [evictable[uid] for uid in chosen]
