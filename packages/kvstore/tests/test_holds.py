from __future__ import annotations

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st
from kvstore_helpers import SIGNATURE, assert_all_pages_back, child, make_store, refused, write

from dagengine_kvstore import Parent, Read


def test_an_artifact_keeps_only_the_pages_of_its_span() -> None:
    store = make_store()
    grandparent = write(store, [9, 9])
    parent = child(store, grandparent, list(range(16)))
    store.unhold(grandparent)
    kid = write(
        store, [7], [Parent.artifact(parent, 5, 7), Parent.artifact(parent, 6, 9)], [Read(parent, 5, 9)], 9
    )
    store.unhold(parent)
    assert [page is None for page in parent.pages] == [True, False, False, True]
    assert not grandparent.held
    store.unhold(kid)
    assert_all_pages_back(store)


def test_what_only_artifacts_hold_can_be_quoted_but_not_inherited() -> None:
    store = make_store()
    parent = write(store, list(range(6)))
    write(store, [7], [Parent.artifact(parent, 0, 6)])
    store.unhold(parent)
    write(store, [8], [Parent.artifact(parent, 1, 5)])
    with refused("state_released", "parents[0]"):
        store.begin([Parent.inherit(parent, 2)], [], 0, signature=SIGNATURE)
    store.check()


SPANS = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(SPANS, max_size=5), SPANS)
def test_a_span_is_covered_if_each_of_its_tokens_is(
    held: list[tuple[int, int]], span: tuple[int, int]
) -> None:
    node = write(make_store(), list(range(9)))
    node.cover = {(start, stop): 1 for start, stop in held if start < stop}
    tokens = {token for start, stop in held for token in range(start, stop)}
    assert node.covers(*span) == (set(range(*span)) <= tokens)


def test_an_empty_artifact_keeps_nothing() -> None:
    store = make_store()
    parent = write(store, [1, 2, 3])
    kid = write(store, [7], [Parent.artifact(parent, 2, 2)])
    store.unhold(parent)
    assert parent.pages == [None]
    store.unhold(kid)
    assert_all_pages_back(store)


def test_what_a_node_digests_is_held_until_it_is_sealed() -> None:
    store = make_store()
    source = write(store, [1, 2, 3])
    parent = child(store, source, [4])
    writer = store.begin([Parent.digest(parent)], [Read(source, 0, 3)], 3, signature=SIGNATURE)
    store.unhold(source)
    store.unhold(parent)
    writer.reserve(1)
    writer.append([5])
    writer.commit(1)
    assert source.held and parent.held
    node = writer.seal()
    assert not source.held and not parent.held and node.held
    store.check()


def test_an_aborted_child_leaves_its_parent_as_it_was() -> None:
    store = make_store()
    parent = write(store, list(range(6)))
    before = (list(parent.pages), dict(parent.cover), parent.root.refs, list(store._books.pool.refs))
    writer = store.begin([Parent.inherit(parent)], [Read(parent, 0, 6)], 6, signature=SIGNATURE)
    writer.reserve(1)
    writer.append([1])
    writer.abort()
    assert before == (list(parent.pages), dict(parent.cover), parent.root.refs, list(store._books.pool.refs))
    with refused("parent_failed"):
        store.begin([Parent.inherit(writer.node)], [], 0, signature=SIGNATURE)
    with refused("writer_closed"):
        writer.abort()


def test_refusals_name_the_parent_and_take_nothing() -> None:
    store = make_store()
    node = write(store, [1, 2, 3], salt="a")
    writing = store.begin([], [], 0, signature=SIGNATURE, salt="a").node
    other = {**SIGNATURE, "dtype": "bfloat16"}
    cases = [
        ([Parent.inherit(node)], SIGNATURE, "b", "state_not_found", "parents[0]"),
        ([Parent.inherit(node), Parent.inherit(writing)], SIGNATURE, "a", "state_not_sealed", "parents[1]"),
        ([Parent.inherit(node, 4)], SIGNATURE, "a", "span_out_of_range", "parents[0]"),
        ([Parent.artifact(node, 2, 1)], SIGNATURE, "a", "span_out_of_range", "parents[0]"),
        ([Parent(node, "inherit", 1, 2)], SIGNATURE, "a", "span_out_of_range", "parents[0].start"),
        ([Parent.inherit(node)], other, "a", "signature_mismatch", "parents[0].signature.dtype"),
        ([Parent.inherit(node), Parent.digest(node)], SIGNATURE, "a", "edge_mix_forbidden", "parents"),
    ]
    for parents, signature, salt, code, field in cases:
        with refused(code, field):
            store.begin(parents, [], 0, signature=signature, salt=salt)
    with refused("span_out_of_range", "reads[0]"):
        store.begin([Parent.inherit(node)], [Read(node, 1, 1)], 0, signature=SIGNATURE, salt="a")
    store.check()


def test_the_same_node_via_two_parents_is_counted_exactly() -> None:
    store = make_store()
    root = write(store, [1, 2, 3])
    left, right = child(store, root, [4]), child(store, root, [5])
    merge = write(store, [6], [Parent.inherit(left), Parent.inherit(right), Parent.artifact(root, 1, 2)])
    lease = store.lease([Read(root, 0, 2), Read(root, 1, 3)])
    for node in (root, left, right):
        store.unhold(node)
    store.check()
    assert root.held
    store.unhold(merge)
    lease.release()
    assert_all_pages_back(store)


def test_a_chain_of_ten_thousand_costs_one_hold_each_and_is_released_without_recursion() -> None:
    length = 10_000
    store = make_store(num_pages=length + 1, page_size=1)
    node = write(store, [0])
    root = node
    for token in range(1, length):
        following = child(store, node, [token])
        store.unhold(node)
        node = following
    assert (root.cover, root.root.refs) == ({(0, 1): 1}, 1)
    assert store.stats().pages_live == length and store.stats().states == length
    store.check()
    last = weakref.ref(root)
    store.unhold(node)
    assert_all_pages_back(store)
    store.begin([], [], 0, signature=SIGNATURE).reserve(length + 1)
    del node, root, following
    gc.collect()
    assert last() is None and len(store._books.nodes()) == 1


def test_nodes_that_nobody_can_reach_disappear() -> None:
    store = make_store()
    source = write(store, [1, 2, 3])
    digest = child(store, source, [4], "digest")
    handle = store.name(digest)
    store.unhold(digest)
    store.unhold(source)
    del source, digest
    gc.collect()
    assert [node.uid for node in store._books.nodes()] == [1, 2], "the recipe of 2 reads 1"
    store.release(handle)
    # Cached pages keep the context they were computed in; using them up forgets it.
    store.begin([], [], 0, signature=SIGNATURE).reserve(16 * 4)
    gc.collect()
    assert [node.uid for node in store._books.nodes()] == [3]
