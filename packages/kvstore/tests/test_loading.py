"""Who brings a state back, what a reader waits for, and how long it stays for him; copies end by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvstore_helpers import (
    SIGNATURE,
    assert_all_pages_back,
    balanced,
    offload,
    read,
    setup,
    use_all_pages,
    write,
)

from dagengine_kvstore import KVStore, OutOfPages, Parent, Read


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
    assert node.leases == {lease: 3} and {run[-1] for run in lease.pages[::2]} == {node.pages[1]}
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
