from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagengine_kvstore.pages import FreeRuns, PagePool, PageState


@given(st.sets(st.integers(0, 11)), st.permutations(range(12)))
def test_any_page_can_be_taken_out_of_the_free_runs(taken: set[int], order: list[int]) -> None:
    runs = FreeRuns(12)
    for page in order:
        if page in taken:
            runs.remove(page)
    free = set(range(12)) - taken
    assert len(runs) == len(free) and {page for page in range(12) if page in runs} == free
    for page in order:
        if page in taken:
            runs.add(page)
    assert runs.take(12) == list(range(12)), "and all are one run again"


def test_a_claimed_page_is_another_generation_without_content() -> None:
    pool = PagePool(3)
    cached, free, other = pool.allocate(3)
    pool.remember(cached, "content")
    pool.turned[cached] = True
    for page in (cached, free):
        pool.drop(page)
    assert pool.state(cached) is PageState.CACHED and pool.state(free) is PageState.FREE
    pool.claim([free, cached])
    assert [pool.state(page) for page in (cached, free, other)] == [PageState.LIVE] * 3
    assert pool.generation == [5, 4, 3] and pool.find("content") is None
    assert not pool.turned[cached], "what is computed on it now is not turned"
    assert pool.problems() == []
