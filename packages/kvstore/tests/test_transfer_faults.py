"""Transfers that fail, refuse, are late or lost, and states that go meanwhile: every page comes back, not before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
from kvstore_helpers import (
    SIGNATURE,
    Clock,
    assert_all_pages_back,
    balanced,
    offload,
    read,
    refused,
    setup,
    use_all_pages,
    write,
)

from dagengine_kvstore import KVStore, NodeRecord, NotResident, OutOfHostPages, OutOfPages, Parent
from dagengine_kvstore.pages import PageState


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
