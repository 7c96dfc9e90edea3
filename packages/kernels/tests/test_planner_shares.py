"""Work is dealt evenly among workers, and tiles of one walk read the same pages together."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagengine_kernels.fused import planner_twin, shares_twin
from dagengine_kernels.fused.planner import balance, plan_spans
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable
from dagengine_kernels.graph_cases import GRAPH_CASES, graph_case

from .planner_batches import (
    H200,
    assert_equal,
    batch,
    check_walks,
    example,
    needs_native,
    pages,
    readers_of_states,
    seeds,
)


@pytest.mark.parametrize("run_cost", [0, 2])
@pytest.mark.parametrize("name", GRAPH_CASES)
def test_the_shares_of_the_graph_cases_are_even(name, run_cost):
    parameters = replace(H200, run_cost=run_cost)
    for makespan, mean in balance(plan_spans(graph_case(name), parameters), parameters):
        assert makespan <= 1.05 * mean


def test_a_share_with_many_runs_is_shorter():
    documents = [pages(100 * i, 64) for i in range(64)]
    table = batch([(pages(9000, 64 * 64), 0, 64 * 64), *((document, 0, 64) for document in documents)])
    parameters = replace(H200, num_kv_heads=1, workers=(8, 8), work_cost=0, run_cost=3)
    arrays = plan_spans(table, parameters)
    works = arrays.classes[0].works
    lengths = (works[:, 3] - works[:, 2]).tolist()
    assert len(works) == 8 and lengths[0] == 40 and max(lengths[2:]) == 10


@pytest.mark.parametrize("boxes", [1, 2])
@pytest.mark.parametrize("workers", [132, 264])
@pytest.mark.parametrize(
    "lengths",
    [[8192] * 32, [91424], [1024] * 64, [65536 // (i + 1) for i in range(64)], [65536] + [1024] * 31],
    ids=["32 x 8192", "1 x 91424", "64 x 1024", "zipf", "a giant"],
)
def test_shares_are_even_where_nothing_is_shared(lengths, workers, boxes):
    parameters = replace(H200, workers=(workers, workers), boxes=boxes)
    table = batch(*([(pages(2000 * i, n), 0, n)] for i, n in enumerate(lengths)))
    for makespan, mean in balance(plan_spans(table, parameters), parameters):
        assert makespan <= 1.05 * mean


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=20),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_shares_cover_every_item_and_respect_the_smallest_piece(lengths, workers, min_chunk, work_cost):
    works, firsts = shares_twin.cut(lengths, workers, min_chunk, work_cost)
    at = [0] * len(lengths)
    for item, begin, end in works:
        assert begin == at[item] and end - begin >= min(min_chunk, lengths[item])
        at[item] = end
    assert at == lengths
    assert works == sorted(works)
    assert (
        firsts[0] == 0
        and firsts[-1] == len(works)
        and firsts == sorted(firsts)
        and len(firsts) == workers + 1
    )


def long_sequences(*lengths: int, rows: int) -> SpanTable:
    """Sequences of so many tokens, of which the last `rows` are the query rows."""
    return SpanTable.from_sequences(
        [SequenceSpans(n - rows, rows, [(pages(5000 * i, n), 0, n, 0, 0)]) for i, n in enumerate(lengths)],
        page_size=64,
    )


def test_many_query_tiles_of_one_walk_are_dealt_whole_and_evenly():
    parameters = replace(H200, rows_per_tile=(128,), workers=(132,), boxes=2, work_cost=1, min_chunk=2)
    for tokens in (2048, 8192):
        arrays = plan_spans(long_sequences(tokens, rows=tokens), parameters)
        assert arrays.num_parts == 0
        for makespan, mean in balance(arrays, parameters):
            assert makespan <= 1.05 * mean


def test_few_query_tiles_of_a_long_walk_read_the_same_pages_at_the_same_time():
    parameters = replace(H200, rows_per_tile=(128,), workers=(132,), boxes=2, work_cost=1, min_chunk=2)
    arrays = plan_spans(long_sequences(91424, rows=64), parameters)
    (one,) = arrays.classes
    for makespan, mean in balance(arrays, parameters):
        assert makespan <= 1.05 * mean
    shares = [one.works[a:b, 1:4] for a, b in pairwise(one.work_indptr)]
    for first, second in zip(shares[::2], shares[1::2], strict=True):
        assert np.abs(first - second).max() <= 1  # one tile's last KV tile may be beyond the other's end


@pytest.mark.parametrize("readers", [64, 128])
def test_query_tiles_that_begin_with_the_same_pages_read_them_at_the_same_time(readers):
    parameters = replace(H200, rows_per_tile=(128,), workers=(132,), boxes=2, owners=True, run_cost=1)
    shared = pages(0, 32768)
    table = batch(*([(shared, 0, 32768), (pages(1000 + i, 48), 0, 48)] for i in range(readers)))
    arrays = plan_spans(table, parameters)
    (one,) = arrays.classes
    width = readers // 32
    assert len(one.tile_rows) == width
    for makespan, mean in balance(arrays, parameters):
        assert makespan <= 1.05 * mean
    begins = [one.works[one.works[:, 0] == tile, 2].min() for tile in range(width)]
    shares = [one.works[a:b] for a, b in pairwise(one.work_indptr)]
    for team in range(len(shares) // width):
        found = [
            [(head, begin - begins[tile], end - begins[tile]) for tile, head, begin, end, _ in share.tolist()]
            for share in shares[team * width : (team + 1) * width]
        ]
        assert found.count(found[0]) == width


@settings(example, max_examples=60)
@given(seeds)
def test_tiles_that_begin_alike_and_end_apart_walk_what_their_rows_see(seed):
    rng = random.Random(seed)
    table, reserve, parameters = readers_of_states(rng)
    arrays = plan_spans(table, parameters, reserve=rng.choice((None, reserve)))
    check_walks(arrays, parameters, table)


@needs_native
@settings(example, max_examples=60)
@given(seeds)
def test_the_planners_cut_tiles_that_begin_alike_and_end_apart_in_the_same_way(seed):
    rng = random.Random(seed)
    table, reserve, parameters = readers_of_states(rng)
    for pages_to_grow in (None, reserve):
        assert_equal(
            plan_spans(table, parameters, reserve=pages_to_grow),
            planner_twin.plan_spans(table, parameters, pages_to_grow),
        )


def test_some_of_these_tiles_are_cut_alike(monkeypatch):
    """Else the tests above would show nothing of that."""
    cut_alike, shares = shares_twin.cut_alike, []

    def spy(items, groups, turns, workers, parameters):
        lengths = [{items[tile * parameters.num_kv_heads].length for tile in group} for group in groups]
        shares.append((cut_alike(items, groups, turns, workers, parameters), max(map(len, lengths)) > 1))
        return shares[-1][0]

    monkeypatch.setattr(shares_twin, "cut_alike", spy)
    found = 0
    for seed in range(40):
        table, _, parameters = readers_of_states(random.Random(seed))
        arrays = planner_twin.plan_spans(table, parameters)
        for (_, indptr), apart in shares:
            found += apart and any(one.work_indptr.tolist() == indptr for one in arrays.classes)
        shares.clear()
    assert found >= 3
