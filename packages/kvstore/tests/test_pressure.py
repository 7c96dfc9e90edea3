"""Who makes room, in numbers: what can be dropped, what is stored for it, and who leaves the host."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from kvstore_helpers import (
    SIGNATURE,
    ByHand,
    Costs,
    balanced,
    make_store,
    offload,
    read,
    refused,
    setup,
    use_all_pages,
    write,
)

from dagengine_kvstore import (
    Candidate,
    Copy,
    KVStore,
    KVStoreError,
    Lease,
    LeastRecentlyUsed,
    NextUse,
    NodeRecord,
    NoTransfer,
    OutOfHostPages,
    OutOfPages,
    Read,
)


def writer_of(store: KVStore, num_pages: int) -> None:
    """A writer that takes pages."""
    store.begin([], [], 0, signature=SIGNATURE).reserve(num_pages * store.page_size)


def tiers(store: KVStore, *nodes: NodeRecord) -> list[str]:
    return [str(store.tier(node)) for node in nodes]


class Recording(LeastRecentlyUsed):
    def __init__(self) -> None:
        self.seen: list[Candidate] = []

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        self.seen = list(candidates)
        return super().order(candidates)


def test_a_policy_sees_next_use_costs_and_what_the_host_has() -> None:
    policy = Recording()
    store, transfer = setup(
        num_pages=5, eviction=policy, costs=Costs(7, 3), next_use=lambda node: node.uid * 10
    )
    clean, dirty = write(store, [1] * 12), write(store, [2] * 5)
    offload(store, transfer, clean)
    store.load([Read(clean, 0, 8)])
    store.lease([Read(clean, 0, 8)]).release()
    use_all_pages(store)
    writer_of(store, store.num_unused)
    assert store.available() == 2
    policy.seen = []
    with pytest.raises(OutOfPages):
        writer_of(store, 3)
    by_uid = {candidate.uid: candidate for candidate in policy.seen}
    assert (by_uid[dirty.uid].num_pages, by_uid[dirty.uid].num_clean) == (2, 0)
    assert by_uid[dirty.uid].next_use == dirty.uid * 10
    assert (by_uid[dirty.uid].recompute_us, by_uid[dirty.uid].reload_us) == (35, 6)
    writer_of(store, 1)
    by_uid = {candidate.uid: candidate for candidate in policy.seen}
    assert (by_uid[clean.uid].num_pages, by_uid[clean.uid].num_clean) == (2, 3)
    assert (by_uid[clean.uid].recompute_us, by_uid[clean.uid].reload_us) == (84, 6)


def test_stores_for_room_are_as_many_as_are_short() -> None:
    for needed, stored in ((1, 1), (2, 2), (3, 2), (4, 3)):
        store, transfer = setup(num_pages=6)
        for token in range(4):
            write(store, [token] * (8 if token == 1 else 4))
        assert store.num_unused == 1
        with pytest.raises(OutOfPages) as caught:
            writer_of(store, 1 + needed)
        assert len(transfer.copies) == stored
        assert caught.value.moving == sum(len(copy.pages) for copy in transfer.copies)
        assert (caught.value.needed, caught.value.available) == (1 + needed, 1)


def test_pages_that_wait_for_a_step_are_not_asked_for_twice() -> None:
    store, transfer = setup(num_pages=4)
    write(store, [1] * 8)
    fence = store.begin_step()
    leaving = store.begin([], [], 0, signature=SIGNATURE)
    leaving.reserve(8)
    leaving.append([3] * 8)
    leaving.abort()
    with pytest.raises(OutOfPages) as caught:
        writer_of(store, 2)
    assert (caught.value.waiting, caught.value.moving) == (2, 0) and transfer.copies == []
    with pytest.raises(OutOfPages) as caught:
        writer_of(store, 3)
    assert caught.value.moving == 2
    store.end_step(fence)


def test_what_can_be_dropped_counts_before_what_must_be_stored() -> None:
    store, transfer = setup(num_pages=4)
    clean, dirty = write(store, [1] * 8), write(store, [2] * 8)
    offload(store, transfer, clean)
    store.load(clean)
    store.lease([read(clean)]).release()
    use = store.lease([read(clean)])
    use.release()
    assert store.available() == 2 and store.can_fit(2) and not store.can_fit(3)
    writer_of(store, 2)
    assert tiers(store, clean, dirty) == ["host", "device"] and len(transfer.copies) == 1


def test_what_the_transfer_refuses_is_dropped_at_once() -> None:
    store, transfer = setup(num_pages=2)
    node = write(store, [1] * 8)
    transfer.refuses = True
    writer_of(store, 1)
    assert tiers(store, node) == ["nowhere"]
    balanced(store)


def test_the_host_takes_what_fits_and_the_rest_is_dropped() -> None:
    """Four host pages, three states of two pages that all would be worth it: the last in order is not stored."""
    store, transfer = setup(num_pages=6, num_host_pages=4)
    nodes = [write(store, [token] * 8) for token in range(3)]
    assert store.available() == 2
    writer_of(store, 2)
    assert tiers(store, *nodes) == ["device", "device", "nowhere"]
    with pytest.raises(OutOfPages):
        writer_of(store, 4)
    assert [len(copy.pages) for copy in transfer.copies] == [2, 2]


def test_a_state_that_just_fits_on_the_host_is_stored() -> None:
    store, _ = setup(num_pages=2, num_host_pages=2)
    node = write(store, [1] * 8)
    assert store.available() == 0
    with pytest.raises(OutOfPages):
        writer_of(store, 1)
    assert tiers(store, node) == ["storing"]


def test_who_comes_later_in_the_order_keeps_its_host_pages_unless_they_are_asked_for() -> None:
    """Under pressure nobody takes the host pages of a state that will be needed sooner; `offload` does."""
    store, transfer = setup(num_pages=6, num_host_pages=2)
    old, young = write(store, [1] * 8), write(store, [2] * 8)
    offload(store, transfer, young)
    use_all_pages(store)
    assert store.available() == 6
    writer_of(store, 5)
    assert tiers(store, old, young) == ["nowhere", "host"] and len(transfer.copies) == 1
    store, transfer = setup(num_pages=6, num_host_pages=2)
    old, young = write(store, [1] * 8), write(store, [2] * 8)
    offload(store, transfer, young)
    store.offload(old)
    assert tiers(store, old, young) == ["storing", "nowhere"]
    balanced(store)


def test_a_pinned_or_claimed_state_keeps_its_host_pages() -> None:
    store, transfer = setup(num_pages=8, num_host_pages=2)
    kept, other = write(store, [1] * 8), write(store, [2] * 8)
    offload(store, transfer, kept)
    handle = store.name(kept, pin=True)
    with pytest.raises(OutOfHostPages) as caught:
        store.offload(other)
    assert (caught.value.needed, caught.value.available) == (2, 0)
    store.unpin(handle)
    store.load(kept)
    with pytest.raises(OutOfHostPages):
        store.offload(other)
    store.lease([read(kept)]).release()
    store.offload(other)
    assert tiers(store, kept, other) == ["device", "storing"]


def test_leased_pages_are_not_offered_nor_are_others_kept_from_it() -> None:
    store, transfer = setup(num_pages=4, num_host_pages=0)
    leased, other = write(store, [1] * 8), write(store, [2] * 8)
    lease = store.lease([Read(leased, 0, 3)])
    assert store.available() == 3
    writer_of(store, 3)
    assert tiers(store, leased, other) == ["nowhere", "nowhere"] and leased.pages[0] is not None
    lease.release()
    assert transfer.copies == []


@pytest.mark.parametrize("write_back, stored", [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)])
def test_storing_ahead_keeps_as_much_as_it_is_told_to(write_back: int, stored: int) -> None:
    """Two pages free or cached, two states of two pages."""
    store, transfer = setup(num_pages=6, write_back=write_back)
    gone = write(store, [9] * 4)
    for token in range(2):
        write(store, [token] * 8)
    store.unhold(gone)
    assert (store.stats().pages_free, store.stats().pages_cached) == (1, 1)
    store.pump()
    assert len(transfer.copies) == stored
    transfer.end(*range(1, stored + 1))
    store.pump()
    store.pump()
    assert len(transfer.copies) == stored


def test_a_restore_in_a_full_pool_takes_the_pages_of_its_own_node() -> None:
    """Of four pages the node has the last three; all four are computed again, and nothing else can go."""
    store, _ = setup(num_pages=4, num_host_pages=0)
    node = write(store, list(range(16)))
    store.lease([Read(node, 0, 3)]).release()
    lease = store.lease([Read(node, 4, 16)])
    writer_of(store, 1)
    lease.release()
    next(iter(store._books.writers.values())).abort()
    use_all_pages(store)
    assert [page is None for page in node.pages] == [True, False, False, False]
    writer = store.restore(node)
    lease = store.lease([Read(node, 12, 16)])
    with pytest.raises(OutOfPages):
        writer.reserve(16)
    assert [page is None for page in node.pages] == [True, False, False, False]
    lease.release()
    writer.reserve(16)
    assert node.pages == [None] * 4
    writer.append(writer.todo)
    writer.commit(16)
    writer.finish()
    assert tiers(store, node) == ["device"]
    store.check()


def test_a_restore_does_not_take_the_pages_that_it_goes_on_from() -> None:
    store, _ = setup(num_pages=4, num_host_pages=0)
    node = write(store, list(range(16)))
    lease = store.lease([Read(node, 0, 4), Read(node, 8, 16)])
    writer_of(store, 1)
    lease.release()
    next(iter(store._books.writers.values())).abort()
    use_all_pages(store)
    writer = store.restore(node)
    assert writer.todo == list(range(4, 16))
    writer.reserve(12)
    assert [page is None for page in node.pages] == [False, True, True, True]


def test_what_came_back_is_found_by_equal_work_and_was_used_last() -> None:
    store, transfer = setup()
    node, other = write(store, list(range(8))), write(store, [7] * 4)
    offload(store, transfer, node)
    use_all_pages(store)
    assert store.begin([], [], 0, signature=SIGNATURE).match(list(range(8))) == 0
    store.load(node)
    transfer.end(2)
    store.pump()
    assert store.begin([], [], 0, signature=SIGNATURE).match(list(range(8))) == 8
    assert node.last_used > other.last_used
    assert (store.stats().pages_stored, store.stats().pages_loaded) == (2, 2)
    for _ in range(2):
        use_all_pages(store)
        store.lease([read(node)]).release()
    store.offload(other)
    transfer.end(3)
    store.pump()
    assert store.stats().pages_stored == 3


def test_a_state_of_which_the_host_has_a_part_is_loaded_in_that_part() -> None:
    store, transfer = setup()
    node = write(store, list(range(12)))
    lease = store.lease([Read(node, 0, 4)])
    offload_part(store, transfer, node)
    lease.release()
    assert store.wants_reload(node)
    use_all_pages(store)
    assert store.load([Read(node, 0, 12)]) == 2
    assert [device for device, _ in transfer.copies[1].pages] != []
    transfer.end(2)
    store.pump()
    assert tiers(store, node) == ["device"] and not store.wants_reload(node)
    with store.lease([read(node)]) as again:
        assert [extent.stored for extent in again.extents(0)] == [0, 4, 8]


def offload_part(store: KVStore, transfer: ByHand, node: NodeRecord) -> None:
    """Under pressure, what a lease reads stays."""
    writer = store.begin([], [], 0, signature=SIGNATURE)
    with pytest.raises(OutOfPages):
        writer.reserve(7 * 4)
    transfer.end(1)
    store.pump()
    writer.reserve(7 * 4)
    writer.abort()
    assert [page is None for page in node.pages] == [False, True, True]


def test_events_of_what_goes_wrong_have_ticket_tier_and_reason() -> None:
    now = [0.0]
    transfer = ByHand()
    store = make_store(8, transfer=transfer, clock=lambda: now[0], transfer_timeout_s=5.0, max_failures=1)
    failing, lost = write(store, [1] * 8), write(store, [2] * 8)
    kid = write(store, [3] * 4)
    offload(store, transfer, failing, lost)
    use_all_pages(store)
    first = store.events.next_seq
    store.load(failing)
    transfer.end(3, error="broken")
    store.poll()
    store.load(lost)
    store.offload(kid)
    now[0] = 5.0
    store.poll()
    transfer.end(4)
    transfer.confirms.add(5)
    store.poll()
    transfer.end(5, 77)
    store.poll()
    seen = [
        (event.kind, event.node, event.pages, event.ticket, event.tier, event.error)
        for event in store.events.since(first)
        if event.ticket is not None
    ]
    assert seen == [
        ("load", 1, 2, 3, "loading", None),
        ("load_failed", 1, 2, 3, "host", "broken"),
        ("given_up", 1, 2, 3, "nowhere", None),
        ("load", 2, 2, 4, "loading", None),
        ("store", 3, 1, 5, "storing", None),
        ("load_lost", 2, 2, 4, "nowhere", None),
        ("store_lost", 3, 1, 5, "device", None),
        ("completion_late", 2, 2, 4, None, None),
        ("quarantine_over", 3, 1, 5, None, None),
        ("completion_duplicate", None, None, 5, None, None),
        ("completion_unknown", None, None, 77, None, None),
    ]
    s = store.stats()
    assert (s.loads_lost, s.stores_lost, s.loads_failed, s.completions_late) == (1, 1, 1, 1)
    assert (s.completions_duplicate, s.completions_unknown) == (1, 1)
    assert store.events.since(store.events.next_seq - 1)[0].seconds == 5.0


def test_an_offload_tells_how_it_ended() -> None:
    store, transfer = setup(max_failures=1)
    loaded, released, failed = (write(store, [token] * 8) for token in range(3))
    for node in (loaded, released, failed):
        store.offload(node)
    store.load(loaded)
    store.unhold(released)
    transfer.end(3, error="broken")
    store.pump()
    ends = [(e.kind, e.node) for e in store.events if e.kind.startswith("offload_")]
    assert ends == [("offload_cancelled", 1), ("offload_cancelled", 2), ("offload_failed", 3)]
    refused_event = [e for e in store.events if e.kind == "store_failed"]
    assert [(e.node, e.ticket, e.tier, e.error) for e in refused_event] == [(3, 3, "device", "broken")]


def test_an_offload_waits_for_a_restore_and_for_a_claim() -> None:
    store, transfer = setup()
    node = write(store, [1] * 8)
    store.load(node)
    store.offload(node)
    transfer.end(1)
    store.pump()
    assert tiers(store, node) == ["device"], "claimed by the load"
    store.lease([read(node)]).release()
    writer = store.restore(node)
    store.pump()
    assert tiers(store, node) == ["device"], "being restored"
    writer.abort()
    store.pump()
    assert tiers(store, node) == ["host"]


def test_who_reads_soonest_is_kept_on_the_device() -> None:
    ranks: dict[int, int] = {}
    store, _ = setup(
        num_pages=6, num_host_pages=0, eviction=NextUse(), next_use=lambda node: ranks.get(node.uid)
    )
    nodes = [write(store, [token] * 8) for token in range(3)]
    ranks.update({nodes[0].uid: 1, nodes[1].uid: 2})
    writer_of(store, 2)
    assert tiers(store, *nodes) == ["device", "device", "nowhere"]
    writer_of(store, 2)
    assert tiers(store, *nodes) == ["device", "nowhere", "nowhere"]


@pytest.mark.parametrize("name", ["nonesuch"])
def test_a_transfer_that_is_not_installed_is_named(name: str) -> None:
    with refused("plugin_not_found", "dagengine.transfers"):
        make_store(transfer=name)


def test_a_transfer_that_is_no_factory_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagengine_kvstore.tiers.load", lambda group, name: group)
    with pytest.raises(KVStoreError, match=r"^'anything' of dagengine\.transfers is not callable$") as caught:
        make_store(transfer="anything")
    assert (caught.value.code, caught.value.field) == ("plugin_broken", "transfer")
    monkeypatch.setattr("dagengine_kvstore.tiers.load", lambda group, name: ByHand)
    assert make_store(transfer="anything").stats().host_total == 16


def test_the_one_tier_takes_nothing_and_says_so() -> None:
    message = "^there is no host tier to store pages to or from$"
    with pytest.raises(KVStoreError, match=message) as caught:
        NoTransfer().submit(Copy("store", ((0, 0),)))
    assert (caught.value.code, caught.value.field) == ("capacity", "pages")


class Counting(LeastRecentlyUsed):
    def __init__(self) -> None:
        self.num_asked = 0

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        self.num_asked += 1
        return super().order(candidates)


def test_one_tiers_policy_is_asked_once_for_many_who_need_room() -> None:
    policy = Counting()
    store = make_store(num_pages=12, eviction=policy)
    nodes = [write(store, [number] * 5) for number in range(6)]
    for _ in range(2):
        writer_of(store, 2)
    assert tiers(store, *nodes) == ["nowhere"] * 2 + ["device"] * 4 and policy.num_asked == 1
    lease = store.lease([read(nodes[2])])
    writer_of(store, 2)
    assert tiers(store, *nodes[2:]) == ["device", "nowhere", "device", "device"] and policy.num_asked == 1
    lease.release()
    writer_of(store, 2)
    assert tiers(store, *nodes[2:]) == ["device", "nowhere", "nowhere", "device"] and policy.num_asked == 2
    with pytest.raises(OutOfPages):
        writer_of(store, 5)
    writer_of(store, 4)
    assert tiers(store, *nodes) == ["nowhere"] * 6
    store.check()


class Asked(LeastRecentlyUsed):
    """The same order, for which the store asks each time."""


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_use_is_that_of_the_policy(seed: int) -> None:
    rng = random.Random(seed)
    stores = [make_store(num_pages=24, eviction=policy) for policy in ("lru", Asked())]
    nodes: list[list[NodeRecord]] = []
    leases: list[list[Lease]] = []
    pins: list[list[str]] = []

    def read_some() -> None:
        chosen = rng.sample(range(len(nodes)), min(len(nodes), rng.randint(1, 3)))
        if all(nodes[index][0].length and None not in nodes[index][0].pages for index in chosen):
            reads = zip(*([read(node) for node in nodes[index]] for index in chosen), strict=True)
            leases.append([store.lease(some) for store, some in zip(stores, reads, strict=True)])

    def written(store: KVStore, tokens: list[int]) -> NodeRecord | None:
        try:
            return write(store, tokens)
        except OutOfPages:
            return None

    def restore() -> None:
        for store, node in zip(stores, rng.choice(nodes), strict=True):
            if None in node.pages:
                writer = store.restore(node)
                try:
                    writer.reserve(len(writer.todo))
                except OutOfPages:
                    writer.abort()
                else:
                    writer.append(writer.todo)
                    writer.commit(writer.num_tokens)
                    writer.finish()

    for number in range(150):
        kind = rng.choice(("write", "write", "read", "end", "pin", "unpin", "restore", "step"))
        if kind == "write" or not nodes:
            tokens = [number] * rng.randint(1, 12)
            both = [written(store, tokens) for store in stores]
            assert both.count(None) in (0, 2), "both have room, or neither has"
            if None not in both:
                nodes.append(both)  # type: ignore[arg-type]
        elif kind == "read":
            read_some()
        elif kind == "end" and leases:
            for lease in leases.pop(rng.randrange(len(leases))):
                lease.release()
        elif kind == "pin" and len(pins) < 3:
            pinned = rng.choice(nodes)
            pins.append([store.name(node, pin=True) for store, node in zip(stores, pinned, strict=True)])
        elif kind == "unpin" and pins:
            for store, name in zip(stores, pins.pop(), strict=True):
                store.unpin(name)
        elif kind == "restore":
            restore()
        elif kind == "step":
            for store in stores:
                store.end_step(store.begin_step())
        assert all(tiers(stores[0], one) == tiers(stores[1], other) for one, other in nodes)
    assert stores[0].stats().evictions == stores[1].stats().evictions > 10
    for store in stores:
        store.check()


def test_the_order_of_use_forgets_nodes_that_nobody_can_reach() -> None:
    store = make_store(num_pages=4)
    kept = write(store, [0])
    for number in range(3000):
        store.unhold(write(store, [number]))
    assert len(store._books._used) < 2000 and list(store._books.by_use()) == [kept]


def test_a_look_at_the_order_of_use_that_ends_early_forgets_what_it_came_by() -> None:
    store = make_store(num_pages=8)
    nodes = [write(store, [number]) for number in range(5)]
    for node in (nodes[0], nodes[1], nodes[4]):
        store.evict(node)
    for node in store._books.by_use():
        assert node is nodes[2]
        break
    assert list(store._books._used) == [nodes[2].uid, nodes[3].uid, nodes[4].uid]
    store.check()


def test_pinned_and_released_nodes_change_who_makes_room() -> None:
    store = make_store(num_pages=8)
    nodes = [write(store, [number] * 5) for number in range(4)]
    writer_of(store, 2)
    pinned = store.name(nodes[1], name="kept", pin=True)
    writer_of(store, 2)
    assert tiers(store, *nodes) == ["nowhere", "device", "nowhere", "device"]
    store.unpin(pinned)
    writer_of(store, 2)
    assert tiers(store, *nodes) == ["nowhere", "nowhere", "nowhere", "device"]
    store.check()


def test_what_was_used_without_a_lease_goes_later() -> None:
    store = make_store(num_pages=6)
    nodes = [write(store, [first] * 8) for first in range(3)]
    store.use([nodes[0], nodes[2]])
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    assert tiers(store, *nodes) == ["device", "nowhere", "device"]
    with pytest.raises(KVStoreError) as error:
        store.use([nodes[1], writer.node])
    assert (error.value.code, error.value.field) == ("state_not_sealed", "nodes")
    assert nodes[1].last_used < nodes[0].last_used == nodes[2].last_used
    writer.abort()
    store.check()
