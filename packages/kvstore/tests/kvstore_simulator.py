"""Requests, steps and transfers in any order under one seed, against the account in kvstore_shadow.py.

The clock is a count of pumps; KV is a function of what it was computed from; steps write and read late; the transfer
delays, reorders, tears, loses, fails and repeats. After each operation the pages of both tiers are counted, and no page
may have changed its tier by a way that there is not; every `audit_every` operations the whole store is counted again.
Run as a script it goes on for as long as it is asked to:

    python kvstore_simulator.py [operations] [first seed]
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore_shadow import Arena, ShadowNode, compute_again, context_of, lay_out, parent_of

from dagengine_kvstore import (
    KVStore,
    KVStoreError,
    Lease,
    LeastRecentlyUsed,
    NextUse,
    NodeRecord,
    NotResident,
    OutOfHostPages,
    OutOfPages,
    PinBudgetExceeded,
    Read,
    Writer,
)
from dagengine_kvstore.audit import problems
from dagengine_kvstore.fake_transfer import FakeTransfer
from dagengine_kvstore.residency import page_tier
from dagengine_kvstore.tiers import Tier

SIGNATURE = {"model": "toy"}
IMPOSSIBLE = {
    (Tier.NOWHERE, Tier.HOST),
    (Tier.NOWHERE, Tier.LOADING),
    (Tier.DEVICE, Tier.LOADING),
    (Tier.STORING, Tier.LOADING),
    (Tier.LOADING, Tier.STORING),
}


class Costs:
    """Long nodes are cheaper to load, short ones to compute again."""

    def recompute(self, node: NodeRecord) -> int:
        return 10 * node.length

    def reload(self, num_pages: int) -> int:
        return 25 + 10 * num_pages


@dataclass(eq=False)
class Request:
    node: ShadowNode
    writer: Writer
    lease: Lease | None = None
    pending: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, kv, stored), not launched
    launched: int = 0  # tokens in open steps
    early: bool = False  # sealed before its last step has ended


@dataclass(eq=False)
class Step:
    fence: int
    writes: list[tuple[int, int, int]]
    commits: list[tuple[Request, int]]
    reads: list[tuple[int, object, int]]  # (slot, what it held, generation of its page)


def reads_node(request: Request, node: ShadowNode) -> bool:
    return any(read.node is node.record for read in request.node.record.reads)


class Simulator:
    """
    Args:
        options: the store's.
        faults: rates of the transfer's.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_pages: int = 20,
        num_host_pages: int = 24,
        page_size: int = 3,
        audit_every: int = 1,
        costs: bool = True,
        faults: dict[str, float] | None = None,
        **options: object,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.arena = Arena(num_pages, page_size)
        faults = {"lose": 0.02, "fail": 0.1, "duplicate": 0.1, "refuse": 0.02, "confirm": 0.1} | (
            faults or {}
        )
        self.transfer = FakeTransfer(
            self.arena.rows, num_host_pages, rows=page_size, seed=seed, delay=(1, 4), **faults
        )
        ids = iter(f"st_{count}" for count in range(10**9))
        self.store = KVStore(
            num_pages,
            page_size,
            clock=lambda: self.now,
            new_id=ids.__next__,
            transfer=self.transfer,
            costs=Costs() if costs else None,
            next_use=self.next_use,
            transfer_timeout_s=12.0,
            patience=20,
            max_events=256,
            **options,  # type: ignore[arg-type]
        )
        self.books = self.store._books
        self.audit_every = audit_every
        self.requests: list[Request] = []
        self.steps: list[Step] = []
        self.held: list[tuple[ShadowNode, int]] = []
        self.handles: dict[str, tuple[ShadowNode, int]] = {}
        self.pinned: list[str] = []
        self.leases: list[tuple[Lease, Sequence[Read]]] = []
        self.shadow: dict[int, ShadowNode] = {}
        self.tiers: dict[tuple[NodeRecord, int], Tier] = {}
        self.num_ops = 0
        self.done: Counter[str] = Counter()  # operations
        self.seen: Counter[str] = Counter()  # events, and what was refused
        self.ops: list[Callable[[], None]] = []
        for weight, op in (
            (6, self.add),
            (14, self.advance),
            (8, self.begin_step),
            (10, self.end_step),
            (6, self.seal),
            (3, self.seal_early),
            (3, self.look_ahead),
            (1, self.abort),
            (1, self.crash),
            (2, self.roll_back),
            (3, self.fork),
            (3, self.release),
            (2, self.unhold),
            (1, self.hold),
            (1, self.pin),
            (2, self.unpin),
            (5, self.read),
            (5, self.end_read),
            (6, self.offload),
            (5, self.load),
            (4, self.prefetch),
            (2, self.evict),
            (1, self.evict_host),
            (2, self.restore),
            (14, self.pump),
        ):
            self.ops += [op] * weight

    def run(self, num_ops: int) -> None:
        """Raises AssertionError, LeakError or whatever the store raises; the message names the seed and operation."""
        op: Callable[[], None] = self.pump
        try:
            for _ in range(num_ops):
                op = self.rng.choice(self.ops)
                op()
                self.num_ops += 1
                self.done[op.__name__] += 1
                self.check()
                if self.num_ops % 500 == 0:
                    op = self.come_to_rest
                    op()
            op = self.end
            op()
        except BaseException as error:
            error.add_note(f"seed {self.seed}, operation {self.num_ops}: {op.__name__}")
            raise

    def next_use(self, node: NodeRecord) -> int | None:
        return next(
            (
                rank
                for rank, request in enumerate(self.requests)
                if any(read.node is node for read in request.node.record.reads)
            ),
            None,
        )

    # Requests.

    def add(self) -> None:
        if len(self.requests) >= 4:
            return
        salt = self.rng.choice(["", "", "other"])
        kept = [(node, at) for node, at in self.kept() if node.salt == salt]
        modes: list[tuple[ShadowNode, str, int, int]] = []
        passing = self.rng.choice(["inherit", "digest"])
        for _ in range(self.rng.randint(0, 2) if kept else 0):
            node, at = self.rng.choice(kept)
            if self.rng.random() < 0.6:
                modes.append((node, passing, 0, self.rng.randint(0, at)))
            else:
                start, stop = sorted((self.rng.randint(0, at), self.rng.randint(0, at)))
                modes.append((node, "artifact", start, stop))
        visible, passed, per_parent = context_of(modes)
        if len(visible) > 18:
            return
        shift = self.rng.randint(0, 2)
        own_start = len(visible) + shift
        writer = self.store.begin(
            [parent_of(*mode) for mode in modes],
            lay_out(visible, shift),
            own_start,
            signature=SIGNATURE,
            salt=salt,
        )
        sees = tuple(
            (node.kv[offset], view - own_start) for view, (node, offset) in enumerate(visible, shift)
        )
        node = ShadowNode(writer.node, salt, passed, per_parent, sees)
        self.shadow[writer.node.uid] = node
        self.requests.append(Request(node, writer))

    def advance(self) -> None:
        """Come to run, or compute some more tokens."""
        growing = [request for request in self.requests if not request.early]
        if not growing:
            return
        request = self.rng.choice(growing)
        writer, node = request.writer, request.node
        if request.lease is None:
            request.lease = self.try_lease(writer.node.reads)
            if request.lease is None:
                return
            self.verify(request.lease, writer.node.reads)
        tokens = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 7))]
        if not writer.num_tokens and not writer.pages:
            known = [n.tokens for n in self.shadow.values() if n.tokens and n.salt == node.salt]
            tokens = list(self.rng.choice(known)) if known and self.rng.random() < 0.5 else tokens
            reused = writer.match(tokens, whole=self.rng.random() < 0.5)
            self.arena.compute(node, tokens[:reused])
            assert self.arena.read(writer.extents()) == node.kv
            tokens = tokens[reused:]
        if len(node.tokens) + len(tokens) > 18:
            return
        fits = self.store.can_fit(writer.pages_needed(len(tokens)), reads=writer.node.reads)
        num_refused = self.transfer.num_refused
        try:
            writer.reserve(len(tokens))
        except OutOfPages as error:
            assert not fits
            self.seen["out_of_pages"] += 1
            self.seen["waits_for_transfers"] += error.moving > 0
            return
        except KVStoreError as error:
            assert error.code == "partial_page_shared"
            return
        assert fits or self.transfer.num_refused > num_refused
        first = len(node.tokens)
        self.arena.compute(node, tokens)
        for offset, slot in enumerate(writer.append(tokens), start=first):
            request.pending.append((slot, node.kv[offset], writer.node.own_start + offset))

    def begin_step(self) -> None:
        if len(self.steps) >= 2:
            return
        step = Step(self.store.begin_step(), [], [], [])
        for request in self.requests:
            step.writes += request.pending
            step.commits.append((request, len(request.pending)))
            request.launched += len(request.pending)
            request.pending = []
            self.watch(step, request.writer.extents(0, request.writer.num_committed))
            if request.lease is not None:
                for index in range(len(request.lease.reads)):
                    self.watch(step, request.lease.extents(index))
        for lease, reads in self.leases:
            for index in range(len(reads)):
                self.watch(step, lease.extents(index))
        self.steps.append(step)

    def watch(self, step: Step, extents: Sequence[tuple[int, int, int, int]]) -> None:
        """What a step reads and no step is to write, itself included."""
        size, rows, generation = self.arena.page_size, self.arena.rows, self.books.pool.generation
        unwritten = self.unwritten() | {slot for slot, _, _ in step.writes}
        for page, lo, hi, _ in extents:
            step.reads += [
                (slot, rows[slot], generation[page])
                for slot in range(page * size + lo, page * size + hi)
                if slot not in unwritten
            ]

    def unwritten(self) -> set[int]:
        """Slots that were given and whose step has not ended."""
        writes = [*(r.pending for r in self.requests), *(step.writes for step in self.steps)]
        return {slot for listed in writes for slot, _, _ in listed}

    def end_step(self) -> None:
        if not self.steps:
            return
        step = self.steps.pop(0)
        for slot, row, generation in step.reads:
            assert self.arena.rows[slot] == row, f"slot {slot} was overwritten under a running step"
            now = self.books.pool.generation[slot // self.arena.page_size]
            assert now == generation, f"slot {slot} was handed out under a running step"
        for slot, kv, stored in step.writes:
            self.arena.rows[slot] = (kv, stored)
        self.store.end_step(step.fence)
        for request, count in step.commits:
            if request in self.requests:
                request.writer.commit(count)
                request.launched -= count
                if request.lease is not None:
                    self.verify(request.lease, request.writer.node.reads)
                if request.early and request.writer.num_committed == request.writer.num_tokens:
                    request.writer.seal()
                    self.leave(request)

    def seal_early(self) -> None:
        """Others may read it from now on, in the step that computes it or later."""
        ready = [r for r in self.requests if r.writer.num_tokens > r.writer.num_committed and not r.early]
        if ready:
            request = self.rng.choice(ready)
            record = request.writer.seal_early()
            assert list(record.tokens) == request.node.tokens
            request.early = True
            self.held.append((request.node, record.length))

    def look_ahead(self) -> None:
        """Changes nothing that anybody sees."""
        if self.requests:
            self.rng.choice(self.requests).writer.look_ahead()

    def seal(self) -> None:
        ready = [r for r in self.requests if r.writer.num_tokens == r.writer.num_committed > 0]
        if not ready:
            return
        request = self.rng.choice(ready)
        record = request.writer.seal()
        assert list(record.tokens) == request.node.tokens
        self.leave(request)
        self.held.append((request.node, record.length))

    def abort(self) -> None:
        if self.requests:
            self.fail(self.rng.choice(self.requests))

    def fail(self, request: Request) -> None:
        """Abort a request, and all that read what of it was sealed early."""
        failed = [request]
        for one in failed:
            if one.early:
                failed += [r for r in self.requests if r not in failed and reads_node(r, one.node)]
        self.rng.shuffle(failed)
        for one in failed:
            node = one.node
            one.writer.abort()
            del self.shadow[node.record.uid]
            self.leave(one)
            for held in [held for held in self.held if held[0] is node]:
                self.held.remove(held)
                self.store.unhold(node.record, held[1])
            for handle in [handle for handle, (named, _) in self.handles.items() if named is node]:
                self.let_go(handle)

    def crash(self) -> None:
        """A request dies while a step of it runs and what it reads is being brought."""
        if not self.requests:
            return
        request = self.rng.choice(self.requests)
        self.begin_step()
        if request.lease is None:
            self.try_load(request.node.record.reads)
        self.fail(request)

    def roll_back(self) -> None:
        """Preemption, at any time."""
        growing = [request for request in self.requests if not request.early]
        if not growing:
            return
        request = self.rng.choice(growing)
        request.writer.rollback()
        self.leave(request)
        request.node.tokens.clear()
        request.node.kv.clear()
        self.requests.append(Request(request.node, request.writer))

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        if request.lease is not None:
            request.lease.release()

    # States.

    def kept(self) -> list[tuple[ShadowNode, int]]:
        return [*self.held, *self.handles.values()]

    def any_kept(self) -> Iterator[tuple[ShadowNode, int]]:
        """One of them, if there are any."""
        kept = self.kept()
        if kept:
            yield self.rng.choice(kept)

    def fork(self) -> None:
        for node, limit in self.any_kept():
            if len(self.handles) < 10:
                at = self.rng.randint(0, limit)
                self.handles[self.store.name(node.record, at=at)] = node, at

    def release(self) -> None:
        if self.handles:
            self.let_go(self.rng.choice(list(self.handles)))

    def let_go(self, handle: str) -> None:
        self.store.release(handle)
        del self.handles[handle]
        if handle in self.pinned:
            self.pinned.remove(handle)

    def hold(self) -> None:
        for node, at in self.any_kept():
            if len(self.held) < 10:
                self.store.hold(node.record, at)
                self.held.append((node, at))

    def unhold(self) -> None:
        if self.held and (len(self.held) > 6 or self.rng.random() < 0.3):
            node, at = self.held.pop(self.rng.randrange(len(self.held)))
            self.store.unhold(node.record, at)

    def pin(self) -> None:
        if self.handles:
            handle = self.rng.choice(list(self.handles))
            try:
                self.store.pin(handle)
            except PinBudgetExceeded:
                self.seen["pin_refused"] += 1
                return
            if handle not in self.pinned:
                self.pinned.append(handle)

    def unpin(self) -> None:
        if self.pinned:
            self.store.unpin(self.pinned.pop())

    def read(self) -> None:
        for node, at in self.any_kept():
            if len(self.leases) >= 3:
                return
            instances = [*node.passed, *((node, offset) for offset in range(at))]
            reads = lay_out(instances, 0)
            lease = self.try_lease(reads)
            if lease is not None:
                self.leases.append((lease, reads))
                self.verify(lease, reads)

    def end_read(self) -> None:
        if self.leases:
            lease, reads = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.verify(lease, reads)
            lease.release()

    def verify(self, lease: Lease, reads: Sequence[Read]) -> None:
        """All that is leased, but for what is still to be written, or never will be."""
        unwritten, size = self.unwritten(), self.arena.page_size
        for index, read in enumerate(reads):
            extents = lease.extents(index)
            rows = {page * size + row for page, lo, hi, _ in extents for row in range(lo, hi)}
            if read.node.uid in self.shadow and not rows & unwritten:
                expected = self.shadow[read.node.uid].kv[read.start : read.stop]
                assert self.arena.read(extents) == expected, f"foreign KV in {read}"
                self.seen["verified"] += 1

    # Tiers.

    def try_lease(self, reads: Sequence[Read]) -> Lease | None:
        """A lease, or what it takes to get one later is started."""
        try:
            return self.store.lease(reads)
        except NotResident as missing:
            assert set(missing.loading) <= set(missing.on_host) <= set(missing.nodes)
            if missing.on_host:
                self.try_load([read for read in reads if read.node in missing.on_host])
            elif self.rng.random() < 0.5:
                self.try_restore(self.shadow[missing.nowhere[0].uid])
        return None

    def try_load(self, reads: Sequence[Read]) -> None:
        try:
            self.store.load(reads)
        except OutOfPages:
            self.seen["load_out_of_pages"] += 1

    def load(self) -> None:
        for node, _ in self.any_kept():
            try:
                self.store.load(node.record)
            except OutOfPages:
                self.seen["load_out_of_pages"] += 1

    def prefetch(self) -> None:
        for node, _ in self.any_kept():
            self.store.prefetch(node.record)

    def offload(self) -> None:
        for node, _ in self.any_kept():
            try:
                self.store.offload(node.record)
            except OutOfHostPages:
                self.seen["out_of_host_pages"] += 1

    def evict(self) -> None:
        for node, _ in self.any_kept():
            try:
                self.store.evict(node.record)
            except KVStoreError as error:
                assert error.code == "state_in_use"
            else:
                assert not any(request.early and request.node is node for request in self.requests)

    def evict_host(self) -> None:
        for node, _ in self.any_kept():
            try:
                self.store.evict_host(node.record)
            except KVStoreError as error:
                assert error.code == "state_in_use"

    def restore(self) -> None:
        for node, _ in self.any_kept():
            self.try_restore(node)

    def try_restore(self, node: ShadowNode) -> bool:
        try:
            self.compute_again(node)
        except OutOfPages:
            return False
        assert self.store.tier(node.record) in (Tier.DEVICE, Tier.STORING)
        return True

    def compute_again(self, node: ShadowNode) -> None:
        compute_again(self.store, self.arena, node, self.bring, self.verify)
        self.check_tiers()

    def bring(self, read: Read) -> Lease:
        """A lease of one read, however long that takes. Raises OutOfPages."""
        for _ in range(200):
            try:
                return self.store.lease([read])
            except NotResident as missing:
                if missing.on_host:
                    self.store.load([read])
                    self.pump()
                else:
                    self.compute_again(self.shadow[read.node.uid])
        raise AssertionError(f"no progress with {read}")

    def bring_when_there_is_room(self, read: Read) -> Lease:
        """The same, where nothing but transfers can be what there is no room for."""
        for _ in range(200):
            try:
                return self.bring(read)
            except OutOfPages as error:
                assert error.moving, f"no room for {read}, and none to come: {error}"
                self.pump()
        raise AssertionError(f"no room for {read}")

    def pump(self) -> None:
        self.now += 1.0
        for event in self.store.pump():
            self.seen[event.kind] += 1
        self.check_tiers()

    # What must always be so.

    def check(self) -> None:
        pool, host = self.books.pool, self.books.host
        counts = pool.num_free, pool.num_cached, pool.num_live, pool.num_waiting, pool.num_moving
        assert sum(counts) == pool.num_pages, counts
        assert host.num_free + host.num_live + host.num_moving == host.num_pages
        self.check_tiers()
        if self.num_ops % self.audit_every == 0:
            found = problems(self.books)
            assert not found, found

    def check_tiers(self) -> None:
        now: dict[tuple[NodeRecord, int], Tier] = {}
        for node in self.books.nodes():
            if node.sealed:
                for index in self.books.holds.covered_pages(node):
                    now[node, index] = page_tier(node, index)
                    step = self.tiers.get((node, index), Tier.DEVICE), now[node, index]
                    assert step not in IMPOSSIBLE, f"page {index} of {node} went {step}"
        self.tiers = now

    def come_to_rest(self) -> None:
        """Nobody runs and nothing is lost any more: then nothing is stuck, and what fits can be read."""
        while self.steps:
            self.end_step()
        while self.leases:
            self.end_read()
        while self.requests:
            self.abort()
        while self.pinned:
            self.unpin()
        self.transfer.release_lost()
        rates = self.transfer.lose, self.transfer.fail, self.transfer.refuse
        self.transfer.lose = self.transfer.fail = self.transfer.refuse = 0.0
        for _ in range(40):
            self.pump()
        stats = self.store.stats()
        assert not stats.tickets_in_flight and not stats.tickets_lost
        assert stats.pages_moving == stats.host_moving == stats.pages_waiting == 0
        for node, _ in self.kept():
            assert self.store.tier(node.record) in (Tier.DEVICE, Tier.HOST, Tier.NOWHERE)
        for node, at in self.kept():
            if at and sum(read.stop - read.start for read in node.record.reads) == 0:
                lease = self.bring_when_there_is_room(Read(node.record, 0, at))
                self.verify(lease, [Read(node.record, 0, at)])
                lease.release()
                self.seen["brought_back"] += 1
        for _ in range(40):
            self.pump()
        self.transfer.lose, self.transfer.fail, self.transfer.refuse = rates
        self.check()

    def end(self) -> None:
        self.come_to_rest()
        for node, at in self.held:
            self.store.unhold(node.record, at)
        for handle in self.handles:
            self.store.release(handle)
        self.held, self.handles = [], {}
        self.check()
        stats = self.store.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total == self.store.available()
        assert stats.host_free == stats.host_total
        assert stats.states == stats.handles == stats.leases == stats.writers == 0


def main(num_ops: int, seed: int) -> None:
    """Runs of 5,000 operations with ever new seeds and settings."""
    done = 0
    while done < num_ops:
        print(f"seed {seed}", flush=True)
        simulator = make_simulator(seed)
        simulator.run(5000)
        done, seed = done + 5000, seed + 1
    print(f"{done} operations; the last run's: {dict(simulator.seen)}")


def make_simulator(seed: int, audit_every: int = 1) -> Simulator:
    """The settings follow from the seed."""
    rng = random.Random(seed)
    return Simulator(
        seed,
        num_pages=rng.choice([14, 20]),
        num_host_pages=rng.choice([4, 12, 40]),
        page_size=rng.choice([1, 3, 4]),
        audit_every=audit_every,
        costs=rng.random() < 0.5,
        eviction=rng.choice([LeastRecentlyUsed(), NextUse()]),
        write_back=rng.choice([0, 0, 6]),
        pin_budget=rng.choice([None, 4]),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
