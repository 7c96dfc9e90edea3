"""A plan that advances is the plan of the next decode step."""

import random

import pytest
from hypothesis import given, settings

from dagengine_kernels import KernelError
from dagengine_kernels.fused import planner_twin
from dagengine_kernels.fused.plan import NO_TAIL
from dagengine_kernels.fused.planner import plan_spans, plan_table
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable

from .planner_batches import (
    H200,
    batch,
    check_walks,
    example,
    pages,
    random_batch,
    random_parameters,
    readers_of_states,
    seeds,
    walked,
)


def grown(table: SpanTable, reserve: list[list[int]], steps: int) -> SpanTable:
    """The table after so many decode steps: the last span of each sequence of one row has grown into its pages."""
    sequences = []
    for b in range(table.num_sequences):
        rows = int(table.q_indptr[b + 1] - table.q_indptr[b])
        listed = table.spans[table.span_indptr[b] : table.span_indptr[b + 1]].tolist()
        spans = []
        for j, (which, start, stop, stored, delta) in enumerate(listed):
            at = table.list_pages[table.list_indptr[which] : table.list_indptr[which + 1]].tolist()
            if rows == 1 and j == len(listed) - 1:
                last = (stop - 1) // table.page_size
                at = at[: last + 1] + list(reserve[b])
                stop += steps
            spans.append((at, start, stop, stored, delta))
        first = int(table.q_positions[table.q_indptr[b]]) if rows else 0
        sequences.append(SequenceSpans(first + steps * (rows == 1), rows, spans))
    return SpanTable.from_sequences(sequences, page_size=table.page_size)


def room(table: SpanTable, reserve: list[list[int]]) -> int:
    """Steps that every tail has room for."""
    size, rooms = table.page_size, [12]
    for b in range(table.num_sequences):
        begin, end = table.span_indptr[b : b + 2]
        if table.q_indptr[b + 1] - table.q_indptr[b] == 1 and end > begin:
            rooms.append(-int(table.spans[end - 1, 2]) % size + size * len(reserve[b]))
    return min(rooms)


@settings(example, max_examples=50)
@given(seeds)
def test_a_plan_that_advances_walks_what_later_rows_see(seed):
    rng = random.Random(seed)
    if rng.random() < 0.7:
        (table, _), parameters = random_batch(rng), random_parameters(rng)
    else:
        table, _, parameters = readers_of_states(rng)
    reserve = []
    for b in range(table.num_sequences):
        grows = (
            table.q_indptr[b + 1] - table.q_indptr[b] == 1 and table.span_indptr[b + 1] > table.span_indptr[b]
        )
        reserve.append([5000 + 50 * b + i for i in range(rng.randint(1, 4))] if grows else [])
    arrays = plan_spans(table, parameters, reserve=reserve)
    for step in range(1, room(table, reserve) + 1):
        planner_twin.advance(arrays)
        if rng.random() < 0.5:
            continue
        now = grown(table, reserve, step)
        check_walks(arrays, parameters, now)


def test_a_tail_ends_with_its_last_reserved_page():
    table = batch([(pages(0, 6, 4), 0, 6)], page_size=4)
    arrays = plan_spans(table, H200, reserve=[[90, 91]])
    (entry, count, stride), filled = arrays.tails[0].tolist(), []
    assert (arrays.entries[entry, 0], count, stride) == (1, 3, 1)
    while arrays.tails[0, 0] >= 0:
        filled.append(int(arrays.entries[arrays.tails[0, 0], 0]))
        planner_twin.advance(arrays)
    assert filled == [1, 1, *[90] * 4, *[91] * 4]
    assert arrays.tails.tolist() == [list(NO_TAIL)]
    assert arrays.entries[entry : entry + 3].tolist() == [
        [1, 4 << 16, 4, 0],
        [90, 4 << 16, 8, 0],
        [91, 4 << 16, 12, 0],
    ]


def test_a_full_last_page_grows_into_the_next_one():
    table = batch([(pages(0, 8, 4), 0, 8)], page_size=4)
    assert plan_spans(table, H200, reserve=[[]]).tails.tolist() == [list(NO_TAIL)]
    arrays = plan_spans(table, H200, reserve=[[90]])
    ((entry, count, _),) = arrays.tails.tolist()
    assert (arrays.entries[entry].tolist(), count) == ([90, 0, 8, 0], 1)


def test_a_tail_that_others_see_grows_for_its_sequence_only():
    shared = pages(0, 70)
    table = batch([(shared, 0, 70)], [(shared, 0, 70)])
    arrays = plan_spans(table, H200, reserve=[[80], [81]])
    planner_twin.advance(arrays)
    rows = walked(arrays, H200, table.q_positions + 1, 2)
    assert [heads[0].total() for heads in rows] == [71, 71]


@pytest.mark.parametrize(
    ("reserve", "named"),
    [
        ([[1]], "reserve"),
        ([[], [1], []], "reserve[1]"),
        ([[], [], [1]], "reserve[2]"),
        ([[-1], [], []], "reserve[0]"),
    ],
)
def test_pages_are_reserved_only_for_what_can_grow(reserve, named):
    table = SpanTable.from_sequences(
        [
            SequenceSpans(3, 1, [([7], 0, 4, 0, 0)]),
            SequenceSpans(3, 2, [([8], 0, 5, 0, 0)]),
            SequenceSpans(0, 1, []),
        ],
        page_size=64,
    )
    for function, argument in ((plan_spans, table), (plan_table, table.to_segments())):
        with pytest.raises(KernelError) as refused:
            function(argument, H200, reserve=reserve)
        assert (refused.value.code, refused.value.field) == ("invalid_argument", named)
