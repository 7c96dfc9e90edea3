"""Nodes that are sealed before the step that computes their last tokens has ended."""

from __future__ import annotations

import pytest
from kvstore_helpers import SIGNATURE, ByHand, assert_all_pages_back, make_store, refused, write
from kvstore_mover import ListMover

from dagengine_kvstore import KVStore, Parent, Read, Reposition, Tier, Writer


def written(store: KVStore, tokens: list[int], *, commit: int = 0) -> Writer:
    """A writer that was given slots for these tokens, the first `commit` of them computed."""
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(len(tokens))
    writer.append(tokens)
    writer.commit(commit)
    return writer


def reader_of(store: KVStore, writer: Writer) -> Writer:
    node = writer.node
    return store.begin(
        [Parent.inherit(node)], [Read(node, 0, node.length, 0)], node.length, signature=SIGNATURE
    )


def test_it_is_read_in_the_step_that_computes_it() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3, 4, 5, 6], commit=3)
    node = writer.seal_early({"turn": (2, 6)})
    assert node.sealed and node.tokens == (1, 2, 3, 4, 5, 6) and node.spans == {"turn": (2, 6)}
    reader = reader_of(store, writer)
    with store.lease(reader.node.reads) as lease:
        assert lease.extents(0) == writer.extents()
        fence = store.begin_step()
        store.end_step(fence)
        writer.commit(3)
        assert writer.seal() is node
        store.check()
    reader.abort()
    handle = store.name(node)
    store.unhold(node)
    assert store.resolve(handle) == (node, 6)
    store.release(handle)
    assert_all_pages_back(store)


def test_its_pages_are_found_by_what_they_hold_only_once_they_are_computed() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3, 4, 5, 6])
    writer.seal_early()

    def found() -> int:
        other = store.begin([], [], 0, signature=SIGNATURE)
        count = other.match([1, 2, 3, 4, 5, 6], whole=True)
        other.abort()
        return count

    assert found() == 0
    writer.commit(4)
    assert found() == 4
    writer.commit(2)
    writer.seal()
    assert found() == 6


def test_it_comes_back_held_once_from_sealing_early_and_not_again() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3])
    node = writer.seal_early()
    writer.commit(3)
    writer.seal()
    store.unhold(node)
    with refused("not_held"):
        store.unhold(node)
    assert_all_pages_back(store)


def test_nothing_is_written_behind_it() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3])
    writer.reserve(9)
    node = writer.seal_early()
    assert len(node.pages) == len(writer.pages) == 1, "what was reserved in vain is given back"
    for refuse in (
        lambda: writer.append([4]),
        lambda: writer.reserve(1),
        lambda: writer.match([4]),
        lambda: writer.rollback(),
        lambda: writer.seal_early(),
    ):
        with refused("writer_closed"):
            refuse()
    assert writer.give_back(0) == 0
    with refused("not_committed"):
        writer.seal()
    writer.commit(3)
    with refused("span_out_of_range", "spans.turn"):
        writer.seal({"turn": (0, 4)})
    writer.seal()
    with refused("writer_closed"):
        writer.seal()
    with refused("writer_closed"):
        writer.abort()


def test_what_is_worked_out_ahead_of_its_seal_holds_the_last_page_too() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3, 4, 5, 6])
    node = writer.seal_early()
    writer.look_ahead()
    other = store.begin([], [], 0, signature=SIGNATURE)
    assert other.match([1, 2, 3, 4, 5, 6], whole=True) == 0, "its step still runs"
    writer.commit(6)
    writer.seal()
    assert other.match([1, 2, 3, 4, 5, 6], whole=True) == 6 and other.pages == list(node.pages)
    with refused("writer_closed"):
        writer.look_ahead()
    store.check()


def test_spans_outside_are_refused_and_change_nothing_and_those_of_the_end_replace_the_first() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3])
    with refused("span_out_of_range", "spans.turn"):
        writer.seal_early({"turn": (0, 4)})
    node = writer.seal_early({"turn": (0, 3), "output": (1, 3)})
    writer.commit(3)
    assert writer.seal({"turn": (0, 3), "output": (1, 2)}) is node
    assert node.spans == {"turn": (0, 3), "output": (1, 2)}
    again = written(store, [1, 2, 3])
    spans = again.seal_early({"turn": (0, 3)}).spans
    again.commit(3)
    assert again.seal().spans == spans


@pytest.mark.parametrize("known", [3, 7, 8, 11])
def test_what_is_not_known_can_be_read_and_is_named_before_it_is_committed(known: int) -> None:
    """Whatever row of a page the last token is; then all of it is found as if it had been known."""
    tokens, own = list(range(20, 20 + known)), [1, 2, 3, 4, 5]
    found = []
    for late in (False, True):
        store = make_store()
        writer = written(store, tokens)
        writer.commit(known)
        writer.reserve(1)
        writer.append([] if late else [9], unknown=int(late))
        node = writer.seal_early()
        assert node.length == known + 1 and node.num_unknown == late
        parents, reads = [Parent.inherit(node)], [Read(node, 0, known + 1)]
        reader = store.begin(parents, reads, known + 1, signature=SIGNATURE)
        store.check()
        if late:
            with refused("not_filled"):
                node.content_key(known + 1)
            with refused("not_filled"):
                reader.page_keys(own)
            assert reader.match(own) == 0
            node.content_key(known)
        with store.lease(reads):
            reader.reserve(5)
            reader.append(own)
            if late:
                writer.fill([9])
            assert node.tokens == (*tokens, 9) and not node.num_unknown
            writer.commit(1)
            reader.commit(5)
        writer.seal()
        sealed = reader.seal()
        again = store.begin(parents, reads, known + 1, signature=SIGNATURE)
        assert again.match(own, whole=True) == 5
        again.abort()
        found.append((node.content_key(known + 1), sealed.content_key(5), sealed.context.key))
        for each in (node, sealed):
            store.unhold(each)
        assert_all_pages_back(store)
    assert found[0] == found[1]


@pytest.mark.parametrize("known", range(2, 9))
def test_what_is_worked_out_ahead_of_its_last_token_leaves_out_the_page_that_this_is_in(known: int) -> None:
    """As of an answer of one token: the step that computes its input ends when it is sealed already."""
    store = make_store()
    tokens = list(range(20, 20 + known))
    writer = written(store, tokens)
    writer.reserve(1)
    writer.append([], unknown=1)
    writer.seal_early()
    writer.look_ahead()
    writer.commit(known)
    writer.fill([9])
    writer.look_ahead()
    writer.commit(1)
    node = writer.seal()
    store.check()
    again = store.begin([], [], 0, signature=SIGNATURE)
    assert again.match([*tokens, 9], whole=True) == known + 1 and again.pages == list(node.pages)
    store.check()
    again.abort()
    store.unhold(node)
    assert_all_pages_back(store)


def test_who_reads_what_is_not_known_cannot_be_read_early_and_may_give_up() -> None:
    store = make_store()
    writer = written(store, [1, 2, 3])
    writer.commit(3)
    writer.reserve(1)
    writer.append([], unknown=1)
    node = writer.seal_early()
    reader = store.begin([Parent.inherit(node)], [Read(node, 0, 4)], 4, signature=SIGNATURE)
    reader.reserve(5)
    reader.append([5, 6, 7, 8, 9])
    with refused("not_filled", "reads"):
        reader.seal_early()
    with refused("not_filled", "count"):
        reader.commit(5)
    assert reader.num_committed == 0 and store.stats().tokens_written == 3
    reader.rollback()
    reader.abort()
    writer.abort()
    assert node.num_unknown == 1
    store.unhold(node)
    assert_all_pages_back(store)


@pytest.mark.parametrize("own_start", [0, 10])
def test_it_is_not_stored_at_other_positions_before_it_is_computed(own_start: int) -> None:
    """Rows that are yet to be written would be copied, and tokens that nobody knows kept."""
    store = make_store()
    mover = ListMover([(0.0, 0)] * store.num_pages * store.page_size, store.page_size)
    writer = written(store, [1, 2, 3, 4, 5])
    writer.reserve(1)
    writer.append([], unknown=1)
    node = writer.seal_early()
    with refused("state_in_use", "moves[0].node"):
        store.reposition([Reposition(node, own_start)], mover, copy=True)
    assert not mover.plans
    writer.fill([6])
    writer.commit(6)
    writer.seal()
    (copy,) = store.reposition([Reposition(node, own_start)], mover, copy=True).nodes
    assert copy.tokens == (1, 2, 3, 4, 5, 6)
    for each in (node, copy):
        store.unhold(each)
    assert_all_pages_back(store)


def test_it_stays_on_the_device_until_its_writer_ends() -> None:
    store = make_store(num_pages=3)
    writer = written(store, [1, 2, 3, 4, 5])
    node = writer.seal_early()
    with refused("state_in_use"):
        store.evict(node)
    other = store.begin([], [], 0, signature=SIGNATURE)
    assert store.available() == 1
    with refused("capacity"):
        other.reserve(8)
    writer.commit(5)
    writer.seal()
    other.reserve(8)
    assert node.pages.count(None) >= 1


def test_it_is_stored_on_the_host_only_once_it_is_computed() -> None:
    transfer = ByHand()
    store = make_store(transfer=transfer)
    writer = written(store, [1, 2, 3, 4, 5], commit=4)
    node = writer.seal_early()
    store.offload(node)
    store.pump()
    assert [[page for page, _ in copy.pages] for copy in transfer.copies] == [node.pages[:1]]
    fence = store.begin_step()
    store.end_step(fence)
    writer.commit(1)
    writer.seal()
    store.pump()
    assert len(transfer.copies) == 2
    assert store.tier(node) is Tier.STORING


@pytest.mark.parametrize("reader_first", [True, False])
@pytest.mark.parametrize("in_step", [True, False])
def test_who_fails_leaves_no_state_and_frees_its_pages_after_the_step(
    reader_first: bool, in_step: bool
) -> None:
    store = make_store()
    writer = written(store, [1, 2, 3, 4, 5], commit=2)
    node, pages = writer.seal_early(), list(writer.pages)
    handle = store.name(node)
    reader = reader_of(store, writer)
    lease = store.lease(reader.node.reads)
    fence = store.begin_step() if in_step else None

    def end_reader() -> None:
        lease.release()
        reader.abort()

    if reader_first:
        end_reader()
    writer.abort()
    store.check()
    with refused("parent_failed"):
        store.lease([Read(node, 0, 5)])
    with refused("parent_failed"):
        store.name(node)
    assert all(page is None for page in node.pages)
    if not reader_first:
        assert {page for extent in lease.extents(0) for page in extent[:1]} == set(pages)
        end_reader()
    store.check()
    if fence is not None:
        assert store.stats().pages_waiting == 2
        store.end_step(fence)
    store.unhold(node)
    store.release(handle)
    other = store.begin([], [], 0, signature=SIGNATURE)
    assert other.match([1, 2, 3, 4, 5]) == 0
    other.abort()
    assert_all_pages_back(store)


def test_what_it_reads_and_digested_stays_until_its_writer_ends() -> None:
    store = make_store()
    source = write(store, [7, 8, 9])
    writer = store.begin([Parent.digest(source)], [Read(source, 0, 3)], 3, signature=SIGNATURE)
    store.unhold(source)
    writer.reserve(2)
    writer.append([1, 2])
    writer.seal_early()
    assert source.held
    writer.commit(2)
    writer.seal()
    assert not source.held


def test_a_node_of_pages_that_were_there_and_an_empty_one_can_be_sealed_early() -> None:
    store = make_store()
    first = write(store, [1, 2, 3, 4, 5])
    writer = store.begin([], [], 0, signature=SIGNATURE)
    assert writer.match([1, 2, 3, 4, 5], whole=True) == 5
    assert writer.seal_early().pages == first.pages
    writer.seal()
    empty = store.begin([], [], 0, signature=SIGNATURE)
    empty.seal_early()
    empty.seal()
    store.check()
