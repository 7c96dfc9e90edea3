from __future__ import annotations

import pytest
from kvstore_helpers import assert_all_pages_back, child, make_store, refused, write

from dagengine_kvstore import KVStore, NodeRecord, NotResident, OutOfPages, Parent, Read


def compute(store: KVStore, node: NodeRecord) -> list[NodeRecord]:
    """Restore a node and whatever it reads; the nodes in the order in which they were finished."""
    writer = store.restore(node)
    done: list[NodeRecord] = []
    leases = []
    for read in node.reads if writer.todo else ():
        try:
            leases.append(store.lease([read]))
        except NotResident as missing:
            done += compute(store, missing.nodes[0])
            leases.append(store.lease([read]))
    todo = writer.todo
    writer.reserve(len(todo))
    writer.append(todo)
    writer.commit(len(todo))
    writer.finish()
    for lease in leases:
        lease.release()
    store.check()
    return [*done, node]


def forget_cache(store: KVStore) -> None:
    """Use every free and cached page once."""
    writer = store.begin([], [], 0, signature={})
    writer.reserve((store.stats().pages_free + store.stats().pages_cached) * store.page_size)
    writer.abort()
    assert store.stats().pages_cached == 0


def test_restoring_is_free_while_the_pages_are_still_cached() -> None:
    store = make_store()
    node = write(store, list(range(6)))
    before = list(node.pages)
    store.evict(node)
    writer = store.restore(node)
    assert writer.todo == []
    writer.finish()
    assert node.pages == before and store.tier(node) == "device"
    store.check()


def test_a_restore_that_waits_gives_its_pages_to_one_that_runs() -> None:
    """Rolled back it holds what it reads, and no page; then it finds its pages again, or computes them."""
    store = make_store()
    source = write(store, list(range(6)))
    node = child(store, source, list(range(10)), "digest")
    store.unhold(source)
    for overwrite in (False, True):
        store.evict(node)
        writer = store.restore(node)
        assert writer.todo == []
        writer.rollback()
        assert writer.todo == list(range(10)) and writer.pages == []
        assert source.held
        store.check()
        if overwrite:
            forget_cache(store)
            compute(store, source)
        assert writer.match(writer.todo, whole=True) == (0 if overwrite else 10)
        todo = writer.todo
        writer.reserve(len(todo))
        writer.append(todo)
        writer.commit(len(todo))
        writer.finish()
        assert store.tier(node) == "device"
        store.check()
    store.unhold(node)
    assert_all_pages_back(store)


def test_only_what_is_missing_is_computed_again() -> None:
    store = make_store()
    node = write(store, list(range(10)))
    store.evict(node)
    other = store.begin([], [], 0, signature={})
    other.reserve((16 - 1) * 4)
    writer = store.restore(node)
    assert writer.todo == list(range(4, 10)), "the first page is the last to be reclaimed"
    other.abort()
    with refused("recipe_mismatch"):
        writer.append([5])
    with refused("not_committed"):
        writer.finish()
    writer.reserve(6)
    with refused("recipe_mismatch"):
        writer.append([], unknown=1)
    writer.append(writer.todo)
    writer.commit(6)
    assert writer.finish() is node
    with store.lease([Read(node, 0, 10)]) as lease:
        assert [extent.stored for extent in lease.extents(0)] == [0, 4, 8]
    store.check()


def test_an_evicted_state_is_recomputed_through_released_nodes_it_digested() -> None:
    store = make_store()
    first = write(store, [1, 2, 3, 4, 5])
    second = child(store, first, [6, 7], "digest")
    third = child(store, second, [8], "digest")
    names = [node.uid for node in (first, second, third)]
    store.unhold(first)
    store.unhold(second)
    del first, second
    store.evict(third)
    forget_cache(store)
    assert [node.uid for node in compute(store, third)] == names
    assert store.tier(third) == "device"
    assert store.stats().states == 1, "the digested nodes went again"
    store.unhold(third)
    assert_all_pages_back(store)


def test_one_restore_of_a_node_runs_at_a_time() -> None:
    store = make_store()
    node = write(store, [1, 2, 3])
    store.evict(node)
    writer = store.restore(node)
    with refused("already_restoring"):
        store.restore(node)
    with refused("state_in_use"):
        store.evict(node)
    writer.abort()
    assert store.tier(node) == "nowhere"
    for _ in range(2):  # the second time nothing is missing
        store.restore(node).finish()
        assert store.tier(node) == "device"
        store.check()


def test_a_restore_that_finds_no_pages_leaves_the_state_as_it_was() -> None:
    store = make_store(num_pages=3)
    node = write(store, [1] * 8)
    store.evict(node)
    blocker = store.begin([], [], 0, signature={})
    blocker.reserve(8)
    writer = store.restore(node)
    with pytest.raises(OutOfPages):
        writer.reserve(len(writer.todo))
    writer.abort()
    store.check()
    blocker.abort()
    compute(store, node)


def test_a_state_released_during_its_restore_is_dropped_when_it_is_done() -> None:
    store = make_store()
    node = write(store, [1, 2, 3])
    store.evict(node)
    writer = store.restore(node)
    store.unhold(node)
    writer.finish()
    assert node.pages == [None]
    assert_all_pages_back(store)
    with refused("state_released"):
        store.restore(node)


def test_only_held_spans_are_restored_and_kept() -> None:
    store = make_store()
    node = write(store, list(range(16)))
    kid = write(store, [7], [Parent.artifact(node, 5, 7)], [Read(node, 5, 7)], 7)
    store.unhold(node)
    assert [page is None for page in node.pages] == [True, False, True, True]
    store.evict(node)
    forget_cache(store)
    writer = store.restore(node)
    assert writer.todo == list(range(8)), "what comes before is needed, what comes behind is not"
    writer.abort()
    compute(store, node)
    assert [page is None for page in node.pages] == [True, False, True, True]
    forget_cache(store)
    writer = store.restore(node)
    assert store.available(exclude=[kid]) == store.stats().pages_free == 14, (
        "what is being restored is not evicted"
    )
    writer.abort()
    store.unhold(kid)
    assert_all_pages_back(store)


def test_a_recipe_tells_everything_that_computing_again_needs() -> None:
    store = make_store()
    parent = write(store, [1, 2])
    node = child(store, parent, [3])
    assert node.recipe.tokens == (3,) and node.recipe.own_start == 2
    assert node.recipe.reads == (Read(parent, 0, 2, 0),)


def test_a_restore_leaves_a_reader_the_page_that_it_computes_anew() -> None:
    """The last page is still there and read while the first is evicted, and both are computed again."""
    store = make_store()
    node = write(store, list(range(8)))
    lease = store.lease([Read(node, 4, 8)])
    store._books.evict(node, {node.pages[0]})  # type: ignore[arg-type]
    forget_cache(store)
    before = lease.extents(0)
    assert compute(store, node) == [node]
    assert lease.extents(0) == before and lease.pages[0].tolist() != node.pages[1:]
    store.unhold(node)
    store.check()
    lease.release()
    assert_all_pages_back(store)


def test_reads_are_there_where_they_can_be_leased_or_loaded() -> None:
    store = make_store()
    node = write(store, list(range(8)))
    other = write(store, list(range(8, 12)))
    assert store.is_there([Read(node, 0, 8), Read(other, 0, 4)]) and store.is_there([])
    store._books.evict(node, {node.pages[1]})  # type: ignore[arg-type]
    assert store.is_there([Read(node, 0, 4)]) and store.is_there([Read(node, 4, 4)])
    assert not store.is_there([Read(other, 0, 4), Read(node, 3, 5)])
    with refused("span_out_of_range", "reads[1]"):
        store.is_there([Read(other, 0, 4), Read(node, 3, 9)])
    assert not node.leases and store.stats().leases == 0
    store.unhold(node)
    with refused("state_released", "reads[0]"):
        store.is_there([Read(node, 0, 8)])
    store.check()
