from __future__ import annotations

import pytest
from kvstore_helpers import refused

from dagengine_kvstore.host_pages import HostPool
from dagengine_kvstore.pages import PagePool, PageState


def test_a_page_freed_in_a_step_waits_for_every_fence_begun_before() -> None:
    pool = PagePool(3)
    a, b, c = pool.allocate(3)
    first = pool.begin_fence()
    pool.drop(a)
    second = pool.begin_fence()
    pool.drop(b)
    pool.end_fence(second)
    assert [pool.state(page) for page in (a, b, c)] == [PageState.WAITING, PageState.WAITING, PageState.LIVE]
    third = pool.begin_fence()
    pool.end_fence(first)
    assert pool.num_free == 2, "the third fence began after both frees"
    pool.drop(c)
    assert pool.state(c) is PageState.WAITING
    pool.end_fence(third)
    assert pool.num_free == 3 and pool.problems() == []


def test_ending_a_fence_twice_is_refused() -> None:
    pool = PagePool(1)
    fence = pool.begin_fence()
    pool.end_fence(fence)
    with refused("unknown_fence"):
        pool.end_fence(fence)


def test_freeing_more_often_than_referring_is_refused() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.drop(page)
    with refused("double_free"):
        pool.drop(page)
    assert pool.refs[page] == 0


def test_a_waiting_page_with_content_may_be_shared_again_and_is_not_freed_by_the_fence() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.remember(page, "content")
    fence = pool.begin_fence()
    pool.drop(page)
    assert pool.state(page) is PageState.WAITING
    pool.share(page)
    pool.end_fence(fence)
    assert pool.state(page) is PageState.LIVE
    pool.drop(page)
    assert pool.state(page) is PageState.CACHED


def test_free_pages_go_first_then_the_least_recently_used_cached_one() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    for page in pages[:2]:
        pool.remember(page, f"content {page}")
    for page in (pages[1], pages[0], pages[2]):
        pool.drop(page)
    assert pool.allocate(1) == [pages[2]]
    assert pool.allocate(1) == [pages[1]] and pool.find(f"content {pages[1]}") is None
    assert pool.find(f"content {pages[0]}") == pages[0]


def test_a_page_handed_out_again_has_a_new_generation() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    before = pool.generation[page]
    pool.drop(page)
    pool.allocate(1)
    assert pool.generation[page] == before + 1


def test_ending_a_fence_frees_what_waited_for_no_other() -> None:
    pool = PagePool(2)
    first_page, second_page = pool.allocate(2)
    first = pool.begin_fence()
    pool.drop(first_page)
    second = pool.begin_fence()
    pool.drop(second_page)
    pool.end_fence(first)
    states = [pool.state(page) for page in (first_page, second_page)]
    assert states == [PageState.FREE, PageState.WAITING]
    with refused("unknown_fence", "fence"):
        pool.end_fence(first)
    pool.end_fence(second)
    assert pool.num_free == 2


def test_a_page_under_a_ticket_goes_nowhere_until_the_ticket_ends() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.remember(page, "content")
    pool.begin_move(page)
    assert pool.state(page) is PageState.MOVING and (pool.num_live, pool.num_moving) == (0, 1)
    with pytest.raises(AssertionError):
        pool.begin_move(page)
    pool.drop(page)
    assert pool.state(page) is PageState.MOVING and pool.num_free + pool.num_cached == 1
    assert pool.problems() == []
    pool.share(page)
    pool.end_move(page)
    assert pool.state(page) is PageState.LIVE and pool.num_moving == 0
    pool.begin_move(page)
    fence = pool.begin_fence()
    pool.drop(page)
    pool.end_move(page)
    assert pool.state(page) is PageState.WAITING
    pool.end_fence(fence)
    assert pool.state(page) is PageState.CACHED and pool.problems() == []


def test_a_page_to_be_written_by_a_ticket_lands_live_or_is_free_again() -> None:
    pool = PagePool(3)
    pages = pool.take_moving(3)
    assert pool.refs == [0, 0, 0] and pool.num_moving == 3 and pool.problems() == []
    pool.land(pages[0], 2, 7, "content")
    pool.land(pages[1], 0, 8, "other")
    pool.end_move(pages[2])
    assert [pool.state(page) for page in pages] == [PageState.LIVE, PageState.CACHED, PageState.FREE]
    assert (pool.refs[0], pool.base[0], pool.find("content"), pool.content(1)) == (2, 7, 0, "other")
    (again,) = pool.take_moving(1)
    pool.land(again, 1, 9, "content")
    assert pool.find("content") == 0 and not pool.has_content(again), "the first stays the registered one"
    assert pool.problems() == []


def test_a_page_is_written_when_the_steps_of_its_writer_have_ended_whoever_reads_it() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    first = pool.begin_fence()
    pool.touch(page, written=True)
    second = pool.begin_fence()
    pool.touch(page)
    assert not pool.is_written(page)
    with pytest.raises(AssertionError):
        pool.begin_move(page)
    pool.end_fence(first)
    assert pool.is_written(page) and not pool.is_quiet(page)
    pool.end_fence(second)
    assert pool.is_quiet(page)


def test_what_a_page_held_can_be_shared_until_it_is_handed_out_again() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    owner = pool.generation[page]
    assert pool.is_shareable(page, owner) and not pool.is_shareable(page, owner - 1)
    pool.drop(page)
    assert not pool.is_shareable(page, owner), "free, and nobody knows what it holds"
    pool.allocate(1)
    assert not pool.is_shareable(page, owner)
    pool.remember(page, "content")
    pool.drop(page)
    assert pool.is_shareable(page, owner + 1)
    with pytest.raises(AssertionError):
        pool.remember(page, "more")


def test_the_pool_names_a_page_in_two_places() -> None:
    for place in ("_free", "_cached", "_waiting", "_moving"):
        pool = PagePool(2)
        pool.allocate(1)
        inside = getattr(pool, place)
        if isinstance(inside, dict):
            inside[0] = None
        else:
            inside.add(0)
        expected = {"_moving": []}.get(place, [f"page 0 is in {[place[1:], 'live']}"])
        found = [problem for problem in pool.problems() if "must be in exactly one" in problem]
        assert [problem.partition(", must")[0] for problem in found] == expected


def test_host_pages_are_free_live_or_moving() -> None:
    host = HostPool(4)
    pages = host.take(3)
    assert pages == [0, 1, 2] and (host.num_free, host.num_live, host.num_moving) == (1, 0, 3)
    for page in pages[:2]:
        host.share(page)
    for page in pages:
        host.end_move(page)
    assert (host.num_free, host.num_live, host.num_moving) == (2, 2, 0)
    with pytest.raises(AssertionError):
        host.share(2)
    with pytest.raises(AssertionError):
        host.begin_move(2)
    host.begin_move(0)
    with pytest.raises(AssertionError):
        host.begin_move(0)
    host.drop(0)
    assert host.is_moving(0) and host.num_free == 2
    host.end_move(0)
    host.drop(1)
    assert host.num_free == 4 and host.problems() == []
    with refused("double_free", "host_page"):
        host.drop(1)
    host.refs[3] = 1
    assert host.problems() == ["host page 3: free is True, moving is False, with 1 references"]
