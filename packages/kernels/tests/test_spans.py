"""Spans: the compact form of a table lists the same tokens, and finds the pages that sequences share."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagengine_kernels import KernelError, SegmentTable, SequenceSegments
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable, to_spans


def table(*sequences, page_size=4, num_pages=50) -> SegmentTable:
    """One row at position 99 for each list of extents."""
    listed = [SequenceSegments(99, 1, extents, i) for i, extents in enumerate(sequences)]
    return SegmentTable.from_sequences(listed, page_size=page_size, num_pages=num_pages)


def spans_of(found: SpanTable, sequence: int) -> list[tuple[int, ...]]:
    begin, end = found.span_indptr[sequence : sequence + 2]
    return [tuple(span) for span in found.spans[begin:end].tolist()]


def pages_of(found: SpanTable) -> list[list[int]]:
    ends = found.list_indptr
    return [found.list_pages[a:b].tolist() for a, b in pairwise(ends)]


def tokens(given: SegmentTable) -> list[Counter]:
    """Per sequence its tokens as (page, row, stored, delta)."""
    listed = []
    for begin, end in zip(given.extent_indptr[:-1], given.extent_indptr[1:], strict=True):
        listed.append(
            Counter(
                (page, row, stored + row - lo, delta)
                for page, lo, hi, stored, delta in given.extents[begin:end].tolist()
                for row in range(lo, hi)
            )
        )
    return listed


def random_table(rng: random.Random) -> SegmentTable:
    size = rng.choice((1, 2, 5))
    sequences = []
    for i in range(rng.randint(0, 5)):
        extents: list[tuple[int, int, int, int, int]] = []
        for _ in range(rng.randint(0, 12)):
            lo = rng.choice((0, rng.randrange(size)))
            hi = rng.choice((size, rng.randint(lo + 1, size)))
            page, delta = rng.randrange(8), rng.choice((0, 0, 3))
            stored = rng.choice((page * size + lo, page * size + lo, rng.randrange(20)))
            if extents and rng.random() < 0.6:
                before = extents[-1]
                stored, delta = before[3] + before[2] - before[1], before[4]
                if rng.random() < 0.7:
                    page, lo, hi = (before[0] + 1) % 8, 0, size
            extents.append((page, lo, hi, stored, delta))
        sequences.append(SequenceSegments(40, rng.randrange(3), extents, i))
    return SegmentTable.from_sequences(sequences, page_size=size, num_pages=8)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63))
def test_spans_list_the_tokens_of_their_table(seed):
    given = random_table(random.Random(seed))
    found = to_spans(given)
    found.validate()
    assert tokens(found.to_segments()) == tokens(given)
    again = to_spans(found.to_segments())
    assert tokens(again.to_segments()) == tokens(given)
    assert len(found.spans) <= len(given.extents)


def test_a_run_of_pages_is_one_span():
    found = to_spans(table([(7, 1, 4, 10, 5), (2, 0, 4, 13, 5), (9, 0, 2, 17, 5)]))
    assert pages_of(found) == [[7, 2, 9]]
    assert spans_of(found, 0) == [(0, 1, 10, 10, 5)]


@pytest.mark.parametrize(
    "second",
    [(2, 0, 4, 13, 6), (2, 0, 4, 14, 5), (2, 1, 4, 13, 5)],
    ids=["another delta", "stored positions with a gap", "rows skipped"],
)
def test_a_run_ends_where_it_does_not_go_on(second):
    found = to_spans(table([(7, 1, 4, 10, 5), second]))
    assert pages_of(found) == [[7], [2]]
    assert len(spans_of(found, 0)) == 2


def test_a_run_may_come_back_to_a_page():
    found = to_spans(table([(7, 1, 4, 10, 5), (7, 0, 4, 13, 5)]))
    assert pages_of(found) == [[7, 7]]
    assert spans_of(found, 0) == [(0, 1, 8, 10, 5)]


def test_extents_that_cut_a_page_are_one_span():
    found = to_spans(table([(7, 0, 1, 0, 0), (7, 1, 4, 1, 0), (2, 0, 3, 4, 0)]))
    assert spans_of(found, 0) == [(0, 0, 7, 0, 0)]


def test_sequences_share_lists_at_any_delta_and_cut():
    found = to_spans(
        table(
            [(7, 0, 4, 0, 0), (2, 0, 4, 4, 0), (9, 0, 4, 8, 0)],
            [(2, 2, 4, 6, 30), (9, 0, 3, 8, 30)],
        )
    )
    assert pages_of(found) == [[7, 2, 9]]
    assert spans_of(found, 1) == [(0, 6, 11, 6, 30)]


def test_a_list_grows_at_its_end():
    found = to_spans(
        table(
            [(7, 0, 4, 0, 0), (2, 0, 4, 4, 0)],
            [(2, 0, 4, 4, 9), (9, 0, 4, 8, 9), (5, 0, 1, 12, 9)],
            [(7, 0, 4, 0, 1), (2, 0, 4, 4, 1), (8, 0, 4, 8, 1)],
        )
    )
    assert pages_of(found) == [[7, 2, 9, 5], [8]]
    assert spans_of(found, 1) == [(0, 4, 13, 4, 9)]
    assert spans_of(found, 2) == [(0, 0, 8, 0, 1), (1, 0, 4, 8, 1)]


def test_a_page_stored_at_two_positions_is_in_two_lists():
    found = to_spans(table([(7, 0, 4, 0, 0)], [(7, 0, 4, 20, 0)]))
    assert pages_of(found) == [[7], [7]]


def test_one_pages_object_is_one_list():
    pages, other = [3, 4], [3, 4]
    found = SpanTable.from_sequences(
        [
            SequenceSpans(20, 1, [(pages, 0, 8, 0, 0), (other, 2, 5, 2, 6)]),
            SequenceSpans(20, 2, [(pages, 4, 6, 4, 6)]),
        ],
        page_size=4,
    )
    assert pages_of(found) == [[3, 4], [3, 4]]
    assert [span[0] for span in found.spans.tolist()] == [0, 1, 0]
    assert found.num_tokens == 13
    assert found.q_positions.tolist() == [20, 20, 21]


def changed(field: str, index: object, value: int) -> SpanTable:
    good = SpanTable.from_sequences(
        [SequenceSpans(9, 2, [([3, 4], 1, 8, 5, -5)]), SequenceSpans(0, 1, [([0], 0, 1, 0, 0)])], page_size=4
    )
    getattr(good, field)[index] = value
    return good


@pytest.mark.parametrize(
    ("field", "index", "value", "named"),
    [
        ("q_indptr", 0, 1, "q_indptr[0]"),
        ("q_indptr", 1, 9, "q_indptr[2]"),
        ("q_indptr", 2, 2, "q_positions"),
        ("q_positions", 1, 12, "q_positions[1]"),
        ("q_positions", 2, -1, "q_positions[2]"),
        ("list_indptr", 2, 2, "list_pages"),
        ("list_pages", 1, -1, "list_pages[1]"),
        ("span_indptr", 2, 1, "spans"),
        ("spans", (1, 0), 2, "spans[1].LIST"),
        ("spans", (0, 1), -1, "spans[0].STOP"),
        ("spans", (0, 1), 8, "spans[0].STOP"),
        ("spans", (0, 2), 9, "spans[0].STOP"),
        ("spans", (0, 3), -1, "spans[0].STORED"),
        ("spans", (0, 3), 2**31 - 3, "spans[0].STORED"),
        ("spans", (0, 4), -6, "spans[0].DELTA"),
        ("spans", (0, 4), 2**31 - 8, "spans[0].DELTA"),
    ],
)
def test_a_wrong_table_is_refused_with_the_row_at_fault(field, index, value, named):
    with pytest.raises(KernelError) as refused:
        changed(field, index, value).validate()
    assert refused.value.code == "invalid_segment_table"
    assert refused.value.field == named


def test_pages_that_a_plan_cannot_hold_are_refused():
    given = SpanTable.from_sequences([SequenceSpans(0, 1, [([0], 0, 1, 0, 0)])], page_size=2**15 - 1)
    object.__setattr__(given, "page_size", 2**15)
    with pytest.raises(KernelError, match="page_size"):
        given.validate()


def test_arrays_of_other_types_are_refused():
    given = changed("spans", (0, 0), 0)
    object.__setattr__(given, "spans", given.spans.astype(np.int64))
    with pytest.raises(KernelError, match=r"spans: must be an array of int32 \[any, 5\]"):
        given.validate()
