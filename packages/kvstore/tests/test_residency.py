"""Where a state is: what takes it to the host and leaves it there, case by case; copies end by hand."""

from __future__ import annotations

import pytest
from kvstore_helpers import (
    SIGNATURE,
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

from dagengine_kvstore import KVStoreError, NotResident, OutOfHostPages, Parent, Read, Tier
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
