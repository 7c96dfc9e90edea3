"""What `load` keeps for somebody who comes no more is given up at once, not after `patience` pumps."""

from __future__ import annotations

import pytest

from dagengine_kvstore import KVStore, NodeRecord, OutOfPages, Read, Tier
from dagengine_kvstore.fake_transfer import FakeTransfer

SIZE = 2


def sealed(store: KVStore, tokens: list[int]) -> NodeRecord:
    writer = store.begin([], [], 0, signature={})
    writer.reserve(len(tokens))
    writer.append(tokens)
    writer.commit(len(tokens))
    return writer.seal()


def settle(store: KVStore) -> None:
    while store.num_in_flight:
        store.pump()


def test_claimed_pages_are_evicted_once_they_are_not_claimed_any_more() -> None:
    store = KVStore(4, SIZE, transfer=FakeTransfer([None] * 4, 8))
    node = sealed(store, [1, 2, 3, 4, 5, 6])
    store.offload(node)
    settle(store)
    assert store.tier(node) is Tier.HOST and store.stats().states_on_host == 1
    filler = store.begin([], [], 0, signature={})
    filler.reserve(4 * SIZE)
    filler.abort()
    reads = [Read(node, 0, 6)]
    assert store.load(reads) == 3
    settle(store)
    assert store.tier(node) is Tier.DEVICE and store.stats().states_on_host == 0
    writer = store.begin([], [], 0, signature={})
    with pytest.raises(OutOfPages):
        writer.reserve(3 * SIZE)
    store.unclaim(reads)
    writer.reserve(3 * SIZE)
    assert store.tier(node) is Tier.HOST
    store.check()


def test_other_claims_stay() -> None:
    store = KVStore(4, SIZE, transfer=FakeTransfer([None] * 4, 8))
    nodes = [sealed(store, [first, first + 1]) for first in (10, 20)]
    for node in nodes:
        store.load([Read(node, 0, 2)])
    store.unclaim([Read(nodes[0], 0, 2)])
    for node in nodes:
        store.offload(node)
    settle(store)
    assert [store.tier(node) for node in nodes] == [Tier.HOST, Tier.DEVICE]
