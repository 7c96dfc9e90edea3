"""What a segment table refuses, and that it names the row."""

from dataclasses import replace

import numpy as np
import pytest

from dagengine_kernels import KernelError, SegmentTable, SequenceSegments
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.fused.planner import plan_table

from .planner_batches import needs_native

BAD_EXTENTS = [
    (1, 0, 5, "extents[1].PAGE"),
    (0, 0, -1, "extents[0].PAGE"),
    (2, 1, 4, "extents[2].HI"),
    (2, 2, 5, "extents[2].HI"),
    (2, 1, -1, "extents[2].HI"),
    (1, 3, -1, "extents[1].STORED"),
    (1, 4, -41, "extents[1].DELTA"),
]

BAD_ARRAYS = [
    ({"page_size": 0}, "page_size"),
    ({"q_indptr": np.array([0, 2, 2, 3], np.int64)}, "q_indptr"),
    ({"q_indptr": np.array([1, 2, 2, 3], np.int32)}, "q_indptr[0]"),
    ({"q_indptr": np.array([0, 3, 2, 3], np.int32)}, "q_indptr[2]"),
    ({"q_indptr": np.array([0, 2, 2, 4], np.int32)}, "q_positions"),
    ({"extent_indptr": np.array([0, 2, 3], np.int32)}, "extent_indptr"),
    ({"extent_indptr": np.array([0, 2, 2, 2], np.int32)}, "extents"),
    ({"q_positions": np.array([10, 12, 5])}, "q_positions[1]"),
    ({"q_positions": np.array([-1, 0, 5])}, "q_positions[0]"),
    ({"q_positions": np.array([10, 11, 2**31])}, "q_positions[2]"),
    ({"extents": np.zeros((3, 4), np.int32)}, "extents"),
    ({"sequence_ids": (1, 2)}, "sequence_ids"),
    ({"sequence_ids": (1, 2, 1)}, "sequence_ids"),
    ({"static_extents": np.array([3, 0, 0], np.int32)}, "static_extents[0]"),
    ({"static_extents": np.array([0, 0, -1], np.int32)}, "static_extents[2]"),
]

PARAMETERS = PlanParameters(1, 1, (64,), (4,), boxes=1)


def table() -> SegmentTable:
    return SegmentTable.from_sequences(
        [
            SequenceSegments(10, 2, [(3, 0, 4, 0, 0), (1, 1, 3, 40, -35)], 7, 1),
            SequenceSegments(0, 0, [], 8),
            SequenceSegments(5, 1, [(0, 2, 4, 2, 3)], 9),
        ],
        page_size=4,
        num_pages=5,
    )


def test_sequences_concatenate():
    t = table()
    assert t.q_indptr.tolist() == [0, 2, 2, 3]
    assert t.q_positions.tolist() == [10, 11, 5]
    assert t.extent_indptr.tolist() == [0, 2, 2, 3]
    assert (t.num_sequences, t.num_rows, t.num_tokens) == (3, 3, 8)
    assert t.sequence_ids == (7, 8, 9)
    assert t.static_extents.tolist() == [1, 0, 0]


def test_no_sequences_is_a_table():
    t = SegmentTable.from_sequences([], page_size=1, num_pages=0)
    assert (t.num_sequences, t.num_rows, t.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize(("row", "column", "value", "field"), BAD_EXTENTS)
def test_a_bad_extent_is_named(row, column, value, field):
    t = table()
    t.extents[row, column] = value
    with pytest.raises(KernelError) as refused:
        t.validate()
    assert refused.value.code == "invalid_segment_table"
    assert refused.value.field == field


@pytest.mark.parametrize(("changes", "field"), BAD_ARRAYS)
def test_a_bad_array_is_named(changes, field):
    with pytest.raises(KernelError) as refused:
        replace(table(), **changes).validate()
    assert refused.value.code == "invalid_segment_table"
    assert refused.value.field == field


@needs_native
@pytest.mark.parametrize(("row", "column", "value", "field"), BAD_EXTENTS)
def test_the_planner_refuses_an_extent_that_nobody_checked(row, column, value, field):
    t = table()
    t.extents[row, column] = value
    t.check_unplanned()
    with pytest.raises(KernelError) as refused:
        plan_table(t, PARAMETERS)
    assert (refused.value.code, refused.value.field) == ("invalid_segment_table", field)


@needs_native
@pytest.mark.parametrize(("changes", "field"), BAD_ARRAYS)
def test_an_array_is_refused_before_or_by_the_planner(changes, field):
    """What the planner does not read, and what it could not be given, is refused before."""
    bad = replace(table(), **changes)
    with pytest.raises(KernelError) as refused:
        bad.check_unplanned()
        plan_table(bad, PARAMETERS)
    assert (refused.value.code, refused.value.field) == ("invalid_segment_table", field)


def test_positions_may_jump_only_between_sequences():
    good = replace(table(), q_positions=np.array([0, 1, 100]))
    good.validate()
