"""Repositioned nodes in two tiers: what was turned stays known, what cannot be computed again is never lost."""

from __future__ import annotations

import pytest
from kvstore_helpers import SIGNATURE, ByHand, Clock, Costs, balanced, read, refused, use_all_pages, write
from kvstore_mover import SIZE, Rows, moved

from dagengine_kvstore import KVStore, NodeRecord, NotResident, OutOfHostPages, OutOfPages, Reposition, Tier
from dagengine_kvstore.fake_transfer import FakeTransfer


def two_tiers(
    num_pages: int = 12, num_host_pages: int = 8, **options: object
) -> tuple[KVStore, Rows, FakeTransfer]:
    rows_of_pages: list[object] = [None] * num_pages
    transfer = FakeTransfer(rows_of_pages, num_host_pages, delay=(1, 1))
    store = KVStore(num_pages, SIZE, transfer=transfer, **options)  # type: ignore[arg-type]
    return store, Rows(store), transfer


def document(store: KVStore, rows: Rows, num_tokens: int = 8) -> NodeRecord:
    node = write(store, list(range(10, 10 + num_tokens)))
    rows.compute(node)
    return node


def offload(store: KVStore, node: NodeRecord) -> None:
    store.offload(node)
    for _ in range(10):
        store.pump()
    assert store.tier(node) is Tier.HOST


def load(store: KVStore, node: NodeRecord) -> None:
    while store.load(node):
        store.pump()


def test_a_source_that_the_host_has_goes_there_and_its_host_copy_is_not_the_new_nodes() -> None:
    store, rows, _ = two_tiers()
    source = document(store, rows)
    offload(store, source)
    load(store, source)
    rows.compute(source)
    (node,) = store.reposition([Reposition(source, 100)], rows).nodes
    assert store.tier(source) is Tier.HOST and store.tier(node) is Tier.DEVICE
    assert rows.read(node) == moved(range(10, 18), 0, 100)
    store.check()
    offload(store, node)
    load(store, node)
    load(store, source)
    assert not set(node.pages) & set(source.pages)
    store.check()


def test_what_was_turned_is_still_known_after_a_trip_to_the_host() -> None:
    store, rows, transfer = two_tiers()
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=True).nodes
    offload(store, node)
    load(store, node)
    with refused("already_repositioned", "moves[0].node"):
        store.reposition([Reposition(node, 5)], rows, copy=True)
    offload(store, source)
    load(store, source)
    assert len(store.reposition([Reposition(source, 5)], rows, copy=True).nodes) == 1
    keys = [key for copy in transfer.copies if copy.kind == "store" for key in copy.keys]
    assert keys[:2] == [b"", b""] and all(keys[2:]), (
        "a persistent tier gets no turned pages under their content"
    )


def test_an_offloaded_source_is_told_to_be_loaded() -> None:
    store, rows, _ = two_tiers()
    source = document(store, rows)
    offload(store, source)
    with pytest.raises(NotResident) as caught:
        store.reposition([Reposition(source, 100)], rows, copy=True)
    assert caught.value.on_host == (source,) and caught.value.nowhere == ()


def test_a_source_under_a_transfer_is_not_written_over() -> None:
    store, rows, _ = two_tiers()
    source = document(store, rows)
    store.offload(source)
    assert store.tier(source) is Tier.STORING
    with refused("state_in_use", "moves[0].node"):
        store.reposition([Reposition(source, 100)], rows)


def test_what_cannot_be_computed_again_is_stored_before_it_leaves_and_stays_in_one_tier() -> None:
    store, rows, _ = two_tiers(6, 4, reuse_across_positions=False)
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=True).nodes
    store.unhold(source)
    with refused("not_recomputable", "node"):
        store.evict(node)
    hog = store.begin([], [], 0, signature=SIGNATURE)
    with pytest.raises(OutOfPages) as caught:
        hog.reserve(6 * SIZE)
    assert caught.value.moving == 2, "its pages are being stored"
    store.pump()
    store.pump()
    hog.reserve(6 * SIZE)
    assert store.tier(node) is Tier.HOST
    with refused("not_recomputable", "node"):
        store.evict_host(node)
    hog.abort()
    load(store, node)
    assert store.evict(node) == 2, "the host has it"
    other = write(store, list(range(50, 66)))
    with pytest.raises(OutOfHostPages):
        store.offload(other)
    assert store.tier(node) is Tier.HOST, "not dropped for others there either"
    store.check()


def test_without_room_on_the_host_it_stays_on_the_device() -> None:
    store, rows, _ = two_tiers(6, 1, reuse_across_positions=False)
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=True).nodes
    store.unhold(source)
    hog = store.begin([], [], 0, signature=SIGNATURE)
    for _ in range(4):
        with pytest.raises(OutOfPages):
            hog.reserve(6 * SIZE)
        store.pump()
    assert store.tier(node) is Tier.DEVICE
    store.check()


def test_what_cannot_be_computed_again_is_loaded_however_cheap_computing_would_be() -> None:
    store, rows, _ = two_tiers(reuse_across_positions=False, costs=Costs(recompute=0, reload=1000))
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=True).nodes
    offload(store, node)
    offload(store, source)
    assert store.wants_reload(node) and not store.wants_reload(source)
    with refused("not_recomputable", "node"):
        store.restore(node)
    load(store, node)
    assert rows.read(node) == moved(range(10, 18), 0, 100)
    store.check()


def turned_on_host(store: KVStore, transfer: ByHand) -> NodeRecord:
    """A node on the host that cannot be computed again, and nothing of it on the device."""
    rows = Rows(store)
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=True).nodes
    store.unhold(source)
    store.offload(node)
    transfer.end(1)
    store.pump()
    use_all_pages(store)
    assert store.tier(node) is Tier.HOST
    return node


@pytest.mark.parametrize("end", ["reported", "aborted"])
def test_a_load_that_is_lost_leaves_what_cannot_be_computed_again_on_the_host(end: str) -> None:
    clock, transfer = Clock(), ByHand()
    options = {"clock": clock, "transfer_timeout_s": 5.0, "reuse_across_positions": False}
    store = KVStore(12, SIZE, transfer=transfer, **options)  # type: ignore[arg-type]
    node = turned_on_host(store, transfer)
    assert store.load(node) == 2
    clock.now += 5.0
    store.pump()
    assert store.tier(node) is Tier.LOADING and store.stats().tickets_lost == 1
    with pytest.raises(NotResident) as caught:
        store.lease([read(node)])
    assert caught.value.loading == (node,) and caught.value.nowhere == ()
    assert store.is_lost(read(node)) and store.failed_loads(read(node)) == 1
    balanced(store)
    if end == "reported":
        transfer.end(2)
    else:
        transfer.confirms.add(2)
    store.pump()
    assert store.tier(node) is Tier.HOST and store.stats().tickets_lost == 0
    assert not store.is_lost(read(node))
    balanced(store)
    assert store.load(node) == 2
    transfer.end(3)
    store.pump()
    assert store.tier(node) is Tier.DEVICE
    balanced(store)


def test_a_node_that_is_let_go_while_its_load_is_lost_leaves_nothing() -> None:
    clock, transfer = Clock(), ByHand()
    options = {"clock": clock, "transfer_timeout_s": 5.0, "reuse_across_positions": False}
    store = KVStore(12, SIZE, transfer=transfer, **options)  # type: ignore[arg-type]
    node = turned_on_host(store, transfer)
    store.load(node)
    clock.now += 5.0
    store.pump()
    store.unhold(node)
    balanced(store)
    transfer.end(2)
    store.pump()
    assert store.stats().host_free == 16 and store.num_unused == 12
    balanced(store)


def test_loading_what_cannot_be_computed_again_is_not_given_up() -> None:
    transfer = ByHand()
    store = KVStore(12, SIZE, transfer=transfer, max_failures=2, reuse_across_positions=False)
    node = turned_on_host(store, transfer)
    for ticket in range(2, 6):
        assert store.load(node) == 2
        transfer.end(ticket, error="broken")
        assert [event.kind for event in store.pump()] == ["load_failed"]
        assert store.tier(node) is Tier.HOST and store.failed_loads(read(node)) == ticket - 1
        balanced(store)
    store.load(node)
    transfer.end(6)
    store.pump()
    assert store.tier(node) is Tier.DEVICE
