"""Runs of free pages against a set of them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dagengine_kvstore.free_runs import SPARE, FreeRuns


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


def test_free_runs_give_the_smallest_run_that_is_long_enough_or_the_longest() -> None:
    runs = FreeRuns(12)
    runs.take(12)
    for page in (0, 1, 3, 4, 5, 7, 8, 9, 10):
        runs.add(page)
    assert runs.take(2) == [0, 1]
    assert runs.take(3) == [3, 4, 5]
    assert runs.take(4) == [7, 8, 9, 10]
    for page in (5, 4, 3, 8, 7):
        runs.add(page)
    assert runs.take(4) == [3, 4, 5, 7]
    assert list(FreeRuns(0).take(0)) == [] and 0 not in FreeRuns(0) and len(FreeRuns(0)) == 0
    empty = FreeRuns(0)
    assert empty._starts == [] and empty._start_of == {}
    runs = FreeRuns(3)
    runs.take(2)
    runs.add(1)
    assert runs.take(2) == [1, 2]


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """(start, length) of the maximal runs of a set, ascending."""
    found: list[tuple[int, int]] = []
    for page in sorted(free):
        if found and sum(found[-1]) == page:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((page, 1))
    return found


def choose(free: set[int], count: int, after: int | None) -> list[int]:
    """What `take` is to give, by looking at all runs."""
    left, pages = set(free), list[int]()
    while len(pages) < count:
        listed, missing = runs_of(left), count - len(pages)
        behind = [run for run in listed if not pages and after is not None and run[0] == after + 1]
        fitting = [run for run in listed if run[1] >= missing]
        if behind:
            start, length = behind[0]
        elif fitting:
            start, length = min(fitting, key=lambda run: (run[1], run[0]))
        else:
            start, length = min(listed, key=lambda run: (-run[1], run[0]))
        pages += range(start, start + min(length, missing))
        left -= set(pages)
    return pages


def test_what_is_given_is_what_a_look_at_all_runs_would_choose() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        size = rng.randint(1, 60)
        runs, free = FreeRuns(size), set(range(size))
        for _ in range(300):
            kind = rng.random()
            if kind < 0.45 and free:
                count = rng.randint(1, min(len(free), rng.choice((1, 3, 60))))
                after = rng.randrange(size) if rng.random() < 0.5 else None
                after = None if after in free else after
                wanted = choose(free, count, after)
                assert runs.take(count, after) == wanted
                free -= set(wanted)
            elif kind < 0.55 and free:
                page = rng.choice(sorted(free))
                runs.remove(page)
                free.remove(page)
            elif len(free) < size:
                page = rng.choice(sorted(set(range(size)) - free))
                runs.add(page)
                free.add(page)
            assert len(runs) == len(free) and [page for page in range(size) if page in runs] == sorted(free)
            listed = runs_of(free)
            assert list(zip(runs._starts, map(runs._length.get, runs._starts), strict=True)) == listed
            assert runs._lengths == sorted({length for _, length in listed})


def test_runs_that_are_gone_are_forgotten() -> None:
    runs = FreeRuns(2001)
    runs.take(2001)
    for page in range(0, 2001, 2):
        runs.add(page)
    rng = random.Random(0)
    for _ in range(20_000):  # runs of three come and go, and are never given out
        page = rng.randrange(1, 2000, 2)
        runs.add(page)
        runs.remove(page)
    kept = sum(map(len, runs._by_length.values()))
    assert kept <= 2 * len(runs._starts) + (SPARE + 1) * len(runs._lengths)
