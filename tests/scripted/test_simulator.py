"""Random graphs through the real engine, exact to the definition. See `simulator` for what a run is.

To repeat a failure: `run_world(seed, graphs)` with the numbers that the message names.
"""

from __future__ import annotations

from collections import Counter

import pytest
from simulator import Settings, run_world

pytestmark = pytest.mark.usefixtures("quiet")

WORLDS_PER_TEST = 6
GRAPHS_PER_WORLD = 8
MOST_TIGHT_WORLDS = 30
TESTS = 11
OVERLAPPED = {"late": 3, "overlap": 1}

PARTS = [("at once", part) for part in range(TESTS)]
PARTS += [(mode, TESTS + part) for mode, parts in OVERLAPPED.items() for part in range(parts)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "part"), PARTS)
def test_random_graphs_equal_the_definition(mode: str, part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * WORLDS_PER_TEST, (part + 1) * WORLDS_PER_TEST):
        counts += run_world(seed, GRAPHS_PER_WORLD, mode=mode)
    assert counts["graphs"] == WORLDS_PER_TEST * GRAPHS_PER_WORLD
    for happened in (
        "answers",
        "aborts",
        "forks",
        "groups",
        "joins",
        "evictions",
        "restored tokens",
        "matched tokens",
    ):
        assert counts[happened], f"no {happened} in {counts}"


@pytest.mark.parametrize("mode", ["at once", "late"])
@pytest.mark.parametrize(("page_size", "pages"), [(1, 45), (3, 20), (16, 7)])
def test_tight_memory_preempts_and_restores(page_size: int, pages: int, mode: str) -> None:
    counts: Counter[str] = Counter()
    settings = Settings(page_size, pages, max_num_batched_tokens=16, max_num_seqs=8)
    happening = ("preemptions", "restored tokens", "evictions")
    for seed in range(MOST_TIGHT_WORLDS):
        if seed >= 4 and all(counts[happened] for happened in happening):
            break
        counts += run_world(seed, 4, settings, mode)
    assert all(counts[happened] for happened in happening), counts


@pytest.mark.usefixtures("step_mode")
def test_a_run_is_its_seed() -> None:
    """Two runs of one seed do the same, step by step; otherwise a printed seed would repeat nothing."""
    first, second = (run_world(3, 3) for _ in range(2))
    for counts in (first, second):
        counts.pop("collected by gc", None)  # depends on when Python last collected, not on the seed
    assert first == second
