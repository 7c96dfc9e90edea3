from __future__ import annotations

import dataclasses

import pytest
from kvstore_helpers import Clock, make_store, write


def test_events_tell_the_life_of_a_state_in_order() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    node = write(store, [1, 2, 3])
    handle = store.name(node)
    clock.now = 200.0
    store.evict(node)
    store.restore(node).finish()
    store.release(handle)
    kinds = [event.kind for event in store.events]
    assert kinds == ["begin", "seal", "name", "evict", "restore", "match", "restored", "release"]
    assert [event.seq for event in store.events] == list(range(8))
    last = store.events.since(7)[0]
    assert (last.node, last.handle, last.seconds) == (node.uid, handle, 200.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.kind = "other"  # type: ignore[misc]


def test_the_log_is_bounded_and_says_how_much_it_has_seen() -> None:
    store = make_store(max_events=3)
    for _ in range(3):
        store.unhold(write(store, [1]))
    assert len(store.events) == 3 and store.events.next_seq == 6
    assert [event.seq for event in store.events.since(0)] == [3, 4, 5]
