"""Any order of operations, against the account in kvstore_shadow.py; the books are checked after each."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvstore_shadow import (
    Arena,
    Instance,
    ShadowNode,
    compute_again,
    context_of,
    covered_pages,
    lay_out,
    parent_of,
)

from dagengine_kvstore import (
    KVStore,
    KVStoreError,
    Lease,
    NodeRecord,
    NoTransfer,
    NotResident,
    OutOfHostPages,
    OutOfPages,
    Read,
    Tier,
    Writer,
)
from dagengine_kvstore.audit import problems
from dagengine_kvstore.fake_transfer import FakeTransfer
from dagengine_kvstore.residency import page_tier

SIGNATURE = {"model": "toy"}
NUM_PAGES = 20
TOKENS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.integers(1, 20).map(lambda length: ([0, 0, 1] * 7)[:length]),
)


@dataclass(eq=False)
class Writing:
    node: ShadowNode
    writer: Writer
    pending: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, kv, stored), not launched
    unfilled: list[int] = field(default_factory=list)  # tokens that the writer was not told yet


@dataclass(eq=False)
class Step:
    """A running step: what it will write when it ends, and what it must still be able to read then."""

    fence: int
    writes: list[tuple[int, int, int]]
    commits: list[tuple[Writing, int]]
    reads: list[tuple[int, tuple[int, int], int]]  # (slot, what the row held and its page's generation then)


class StoreMachine(RuleBasedStateMachine):
    page_size = 3
    num_host_pages = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        ids = iter(f"st_{count}" for count in range(10**6))
        self.arena = Arena(NUM_PAGES, self.page_size)
        self.transfer: FakeTransfer | NoTransfer = NoTransfer()
        if self.num_host_pages:
            self.transfer = FakeTransfer(
                self.arena.rows,
                self.num_host_pages,
                rows=self.page_size,
                lose=0.05,
                fail=0.1,
                duplicate=0.1,
                refuse=0.02,
                confirm=0.2,
            )
        self.store = KVStore(
            NUM_PAGES,
            self.page_size,
            clock=lambda: self.now,
            new_id=ids.__next__,
            transfer=self.transfer,
            transfer_timeout_s=4.0,
        )
        self.books = self.store._books
        self.shadow: dict[int, ShadowNode] = {}
        self.writing: list[Writing] = []
        self.handles: dict[str, tuple[ShadowNode, int, float | None, bool]] = {}
        self.held: list[tuple[ShadowNode, int]] = []
        self.leases: list[tuple[Lease, list[Read]]] = []
        self.steps: list[Step] = []

    def held_nodes(self) -> list[tuple[ShadowNode, int]]:
        return self.held + [(node, at) for node, at, _, _ in self.handles.values()]

    def pick(self, data: st.DataObject, items: list) -> object:
        return items[data.draw(st.integers(0, len(items) - 1))]

    @initialize(data=st.data())
    def first_states(self, data: st.DataObject) -> None:
        for _ in range(2):
            self.make_state(data, 0, data.draw(TOKENS))

    @rule(data=st.data(), shift=st.integers(0, 2), tokens=TOKENS)
    def make_state(self, data: st.DataObject, shift: int, tokens: list[int]) -> None:
        """The whole life of a request at once, so that there are states to work with."""
        writing = self.start(data, shift)
        reused = writing.writer.match(tokens, whole=True)
        self.arena.compute(writing.node, tokens[:reused])
        assert self.arena.read(writing.writer.extents()) == writing.node.kv
        self.write(writing, tokens[reused:])
        if len(writing.node.tokens) < len(tokens):
            return
        self.begin_step()
        while self.steps:
            self.end_step()
        self.finish(writing)

    @precondition(lambda self: len(self.writing) < 3)
    @rule(data=st.data(), shift=st.integers(0, 2))
    def begin(self, data: st.DataObject, shift: int) -> None:
        self.start(data, shift)

    def start(self, data: st.DataObject, shift: int) -> Writing:
        modes: list[tuple[ShadowNode, str, int, int]] = []
        passing = data.draw(st.sampled_from(["inherit", "digest"]))
        for _ in range(data.draw(st.integers(0, 3)) if self.held_nodes() else 0):
            node, at = self.pick(data, self.held_nodes())
            if data.draw(st.booleans()):
                modes.append((node, passing, 0, data.draw(st.integers(0, at))))
            else:
                start, stop = sorted((data.draw(st.integers(0, at)), data.draw(st.integers(0, at))))
                modes.append((node, "artifact", start, stop))
        visible, passed, per_parent = context_of(modes)
        own_start = len(visible) + shift
        reads = lay_out(visible, shift)
        writer = self.store.begin([parent_of(*mode) for mode in modes], reads, own_start, signature=SIGNATURE)
        sees = tuple(
            (node.kv[offset], view - own_start) for view, (node, offset) in enumerate(visible, shift)
        )
        node = ShadowNode(writer.node, "", passed, per_parent, sees)
        self.shadow[writer.node.uid] = node
        self.writing.append(Writing(node, writer))
        return self.writing[-1]

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), whole=st.booleans())
    def match(self, data: st.DataObject, whole: bool) -> None:
        writing = self.pick(data, self.writing)
        if writing.writer.num_tokens or writing.writer.pages:
            return
        known = [node.tokens for node in self.shadow.values() if node.tokens]
        tokens = list(self.pick(data, known)) if known else []
        if data.draw(st.booleans()):
            tokens += [0]
        reused = writing.writer.match(tokens, whole=whole)
        assert reused == len(tokens) or reused % self.page_size == 0
        self.arena.compute(writing.node, tokens[:reused])
        assert self.arena.read(writing.writer.extents()) == writing.node.kv

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), tokens=TOKENS, unknown=st.integers(0, 3))
    def append(self, data: st.DataObject, tokens: list[int], unknown: int) -> None:
        self.write(self.pick(data, self.writing), tokens, unknown)

    def write(self, writing: Writing, tokens: list[int], unknown: int = 0) -> None:
        """Append tokens, the last `unknown` of them (all, behind an unknown one) without saying which."""
        writer = writing.writer
        needed = writer.pages_needed(len(tokens))
        fits = self.store.can_fit(needed, reads=writer.node.reads)
        before = self.store.stats()
        num_refused = self.num_refused()
        try:
            writer.reserve(len(tokens))
        except OutOfPages:
            assert not fits
            if not self.num_host_pages:
                assert self.store.stats() == before
            assert self.store.stats().evictions == before.evictions
            return
        except KVStoreError as error:
            assert error.code == "partial_page_shared" and writer.num_tokens % self.page_size
            return
        assert fits or self.num_refused() > num_refused
        first = len(writing.node.tokens)
        known = len(tokens) - unknown if len(tokens) > unknown else 0
        if writing.unfilled:
            with pytest.raises(KVStoreError) as caught:
                writer.append(tokens)
            assert caught.value.code == "not_filled"
            known = 0
        slots = writer.append(tokens[:known], len(tokens) - known)
        writing.unfilled += tokens[known:]
        self.arena.compute(writing.node, tokens)
        for offset, slot in enumerate(slots, start=first):
            writing.pending.append((slot, writing.node.kv[offset], writer.node.own_start + offset))

    def num_refused(self) -> int:
        return self.transfer.num_refused if isinstance(self.transfer, FakeTransfer) else 0

    @precondition(lambda self: len(self.steps) < 3)
    @rule()
    def begin_step(self) -> None:
        step = Step(self.store.begin_step(), [], [], [])
        for writing in self.writing:
            step.writes += writing.pending
            step.commits.append((writing, len(writing.pending)))
            writing.pending = []
            self.watch(step, writing.writer.extents(0, writing.writer.num_committed))
        for lease, reads in self.leases:
            for index in range(len(reads)):
                self.watch(step, lease.extents(index))
        self.steps.append(step)

    def watch(self, step: Step, extents: list) -> None:
        for page, lo, hi, _ in extents:
            for slot in range(page * self.page_size + lo, page * self.page_size + hi):
                step.reads.append((slot, self.arena.rows[slot], self.books.pool.generation[page]))

    @precondition(lambda self: self.steps)
    @rule()
    def end_step(self) -> None:
        step = self.steps.pop(0)
        for slot, row, generation in step.reads:
            assert self.arena.rows[slot] == row, "a page was overwritten under a running step"
            now = self.books.pool.generation[slot // self.page_size]
            assert now == generation, "a page was handed out under a running step"
        for slot, kv, stored in step.writes:
            self.arena.rows[slot] = (kv, stored)
        self.store.end_step(step.fence)
        for writing, count in step.commits:
            if writing in self.writing:
                self.commit(writing, count)

    def commit(self, writing: Writing, count: int) -> None:
        """Commit, after naming what has to be known for it."""
        writer = writing.writer
        missing = writer.num_committed + count - writer.num_known
        if missing > 0:
            with pytest.raises(KVStoreError) as caught:
                writer.commit(count)
            assert caught.value.code == "not_filled"
            self.fill_first(writing, missing)
        writer.commit(count)

    @precondition(lambda self: any(writing.unfilled for writing in self.writing))
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        writing = self.pick(data, [writing for writing in self.writing if writing.unfilled])
        self.fill_first(writing, data.draw(st.integers(1, len(writing.unfilled))))

    def fill_first(self, writing: Writing, count: int) -> None:
        writing.writer.fill(writing.unfilled[:count])
        del writing.unfilled[:count]

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        writing = self.pick(data, self.writing)
        if writing.writer.num_committed < writing.writer.num_tokens:
            with pytest.raises(KVStoreError) as caught:
                writing.writer.seal()
            assert caught.value.code == "not_committed"
            return
        self.finish(writing)

    def finish(self, writing: Writing) -> None:
        record = writing.writer.seal()
        assert list(record.tokens) == writing.node.tokens
        self.writing.remove(writing)
        self.held.append((writing.node, record.length))

    @precondition(lambda self: len(self.writing) > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        writing = self.pick(data, self.writing)
        writing.writer.abort()
        self.writing.remove(writing)
        del self.shadow[writing.node.record.uid]

    @precondition(lambda self: len(self.writing) > 1)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        writing = self.pick(data, self.writing)
        writing.writer.rollback()
        self.writing.remove(writing)
        writing.node.tokens.clear()
        writing.node.kv.clear()
        self.writing.append(Writing(writing.node, writing.writer))

    @precondition(lambda self: self.held_nodes())
    @rule(data=st.data(), ttl=st.sampled_from([None, 1.0, 5.0]), pin=st.booleans())
    def name(self, data: st.DataObject, ttl: float | None, pin: bool) -> None:
        node, limit = self.pick(data, self.held_nodes())
        at = data.draw(st.integers(0, limit))
        handle = self.store.name(node.record, at=at, ttl_s=ttl, pin=pin)
        assert self.store.resolve(handle) == (node.record, at)
        self.handles[handle] = (node, at, None if ttl is None else self.now + ttl, pin)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = self.pick(data, list(self.handles))
        self.store.release(handle)
        del self.handles[handle]
        with pytest.raises(KVStoreError) as caught:
            self.store.release(handle)
        assert caught.value.code == "state_released"

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), pin=st.booleans())
    def change_pin(self, data: st.DataObject, pin: bool) -> None:
        handle = self.pick(data, list(self.handles))
        (self.store.pin if pin else self.store.unpin)(handle)
        self.handles[handle] = (*self.handles[handle][:3], pin)
        self.forget_expired()

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire()
        self.forget_expired()

    def forget_expired(self) -> None:
        for handle, (_, _, deadline, pinned) in list(self.handles.items()):
            if deadline is not None and deadline <= self.now and not pinned:
                del self.handles[handle]

    @precondition(lambda self: self.held_nodes())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        node, at = self.pick(data, self.held_nodes())
        self.store.hold(node.record, at)
        self.held.append((node, at))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        node, at = self.held.pop(index)
        self.store.unhold(node.record, at)

    @precondition(lambda self: self.held_nodes())
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        node, at = self.pick(data, self.held_nodes())
        instances = [*node.passed, *((node, offset) for offset in range(at))]
        reads = lay_out(instances, 0)
        before = list(self.books.pool.refs)
        try:
            lease = self.store.lease(reads)
        except NotResident as error:
            assert error.nodes and self.books.pool.refs == before
            assert set(error.on_host) | set(error.nowhere) == set(error.nodes)
            assert not set(error.on_host) & set(error.nowhere)
            for tier, nodes in (("nowhere", error.nowhere), ("loading", error.loading)):
                assert self.num_host_pages or not error.on_host
                assert all(tier in page_tiers(node) for node in nodes)
            return
        self.leases.append((lease, reads))
        self.verify(lease, reads)

    def verify(self, lease: Lease, reads: list[Read]) -> None:
        for index, read in enumerate(reads):
            expected = self.shadow[read.node.uid].kv[read.start : read.stop]
            assert self.arena.read(lease.extents(index)) == expected

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease, reads = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.verify(lease, reads)
        lease.release()
        with pytest.raises(KVStoreError) as caught:
            lease.release()
        assert caught.value.code == "lease_released"

    @precondition(lambda self: self.held_nodes())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        node, _ = self.pick(data, self.held_nodes())
        leased = any(read.node is node.record for _, reads in self.leases for read in reads)
        pinned = {
            instance[0].record
            for owner, at, _, pin in self.handles.values()
            if pin
            for instance in [*owner.passed, *((owner, offset) for offset in range(at))]
        }
        moving = any(page is not None and self.books.pool.is_moving(page) for page in node.record.pages)
        if leased or moving or node.record in pinned:
            with pytest.raises(KVStoreError) as caught:
                self.store.evict(node.record)
            assert caught.value.code == "state_in_use"
        else:
            self.store.evict(node.record)
            assert all(page is None for page in node.record.pages)

    @precondition(lambda self: self.held_nodes())
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        node, _ = self.pick(data, self.held_nodes())
        try:
            self.compute_again(node)
        except OutOfPages:
            return
        assert self.store.tier(node.record) in ("device", "storing")

    @precondition(lambda self: self.num_host_pages and self.held_nodes())
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        node, _ = self.pick(data, self.held_nodes())
        try:
            self.store.offload(node.record)
        except OutOfHostPages:
            assert self.books.host.num_free < len(node.record.pages)

    @precondition(lambda self: self.num_host_pages and self.held_nodes())
    @rule(data=st.data(), demand=st.booleans())
    def load(self, data: st.DataObject, demand: bool) -> None:
        node, _ = self.pick(data, self.held_nodes())
        try:
            on_way = (self.store.load if demand else self.store.prefetch)(node.record)
        except OutOfPages:
            assert demand
            return
        assert (on_way > 0) == ("loading" in page_tiers(node.record))

    @precondition(lambda self: self.num_host_pages and self.held_nodes())
    @rule(data=st.data())
    def evict_host(self, data: st.DataObject) -> None:
        node, _ = self.pick(data, self.held_nodes())
        try:
            self.store.evict_host(node.record)
        except KVStoreError as error:
            assert error.code == "state_in_use"
            return
        assert not any(node.record.copies)

    @precondition(lambda self: self.num_host_pages)
    @rule(polls=st.integers(1, 5))
    def pump(self, polls: int) -> None:
        for _ in range(polls):
            self.now += 0.5
            self.store.pump()
        self.forget_expired()

    def compute_again(self, node: ShadowNode) -> None:
        compute_again(self.store, self.arena, node, self.bring, self.verify)
        self.forget_expired()

    def bring(self, read: Read) -> Lease:
        while True:
            try:
                return self.store.lease([read])
            except NotResident as missing:
                assert missing.nodes == (read.node,)
                if missing.nowhere:
                    self.compute_again(self.shadow[read.node.uid])
                else:
                    self.store.load([read])
                    self.pump(1)

    @invariant()
    def books_balance(self) -> None:
        assert problems(self.books) == []
        stats = self.store.stats()
        pages = stats.pages_free + stats.pages_cached + stats.pages_live + stats.pages_waiting
        assert pages + stats.pages_moving == stats.pages_total
        assert stats.host_free + stats.host_live + stats.host_moving == stats.host_total
        if not self.steps:
            assert stats.pages_waiting == 0

    @invariant()
    def exactly_what_is_held_is_kept(self) -> None:
        held: list[Instance] = []
        for node, at in self.held_nodes():
            held += [*node.passed, *((node, offset) for offset in range(at))]
        for writing in self.writing:
            for instances in writing.node.parents:
                held += instances
        expected = covered_pages(self.store, held)
        for node in self.shadow.values():
            kept = self.books.holds.covered_pages(node.record)
            assert kept == expected.get(node.record, set())
            assert all(page is None or index in kept for index, page in enumerate(node.record.pages))

    def teardown(self) -> None:
        while self.steps:
            self.end_step()
        for writing in self.writing:
            writing.writer.abort()
        for lease, reads in self.leases:
            self.verify(lease, reads)
            lease.release()
        for node, at in self.held:
            self.store.unhold(node.record, at)
        for handle in self.handles:
            self.store.release(handle)
        if isinstance(self.transfer, FakeTransfer):
            self.transfer.release_lost()
            self.pump(10)
            assert self.store.stats().host_free == self.num_host_pages
        assert problems(self.books) == []
        stats = self.store.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total == self.store.available()
        assert stats.states == stats.handles == stats.leases == stats.writers == 0


def page_tiers(node: NodeRecord) -> set[Tier]:
    return {page_tier(node, index) for index in range(len(node.pages))}


@pytest.mark.parametrize(
    "page_size, num_host_pages", [(1, 0), (3, 0), (16, 0), (1, 12), (3, 5), (3, 40), (16, 8)]
)
def test_any_order_of_operations_keeps_the_books_and_the_kv(page_size: int, num_host_pages: int) -> None:
    sizes = {"page_size": page_size, "num_host_pages": num_host_pages}
    machine = type(f"PageSize{page_size}Host{num_host_pages}", (StoreMachine,), sizes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
