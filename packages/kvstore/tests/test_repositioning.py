from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from kvstore_helpers import (
    SIGNATURE,
    assert_all_pages_back,
    child,
    make_store,
    refused,
    use_all_pages,
    write,
)
from kvstore_mover import SIZE, Rows, moved

from dagengine_kvstore import (
    KVStore,
    KVStoreError,
    NodeRecord,
    NotResident,
    OutOfPages,
    Parent,
    Read,
    Reposition,
    StepKind,
)

REFUSED = {
    "already_repositioned",
    "state_shared",
    "state_in_use",
    "not_recomputable",
    "not_resident",
    "capacity",
}


@pytest.fixture
def store() -> KVStore:
    return make_store(16, SIZE)


def document(
    store: KVStore, rows: Rows, tokens: Sequence[int] = range(10, 19), own_start: int = 0
) -> NodeRecord:
    node = write(store, list(tokens), own_start=own_start)
    rows.compute(node)
    return node


def test_in_place_a_node_keeps_its_pages_and_its_source_is_evicted(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    pages, name = list(source.pages), store.name(source)
    store.unhold(source)
    made = store.reposition([Reposition(source, 100)], rows)
    (node,) = made.nodes
    assert node.pages == pages and source.pages == [None] * 3
    assert rows.read(node) == moved(range(10, 19), 0, 100)
    assert (node.own_start, node.tokens, node.sealed) == (100, source.tokens, True)
    assert made.plan.value_rows == 0 and made.plan.key_rows == 9
    assert store.resolve(name) == (source, 9), "its name stays, and it can be computed again"
    store.check()
    assert store.restore(source).num_tokens == 0, "not from the pages that now are elsewhere"
    store.unhold(node)
    store.release(name)


def test_a_copy_leaves_its_source_alone(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    other = child(store, source, [1, 2])
    before = rows.read(source)
    (node,) = store.reposition([Reposition(source, 7)], rows, copy=True).nodes
    assert not set(node.pages) & set(source.pages)
    assert rows.read(source) == before and rows.read(node) == moved(range(10, 19), 0, 7)
    for held in (source, other, node):
        store.unhold(held)
    assert_all_pages_back(store)


def test_one_source_at_several_positions_is_copied_before_it_is_turned(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    starts = (9, 18, 27)
    nodes = store.reposition([Reposition(source, start) for start in starts], rows).nodes
    for node, start in zip(nodes, starts, strict=True):
        assert rows.read(node) == moved(range(10, 19), 0, start)
    assert len({page for node in nodes for page in node.pages}) == 9
    store.check()


@pytest.mark.parametrize("busy", [0, 8])
def test_pages_in_order_trade_places_through_spare_pages_or_the_host(busy: int) -> None:
    store = make_store(8 + busy, SIZE)
    rows = Rows(store)
    a, b = (document(store, rows, range(first, first + 16)) for first in (10, 30))
    if busy:
        assert store.num_unused == 8
    made = store.reposition([Reposition(b, 0), Reposition(a, 16)], rows, in_order=True)
    assert [page for node in made.nodes for page in node.pages] == sorted(range(8))
    assert rows.read(made.nodes[0]) == [(f"{t}@{i}", t, i) for i, t in enumerate(range(30, 46))]
    assert rows.read(made.nodes[1]) == moved(range(10, 26), 0, 16)
    assert (StepKind.SAVE in [step.kind for step in made.plan.steps]) == (not busy)
    store.check()
    assert store.num_unused == busy, "spare pages are back"


def test_a_new_node_is_what_its_source_is_with_all_that_it_reads_shifted(store: KVStore) -> None:
    rows = Rows(store)
    parent = document(store, rows, range(5))
    source = child(store, parent, [7, 8, 9])
    rows.compute(source)
    (node,) = store.reposition([Reposition(source, 25)], rows).nodes
    assert node.reads == (Read(parent, 0, 5, 20),) and node.parents == source.parents
    assert node.recipe.own_start == 25 and node.recipe.reads == node.reads
    assert node.content_key(3) == source.content_key(3)
    store.unhold(parent)
    store.unhold(source)
    assert store.tier(parent).value == "device", "the new node passes its parent on"
    store.evict(node)
    restore = store.restore(node)
    restore.rollback()
    assert restore.todo == [7, 8, 9]
    restore.abort()
    store.unhold(node)
    assert_all_pages_back(store)


def test_what_it_reads_cannot_get_before_position_0(store: KVStore) -> None:
    rows = Rows(store)
    parent = document(store, rows, range(5))
    source = child(store, parent, [7, 8, 9])
    for start in (4, -1, True, 1.5):
        with refused("invalid_position", "moves[0].own_start"):
            store.reposition([Reposition(source, start)], rows)  # type: ignore[arg-type]
    assert rows.plans == []


@pytest.mark.parametrize("how", ["in place", "copy, source gone", "copy"])
def test_turned_pages_are_found_by_nobody_and_equal_new_work_can_be_repositioned(
    store: KVStore, how: str
) -> None:
    rows = Rows(store)
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=how != "in place").nodes
    if how == "copy, source gone":
        store.evict(source)
        use_all_pages(store)
    for held in (True, False):
        if not held:
            store.unhold(node)
        writer = store.begin([], [], 3, signature=SIGNATURE)
        assert writer.match(list(range(10, 19)), whole=True) == (9 if how == "copy" else 0)
        writer.abort()
    twin = write(store, list(range(10, 19)), own_start=3, match=True)
    rows.compute(twin)
    (again,) = store.reposition([Reposition(twin, 200)], rows, copy=True).nodes
    start = 0 if how == "copy" else 3
    assert rows.read(again) == moved(range(10, 19), start, 200 - start)
    for left in (source, twin, again):
        store.unhold(left)
    assert_all_pages_back(store)


def test_where_its_pages_are_nothing_is_turned_again_and_what_reads_it_is_equal(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows, copy=True).nodes
    with refused("already_repositioned", "moves[0].node"):
        store.reposition([Reposition(node, 3)], rows, copy=True)
    (same,) = store.reposition([Reposition(node, 100)], rows, copy=True).nodes
    assert rows.read(same) == moved(range(10, 19), 0, 100)
    assert node.content_key(9) == source.content_key(9)
    child(store, source, list(range(4)))
    reader = store.begin([Parent.inherit(node)], [Read(node, 0, 9)], 109, signature=SIGNATURE)
    assert reader.match(list(range(4))) == 4
    reader.abort()


def test_nothing_is_turned_twice_until_it_is_computed_again(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    (node,) = store.reposition([Reposition(source, 100)], rows).nodes
    with refused("already_repositioned", "moves[0].node"):
        store.reposition([Reposition(node, 200)], rows)
    store.evict(node)
    restore = store.restore(node)
    restore.rollback()
    restore.reserve(9)
    restore.append(list(range(10, 19)))
    restore.commit(9)
    restore.finish()
    rows.compute(node)
    (again,) = store.reposition([Reposition(node, 200)], rows).nodes
    assert rows.read(again) == moved(range(10, 19), 100, 100)


def test_where_equal_content_means_equal_bits_turned_pages_are_content_of_their_own() -> None:
    store = make_store(16, SIZE, reuse_across_positions=False)
    rows = Rows(store)
    source = document(store, rows, range(10, 18))
    reader = child(store, source, [1, 2, 3, 4])
    turned, kept = store.reposition([Reposition(source, 100), Reposition(source, 0)], rows, copy=True).nodes
    assert turned.content_key(8) != source.content_key(8) == kept.content_key(8)
    writer = store.begin([], [], 100, signature=SIGNATURE)
    assert writer.match(list(range(10, 18)), whole=True) == 0, "not found as if it had been computed there"
    writer.abort()
    read = Read(turned, 0, 8, -100)
    below = store.begin([Parent.inherit(turned)], [read], 8, signature=SIGNATURE)
    assert below.match([1, 2, 3, 4], whole=True) == 0, "nor is what read it"
    below.abort()
    with refused("not_recomputable", "node"):
        store.evict(turned)
    with refused("not_recomputable", "moves[0].node"):
        store.reposition([Reposition(turned, 100)], rows, in_order=True)
    (copy,) = store.reposition([Reposition(turned, 100)], rows, copy=True).nodes
    assert copy.context is turned.context and not copy.recomputable
    for node in (source, reader, kept):
        store.unhold(node)
    hog = store.begin([], [], 0, signature=SIGNATURE)
    with pytest.raises(OutOfPages):
        hog.reserve(16 * SIZE)
    assert turned.pages.count(None) == 0, "never dropped for others"
    hog.abort()
    for node in (turned, copy):
        store.unhold(node)
    assert_all_pages_back(store)


def test_pages_that_somebody_else_may_read_are_not_written_over(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    move = [Reposition(source, 9)]
    with refused("state_shared", "moves[0].node"):
        store.name(source)
        store.reposition(move, rows)
    store.unhold(source)
    with store.lease([Read(source, 0, 1)]), refused("state_in_use", "moves[0].node"):
        store.reposition(move, rows)
    fence = store.begin_step()
    with store.lease([Read(source, 0, 1)]):
        pass
    with refused("state_in_use", "moves[0].node"):
        store.reposition(move, rows)
    store.end_step(fence)
    twin = write(store, list(range(10, 19)), match=True)
    with refused("state_shared", "moves[0].node"):
        store.reposition(move, rows)
    store.unhold(twin)
    writer = store.begin([Parent.inherit(source)], [Read(source, 0, 9)], 9, signature=SIGNATURE)
    with refused("state_shared", "moves[0].node"):
        store.reposition(move, rows)
    writer.abort()
    assert rows.plans == []
    assert len(store.reposition(move, rows).nodes) == 1


def test_pinned_evicted_released_and_unsealed_nodes_are_refused(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    name = store.name(source, pin=True)
    store.unhold(source)
    with refused("state_in_use", "moves[0].node"):
        store.reposition([Reposition(source, 9)], rows)
    store.unpin(name)
    store.evict(source)
    with pytest.raises(NotResident) as caught:
        store.reposition([Reposition(source, 9)], rows, copy=True)
    assert caught.value.nodes == (source,)
    store.release(name)
    with refused("state_released", "moves[0].node"):
        store.reposition([Reposition(source, 9)], rows)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    with refused("state_not_sealed", "moves[0].node"):
        store.reposition([Reposition(writer.node, 9)], rows)
    writer.abort()


def test_a_fork_repositions_the_tokens_that_it_shows(store: KVStore) -> None:
    rows = Rows(store)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(9)
    writer.append(range(10, 19))
    writer.commit(9)
    source = writer.seal({"prompt": (0, 4), "output": (4, 9)})
    rows.compute(source)
    (node,) = store.reposition([Reposition(source, 50, 6)], rows, copy=True).nodes
    assert rows.read(node) == moved(range(10, 16), 0, 50)
    assert node.spans == {"prompt": (0, 4), "output": (4, 6)}
    with refused("span_out_of_range", "moves[0].stop"):
        store.reposition([Reposition(source, 50, 0)], rows, copy=True)
    with refused("span_out_of_range", "moves[0].node"):
        store.reposition([Reposition(source, 50, 10)], rows, copy=True)


def test_a_fork_that_alone_is_held_takes_its_pages_in_place(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    fork = store.name(source, at=6)
    store.unhold(source)
    assert source.pages[2] is None
    (node,) = store.reposition([Reposition(source, 50, 6)], rows).nodes
    assert rows.read(node) == moved(range(10, 16), 0, 50)
    assert source.pages == [None] * 3
    restore = store.restore(source)
    restore.rollback()
    assert len(restore.todo) == 8, "all of the page that the fork ends in"
    restore.abort()
    store.release(fork)
    store.unhold(node)
    assert_all_pages_back(store)


def test_a_width_below_1_is_refused_before_anything_happens(store: KVStore) -> None:
    rows = Rows(store)
    source = document(store, rows)
    with refused("invalid_size", "width"):
        store.reposition([Reposition(source, 9)], rows, width=0)
    assert None not in source.pages


def test_no_moves_make_no_nodes(store: KVStore) -> None:
    assert store.reposition([], Rows(store)).nodes == ()


def test_copies_evict_others_but_never_a_source() -> None:
    store = make_store(6, SIZE)
    rows = Rows(store)
    source = document(store, rows, range(10, 18))
    other = document(store, rows, range(30, 46))
    (node,) = store.reposition([Reposition(source, 8)], rows, copy=True).nodes
    assert rows.read(node) == moved(range(10, 18), 0, 8)
    assert None in other.pages and None not in source.pages
    with pytest.raises(OutOfPages):
        store.reposition([Reposition(source, start) for start in (1, 2, 3)], rows, copy=True)
    store.check()


@pytest.mark.parametrize("copy", [True, False])
def test_a_mover_that_fails_leaves_no_node_and_nothing_to_be_found(store: KVStore, copy: bool) -> None:
    rows = Rows(store)
    source = document(store, rows)
    rows.fail_at = 0
    with pytest.raises(RuntimeError, match="the device is gone"):
        store.reposition([Reposition(source, 9), Reposition(source, 18)], rows, copy=copy)
    store.check()
    assert source.pages.count(None) == (0 if copy else 3)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    assert writer.match(list(range(10, 19)), whole=True) == (9 if copy else 0)
    writer.abort()
    store.unhold(source)
    assert_all_pages_back(store)


def test_steps_that_began_meanwhile_wait_for_spare_pages(store: KVStore) -> None:
    rows = Rows(store)
    nodes = [document(store, rows, range(first, first + 8)) for first in (10, 30)]
    fence = store.begin_step()
    store.reposition([Reposition(node, 8 * i) for i, node in enumerate(reversed(nodes))], rows, in_order=True)
    store.check()
    store.end_step(fence)
    assert store.stats().pages_waiting == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strict", [False, True])
def test_whatever_is_repositioned_every_node_reads_its_own_tokens_turned_at_most_once(
    seed: int, strict: bool
) -> None:
    rng = random.Random(seed)
    store = make_store(40, SIZE, reuse_across_positions=not strict)
    rows = Rows(store)
    nodes: list[NodeRecord] = []
    made = 0
    for _ in range(150):
        if rng.random() < 0.3 or not nodes:
            tokens = [rng.randrange(20)] * rng.randint(1, 10)
            try:
                writer = store.begin([], [], rng.randrange(3), signature=SIGNATURE)
                found = writer.match(tokens, whole=True)
                writer.reserve(len(tokens) - found)
                writer.append(tokens[found:])
                writer.commit(len(tokens) - found)
            except OutOfPages:
                writer.abort()
            else:
                nodes.append(writer.seal())
                if found < len(tokens):
                    rows.compute(nodes[-1], found // SIZE)
        elif rng.random() < 0.3:
            store.unhold(nodes.pop(rng.randrange(len(nodes))))
        else:
            moves = [Reposition(rng.choice(nodes), rng.randrange(40)) for _ in range(rng.randint(1, 3))]
            copy, in_order = rng.random() < 0.5, rng.random() < 0.5
            try:
                nodes += store.reposition(moves, rows, copy=copy, in_order=in_order, width=2).nodes
                made += 1
            except KVStoreError as error:
                assert error.code in REFUSED, error
        store.check()
        for node in nodes:
            if None in node.pages:
                continue
            for (key, value, position), token in zip(rows.read(node), node.tokens, strict=True):
                computed, *deltas = key if isinstance(key, tuple) else (key,)
                assert value == token and len(deltas) <= 1
                assert computed == f"{token}@{position - sum(deltas)}"
    assert made > 10
    for node in nodes:
        store.unhold(node)
    assert_all_pages_back(store)
