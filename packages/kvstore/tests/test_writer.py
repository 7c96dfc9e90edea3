from __future__ import annotations

import pytest
from kvstore_helpers import SIGNATURE, assert_all_pages_back, make_store, refused, write

from dagengine_kvstore import KVStore, OutOfPages


def test_slots_are_rows_of_contiguous_pages() -> None:
    store = make_store()
    writer = store.begin([], [], 7, signature=SIGNATURE)
    writer.reserve(6)
    assert writer.append([1, 2, 3, 4, 5]) == [0, 1, 2, 3, 4]
    writer.reserve(5)
    assert writer.append([6, 7]) == [5, 6]
    assert [tuple(extent) for extent in writer.extents(2, 7)] == [(0, 2, 4, 9), (1, 0, 3, 11)]
    assert writer.node.length == 7 and not writer.node.sealed


def test_growing_keeps_contiguous_where_the_next_page_is_free() -> None:
    store = make_store()
    first, second = (store.begin([], [], 0, signature=SIGNATURE) for _ in range(2))
    first.reserve(4)
    second.reserve(4)
    first.reserve(8)
    second.reserve(8)
    assert (first.pages, second.pages) == ([0, 2], [1, 3])
    first.abort()
    second.reserve(12)
    assert second.pages == [1, 3, 4]


def test_appending_needs_a_reservation_and_changes_nothing_without() -> None:
    store = make_store()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(3)
    with refused("not_reserved", "tokens"):
        writer.append([1, 2, 3, 4, 5])
    assert writer.num_tokens == 0 and writer.capacity == 4
    assert writer.pages_needed(9) == 2


def test_a_reservation_is_all_or_nothing() -> None:
    store = make_store(num_pages=3)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(4)
    with pytest.raises(OutOfPages) as caught:
        writer.reserve(13)
    assert (caught.value.needed, caught.value.available, caught.value.code) == (3, 2, "capacity")
    assert store.stats().pages_free == 2 and len(writer.pages) == 1
    with refused("invalid_count"):
        writer.reserve(-1)


def test_a_reservation_can_leave_states_alone() -> None:
    store = make_store(num_pages=3)
    state = write(store, [1, 2, 3, 4, 5])
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(4, evict=False)
    with pytest.raises(OutOfPages) as caught:
        writer.reserve(5, evict=False)
    assert (caught.value.needed, caught.value.available) == (1, 0)
    assert store.num_unused == 0 and all(page is not None for page in state.pages)
    writer.reserve(5)
    assert len(writer.pages) == 2 and None in state.pages


def test_pages_behind_what_is_needed_go_back_the_last_first() -> None:
    store = make_store(num_pages=8)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(20)
    writer.append([1, 2, 3])
    pages = writer.pages
    assert writer.pages_spare(2) == 3 and writer.pages_spare(1) == 4
    assert writer.give_back(2, most=1) == 1
    assert writer.pages == pages[:4] and len(pages) == 5, "who remembered the list sees that it is another"
    assert writer.give_back(2) == 2 and writer.give_back(2) == 0
    assert writer.pages == pages[:2] and store.num_unused == 6
    assert writer.append([4, 5]) == [3, 4]
    store.check()
    for count, most, field in ((-1, None, "count"), (0, -1, "most")):
        with refused("invalid_count", field):
            writer.give_back(count, most)
    writer.abort()
    with refused("writer_closed"):
        writer.give_back(0)


def test_pages_given_back_are_free_while_a_step_runs() -> None:
    store = make_store(num_pages=3)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(12)
    writer.append([1, 2])
    fence = store.begin_step()
    assert writer.give_back(0) == 2
    assert store.num_unused == 2 and store.stats().pages_waiting == 0
    store.end_step(fence)
    store.check()


def test_a_seal_needs_every_token_committed_and_valid_spans() -> None:
    store = make_store()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(9)
    writer.append([1, 2, 3])
    with refused("not_committed"):
        writer.seal()
    with refused("invalid_count"):
        writer.commit(4)
    writer.commit(3)
    with refused("span_out_of_range", "spans.output"):
        writer.seal({"output": (2, 4)})
    node = writer.seal({"output": (1, 3), "prompt": (0, 1)})
    assert node.spans == {"output": (1, 3), "prompt": (0, 1)} and node.tokens == (1, 2, 3)
    assert store.stats().pages_live == 1, "pages reserved in vain went back"
    for use in (lambda: writer.append([4]), writer.seal, writer.rollback, lambda: writer.reserve(1)):
        with refused("writer_closed"):
            use()


def test_unknown_tokens_are_named_before_they_are_committed() -> None:
    store = make_store()
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(9)
    assert writer.append([1, 2], unknown=2) == [0, 1, 2, 3]
    assert (writer.num_known, writer.num_tokens, writer.node.length) == (2, 4, 2)
    with refused("not_filled", "tokens"):
        writer.append([3])
    assert writer.append([], unknown=1) == [4], "unknown ones may follow"
    with refused("not_filled", "count"):
        writer.commit(3)
    assert writer.num_committed == 0, "nothing was committed"
    with refused("invalid_count", "tokens"):
        writer.fill([3, 4, 5, 6])
    with refused("invalid_count", "unknown"):
        writer.append([], unknown=-1)
    writer.fill([3])
    writer.commit(3)
    writer.fill([4, 5])
    with refused("not_committed"):
        writer.seal()
    writer.commit(2)
    assert writer.append([6]) == [5], "known ones may follow when all are named"
    writer.commit(1)
    assert writer.seal().tokens == (1, 2, 3, 4, 5, 6)
    store.check()


def test_a_page_is_reusable_only_when_its_tokens_are_named() -> None:
    store = make_store()
    first, second = (store.begin([], [], 0, signature=SIGNATURE) for _ in range(2))
    first.reserve(4)
    first.append([1, 2, 3], unknown=1)
    first.commit(3)
    assert second.match([1, 2, 3, 4]) == 0
    first.fill([4])
    assert second.match([1, 2, 3, 4]) == 0, "known, but its step still runs"
    first.commit(1)
    assert second.match([1, 2, 3, 5]) == 0 and second.match([1, 2, 3, 4]) == 4


def test_slots_go_on_in_the_next_page_wherever_it_is() -> None:
    store = make_store()
    first, second = (store.begin([], [], 0, signature=SIGNATURE) for _ in range(2))
    for writer in (first, second, first):
        writer.reserve(4 if writer is second else len(first.pages) * 4 + 3)
    first.reserve(10)
    slots = first.append([1]) + first.append([2, 3, 4, 5, 6, 7], unknown=1) + first.append([], 0)
    assert slots == [page * 4 + row for page in first.pages[:2] for row in range(4)]
    assert first.pages[1] != first.pages[0] + 1, "the second writer has the page behind the first"


def test_what_was_worked_out_ahead_of_a_commit_is_found_after_it_and_not_sooner() -> None:
    store = make_store()
    first, second = (store.begin([], [], 0, signature=SIGNATURE) for _ in range(2))
    first.reserve(11)
    first.append([1, 2, 3, 4, 5, 6, 7, 8, 9])
    first.commit(2)
    for _ in range(2):
        first.look_ahead()
        assert second.match([1, 2, 3, 4, 5, 6, 7, 8]) == 0, "its step still runs"
    first.commit(4)
    first.append([10], unknown=1)
    first.look_ahead()
    first.commit(4)
    first.fill([12])
    first.commit(1)
    node = first.seal()
    assert second.match([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert second.match([9, 10, 11], whole=True) == 0 and second.match([9, 10, 12], whole=True) == 3
    assert second.pages == node.pages
    with refused("writer_closed"):
        first.look_ahead()
    store.check()


def test_what_was_worked_out_ahead_goes_with_a_rollback() -> None:
    store = make_store()
    first, second = (store.begin([], [], 0, signature=SIGNATURE) for _ in range(2))
    for tokens in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 1]):
        first.rollback()
        first.reserve(5)
        first.append(tokens)
        first.look_ahead()
    first.commit(5)
    assert second.match([1, 2, 3, 4]) == 0 and second.match([6, 7, 8, 9]) == 4
    store.check()


@pytest.mark.parametrize("end", ["rollback", "abort"])
def test_unknown_tokens_end_with_their_writer(end: str) -> None:
    store = make_store(num_pages=2)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(5)
    writer.append([1, 2, 3], unknown=2)
    if end == "abort":
        writer.abort()
    else:
        writer.rollback()
        assert (writer.num_tokens, writer.num_known) == (0, 0)
        writer.reserve(1)
        writer.append([7])
        writer.commit(1)
        store.unhold(writer.seal())
    assert_all_pages_back(store)


def test_an_empty_node_is_a_state_without_pages() -> None:
    store = make_store()
    node = write(store, [])
    assert store.tier(node) == "device" and node.length == 0
    store.restore(node).finish()
    store.unhold(node)
    assert_all_pages_back(store)


def test_pages_freed_in_a_step_count_as_waiting_until_it_ends() -> None:
    store = make_store(num_pages=2)
    writer = store.begin([], [], 0, signature=SIGNATURE)
    writer.reserve(8)
    fence = store.begin_step()
    writer.rollback()
    with pytest.raises(OutOfPages) as caught:
        writer.reserve(4)
    assert (caught.value.available, caught.value.waiting) == (0, 2)
    store.check()
    store.end_step(fence)
    writer.reserve(8)
    with refused("unknown_fence"):
        store.end_step(fence)


@pytest.mark.parametrize("field", ["num_pages", "page_size", "max_events"])
def test_sizes_must_be_positive(field: str) -> None:
    sizes = {"num_pages": 1, "page_size": 1, "max_events": 1, field: 0}
    with refused("invalid_size", field):
        KVStore(**sizes)
