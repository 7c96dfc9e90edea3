from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvstore_helpers import refused

from dagengine_kvstore.pages import FreeRuns, PagePool, PageState


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 11)), max_size=40))
def test_free_runs_behave_as_a_set_and_are_contiguous_where_they_can(steps: list[tuple[int, int]]) -> None:
    runs, free, taken = FreeRuns(12), set(range(12)), []
    for count, page in steps:
        if count > len(free) or count == 0:
            for page in taken[: count + 1]:
                runs.add(page)
                free.add(page)
            taken = taken[count + 1 :]
            continue
        longest = max(
            (n for n in range(1, 13) if any({*range(s, s + n)} <= free for s in range(12))), default=0
        )
        after = None if page < 0 or page in free else page
        follows = after is not None and after + 1 in free
        got = runs.take(count, after)
        assert len(set(got)) == count and set(got) <= free
        if follows:
            assert got[0] == after + 1
        elif longest >= count:
            assert got == list(range(got[0], got[0] + count))
        free -= set(got)
        taken += got
        assert len(runs) == len(free)
        assert {page for page in range(12) if page in runs} == free


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
