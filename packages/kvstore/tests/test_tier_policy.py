"""Who leaves the device and the host, and whether by a store or for nothing; copies end by hand."""

from __future__ import annotations

import pytest
from kvstore_helpers import SIGNATURE, Costs, balanced, offload, read, setup, write

from dagengine_kvstore import NextUse, OutOfHostPages, OutOfPages


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
