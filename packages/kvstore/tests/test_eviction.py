from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from kvstore_helpers import SIGNATURE, assert_all_pages_back, child, make_store, refused, write

from dagengine_kvstore import Candidate, KVStore, NodeRecord, NotResident, OutOfPages, Parent, Read


def fill(store: KVStore, num_pages: int) -> None:
    """A writer that takes pages."""
    store.begin([], [], 0, signature=SIGNATURE).reserve(num_pages * store.page_size)


def test_free_pages_go_first_then_cached_then_the_least_recently_used_state() -> None:
    store = make_store(num_pages=6)
    old, used, gone = write(store, [1] * 8), write(store, [2] * 4), write(store, [3] * 4)
    store.unhold(gone)
    assert store.stats().pages_free == 2 and store.stats().pages_cached == 1
    fill(store, 3)
    assert store.tier(old) == store.tier(used) == "device"
    store.lease([Read(old, 0, 1)]).release()
    fill(store, 1)
    assert (store.tier(old), store.tier(used)) == ("device", "nowhere")
    store.check()


def test_an_evicted_state_keeps_its_handle_and_says_that_it_is_not_resident() -> None:
    store = make_store()
    node = write(store, list(range(6)))
    handle = store.name(node)
    assert store.evict(node) == 2
    assert store.resolve(handle) == (node, 6)
    assert store.describe(handle).tier == "nowhere"
    with pytest.raises(NotResident) as caught:
        store.lease([Read(node, 0, 6)])
    assert caught.value.nodes == (node,) and caught.value.code == "not_resident"
    assert store.evict(node) == 0
    store.check()


def test_leased_pinned_and_unsealed_nodes_are_never_evicted() -> None:
    store = make_store(num_pages=5)
    leased, parent = write(store, [1] * 8), write(store, [2] * 4)
    pinned = child(store, parent, [3] * 4)
    lease = store.lease([Read(leased, 3, 5)])
    handle = store.name(pinned, pin=True)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(4)
    for node in (leased, pinned, parent):
        with refused("state_in_use"):
            store.evict(node)
    with refused("state_not_sealed"):
        store.evict(writer.node)
    assert store.available() == 0 and not store.can_fit(1) and store.can_fit(0)
    with pytest.raises(OutOfPages):
        fill(store, 1)
    store.unpin(handle)
    assert store.available() == 2
    lease.release()
    fill(store, 4)
    store.check()


@pytest.mark.parametrize("leased", [False, True])
def test_what_a_reader_does_not_read_of_a_node_makes_room(leased: bool) -> None:
    """Six pages: of a state of four the new node reads the second one, and writes five; then all is read again."""
    store = make_store(num_pages=6)
    source = write(store, list(range(14)))
    read = Read(source, 4, 7, -4)
    writer = store.begin([Parent.artifact(source, 4, 7)], [read], 3, signature=SIGNATURE)
    lease = store.lease([read]) if leased else None
    assert store.available(reads=[read]) == 5 and store.available(exclude=[source]) == 2
    assert store.can_fit(5, reads=[read]) and not store.can_fit(6, reads=[read])
    with pytest.raises(OutOfPages):
        writer.reserve(6 * 4)
    assert store.tier(source) == "device"
    writer.reserve(5 * 4)
    assert [page is not None for page in source.pages] == [False, True, False, False]
    assert store.tier(source) == "nowhere"
    store.lease([read]).release()
    with pytest.raises(NotResident):
        store.lease([Read(source, 0, 14)])
    store.check()
    writer.append(list(range(20)))
    writer.commit(20)
    store.unhold(writer.seal())
    if lease is not None:
        lease.release()
    again = store.restore(source)
    assert again.todo == list(range(14))
    again.reserve(14)
    again.append(again.todo)
    again.commit(14)
    again.finish()
    assert store.tier(source) == "device"
    store.check()
    store.unhold(source)
    assert_all_pages_back(store)


def test_a_pinned_fork_of_no_tokens_pins_what_its_node_passes_on_and_not_the_node() -> None:
    store = make_store()
    parent = write(store, [1] * 4)
    node = child(store, parent, [2] * 4)
    store.name(node, at=0, pin=True)
    assert store.evict(node) == 1
    with refused("state_in_use"):
        store.evict(parent)


def test_a_writer_never_evicts_what_it_reads() -> None:
    store = make_store(num_pages=2)
    source = write(store, [1] * 4)
    writer = store.begin([Parent.inherit(source)], [Read(source, 0, 4)], 4, signature=SIGNATURE)
    writer.reserve(4)
    assert store.available() == 1 and store.available(exclude=[source]) == 0
    with pytest.raises(OutOfPages):
        writer.reserve(5)
    assert store.tier(source) == "device"


def test_shared_pages_count_once_and_only_when_all_their_owners_may_go() -> None:
    store = make_store(num_pages=4)
    tokens = list(range(8))
    twins = [write(store, tokens), write(store, tokens, match=True)]
    assert store.stats().pages_live == store.stats().pages_shared == 2
    assert store.available() == 4
    lease = store.lease([Read(twins[0], 0, 8)])
    assert store.available() == 2
    assert store.evict(twins[1]) == 2 and store.stats().pages_live == 2, "only a reference less"
    lease.release()
    fill(store, 4)
    assert store.tier(twins[0]) == "nowhere"


def test_states_whose_eviction_frees_nothing_are_left_alone() -> None:
    store = make_store(num_pages=3)
    tokens = list(range(8))
    twins = [write(store, tokens), write(store, tokens, match=True)]
    other = write(store, [5] * 4)
    store.lease([Read(twins[1], 0, 1)])
    fill(store, 1)
    assert [store.tier(node) for node in (*twins, other)] == ["device", "device", "nowhere"]


def test_evicting_is_all_or_nothing() -> None:
    store = make_store(num_pages=3)
    node = write(store, [1] * 8)
    with pytest.raises(OutOfPages):
        fill(store, 4)
    assert store.tier(node) == "device"
    store.check()


def sealed_in_the_step(store: KVStore) -> NodeRecord:
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    writer.append([1] * 8)
    store.begin_step()
    writer.commit(8)
    return writer.seal()


def read_in_the_step(store: KVStore) -> NodeRecord:
    node = write(store, [1] * 8)
    lease = store.lease([Read(node, 0, 8)])
    store.begin_step()
    lease.release()
    return node


def restored_in_the_step(store: KVStore) -> NodeRecord:
    node = write(store, [1] * 8)
    store.evict(node)
    writer = store.restore(node)
    store.begin_step()
    writer.finish()
    return node


def reused_in_the_step(store: KVStore) -> NodeRecord:
    node = write(store, [1] * 8)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    assert writer.match([1] * 8) == 8
    store.begin_step()
    writer.abort()
    return node


@pytest.mark.parametrize(
    "use", [sealed_in_the_step, read_in_the_step, restored_in_the_step, reused_in_the_step]
)
@pytest.mark.parametrize("later", [0, 1])
def test_evicting_waits_for_every_open_step_that_may_touch_a_page(
    use: Callable[[KVStore], NodeRecord], later: int
) -> None:
    store = make_store(num_pages=3)
    node = use(store)
    for _ in range(later):
        store.begin_step()
    for fence in range(1, later + 1):
        assert store.available() == 1, "the step may touch the other two"
        with pytest.raises(OutOfPages):
            fill(store, 2)
        store.end_step(fence + 1)
    assert store.available() == 1 and store.tier(node) == "device"
    store.end_step(1)
    fill(store, 2)
    assert store.tier(node) == "nowhere"
    store.check()


@pytest.mark.parametrize("use", [sealed_in_the_step, read_in_the_step])
def test_a_page_that_is_evicted_too_early_waits(use: Callable[[KVStore], NodeRecord]) -> None:
    store = make_store(num_pages=3)
    assert store.evict(use(store)) == 2
    assert (store.stats().pages_waiting, store.available()) == (2, 1)
    store.end_step(1)
    assert store.available() == 3


def test_what_no_open_step_may_touch_is_evicted_at_once() -> None:
    """Not used since the older of two steps began, though it was read before."""
    store = make_store(num_pages=5)
    old, read = write(store, [1] * 8), write(store, [2] * 4)
    store.lease([Read(old, 0, 8)]).release()
    lease = store.lease([Read(read, 0, 4)])
    fences = [store.begin_step(), store.begin_step()]
    assert store.available() == 4
    fill(store, 4)
    assert [store.tier(node) for node in (old, read)] == ["nowhere", "device"]
    store.check()
    lease.release()
    for fence in fences:
        store.end_step(fence)
    store.check()


class Newest:
    name = "newest"

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        return sorted((candidate.uid for candidate in candidates), reverse=True)


class Broken(Newest):
    name = "broken"

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        return [candidate.uid for candidate in candidates] * 2


def test_the_policy_decides_and_sees_what_recomputing_costs() -> None:
    seen: list[Candidate] = []

    class Recording(Newest):
        def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
            seen.extend(candidates)
            return super().order(candidates)

    store = make_store(num_pages=4, eviction=Recording())
    old = write(store, [1] * 4)
    new = child(store, old, [2] * 6)
    fill(store, 2)
    assert [store.tier(node) for node in (old, new)] == ["device", "nowhere"]
    assert [(c.uid, c.num_pages, c.num_tokens, c.num_read) for c in seen] == [(1, 1, 4, 0), (2, 2, 6, 4)]


def test_a_policy_that_answers_nonsense_is_named_and_changes_nothing() -> None:
    store = make_store(num_pages=1, eviction=Broken())
    node = write(store, [1])
    with refused("plugin_broken", "eviction"):
        fill(store, 1)
    assert store.tier(node) == "device"
    store.unhold(node)
    assert_all_pages_back_but_writers(store)


def assert_all_pages_back_but_writers(store: KVStore) -> None:
    for writer in list(store._books.writers.values()):
        writer.abort()
    assert_all_pages_back(store)
