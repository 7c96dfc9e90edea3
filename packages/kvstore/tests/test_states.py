from __future__ import annotations

import pytest
from kvstore_helpers import SIGNATURE, Clock, assert_all_pages_back, child, make_store, refused, write

from dagengine_kvstore import Lease, NodeRecord, Parent, Read


def test_a_released_handle_is_remembered_for_an_hour() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    node = write(store, [1, 2, 3])
    handle = store.name(node)
    store.release(handle)
    with refused("state_released", "state"):
        store.resolve(handle)
    clock.now += 3599
    with refused("state_released"):
        store.release(handle)
    clock.now += 1
    with refused("state_not_found"):
        store.resolve(handle)


def test_another_tenants_handle_is_not_found_alive_or_released() -> None:
    store = make_store()
    node = write(store, [1], salt="tenant a")
    handle = store.name(node, salt="tenant a")
    assert store.resolve(handle, "tenant a") == (node, 1)
    for salt in ("", "tenant b"):
        with refused("state_not_found"):
            store.resolve(handle, salt)
        with refused("state_not_found"):
            store.release(handle, salt=salt)
        with refused("state_not_found"):
            store.name(node, salt=salt)
    assert [info.id for info in store.states(salt="tenant a")] == [handle]
    assert store.states(salt="tenant b") == ()
    store.release(handle, salt="tenant a")
    with refused("state_not_found"):
        store.resolve(handle, "tenant b")


def test_a_state_ends_with_its_time_to_live_unless_pinned() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    node = write(store, [1, 2, 3, 4, 5])
    short, pinned = store.name(node, ttl_s=10), store.name(node, ttl_s=10, pin=True)
    longer = store.name(node, ttl_s=10)
    store.retain(longer, ttl_s=30)
    store.unhold(node)
    clock.now += 10
    store.begin_step()
    with refused("state_released"):
        store.resolve(short)
    assert store.resolve(pinned)[0] is store.resolve(longer)[0] is node
    store.unpin(pinned)
    with refused("state_released"):
        store.resolve(pinned)
    clock.now += 20
    store.end_step(1)
    with refused("state_released"):
        store.describe(longer)
    assert_all_pages_back(store)


def test_what_is_found_is_not_over_before_the_store_says_so_and_may_last_longer() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    node = write(store, [1, 2], salt="tenant a")
    short, longer = store.name(node, ttl_s=10), store.name(node, ttl_s=10)
    clock.now += 9
    assert store.find(longer, "tenant a", ttl_s=5) == (node, 2)
    clock.now += 1
    assert store.find(short, "tenant a") == (node, 2)
    with refused("state_not_found"):
        store.find(short, "tenant b", ttl_s=5)
    with refused("invalid_ttl", "ttl_s"):
        store.find(short, "tenant a", ttl_s=0)
    store.expire()
    with refused("state_released"):
        store.find(short, "tenant a")
    assert store.find(longer, "tenant a") == (node, 2)
    clock.now += 4
    with refused("state_released"):
        store.resolve(longer, "tenant a")


def test_retaining_without_a_time_keeps_the_state() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    handle = store.name(write(store, [1]), ttl_s=1)
    store.retain(handle)
    clock.now += 10**6
    assert store.describe(handle).expires_s is None


def test_a_state_that_is_retained_ends_in_time_and_costs_no_more_however_often_that_was() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    node = write(store, [1])
    handle, never, unpinned = store.name(node), store.name(node), store.name(node, ttl_s=5, pin=True)
    for _ in range(1000):
        clock.now += 1
        store.retain(handle, ttl_s=5000)
        store.retain(never, ttl_s=5000)
        store.pin(unpinned)
    assert len(store._books.handles._deadlines) < 10
    store.retain(never, None)
    store.retain(handle, ttl_s=3)
    clock.now += 2.9
    assert len(store.states()) == 3
    clock.now += 0.1
    assert [state.id for state in store.states()] == [never, unpinned]
    clock.now += 10**6
    store.unpin(unpinned)
    assert [state.id for state in store.states()] == [never]
    store.check()


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_time_to_live_must_be_positive(ttl_s: float) -> None:
    store = make_store()
    node = write(store, [1])
    with refused("invalid_ttl", "ttl_s"):
        store.name(node, ttl_s=ttl_s)
    assert store.states() == ()
    store.check()


def test_a_fork_shows_its_first_tokens_and_keeps_no_page_behind_them() -> None:
    store = make_store()
    node = write(store, list(range(10)))
    fork = store.name(node, at=5)
    store.unhold(node)
    assert store.resolve(fork) == (node, 5)
    assert [page is None for page in node.pages] == [False, False, True]
    with refused("span_out_of_range"):
        store.name(node, at=11)
    with refused("state_released"):
        store.name(node)
    with refused("state_released"):
        store.lease([Read(node, 0, 10)])
    with store.lease([Read(node, 0, 5)]):
        store.check()


def test_releasing_a_state_with_readers_only_hides_its_name() -> None:
    store = make_store()
    parent = write(store, [1, 2, 3])
    handle = store.name(parent)
    store.unhold(parent)
    kid = child(store, parent, [4])
    store.release(handle)
    with refused("state_released"):
        store.resolve(handle)
    with store.lease([Read(parent, 0, 3)]) as lease:
        assert [extent.hi for extent in lease.extents(0)] == [3]
    store.unhold(kid)
    assert_all_pages_back(store)


def test_a_running_reader_keeps_the_pages_of_a_released_state() -> None:
    store = make_store()
    node = write(store, [1, 2, 3])
    lease = store.lease([Read(node, 0, 3)])
    before = lease.extents(0)
    store.unhold(node)
    store.check()
    assert store.stats().pages_live == 1 and lease.extents(0) == before
    lease.release()
    assert_all_pages_back(store)
    for ask in (lambda: lease.extents(0), lambda: lease.bases(0), lambda: lease.base_of):
        with refused("lease_released"):
            ask()


def test_each_reader_keeps_what_it_reads_of_a_released_state_and_no_more() -> None:
    """The page in the middle is read by both, by one of them twice."""
    store = make_store()
    node = write(store, list(range(12)))
    first = store.lease([Read(node, 0, 5)])
    second = store.lease([Read(node, 4, 12), Read(node, 6, 8)])
    extents = first.extents(0), second.extents(0), second.extents(1)
    store.unhold(node)
    store.check()
    refs = store._books.pool.refs
    assert [refs[page] for page in second.pages[0]] == [3, 1] and refs[first.pages[0][0]] == 1
    assert (first.extents(0), second.extents(0), second.extents(1)) == extents
    second.release()
    store.check()
    assert [refs[page] for page in first.pages[0]] == [1, 1] and store.stats().pages_live == 2
    first.release()
    assert_all_pages_back(store)


def test_a_page_of_a_released_state_waits_for_the_step_that_read_it_under_a_lease() -> None:
    store = make_store()
    node = write(store, [1, 2, 3, 4])
    with store.lease([Read(node, 0, 4)]):
        fence = store.begin_step()
    store.unhold(node)
    assert store.stats().pages_waiting == 1
    store.end_step(fence)
    assert_all_pages_back(store)


def test_a_page_of_a_released_state_is_asked_for_by_the_leases_that_read_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store(num_pages=64)
    nodes = [write(store, list(range(at, at + 8))) for at in range(0, 80, 8)]
    leases = [store.lease([Read(node, 0, 8), Read(node, 2, 6)]) for node in nodes]
    asked: list[Lease] = []
    keep = Lease.keep

    def count(lease: Lease, node: NodeRecord, index: int, page: int) -> int:
        asked.append(lease)
        return keep(lease, node, index, page)

    monkeypatch.setattr(Lease, "keep", count)
    for node in nodes:
        store.unhold(node)
    assert asked == [lease for lease in leases for _ in range(2)]
    for lease in leases:
        lease.release()
    assert_all_pages_back(store)


def test_unholding_more_often_than_holding_is_refused() -> None:
    store = make_store()
    node = write(store, [1])
    store.hold(node)
    store.unhold(node)
    store.unhold(node)
    with refused("not_held"):
        store.unhold(node)
    with refused("state_released"):
        store.hold(node)
    with refused("state_released"):
        store.begin([Parent.inherit(node)], [], 1, signature=SIGNATURE)


def test_a_state_can_be_described() -> None:
    store = make_store()
    node = write(store, [1, 2, 3, 4, 5])
    handle = store.name(node, name="plan", pin=True)
    with store.lease([Read(node, 0, 1)]):
        info = store.describe(handle)
    assert (info.name, info.at, info.pages, info.tier, info.readers, info.pinned) == (
        "plan",
        5,
        2,
        "device",
        1,
        True,
    )


@pytest.mark.parametrize("at", [1.0, 0.5, True, "1", float("nan")])
def test_tokens_are_counted_in_integers(at: object) -> None:
    store = make_store()
    node = write(store, list(range(6)))
    with refused("span_out_of_range", "node"):
        store.name(node, at=at)  # type: ignore[arg-type]
    with refused("span_out_of_range", "node"):
        store.hold(node, at)  # type: ignore[arg-type]
    with refused("span_out_of_range", "parents[0]"):
        store.begin([Parent(node, "inherit", 0, at)], [], 0, signature=SIGNATURE)  # type: ignore[arg-type]
    with refused("span_out_of_range", "reads[0]"):
        store.lease([Read(node, 0, at)])  # type: ignore[arg-type]
    store.check()
    store.unhold(node)
    assert_all_pages_back(store)
