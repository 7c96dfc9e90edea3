"""What offloading and loading promise, case by case; the transfer is driven by hand, one completion at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
from kvstore_helpers import (
    SIGNATURE,
    Clock,
    Costs,
    assert_all_pages_back,
    balanced,
    child,
    make_store,
    offload,
    read,
    refused,
    setup,
    use_all_pages,
    write,
)

from dagengine_kvstore import (
    KVStore,
    KVStoreError,
    NextUse,
    NodeRecord,
    NotResident,
    OutOfHostPages,
    OutOfPages,
    Parent,
    PinBudgetExceeded,
    Read,
    Tier,
)
from dagengine_kvstore.pages import PageState
from dagengine_kvstore.residency import PageCopy, not_resident


def test_a_state_goes_to_the_host_and_back_and_stays_what_it_is() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)), own_start=7)
    kid = child(store, node, [1])
    handle = store.name(node)
    keys = node.content_key(6)
    tiers = [store.tier(node)]
    store.offload(node)
    tiers.append(store.tier(node))
    assert transfer.copies[0].kind == "store" and len(transfer.copies[0].pages) == 2
    assert transfer.copies[0].bases == (7, 11) and transfer.copies[0].tokens == ((0, 1, 2, 3), (4, 5))
    assert len(set(transfer.copies[0].keys)) == 2 and {len(k) for k in transfer.copies[0].keys} == {32}
    balanced(store)
    transfer.end(1)
    assert [event.kind for event in store.pump()] == ["stored", "evict", "offloaded"]
    tiers.append(store.tier(node))
    info = store.describe(handle)
    assert (info.tier, info.pages, info.host_pages, info.node) == ("host", 0, 2, node.uid)
    assert store.stats().host_live == 2
    fill = store.begin([], [], 0, signature=SIGNATURE)
    fill.reserve((store.num_unused) * 4)  # the old device pages become somebody else's
    fill.abort()
    with pytest.raises(NotResident) as caught:
        store.lease([read(node), read(kid)])
    assert (caught.value.nodes, caught.value.on_host, caught.value.nowhere) == ((node,), (node,), ())
    assert caught.value.loading == ()
    assert store.load([read(node)]) == 2
    tiers.append(store.tier(node))
    with pytest.raises(NotResident) as caught:
        store.lease([read(node)])
    assert caught.value.loading == caught.value.on_host == (node,)
    balanced(store)
    transfer.end(2)
    assert [event.kind for event in store.poll()] == ["loaded"]
    tiers.append(store.tier(node))
    assert tiers == ["device", "storing", "host", "loading", "device"]
    with store.lease([read(node)]) as lease:
        assert [extent.stored for extent in lease.extents(0)] == [7, 11]
    assert store.resolve(handle) == (node, 6) and node.content_key(6) == keys
    assert [copy.kind for copy in transfer.copies] == ["store", "load"]
    balanced(store)


def test_a_page_goes_only_the_ways_that_there_are() -> None:
    copy = PageCopy(0, 0, 1, 0, None)
    with refused("illegal_transition", "tier"):
        copy.to(Tier.LOADING)
    assert copy.tier is Tier.DEVICE
    for tier in (Tier.STORING, Tier.HOST, Tier.LOADING, Tier.DEVICE, Tier.HOST, Tier.NOWHERE):
        copy.to(tier)
    with refused("illegal_transition"):
        copy.to(Tier.HOST)


def test_a_state_that_is_read_can_be_read_while_it_is_stored_and_leaves_when_it_is_free() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)))
    lease = store.lease([read(node)])
    store.offload(node)
    assert store.tier(node) == "storing"
    second = store.lease([read(node)])
    transfer.end(1)
    store.pump()
    assert store.tier(node) == "device", "still read"
    lease.release()
    store.pump()
    assert store.tier(node) == "device"
    fence = store.begin_step()
    second.release()
    store.pump()
    assert store.tier(node) == "host" and store.stats().pages_waiting == 2, "the step may read it"
    store.end_step(fence)
    assert store.available() == 8
    balanced(store)


def test_what_the_host_has_or_sends_is_there() -> None:
    store, transfer = setup()
    node = write(store, list(range(8)))
    offload(store, transfer, node)
    use_all_pages(store)
    assert store.is_there([read(node)])
    assert store.load([read(node)]) == 2
    assert store.is_there([read(node)]), "on its way"
    transfer.end(2)
    store.poll()
    store.evict_host(node)
    store.evict(node)
    assert not store.is_there([read(node)])
    store.check()


def test_a_pinned_state_is_stored_and_stays_on_the_device_until_it_is_unpinned() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)))
    handle = store.name(node, pin=True)
    store.offload(node)
    transfer.end(1)
    store.pump()
    assert store.tier(node) == "device"
    with refused("state_in_use"):
        store.evict_host(node)
    store.unpin(handle)
    store.pump()
    assert store.tier(node) == "host"


def test_loading_a_state_undoes_its_offload() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)))
    store.offload(node)
    assert store.load(node) == 0
    transfer.end(1)
    store.pump()
    assert store.tier(node) == "device"
    assert store.evict(node) == 2 and store.tier(node) == "host", "the copy is kept"


def test_storing_waits_for_every_step_that_may_still_write_the_page() -> None:
    """vllm#45704: nothing is copied before its kernel has run; readers are no hindrance."""
    store, transfer = setup()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    writer.append([1] * 8)
    first, second = store.begin_step(), store.begin_step()
    writer.commit(8)
    node = writer.seal()
    store.offload(node)
    store.pump()
    assert transfer.copies == [] and store.tier(node) == "device"
    store.end_step(first)
    store.pump()
    assert transfer.copies == []
    third = store.begin_step()
    store.end_step(second)
    store.pump()
    assert len(transfer.copies) == 1, "the third step began after the writer had gone"
    store.end_step(third)
    balanced(store)


def test_an_open_step_that_only_reads_does_not_keep_a_page_from_being_stored() -> None:
    store, transfer = setup()
    node = write(store, [1] * 8)
    lease = store.lease([read(node)])
    store.begin_step()
    lease.release()
    store.offload(node)
    assert len(transfer.copies) == 1


def test_an_unsealed_or_released_node_is_not_moved() -> None:
    store, transfer = setup()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    for move in (store.offload, store.load, store.prefetch, store.evict_host):
        with refused("state_not_sealed"):
            move(writer.node)
    writer.abort()
    node = write(store, [1])
    store.unhold(node)
    for move in (store.offload, store.load, store.prefetch):
        with refused("state_released"):
            move(node)
    with refused("state_released"):
        store.load([read(node)])
    assert transfer.copies == []


def test_nothing_is_stored_that_is_still_being_loaded() -> None:
    """vllm#46951: a block that has not arrived is not offloaded."""
    store, transfer = setup()
    node = write(store, list(range(6)))
    offload(store, transfer, node)
    use_all_pages(store)
    store.prefetch(node)
    store.offload(node)
    store.pump()
    assert [copy.kind for copy in transfer.copies] == ["store", "load"]
    transfer.end(2)
    store.pump()
    assert store.tier(node) == "host" and len(transfer.copies) == 2, "its copy is still good"
    balanced(store)


def test_equal_nodes_are_stored_once_and_loaded_once() -> None:
    """LMCache: the same page under two names is counted and copied once, and freed once."""
    store, transfer = setup()
    tokens = list(range(8))
    twins = [write(store, tokens), write(store, tokens, match=True)]
    assert twins[0].pages == twins[1].pages
    offload(store, transfer, *twins)
    assert len(transfer.copies) == 1 and store.stats().host_live == 2
    use_all_pages(store)
    assert store.load(twins[0]) == store.load(twins[1]) == 2
    assert len(transfer.copies) == 2
    transfer.end(2)
    store.poll()
    assert twins[0].pages == twins[1].pages and store.stats().pages_live == 2
    store.check()
    store.unhold(twins[0])
    assert store.tier(twins[1]) == "device" and store.stats().host_live == 2
    store.unhold(twins[1])
    assert store.stats().host_free == 16
    assert_all_pages_back(store)


def test_an_equal_node_finds_the_copy_that_another_one_made() -> None:
    """Its own offload copies nothing, even its eviction loses nothing."""
    store, transfer = setup()
    tokens = list(range(8))
    twins = [write(store, tokens), write(store, tokens, match=True)]
    offload(store, transfer, twins[0])
    assert store.tier(twins[1]) == "device"
    store.evict(twins[1])
    assert store.tier(twins[1]) == "host" and len(transfer.copies) == 1
    balanced(store)


def test_overlapping_reads_of_one_state_through_several_parents_load_each_page_once() -> None:
    """vllm#37076: the same block twice in one table."""
    store, transfer = setup()
    node = write(store, list(range(12)))
    reads = [Read(node, 0, 7), Read(node, 5, 12), Read(node, 0, 7, 3)]
    offload(store, transfer, node)
    use_all_pages(store)
    assert store.load(reads) == 3 and len(transfer.copies[1].pages) == 3
    transfer.end(2)
    store.poll()
    lease = store.lease(reads)
    assert node.leases == 3 and {run[-1] for run in lease.pages[::2]} == {node.pages[1]}
    lease.release()
    balanced(store)


def test_many_readers_of_an_offloaded_state_wait_for_one_load() -> None:
    """vllm#44294: nobody waits for a load of his own."""
    store, transfer = setup()
    node = write(store, list(range(8)))
    readers = [Parent.inherit(node)] * 50
    writers = [store.begin([parent], [read(node)], 8, signature=SIGNATURE) for parent in readers]
    offload(store, transfer, node)
    use_all_pages(store)
    for writer in writers:
        assert store.load(writer.node.reads) == 2
    assert len(transfer.copies) == 2
    transfer.end(2)
    store.poll()
    leases = [store.lease(writer.node.reads) for writer in writers]
    for lease, writer in zip(leases, writers, strict=True):
        lease.release()
        writer.abort()
    store.unhold(node)
    assert_all_pages_back(store)


def test_a_page_is_on_the_device_again_without_a_copy_if_it_is_still_there() -> None:
    store, transfer = setup()
    node = write(store, list(range(8)))
    pages = list(node.pages)
    offload(store, transfer, node)
    assert store.load(node) == 0
    assert node.pages == pages and store.tier(node) == "device" and len(transfer.copies) == 1
    last = store.events.since(store.events.next_seq - 1)[0]
    assert (last.kind, last.node, last.pages, last.tier) == ("returned", node.uid, 2, "device")
    balanced(store)


def test_loading_takes_all_pages_or_none() -> None:
    store, transfer = setup(num_pages=4)
    first, second = write(store, list(range(8))), write(store, list(range(1, 9)))
    offload(store, transfer, first, second)
    use_all_pages(store)
    blocker = store.begin([], [], 0, signature=SIGNATURE)
    blocker.reserve(4)
    before = store.stats()
    with pytest.raises(OutOfPages) as caught:
        store.load([read(first), read(second)])
    assert (caught.value.needed, caught.value.available) == (4, 3)
    assert store.prefetch([read(first), read(second)]) == 0
    assert store.stats() == before and len(transfer.copies) == 2
    assert store.prefetch([read(first)]) == 2
    balanced(store)


def test_prefetching_evicts_nobody_and_loading_does() -> None:
    store, transfer = setup(num_pages=4)
    away, here = write(store, list(range(8))), write(store, list(range(1, 9)))
    offload(store, transfer, away, here)
    store.load(here)
    store.lease([read(here)]).release()
    other = write(store, [3] * 8)
    assert store.num_unused == 0
    assert store.prefetch(away) == 0 and len(transfer.copies) == 2
    assert store.load(away) == 2
    assert store.tier(here) == "host", "it has a copy, so it goes first"
    assert store.tier(other) == "device"
    balanced(store)


@pytest.mark.parametrize("patience", [3])
def test_what_was_loaded_for_a_reader_stays_until_it_was_used_once(patience: int) -> None:
    """An exact fit: two readers of four pages each in a pool of four. Nobody evicts what the other waits for."""
    store, transfer = setup(num_pages=4, patience=patience)
    states = [write(store, [token] * 16, own_start=0) for token in (1,)]
    offload(store, transfer, states[0])
    states.append(write(store, [2] * 16))
    offload(store, transfer, states[1])
    use_all_pages(store)
    first, second = states
    assert store.load(first) == 4
    for _ in range(patience):
        with pytest.raises(OutOfPages):
            store.load(second)
        store.pump()
        assert store.load(first) == 4
    transfer.end(3)
    store.pump()
    with pytest.raises(OutOfPages):
        store.load(second)
    assert store.tier(first) == "device"
    lease = store.lease([read(first)])
    with pytest.raises(OutOfPages):
        store.load(second)
    lease.release()
    assert store.load(second) == 4 and store.tier(first) == "host"
    transfer.end(4)
    store.pump()
    store.lease([read(second)]).release()
    assert [copy.kind for copy in transfer.copies] == ["store", "store", "load", "load"]
    balanced(store)


def test_a_reader_who_never_comes_keeps_nobody_out() -> None:
    """LMCache#987: what was looked up and never used does not stay pinned."""
    store, transfer = setup(num_pages=2, patience=3)
    first = write(store, [1] * 8)
    offload(store, transfer, first)
    second = write(store, [2] * 8)
    offload(store, transfer, second)
    use_all_pages(store)
    store.load(first)
    transfer.end(3)
    for _ in range(3):
        store.pump()
        with pytest.raises(OutOfPages):
            store.load(second)
    store.pump()
    assert store.load(second) == 2
    transfer.end(4)
    store.pump()
    for node in (first, second):
        store.unhold(node)
    assert_all_pages_back(store)
    assert store.stats().host_free == 16


def test_two_readers_who_have_half_of_it_each_do_not_wait_for_each_other_for_ever() -> None:
    """vllm#45388: two half-loaded requests in a pool that takes one of them."""
    store, transfer = setup(num_pages=4, patience=3)
    halves = [write(store, [token] * 8) for token in range(2)]
    offload(store, transfer, *halves)
    others = [write(store, [token] * 8) for token in range(2, 4)]
    offload(store, transfer, *others)
    first, second = ([read(a), read(b)] for a, b in zip(halves, others, strict=True))
    use_all_pages(store)
    for reads in (first, second):
        store.load(reads[:1])
        transfer.end(len(transfer.copies))
        store.pump()
    done: list[Sequence[Read]] = []
    for _ in range(8):
        for reads in (first, second):
            if reads not in done and try_load(store, reads):
                transfer.end(len(transfer.copies))
                store.pump()
                store.lease(reads).release()
                done.append(reads)
        store.pump()
    assert len(done) == 2
    balanced(store)


def try_load(store: KVStore, reads: Sequence[Read]) -> bool:
    try:
        store.load(reads)
    except OutOfPages:
        return False
    return True


def cancel(store: KVStore, node: NodeRecord) -> None:
    store.unhold(node)


def pass_by(store: KVStore, node: NodeRecord) -> None:
    pass


@pytest.mark.parametrize("act", [cancel, pass_by])
@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("end", ["done", "failed", "lost", "late"])
def test_whatever_becomes_of_state_and_transfer_every_page_comes_back(
    act: Callable[[KVStore, NodeRecord], None], kind: str, when: str, end: str
) -> None:
    """vllm#46283, vllm-ascend#16662: abort × {store, load} × how and when the transfer ends."""
    clock = Clock()
    store, transfer = setup(clock=clock, transfer_timeout_s=5.0)
    node = write(store, list(range(6)))
    if kind == "load":
        offload(store, transfer, node)
        use_all_pages(store)
        store.load(node)
    else:
        store.offload(node)
    ticket = len(transfer.copies)
    moving = [page for page, _ in transfer.copies[-1].pages]
    if when == "before":
        act(store, node)
    assert {store._books.pool.state(page) for page in moving} == {PageState.MOVING}
    assert store.stats().pages_moving == store.stats().host_moving == 2
    balanced(store)
    if end in ("lost", "late"):
        clock.now += 5.0
        store.pump()
        assert store.stats().tickets_lost == 1 and store.num_in_flight == 0
        others = store.begin([], [], 0, signature={})
        others.reserve(store.num_unused * 4)
        assert not set(others.pages) & set(moving), "what a lost transfer may touch is not given to anybody"
        others.abort()
        balanced(store)
    if end == "lost":
        transfer.confirms.add(ticket)
    else:
        transfer.end(ticket, error="broken" if end == "failed" else None)
    store.poll()
    assert store.stats().pages_moving == store.stats().host_moving == store.stats().tickets_lost == 0
    assert store.stats().completions_late == (end == "late")
    balanced(store)
    if when == "after":
        act(store, node)
    if act is pass_by:
        assert (
            store.tier(node)
            == {
                "store": {"done": "device", "failed": "device", "lost": "device", "late": "device"},
                "load": {"done": "device", "failed": "host", "lost": "nowhere", "late": "nowhere"},
            }[kind][end]
        )
        assert store.stats().host_live == (2 if end == "done" or (kind, end) == ("load", "failed") else 0)
        store.unhold(node)
    assert_all_pages_back(store)
    assert store.stats().host_free == 16
    transfer.end(ticket)
    store.pump()
    assert store.stats().completions_duplicate == 1
    balanced(store)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_store_and_a_load_may_end_in_any_order_around_an_abort(order: tuple[int, ...]) -> None:
    """vllm PR#56089: abort with both under way kills nothing."""
    store, transfer = setup()
    here, there = write(store, list(range(6))), write(store, list(range(9)))
    offload(store, transfer, there)
    use_all_pages(store)
    writer = store.begin(
        [Parent.inherit(here), Parent.inherit(there)], [read(there)], 20, signature=SIGNATURE
    )
    store.offload(here)
    store.load(writer.node.reads)
    for event in order:
        [writer.abort, lambda: transfer.end(2), lambda: transfer.end(3)][event]()
        store.pump()
        balanced(store)
    assert (store.tier(here), store.tier(there)) == ("host", "device")
    for node in (here, there):
        store.unhold(node)
    assert_all_pages_back(store)


def test_preemption_under_a_transfer_gives_its_pages_to_nobody() -> None:
    """vllm PR#29870: the pages of a preempted request that a transfer still reads are not overwritten."""
    store, transfer = setup(num_pages=4)
    node = write(store, list(range(8)))
    twin = store.begin([], [], 0, signature=SIGNATURE)
    assert twin.match(list(range(8))) == 8
    store.offload(node)
    store.unhold(node)
    twin.rollback()
    with pytest.raises(OutOfPages) as caught:
        twin.reserve(12)
    assert caught.value.moving == 2
    twin.reserve(8)
    transfer.end(1)
    store.pump()
    twin.reserve(16)
    twin.abort()
    assert_all_pages_back(store)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_two_transfers_never_touch_one_page_of_either_tier(kind: str) -> None:
    """TRT-LLM#9056: who let go of what is moving does not make its pages anybody else's."""
    store, transfer = setup(num_pages=8, num_host_pages=4)
    first, second = write(store, [1] * 8), write(store, [2] * 8)
    if kind == "load":
        offload(store, transfer, first)
        use_all_pages(store)
        store.load(first)
    else:
        store.offload(first)
    under_way = transfer.copies[-1]
    store.unhold(first)
    store.offload(second)
    third = write(store, [3] * 8)
    with pytest.raises(OutOfHostPages):
        store.offload(third)
    assert not {host for _, host in under_way.pages} & {host for _, host in transfer.copies[-1].pages}
    assert not {page for page, _ in under_way.pages} & {*second.pages, *third.pages}
    balanced(store)
    transfer.end(len(transfer.copies) - 1)
    store.pump()
    store.offload(third)
    assert {host for _, host in transfer.copies[-1].pages} == {host for _, host in under_way.pages}
    balanced(store)


def test_late_duplicate_and_unknown_completions_are_counted_and_change_nothing() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)))
    offload(store, transfer, node)
    transfer.end(1, 1, 99)
    store.pump()
    s = store.stats()
    assert (s.completions_duplicate, s.completions_unknown, s.completions_late) == (2, 1, 0)
    assert store.tier(node) == "host"
    balanced(store)


def test_a_failed_load_is_tried_again_and_given_up_after_so_many() -> None:
    store, transfer = setup(max_failures=2)
    node = write(store, list(range(6)))
    offload(store, transfer, node)
    use_all_pages(store)
    store.load(node)
    transfer.end(2, error="broken")
    assert [(event.kind, event.error, event.tier) for event in store.pump()] == [
        ("load_failed", "broken", "host")
    ]
    assert store.tier(node) == "host" and store.stats().pages_moving == 0
    store.load(node)
    transfer.end(3, error="broken")
    assert [event.kind for event in store.pump()] == ["load_failed", "given_up"]
    assert store.tier(node) == "nowhere" and store.stats().host_free == 16
    with pytest.raises(NotResident) as caught:
        store.lease([read(node)])
    assert caught.value.nowhere == (node,)
    balanced(store)


def test_a_failed_store_leaves_the_state_where_it_is_and_is_given_up_after_so_many() -> None:
    store, transfer = setup(max_failures=2)
    node = write(store, list(range(6)))
    store.offload(node)
    transfer.end(1, error="broken")
    assert [event.kind for event in store.pump()] == ["store_failed", "store"], "tried again"
    assert store.tier(node) == "storing"
    transfer.end(2, error="broken")
    assert [event.kind for event in store.pump()] == ["store_failed", "offload_failed"]
    assert store.tier(node) == "device" and store.stats().host_free == 16
    store.offload(node)
    assert len(transfer.copies) == 3, "who asks again is not refused"
    balanced(store)


def test_a_transfer_that_refuses_is_a_failed_copy() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)))
    transfer.refuses = True
    store.offload(node)
    assert store.tier(node) == "device" and store.stats().stores_failed == 1
    assert [event.error for event in store.events if event.kind == "store_failed"] == ["RuntimeError: no"]
    balanced(store)
    transfer.refuses = False
    store.pump()
    assert store.tier(node) == "storing"
    transfer.end(1)
    store.pump()
    use_all_pages(store)
    transfer.refuses = True
    assert store.load(node) == 0
    assert store.tier(node) == "host" and store.stats().loads_failed == 1
    balanced(store)


def test_nothing_is_stored_while_a_transfer_is_lost() -> None:
    """A tier that does not answer is not trusted with more; what must go is computed again."""
    clock = Clock()
    store, transfer = setup(num_pages=4, clock=clock, transfer_timeout_s=5.0)
    lost, other = write(store, [1] * 8), write(store, [2] * 8)
    store.offload(lost)
    clock.now += 5.0
    store.pump()
    assert store.tier(lost) == "device"
    store.offload(other)
    assert len(transfer.copies) == 1
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    assert store.tier(other) == "nowhere" and store.tier(lost) == "device", "its pages may be read yet"
    with refused("state_in_use"):
        store.evict(lost)
    transfer.end(1)
    store.pump()
    assert store.stats().tickets_lost == 0
    balanced(store)


def test_under_pressure_one_round_of_stores_is_started_and_what_it_brings_is_waited_for() -> None:
    """vllm-ascend#16315: whoever is short of pages that are on their way starts nothing more."""
    store, transfer = setup(num_pages=6)
    nodes = [write(store, [token] * 8) for token in range(3)]
    writer = store.begin([], [], 0, signature=SIGNATURE)
    for _ in range(3):
        with pytest.raises(OutOfPages) as caught:
            writer.reserve(8)
        assert caught.value.moving == 2
        store.pump()
    assert len(transfer.copies) == 1, "the oldest, and only as much as is short"
    assert [store.tier(node) for node in nodes] == ["storing", "device", "device"]
    transfer.end(1)
    store.pump()
    writer.reserve(8)
    assert [store.tier(node) for node in nodes] == ["host", "device", "device"]
    balanced(store)


@pytest.mark.parametrize("recompute, reload, stored", [(10, 39, True), (10, 40, False), (10, 41, False)])
def test_a_page_is_stored_if_loading_is_cheaper_and_dropped_if_computing_is(
    recompute: int, reload: int, stored: bool
) -> None:
    store, transfer = setup(num_pages=2, costs=Costs(recompute, reload))
    node = write(store, [1] * 8)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    if stored:
        with pytest.raises(OutOfPages):
            writer.reserve(8)
        transfer.end(1)
        store.pump()
    writer.reserve(8)
    assert store.tier(node) == ("host" if stored else "nowhere")
    assert store.wants_reload(node) == stored
    assert len(transfer.copies) == stored


def test_a_page_with_a_copy_is_dropped_at_once_however_cheap_computing_is() -> None:
    store, transfer = setup(num_pages=2, costs=Costs(1, 1000))
    node = write(store, [1] * 8)
    store.offload(node)
    transfer.end(1)
    store.load(node)
    store.pump()
    store.lease([read(node)]).release()
    store.begin([], [], 0, signature=SIGNATURE).reserve(8)
    assert store.tier(node) == "host" and not store.wants_reload(node)


def test_pumping_stores_ahead_so_that_pages_can_be_dropped_at_once() -> None:
    store, transfer = setup(num_pages=6, write_back=3)
    nodes = [write(store, [token] * 8) for token in range(2)]
    store.pump()
    assert [copy.pages[0][0] for copy in transfer.copies] == [0], "two are unused; one more is wanted"
    assert store.tier(nodes[0]) == "storing"
    transfer.end(1)
    store.pump()
    assert store.tier(nodes[0]) == "device" and store.available() == 4
    store.pump()
    assert len(transfer.copies) == 1, "that is enough"
    store.begin([], [], 0, signature=SIGNATURE).reserve(16)
    assert [store.tier(node) for node in nodes] == ["host", "device"]


def test_next_use_decides_who_leaves_the_device_and_the_host() -> None:
    ranks: dict[int, int] = {}
    store, transfer = setup(
        num_pages=6, num_host_pages=2, eviction=NextUse(), next_use=lambda node: ranks.get(node.uid)
    )
    soon, late, never = (write(store, [token] * 8) for token in range(3))
    ranks |= {soon.uid: 0, late.uid: 5}
    offload(store, transfer, late)
    store.load(late)
    store.lease([read(late)]).release()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    assert [store.tier(n) for n in (soon, late, never)] == ["device", "device", "nowhere"], "the host is full"
    writer.reserve(16)
    assert [store.tier(n) for n in (soon, late, never)] == ["device", "host", "nowhere"], "it has a copy"
    with pytest.raises(OutOfPages):
        writer.reserve(24)
    assert transfer.copies[-1].kind == "store", "what is read soon displaces what is read late"
    assert store.tier(late) == "nowhere" and store.tier(soon) == "storing"
    balanced(store)


def test_offloading_makes_room_on_the_host_or_says_that_there_is_none() -> None:
    store, transfer = setup(num_host_pages=3)
    old, new, big = write(store, [1] * 8), write(store, [2] * 8), write(store, [3] * 16)
    offload(store, transfer, old)
    store.offload(new)
    assert store.tier(old) == "nowhere" and store.stats().host_evictions == 1
    with pytest.raises(OutOfHostPages) as caught:
        store.offload(big)
    assert caught.value.code == "capacity" and caught.value.field == "host" and caught.value.needed == 4
    assert store.tier(big) == "device"
    balanced(store)


def test_without_a_second_tier_nothing_is_offloaded() -> None:
    store = make_store()
    node = write(store, [1])
    with pytest.raises(OutOfHostPages):
        store.offload(node)
    assert store.load(node) == store.prefetch(node) == 0 and not store.wants_reload(node)
    assert store.pump() == store.poll() == ()


def test_dropping_the_host_copy_leaves_the_device_page() -> None:
    store, transfer = setup()
    node, away = write(store, [1] * 8), write(store, [2] * 8)
    offload(store, transfer, node, away)
    store.load(node)
    assert (store.evict_host(node), store.evict_host(away)) == (2, 2)
    assert (store.tier(node), store.tier(away)) == ("device", "nowhere")
    assert store.stats().host_free == 16 and store.evict_host(node) == 0
    store.offload(node)
    with refused("state_in_use"):
        store.evict_host(node)
    with refused("state_in_use"):
        store.evict(node)
    balanced(store)


def test_a_released_span_leaves_the_host_too() -> None:
    store, transfer = setup()
    node = write(store, list(range(16)))
    kid = write(store, [7], [Parent.artifact(node, 5, 7)], [Read(node, 5, 7)], 7)
    offload(store, transfer, node)
    store.unhold(node)
    assert [copy is not None for copy in node.copies] == [False, True, False, False]
    assert store.stats().host_live == 1 and store.tier(node) == "host"
    store.unhold(kid)
    assert store.stats().host_live == 0
    assert_all_pages_back(store)


def test_computing_again_what_the_host_has_ends_the_copy_of_what_was_computed() -> None:
    store, transfer = setup()
    node = write(store, list(range(8)))
    offload(store, transfer, node)
    use_all_pages(store)
    store.load(node)
    writer = store.restore(node)
    todo = writer.todo
    writer.reserve(len(todo))
    writer.append(todo)
    writer.commit(len(todo))
    writer.finish()
    assert store.tier(node) == "device" and store.stats().host_moving == 2
    balanced(store)
    transfer.end(2)
    store.pump()
    assert store.stats().host_free == 16 and store.tier(node) == "device"
    store.unhold(node)
    assert_all_pages_back(store)


def test_another_tenants_equal_state_has_a_copy_of_its_own() -> None:
    """vllm#44701: the salt is in the key of every tier."""
    store, transfer = setup()
    mine, theirs = write(store, [1] * 8, salt="a"), write(store, [1] * 8, salt="b", match=True)
    offload(store, transfer, mine, theirs)
    first, second = transfer.copies
    assert not set(first.keys) & set(second.keys)
    assert not {host for _, host in first.pages} & {host for _, host in second.pages}
    store.evict_host(mine)
    assert store.tier(theirs) == "host"


@pytest.mark.parametrize("field", ["pin_budget", "pin_budget_per_salt"])
def test_one_budget_for_pins_is_enough_to_refuse(field: str) -> None:
    store = make_store(**{field: 1})
    with pytest.raises(PinBudgetExceeded) as caught:
        store.name(write(store, [1] * 8), pin=True)
    assert (caught.value.field, caught.value.used, caught.value.budget) == (field, 2, 1)
    store.name(write(store, [2] * 4), pin=True)


def test_pins_have_a_budget_for_all_and_for_each_tenant() -> None:
    store = make_store(pin_budget=3, pin_budget_per_salt=2)
    a, b, c = (write(store, [t] * 8, salt=s) for t, s in ((1, "a"), (2, "b"), (3, "a")))
    pinned = store.name(a, pin=True)
    with refused("pin_budget_exceeded", "pin_budget_per_salt"):
        store.name(c, pin=True)
    with refused("pin_budget_exceeded", "pin_budget"):
        store.name(b, pin=True)
    store.check()
    handle = store.name(b)
    with refused("pin_budget_exceeded", "pin_budget"):
        store.pin(handle)
    assert not store.describe(handle).pinned
    store.pin(pinned)
    store.unpin(pinned)
    store.pin(handle)
    assert store.describe(handle).pinned


@pytest.mark.parametrize(
    "option, value",
    [
        ("write_back", -1),
        ("max_failures", 0),
        ("patience", -1),
        ("pin_budget", -1),
        ("pin_budget_per_salt", -1),
    ],
)
def test_sizes_that_are_none_are_refused(option: str, value: int) -> None:
    with refused("invalid_size", option):
        make_store(**{option: value})


def test_a_timeout_that_is_none_is_refused() -> None:
    with refused("invalid_ttl", "transfer_timeout_s"):
        make_store(transfer_timeout_s=0)


def test_every_step_of_a_state_is_an_event_with_its_ticket_and_tier() -> None:
    store, transfer = setup()
    node = write(store, list(range(6)))
    offload(store, transfer, node)
    use_all_pages(store)
    store.load(node)
    transfer.end(2)
    store.pump()
    seen = [
        (e.kind, e.node, e.pages, e.ticket, e.tier) for e in store.events if e.kind not in ("begin", "abort")
    ]
    assert seen == [
        ("seal", 1, 2, None, None),
        ("offload", 1, None, None, None),
        ("store", 1, 2, 1, "storing"),
        ("stored", 1, 2, 1, "host"),
        ("evict", 1, 2, None, "host"),
        ("offloaded", 1, None, None, None),
        ("load", 1, 2, 2, "loading"),
        ("loaded", 1, 2, 2, "device"),
    ]


def test_a_host_page_freed_too_often_is_an_error() -> None:
    """LMCache#3381: no count goes below zero."""
    store, transfer = setup()
    node = write(store, [1])
    offload(store, transfer, node)
    host = store._books.host
    host.drop(node.copies[0].host)  # type: ignore[union-attr]
    with refused("double_free", "host_page"):
        host.drop(node.copies[0].host)  # type: ignore[union-attr]
    with pytest.raises(KVStoreError):
        store.check()


def test_what_is_missing_is_on_the_host_unless_a_part_of_it_is_nowhere() -> None:
    store = make_store()
    host, coming, both, gone = (write(store, [token]) for token in range(4))
    refusal = not_resident(
        {
            host: {Tier.HOST},
            coming: {Tier.LOADING},
            both: {Tier.HOST, Tier.LOADING},
            gone: {Tier.HOST, Tier.NOWHERE},
        }
    )
    assert refusal.nodes == (host, coming, both, gone)
    assert refusal.on_host == (host, coming, both) and refusal.nowhere == (gone,)
    assert refusal.loading == (coming,)
