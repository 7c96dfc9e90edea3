"""Plans are held to their definition: walked by brute force they give what the table says, each token once."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from dagengine_kernels import KernelError
from dagengine_kernels.fused import planner_twin
from dagengine_kernels.fused.plan import INVISIBLE, PlanArrays, PlanParameters
from dagengine_kernels.fused.planner import plan_spans, plan_table
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable, to_spans
from dagengine_kernels.graph_cases import GRAPH_CASES, GraphBuilder, graph_case

from .planner_batches import (
    H200,
    assert_equal,
    batch,
    check_walks,
    example,
    needs_native,
    pages,
    random_batch,
    random_parameters,
    seeds,
)


@example
@given(seeds)
def test_a_plan_walks_exactly_what_each_row_sees(seed):
    rng = random.Random(seed)
    table, reserve = random_batch(rng)
    parameters = random_parameters(rng)
    arrays = plan_spans(table, parameters, reserve=reserve)
    check_walks(arrays, parameters, table)


@needs_native
@example
@given(seeds)
def test_the_planner_in_cpp_gives_what_its_twin_gives(seed):
    rng = random.Random(seed)
    table, reserve = random_batch(rng)
    parameters = random_parameters(rng)
    assert_equal(
        plan_spans(table, parameters, reserve=reserve), planner_twin.plan_spans(table, parameters, reserve)
    )
    segments = table.to_segments()
    last = max((page for pages in reserve or () for page in pages), default=0)
    segments = replace(segments, num_pages=max(segments.num_pages, last + 1))
    assert_equal(
        plan_table(segments, parameters, reserve=reserve),
        planner_twin.plan_spans(to_spans(segments), parameters, reserve),
    )


@needs_native
@pytest.mark.parametrize("sequences", [10, 150])
@pytest.mark.parametrize("heights", [(64, 128), (70,)])
def test_the_planners_agree_where_many_slots_see_slices_with_many_ends(sequences, heights):
    rng = random.Random(sequences)
    nodes = [list(range(10 * i, 10 * i + 10)) for i in range(3)]
    contexts = []
    for _ in range(sequences):
        starts = [rng.randrange(150) for _ in range(3)]
        contexts.append([(rng.choice(nodes), start, rng.randint(start + 1, 160)) for start in starts])
    table = batch(*contexts, page_size=16)
    workers = tuple(9 for _ in heights)
    parameters = PlanParameters(group=1, num_kv_heads=2, rows_per_tile=heights, workers=workers, boxes=2)
    for one in (parameters, replace(parameters, boxes=1, run_cost=2, work_cost=0, min_chunk=3)):
        assert_equal(plan_spans(table, one), planner_twin.plan_spans(table, one))


@pytest.mark.parametrize("name", GRAPH_CASES)
def test_the_graph_cases_read_little_more_than_what_is_distinct(name):
    table = graph_case(name)
    arrays = plan_spans(table, H200)
    assert 1 <= arrays.read_ratio <= 1.15
    assert plan_table(table.to_segments(), H200).read_ratio == arrays.read_ratio


def test_sharing_does_not_depend_on_the_order_of_contexts():
    same, own = (plan_spans(graph_case(name), H200) for name in ("same-order", "own-order"))
    assert own.tokens_read == same.tokens_read
    assert own.tokens_unique == same.tokens_unique == 32 * 2857 + 32 * 256


def heights(arrays: PlanArrays) -> list[tuple[int, list[int]]]:
    """Per class its height and the rows of each tile."""
    return [(one.rows_per_tile, (one.tile_rows >= 0).sum(axis=1).tolist()) for one in arrays.classes]


def test_what_is_shared_by_many_is_read_by_the_high_tile():
    shared = pages(0, 5000)
    table = batch(*([(shared, 0, 5000), (pages(100 + i, 10), 0, 10)] for i in range(40)))
    arrays = plan_spans(table, H200)
    assert heights(arrays) == [(64, [8]), (128, [32])]


def test_few_rows_take_the_low_tile():
    shared = pages(0, 5000)
    assert heights(plan_spans(batch(*[[(shared, 0, 5000)]] * 16), H200)) == [(64, [16])]
    assert heights(plan_spans(batch(*[[(shared, 0, 5000)]] * 17), H200)) == [(128, [17])]


def test_a_high_tile_is_split_where_low_ones_read_as_little():
    families = [pages(1000, 640), pages(2000, 640)]
    link = pages(0, 160)
    table = batch(*([(link, 0, 160), (families[i % 2], 0, 640)] for i in range(32)))
    assert heights(plan_spans(table, replace(H200, wide_cost=1.1))) == [(128, [32])]
    arrays = plan_spans(table, replace(H200, wide_cost=1.15))
    assert heights(arrays) == [(64, [16, 16])]
    assert arrays.classes[0].tile_rows.tolist() == [list(range(0, 32, 2)), list(range(1, 32, 2))]


def test_a_little_in_common_does_not_bring_sequences_together():
    shared = pages(0, 64)
    for tokens, tiles in ((63, 2), (64, 1)):
        table = batch(*([(shared, 0, tokens), (pages(10 + 9 * i, 400), 0, 400)] for i in range(2)))
        assert heights(plan_spans(table, H200)) == [(64, [1, 1] if tiles == 2 else [2])]
    table = batch(*([(shared, 0, 64), (pages(10 + 99 * i, 4000), 0, 4000)] for i in range(2)))
    assert heights(plan_spans(table, H200)) == [(64, [1, 1])]


def test_runs_with_one_delta_vector_are_one_run():
    documents = [pages(100 * i, 300) for i in range(4)]
    table = batch(*[[(document, 0, 300) for document in documents]] * 3)
    spans = table.spans.copy()
    spans[:, 4] = 0
    arrays = plan_spans(replace(table, spans=spans), H200)
    assert arrays.runs.tolist() == [[0, -1]]
    assert len(arrays.deltas) == 0
    assert len(arrays.entries) == 4 * 5


def test_a_page_that_two_ranges_cut_is_one_entry_if_they_are_seen_alike():
    shared = pages(0, 300)
    table = batch([(shared, 0, 100), (shared, 100, 300)], [(shared, 0, 300)])
    assert len(plan_spans(table, H200).entries) == 5


def test_a_sequence_sees_a_range_as_often_as_it_lists_it():
    shared = pages(0, 128)
    arrays = plan_spans(batch([(shared, 0, 128), (shared, 0, 128)], [(shared, 0, 128)]), H200)
    assert arrays.runs[:, 1].tolist() == [-1, 0]
    assert arrays.deltas[:2].tolist() == [128, INVISIBLE]
    assert (arrays.tokens_read, arrays.tokens_unique) == (256, 128)


def test_chunks_of_a_long_sequence_share_a_walk_that_ends_where_their_rows_do():
    table = batch([(pages(0, 640), 0, 640)], rows=640)
    parameters = replace(H200, num_kv_heads=1)
    arrays = plan_spans(table, parameters)
    assert heights(arrays) == [(128, [32] * 20)]
    assert len(arrays.entries) == 10
    ends = {}
    for tile, _, begin, end, _ in arrays.classes[0].works.tolist():
        ends[tile] = max(end, ends.get(tile, 0))
        assert begin >= 0
    assert [ends[tile] for tile in range(20)] == [1 + tile // 2 for tile in range(20)]
    assert arrays.tokens_read == 64 * sum(ends.values())


def test_a_window_cuts_what_chunks_read_on_both_sides():
    table = batch([(pages(0, 6400), 0, 6400)], rows=640)
    arrays = plan_spans(table, replace(H200, window=128))
    assert len(arrays.entries) == 12
    assert arrays.tokens_read <= 20 * 4 * 64
    one = plan_spans(batch([(pages(0, 6400), 0, 6400)]), replace(H200, window=128))
    assert one.tokens_read == 128


def test_the_rest_of_a_long_sequence_takes_the_tile_that_it_fits():
    for rows, want in ((40, [(64, [8]), (128, [32])]), (52, [(128, [32, 20])])):
        assert heights(plan_spans(batch([(pages(0, 640), 0, 640)], rows=rows), H200)) == want


def test_a_long_walk_turns_to_own_tokens_last():
    shared = pages(0, 128)
    sequence = SequenceSpans(
        256, 64, [(pages(50, 64), 0, 64, 0, 0), (shared, 0, 128, 0, 64), (pages(60, 128), 0, 128, 192, 0)]
    )
    arrays = plan_spans(SpanTable.from_sequences([sequence], page_size=64), H200)
    assert arrays.runs[:, 0].tolist() == [0, 64, 0]
    assert arrays.entries[:, 0].tolist() == [50, 0, 1, 60, 61]


def test_rows_that_see_nothing_are_merged_from_no_parts():
    later = SequenceSpans(3, 1, [([7], 0, 1, 9, 0)])
    table = SpanTable.from_sequences([SequenceSpans(0, 1, []), later], page_size=64)
    arrays = plan_spans(table, H200)
    assert arrays.classes == () and arrays.num_parts == 0
    assert arrays.merge_rows.tolist() == list(range(16))
    assert arrays.merge_indptr.tolist() == [0] * 17
    assert (arrays.tokens_read, arrays.tokens_unique) == (0, 1)


def test_merge_lists_leave_out_works_whose_runs_the_row_does_not_see():
    shared = pages(0, 6400)
    table = batch(*([(shared, 0, 6400), (pages(1000 + 100 * i, 6400), 0, 6400)] for i in range(2)))
    arrays = plan_spans(table, replace(H200, num_kv_heads=1))
    works = len(arrays.classes[0].works)
    assert heights(arrays) == [(64, [2])]
    for count in np.diff(arrays.merge_indptr):
        assert works / 2 < count < 0.8 * works


def test_an_empty_batch_has_an_empty_plan():
    arrays = plan_spans(SpanTable.from_sequences([], page_size=16), H200)
    assert arrays.classes == () and len(arrays.entries) == len(arrays.merge_rows) == len(arrays.tails) == 0


def test_equal_batches_have_equal_plans():
    assert_equal(plan_spans(graph_case("subsets"), H200), plan_spans(graph_case("subsets"), H200))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("group", 0, "group"),
        ("num_kv_heads", 0, "num_kv_heads"),
        ("boxes", 0, "boxes"),
        ("min_chunk", 0, "min_chunk"),
        ("work_cost", -1, "work_cost"),
        ("window", 0, "window"),
        ("wide_cost", 0.0, "wide_cost"),
        ("rows_per_tile", (), "rows_per_tile"),
        ("rows_per_tile", (128, 64), "rows_per_tile"),
        ("rows_per_tile", (16, 64, 128), "rows_per_tile"),
        ("rows_per_tile", (3, 128), "rows_per_tile"),
        ("workers", (132,), "workers"),
        ("workers", (132, 0), "workers"),
    ],
)
def test_parameters_that_no_plan_can_have_are_refused(field, value, named):
    with pytest.raises(KernelError) as refused:
        plan_spans(graph_case("judges"), replace(H200, **{field: value}))
    assert (refused.value.code, refused.value.field) == ("invalid_argument", named)


def test_a_table_that_is_not_valid_is_refused_with_the_row_at_fault():
    table = graph_case("judges")
    table.spans[7, 2] = 2**30
    with pytest.raises(KernelError) as refused:
        plan_spans(table, H200)
    assert refused.value.field == "spans[7].STOP"
    segments = graph_case("judges").to_segments()
    segments.extents[11, 0] = segments.num_pages
    with pytest.raises(KernelError) as refused:
        plan_table(segments, H200)
    assert refused.value.field == "extents[11].PAGE"


def test_positions_that_a_plan_cannot_hold_are_refused():
    segments = graph_case("judges").to_segments()
    segments.extents[-1, 3] = 2**31 - 2
    segments.validate()
    with pytest.raises(KernelError) as refused:
        plan_table(segments, H200)
    assert refused.value.field.endswith(".STORED")


def test_arrays_need_not_be_contiguous():
    table = graph_case("judges")
    strided = replace(
        table, spans=np.repeat(table.spans, 2, axis=0)[::2], list_pages=table.list_pages.copy()[::1]
    )
    assert not strided.spans.flags.c_contiguous
    assert_equal(plan_spans(strided, H200), plan_spans(table, H200))


def test_an_unknown_graph_case_is_refused_with_those_that_there_are():
    with pytest.raises(KernelError, match="own-order"):
        graph_case("own order")


def test_the_documents_of_a_graph_case_have_a_delta_in_each_sequence():
    build = GraphBuilder(64, 10, random.Random(0))
    one, other = build.node(100), build.node(50, stored=7)
    table = build.batch([[one, other], [other, one]])
    assert table.spans[:, 1:].tolist() == [
        [0, 100, 0, 0],
        [0, 50, 7, 93],
        [0, 10, 150, 0],
        [0, 50, 7, -7],
        [0, 100, 0, 50],
        [0, 10, 150, 0],
    ]
    assert table.q_positions.tolist() == [159, 159]
