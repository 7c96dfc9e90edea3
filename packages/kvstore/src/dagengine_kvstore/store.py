"""KVStore: states of a graph of requests over paged KV. Knows pages, nodes, holds, leases, names and tiers; does not
know what is in the tensors, how positions are laid out, or who asks.

Three lifetimes: a request owns a Writer; a state lives while something holds it (a handle, an anonymous hold,
a sealed child that passes it on, a writer that reads it); a page lives while a state, a writer or a lease
refers to it, and until every step and every transfer that may touch it has ended.

One thread uses a store. Every public operation either happens whole or raises and changes nothing.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from dagengine_kvstore import audit
from dagengine_kvstore.books import Books
from dagengine_kvstore.claims import Claims
from dagengine_kvstore.costs import CostModel
from dagengine_kvstore.errors import KVStoreError, LeakError
from dagengine_kvstore.events import Event, EventLog
from dagengine_kvstore.eviction import EvictionPolicy, eviction_policy
from dagengine_kvstore.holds import Hold
from dagengine_kvstore.leases import Lease
from dagengine_kvstore.move_plan import DEFAULT_WIDTH
from dagengine_kvstore.moves import Mover
from dagengine_kvstore.nodes import NodeRecord
from dagengine_kvstore.pins import PinBudget, pinned_nodes
from dagengine_kvstore.pressure import NextUseOf, Pressure
from dagengine_kvstore.references import Parent, Read, Signature, check_held, check_readable, check_references
from dagengine_kvstore.repositioning import Reposition, Repositioned, Repositioner
from dagengine_kvstore.residency import clean_copy, failed_loads, is_lost, not_resident, page_tier
from dagengine_kvstore.states import Handle, HandleTable
from dagengine_kvstore.stats import StateInfo, StoreStats, state_info, store_stats
from dagengine_kvstore.tiers import Tier, Transfer, transfer_of
from dagengine_kvstore.transfers import Transfers
from dagengine_kvstore.writer import RestoreWriter, Writer


def _new_id() -> str:
    return f"st_{secrets.token_hex(12)}"


class KVStore:
    """
    Args:
        num_pages, page_size: the arena's size; page_size in tokens.
        clock: seconds that only grow; times to live and tombstones are measured by it.
        eviction: a registered policy's name (group `dagengine.eviction_policies`) or a policy.
        tombstone_s: how long a released handle is remembered.
        max_events: records kept by `events`.
        new_id: makes handle ids; the default cannot be guessed.
        reuse_across_positions: whether `match` finds pages that were computed at other positions, one rotation away;
            without, only pages that a node at this own start, whose reads stand where this one's do, wrote.
        transfer: a registered transfer's name (group `dagengine.transfers`) or a transfer; its host pages are the
            second tier. "none": there is one tier.
        costs: decides between loading and computing again; None: loading is always preferred.
        next_use: when somebody who waits or runs will read a node, smaller is sooner; None: nobody. Policies see it.
        write_back: `pump` keeps so many pages unused or fit to be dropped at once, storing others ahead for it.
        transfer_timeout_s: after which nobody waits for a transfer any more.
        max_failures: failed loads after which a page that can be computed again is given up, failed stores after which
            a node is not tried again.
        patience: pumps for which what `load` brought is kept for who asked for it.
        pin_budget, pin_budget_per_salt: pages that pinned handles may keep, in all and per tenant; None: any number.

    Raises:
        KVStoreError `invalid_size`, `plugin_not_found`, `plugin_broken`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        eviction: str | EvictionPolicy = "lru",
        tombstone_s: float = 3600.0,
        max_events: int = 4096,
        new_id: Callable[[], str] = _new_id,
        reuse_across_positions: bool = True,
        transfer: str | Transfer = "none",
        costs: CostModel | None = None,
        next_use: NextUseOf | None = None,
        write_back: int = 0,
        transfer_timeout_s: float = 30.0,
        max_failures: int = 3,
        patience: int = 64,
        pin_budget: int | None = None,
        pin_budget_per_salt: int | None = None,
    ) -> None:
        for field, size, least in (
            ("num_pages", num_pages, 1),
            ("page_size", page_size, 1),
            ("max_events", max_events, 1),
            ("write_back", write_back, 0),
            ("max_failures", max_failures, 1),
            ("patience", patience, 0),
            ("pin_budget", pin_budget or 0, 0),
            ("pin_budget_per_salt", pin_budget_per_salt or 0, 0),
        ):
            if size < least:
                raise KVStoreError(
                    "invalid_size", f"{field} must be at least {least}, not {size}", field=field
                )
        if not transfer_timeout_s > 0:
            message = f"transfer_timeout_s must be positive, not {transfer_timeout_s}"
            raise KVStoreError("invalid_ttl", message, field="transfer_timeout_s")
        self.page_size = page_size
        self.transfer_timeout_s = transfer_timeout_s
        self.max_failures = max_failures
        self._clock = clock
        self._reuse_across_positions = reuse_across_positions
        handles = HandleTable(clock, tombstone_s, new_id)
        mover = transfer_of(transfer)
        self._books = Books(num_pages, mover.num_host_pages, page_size, clock, handles, max_events)
        self._transfers = Transfers(self._books, mover, transfer_timeout_s, max_failures)
        self._claims = Claims(patience)
        policy = eviction_policy(eviction)
        self._pressure = Pressure(
            self._books, self._transfers, self._claims, policy, costs, next_use, write_back
        )
        self._books.pressure = self._pressure
        self._pins = PinBudget(pin_budget, pin_budget_per_salt)
        self._next_uid = 1
        self._signature: Signature = ()  # the last one: the same object compares fast

    @property
    def num_pages(self) -> int:
        return self._books.pool.num_pages

    @property
    def num_unused(self) -> int:
        """Pages that are free or cached: what can be reserved without evicting a state."""
        return self._books.pool.num_free + self._books.pool.num_cached

    @property
    def events(self) -> EventLog:
        return self._books.events

    def begin(
        self,
        parents: Sequence[Parent],
        reads: Sequence[Read],
        own_start: int,
        *,
        signature: Mapping[str, str],
        salt: str = "",
    ) -> Writer:
        """Start a node. `parents` are held at once; `reads` is the layout of what its tokens attend,
        in order, each inside what some parent gives; `own_start` is the position of its first token. Tokens that
        are not known yet, of nodes sealed early, may be among what it reads, and must be known before its first
        `commit`.

        Raises:
            KVStoreError with the refusals of `check_references`; `field` names the parent or read.
        """
        self.expire()
        parents, reads = tuple(parents), tuple(reads)
        fields = tuple(sorted(signature.items()))
        if fields == self._signature:
            fields = self._signature
        self._signature = fields
        check_references(parents, reads, fields, salt)
        content = fields
        if not self._reuse_across_positions:
            content += (("own_start", str(own_start)),)
        make_context = partial(self._books.contents.context, content, salt, reads, own_start)
        is_known = not any(node.num_unknown for node, _, _, _ in reads)
        context = make_context() if is_known else make_context
        passing: list[Hold] = []
        digested: list[Hold] = []
        holds = self._books.holds
        for parent, mode, start, stop in parents:
            hold = holds.hold(parent, start, stop, passed=mode != "artifact")
            (digested if mode == "digest" else passing).append(hold)
        root = holds.root(passing)
        node = NodeRecord(
            self._next_uid, own_start, parents, reads, fields, salt, context, root, self.page_size
        )
        self._next_uid += 1
        self._books.add_node(node)
        self._books.writers[node] = Writer(self._books, node, tuple(digested))
        self._books.note("begin", node)
        return self._books.writers[node]

    def name(
        self,
        node: NodeRecord,
        *,
        at: int | None = None,
        salt: str | None = None,
        name: str | None = None,
        ttl_s: float | None = None,
        pin: bool = False,
    ) -> str:
        """A new handle on a sealed node, or on its first `at` tokens (a fork).

        Args:
            salt: the tenant that asks; None: not checked. The handle is the node's tenant's.
            name: a label for people; not unique, not resolved.
            ttl_s: the handle ends by itself after so many seconds, unless pinned.
            pin: what the handle keeps is never evicted: the node, unless `at` is 0, and what it passes on.

        Raises:
            KVStoreError `state_not_sealed`, `parent_failed`, `state_not_found` (another tenant's),
            `span_out_of_range`, `state_released`, `invalid_ttl`, `pin_budget_exceeded` (as PinBudgetExceeded).
        """
        self.expire()
        at = node.length if at is None else at
        check_readable(node, 0, at, salt, "node")
        check_held(node, 0, at, passed=True, field="node")
        if ttl_s is not None and not ttl_s > 0:
            raise KVStoreError("invalid_ttl", f"ttl_s must be positive, not {ttl_s}", field="ttl_s")
        hold = self._books.holds.hold(node, 0, at, passed=True)
        if pin:
            try:
                self._check_pin(hold, node.salt)
            except KVStoreError:
                self._books.holds.release(hold)
                raise
        handle = self._books.handles.add(node, at, hold, name, pin)
        self._books.handles.set_ttl(handle, ttl_s)
        self._books.note("name", node, handle=handle.id)
        return handle.id

    def resolve(self, handle_id: str, salt: str = "") -> tuple[NodeRecord, int]:
        """The node that a handle names and the number of its tokens that the handle shows.

        Raises KVStoreError `state_not_found` (also for another tenant's), `state_released`.
        """
        self.expire()
        return self.find(handle_id, salt)

    def find(self, handle_id: str, salt: str = "", *, ttl_s: float | None = None) -> tuple[NodeRecord, int]:
        """As `resolve`, but a handle whose time to live is over is found until `expire`: who looks several up calls
        that once, before the first.

        Args:
            ttl_s: the handle ends so many seconds from now; None: as it would.

        Raises as `resolve`, and KVStoreError `invalid_ttl`.
        """
        handle = self._books.handles.get(handle_id, salt)
        if ttl_s is not None:
            self._books.handles.set_ttl(handle, ttl_s)
        return handle.node, handle.at

    def release(self, handle_id: str, *, salt: str | None = None) -> None:
        """End a handle, pinned or not. Whoever reads the state keeps it; only the name is gone.

        Raises KVStoreError `state_not_found`, `state_released` (also the second time).
        """
        self._books.end_handle(self._handle(handle_id, salt), "release")

    def retain(self, handle_id: str, ttl_s: float | None = None, *, salt: str | None = None) -> None:
        """Let the handle end `ttl_s` seconds from now, or (None) not by itself. Raises as `release`."""
        self._books.handles.set_ttl(self._handle(handle_id, salt), ttl_s)

    def pin(self, handle_id: str, *, salt: str | None = None) -> None:
        """Never evict the state or what it passes on, nor let it expire.

        Raises as `release`, and PinBudgetExceeded (code `pin_budget_exceeded`).
        """
        handle = self._handle(handle_id, salt)
        self._check_pin(handle.hold, handle.node.salt)
        self._books.handles.set_pinned(handle, True)

    def unpin(self, handle_id: str, *, salt: str | None = None) -> None:
        """Undo `pin`; a time to live that is over ends the handle now. Raises as `release`."""
        self._books.handles.set_pinned(self._handle(handle_id, salt), False)
        self._books.releases += 1
        self.expire()

    def expire(self) -> None:
        """End the handles whose time to live is over. The other operations on names and steps call it."""
        for handle in self._books.handles.due():
            self._books.end_handle(handle, "expire")

    def hold(self, node: NodeRecord, at: int | None = None) -> None:
        """Keep a sealed node without a name. Raises as `name`."""
        at = node.length if at is None else at
        check_readable(node, 0, at, None, "node")
        check_held(node, 0, at, passed=True, field="node")
        self._books.hold(node, at)

    def unhold(self, node: NodeRecord, at: int | None = None) -> None:
        """Undo one `hold` (or the one that `seal` gave). Raises KVStoreError `not_held` if there is none."""
        self._books.unhold(node, node.length if at is None else at)

    def lease(self, reads: Sequence[Read]) -> Lease:
        """Pin the pages of all reads, or of none.

        Raises:
            NotResident (code `not_resident`): held nodes that are not on the device; load or restore them, then lease
                again.
            KVStoreError `state_released` for tokens that are neither resident nor held, `state_not_sealed`,
            `parent_failed`, `span_out_of_range`.
        """
        reads = tuple(reads)
        runs: list[array[int]] = []
        missing: dict[NodeRecord, set[Tier]] = {}
        nodes: list[NodeRecord] = []
        for index, (node, start, stop, _) in enumerate(reads):
            check_readable(node, start, stop, None, "reads", index)
            run = self._run(node, start, stop)
            if run is None:
                tiers = self._missing(reads[index], f"reads[{index}]")
                missing.setdefault(node, set()).update(tiers)
            else:
                runs.append(run)
                nodes.append(node)
        if missing:
            raise not_resident(missing)
        self._books.use(nodes)
        if self._claims:
            self.unclaim(reads)
        return self._books.lease(reads, tuple(runs))

    def is_there(self, reads: Iterable[Read]) -> bool:
        """Whether all pages of some reads are on the device, or on the host, or on their way from there. Takes nothing.

        Raises KVStoreError as `lease`, but for NotResident.
        """
        there = True
        for index, read in enumerate(reads):
            check_readable(read.node, read.start, read.stop, None, "reads", index)
            run = self._run(read.node, read.start, read.stop)
            if run is None and Tier.NOWHERE in self._missing(read, f"reads[{index}]"):
                there = False
        return there

    def use(self, nodes: Iterable[NodeRecord]) -> None:
        """Nodes are used now, together, as by a lease: policies that go by use evict others first.

        Raises KVStoreError `state_not_sealed`, `parent_failed`; nothing was changed then.
        """
        nodes = tuple(nodes)
        for node in nodes:
            check_readable(node, 0, node.length, None, "nodes")
        self._books.use(nodes)

    def restore(self, node: NodeRecord) -> RestoreWriter:
        """Compute the missing pages of a held, sealed node again. One restore of a node runs at a time.

        Raises KVStoreError `state_not_sealed`, `parent_failed`, `state_released`, `already_restoring`,
        `not_recomputable` (repositioned: `load` it).
        """
        check_readable(node, 0, node.length, None, "node")
        self._check_held(node)
        self._check_recomputable(node, False)
        if node.restoring:
            raise KVStoreError("already_restoring", f"node {node.uid} is being restored, wait", field="node")
        held_stop = max((stop for _, stop in node.cover), default=0)
        target = min(node.length, self._books.holds.page_range(0, held_stop).stop * self.page_size)
        holds = [self._books.holds.hold(node, 0, target, passed=False)]
        holds += [
            self._books.holds.hold(read.node, read.start, read.stop, passed=False) for read in node.reads
        ]
        node.restoring = True
        self._books.note("restore", node)
        writer = RestoreWriter(self._books, node, target, tuple(holds))
        self._books.restores[node] = writer
        return writer

    def evict(self, node: NodeRecord) -> int:
        """Take a node's own pages from the device; its handles, its recipe and what the host has of it stay.

        Returns: the number of pages.

        Raises KVStoreError `state_not_sealed`, `parent_failed`, `state_in_use` (leased, pinned, restoring or under a
        transfer), `not_recomputable` (repositioned, and the host does not have all of it).
        """
        check_readable(node, 0, node.length, None, "node")
        on_host = (
            page is None or clean_copy(node, index) is not None for index, page in enumerate(node.pages)
        )
        self._check_recomputable(node, all(on_host))
        pages = {page for page in node.pages if page is not None}
        moving = any(self._books.pool.is_moving(page) for page in pages)
        if moving or node.leases or node.restoring or node in self._books.pinned():
            message = f"node {node.uid} is leased, pinned, restoring or under a transfer"
            raise KVStoreError("state_in_use", message, field="node")
        return self._books.evict(node, pages)

    def evict_host(self, node: NodeRecord) -> int:
        """Drop what the host has of a node. Returns the number of its pages. Raises as `evict`."""
        check_readable(node, 0, node.length, None, "node")
        here = (
            page is not None for page, copy in zip(node.pages, node.copies, strict=False) if copy is not None
        )
        self._check_recomputable(node, all(here))
        moving = any(copy is not None and copy.ticket is not None for copy in node.copies)
        if moving or node in self._books.pinned():
            message = f"node {node.uid} is pinned or under a transfer"
            raise KVStoreError("state_in_use", message, field="node")
        return self._books.evict_host(node)

    def offload(self, node: NodeRecord) -> None:
        """Move a node's own pages to the host: they are stored as soon as no step writes them, and leave the device as
        soon as no lease, pin or restore keeps them there. `pump` sees to that; `load` undoes it.

        Raises:
            OutOfHostPages (code `capacity`): the host has no room; nothing was changed.
            KVStoreError `state_not_sealed`, `parent_failed`, `state_released`.
        """
        check_readable(node, 0, node.length, None, "node")
        self._check_held(node)
        self._pressure.offload(node)

    def load(self, what: Sequence[Read] | NodeRecord) -> int:
        """Bring what the host has of some reads, or of all that is held of a node, for a reader who runs next.

        What is on its way already is not started again. All of it, also what is on the device, is kept there until it
        is leased, or until nobody has asked for `patience` pumps: ask again while waiting.

        Returns: pages on their way. When there are none, a lease finds everything, or names what is nowhere.

        Raises:
            OutOfPages (code `capacity`): nothing was started.
            KVStoreError `state_not_sealed`, `parent_failed`, `span_out_of_range`, `state_released`.
        """
        return self._pressure.load(self._reads_of(what), demand=True)

    def prefetch(self, what: Sequence[Read] | NodeRecord) -> int:
        """The same for a reader who waits: into unused pages only, and kept for nobody. Starts nothing if there are too
        few of them. Raises as `load`, but for OutOfPages.
        """
        return self._pressure.load(self._reads_of(what), demand=False)

    def unclaim(self, reads: Iterable[Read]) -> None:
        """Undo the protection that `load` gave to what some reads read: who asked for it gives way, or is gone."""
        for read in reads:
            self._claims.end(read.node, self._books.holds.page_range(read.start, read.stop))

    def wants_reload(self, node: NodeRecord) -> bool:
        """Whether what the host has of a node is to be loaded rather than computed again; False if it has nothing."""
        return self._pressure.wants_reload(node)

    def failed_loads(self, read: Read) -> int:
        """How many loads of the pages of a read have failed or were lost, of the page that had most. What can be
        computed again is given up after `max_failures`; of what cannot, whoever waits gives up by this number.
        """
        return failed_loads(read.node, self._books.holds.page_range(read.start, read.stop))

    def is_lost(self, read: Read) -> bool:
        """Whether a load of one of the pages of a read is lost: it may never be over."""
        return is_lost(read.node, self._books.holds.page_range(read.start, read.stop))

    def poll(self) -> tuple[Event, ...]:
        """Take in the transfers that ended, and give up on those past their deadline. Returns what happened."""
        first = self.events.next_seq
        self._transfers.poll()
        return self.events.since(first)

    def pump(self) -> tuple[Event, ...]:
        """What is to be done between steps: `poll`, go on with offloads, store ahead. Returns what happened."""
        first = self.events.next_seq
        self.expire()
        self._transfers.poll()
        self._pressure.pump()
        return self.events.since(first)

    @property
    def num_in_flight(self) -> int:
        """Transfers under way, without lost ones."""
        return self._transfers.tickets.num_in_flight

    @property
    def num_lost(self) -> int:
        """Transfers past their deadline that may still touch their pages."""
        return self._transfers.tickets.num_lost

    def reposition(
        self,
        moves: Sequence[Reposition],
        mover: Mover,
        *,
        copy: bool = False,
        in_order: bool = False,
        width: int = DEFAULT_WIDTH,
    ) -> Repositioned:
        """Make new nodes of the same tokens whose K is stored at other positions, for readers that cannot turn queries.

        A new node is what its source would be with its own start and all that it reads shifted by the same distance:
        its content is the source's, its K was turned once. It comes back sealed and held once, as by `seal`.

        Args:
            moves: sources and their new own starts; a source may occur several times.
            mover: moves the rows; when it fails, no node is made, and sources in place are evicted.
            copy: leave the sources as they are and write to other pages. Otherwise each source gives its pages to the
                first node made of it and is evicted: its handles and its recipe stay.
            in_order: deal the pages given up out in ascending order to the nodes made in place.
            width: as in `plan_moves`; up to so many free pages serve as spare ones where pages trade places.

        Raises:
            NotResident; OutOfPages; KVStoreError `state_not_sealed`, `parent_failed`, `state_released`,
            `span_out_of_range` (no token), `invalid_position` (something would be at a negative position),
            `already_repositioned` (K would be turned a second time), `state_in_use` (sealed early, and not computed
            yet), and unless `copy`: `state_shared` (somebody else holds the source, or shares its pages),
            `state_in_use` (leased, pinned, restoring, or touched by an open step), `not_recomputable`; `invalid_size`
            for a width below 1.
        """
        repositioner = Repositioner(self._books, strict=not self._reuse_across_positions)
        made = repositioner.run(moves, mover, self._next_uid, copy=copy, in_order=in_order, width=width)
        self._next_uid += len(made.nodes)
        return made

    def _check_recomputable(self, node: NodeRecord, elsewhere: bool) -> None:
        """Whether a node may lose its pages in one tier. Raises KVStoreError `not_recomputable`."""
        if not node.recomputable and not elsewhere:
            message = f"node {node.uid} was repositioned, and its recipe does not give its bits again"
            raise KVStoreError("not_recomputable", message, field="node")

    def tier(self, node: NodeRecord) -> Tier:
        """Where a sealed node is: where the least available of its held pages is. NOWHERE if nothing holds it."""
        return self._books.tier(node)

    def available(self, exclude: Iterable[NodeRecord] = (), *, reads: Iterable[Read] = ()) -> int:
        """Pages that `reserve` could take now; shared pages once.

        Args:
            exclude: nodes that may not be evicted.
            reads: tokens that may not be evicted, such as those that the node to be written reads.

        While steps are open, pages that they may touch do not count.
        """
        return self.num_unused + self._pressure.num_droppable(set(exclude), reads)

    def can_fit(
        self, num_pages: int, exclude: Iterable[NodeRecord] = (), *, reads: Iterable[Read] = ()
    ) -> bool:
        """Whether `available(exclude, reads=reads) >= num_pages`, without looking at states if that is not needed."""
        return num_pages <= self.num_unused or num_pages <= self.available(exclude, reads=reads)

    def begin_step(self) -> int:
        """A step (or a transfer) starts to touch pages: what is freed from now on waits until it ends."""
        self.expire()
        return self._books.pool.begin_fence()

    def end_step(self, fence: int) -> None:
        """The step is done on the device. Raises KVStoreError `unknown_fence`, also the second time."""
        self._books.releases += 1
        self._books.pool.end_fence(fence)

    def set_aside(self, fence: int, pages: Iterable[int]) -> None:
        """The step ends, but for these pages, given out before it began: nobody gets them before `end_aside`.

        Raises as `end_step`.
        """
        pages = tuple(pages)
        self._books.pool.check_fence(fence)
        self._books.pool.set_aside(pages)
        self.end_step(fence)

    def end_aside(self, pages: Iterable[int]) -> None:
        """Nothing writes the pages of `set_aside` any more."""
        self._books.pool.end_aside(pages)

    def now(self) -> float:
        """Seconds of the store's clock."""
        return self._clock()

    def check(self) -> None:
        """Count everything again. Raises LeakError naming every difference."""
        found = audit.problems(self._books)
        if found:
            raise LeakError(found)

    def stats(self) -> StoreStats:
        return store_stats(self._books, self._transfers)

    def describe(self, handle_id: str, *, salt: str | None = None) -> StateInfo:
        """What a handle names. Raises as `release`."""
        return self._describe(self._handle(handle_id, salt))

    def states(self, *, salt: str | None = None) -> tuple[StateInfo, ...]:
        """All handles of a tenant (None: of all), in order of arrival."""
        self.expire()
        return tuple(
            self._describe(handle) for handle in self._books.handles if salt in (None, handle.node.salt)
        )

    def _run(self, node: NodeRecord, start: int, stop: int) -> array[int] | None:
        """The pages of tokens [start, stop) of a node; None while one of them is missing."""
        size = self.page_size
        first, end = (start // size, -(-stop // size)) if start < stop else (0, 0)
        run = node.run()
        if run is not None:
            return (run if first == 0 and end == len(run) else run[first:end]) if end <= len(run) else None
        pages = node.pages[first:end]
        return None if len(pages) < end - first or None in pages else array("i", pages)  # type: ignore[arg-type]

    def _missing(self, read: Read, field: str) -> set[Tier]:
        """Where those pages of a read are that are not on the device. Raises KVStoreError `state_released`."""
        check_held(read.node, read.start, read.stop, passed=False, field=field)
        span = self._books.holds.page_range(read.start, read.stop)
        return {page_tier(read.node, i) for i in span if read.node.pages[i] is None}

    def _reads_of(self, what: Sequence[Read] | NodeRecord) -> tuple[Read, ...]:
        """The reads, checked; a node's held tokens."""
        if isinstance(what, NodeRecord):
            check_readable(what, 0, what.length, None, "node")
            self._check_held(what)
            return tuple(Read(what, start, stop) for start, stop in sorted(what.cover))
        for index, read in enumerate(what):
            field = f"reads[{index}]"
            check_readable(read.node, read.start, read.stop, None, field)
            check_held(read.node, read.start, read.stop, passed=False, field=field)
        return tuple(what)

    def _check_held(self, node: NodeRecord) -> None:
        if not node.held:
            raise KVStoreError("state_released", f"nothing holds node {node.uid} any more", field="node")

    def _check_pin(self, hold: Hold, salt: str) -> None:
        """Whether what a hold keeps may be pinned, too."""
        holds = [handle.hold for handle in self._books.handles.pinned]
        self._pins.check(pinned_nodes([*holds, hold]), self._books.holds, salt)

    def _handle(self, handle_id: str, salt: str | None) -> Handle:
        self.expire()
        return self._books.handles.get(handle_id, salt)

    def _describe(self, handle: Handle) -> StateInfo:
        return state_info(self._books, handle, self._clock())
