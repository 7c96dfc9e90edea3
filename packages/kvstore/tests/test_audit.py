"""`check` names what is wrong: each kind of damage, done on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvstore_helpers import make_store, write

from dagengine_kvstore import KVStore, LeakError, NodeRecord, Read


def lose_a_page(store: KVStore, node: NodeRecord) -> None:
    node.pages[0] = None


def count_a_reference_too_many(store: KVStore, node: NodeRecord) -> None:
    store._books.pool.refs[node.pages[0]] += 1  # type: ignore[index]


def lose_a_hold(store: KVStore, node: NodeRecord) -> None:
    del store._books.anonymous[node]


def keep_what_nothing_holds(store: KVStore, node: NodeRecord) -> None:
    node.cover.clear()


def lose_a_lease(store: KVStore, node: NodeRecord) -> None:
    node.leases.popitem()


def mark_as_restoring(store: KVStore, node: NodeRecord) -> None:
    node.restoring = True


def hand_out_a_leased_page(store: KVStore, node: NodeRecord) -> None:
    store._books.pool._hand_out([node.pages[0]])  # type: ignore[list-item]


def go_on_with_pages_that_are_gone(store: KVStore, node: NodeRecord) -> None:
    node.run()
    node.pages[0] = 1


def free_a_live_page(store: KVStore, node: NodeRecord) -> None:
    store._books.pool._free.add(node.pages[0])  # type: ignore[arg-type]


def commit_what_is_unknown(store: KVStore, node: NodeRecord) -> None:
    writer = store.begin([], [], 0, signature={})
    writer.reserve(1)
    writer.append([], unknown=1)
    writer._committed = 1


def share_what_is_not_committed(store: KVStore, node: NodeRecord) -> None:
    writer = store.begin([], [], 0, signature={})
    writer.reserve(1)
    store._books.pool.remember(writer.pages[0], "content")


def find_a_page_by_less_than_it_holds(store: KVStore, node: NodeRecord) -> None:
    pool, page = store._books.pool, node.pages[0]
    assert page is not None
    content = store._books.contents.extend(node.context, [1, 2])
    pool._forget(page)
    pool.remember(page, content)


def know_less_than_its_writer(store: KVStore, node: NodeRecord) -> None:
    node.num_unknown = 1


@pytest.mark.parametrize(
    "damage, words",
    [
        (lose_a_page, "page 0 has 1 references, its owners are 0"),
        (count_a_reference_too_many, "page 0 has 2 references, its owners are 1"),
        (lose_a_hold, "NodeRecord(uid=1, sealed, 3 tokens) is covered {(0, 3): 1}, its holds say {}"),
        (keep_what_nothing_holds, "keeps page 0, which nothing holds"),
        (lose_a_lease, "counts 0 reads by leases, there are 1"),
        (mark_as_restoring, "is marked restoring=True"),
        (hand_out_a_leased_page, "were handed out again under a lease"),
        (go_on_with_pages_that_are_gone, "has pages [1], and says [0]"),
        (free_a_live_page, "page 0 is in ['free', 'live']"),
        (commit_what_is_unknown, "is committed, known, appended, reserved up to (1, 0, 1, 4)"),
        (share_what_is_not_committed, "shares page 1, of which nothing is committed"),
        (find_a_page_by_less_than_it_holds, "3 tokens) is found by (1, 2), which it does not hold"),
        (know_less_than_its_writer, "says that 1 tokens are not known, its writer 0"),
    ],
)
def test_check_names_the_difference(damage: Callable[[KVStore, NodeRecord], None], words: str) -> None:
    store = make_store(num_pages=2)
    node = write(store, [1, 2, 3])
    lease = store.lease([Read(node, 0, 3)])
    store.check()
    damage(store, node)
    with pytest.raises(LeakError) as caught:
        store.check()
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
    assert lease.reads


def test_check_counts_what_a_lease_refers_to_itself() -> None:
    store = make_store(num_pages=2)
    node = write(store, [1, 2, 3])
    lease = store.lease([Read(node, 0, 3)])
    store.unhold(node)
    store.check()
    lease._own.clear()
    with pytest.raises(LeakError, match="page 0 has 1 references, its owners are 0"):
        store.check()
