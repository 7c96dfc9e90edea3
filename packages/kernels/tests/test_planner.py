"""Plans are held to their definition: walked by brute force they give what the table says, each token once."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagengine_kernels import KernelError
from dagengine_kernels.fused import planner_twin, shares_twin
from dagengine_kernels.fused.native import why_missing
from dagengine_kernels.fused.plan import INVISIBLE, PlanArrays, PlanClass, PlanParameters
from dagengine_kernels.fused.planner import balance, implementation, plan_spans, plan_table
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable, to_spans
from dagengine_kernels.graph_cases import GRAPH_CASES, GraphBuilder, graph_case

H200 = PlanParameters(group=4, num_kv_heads=8, rows_per_tile=(64, 128), workers=(264, 132), boxes=1)


def random_batch(rng: random.Random) -> tuple[SpanTable, list[list[int]] | None]:
    """A batch of shared, sliced, twice quoted, empty and multi-row sequences, and pages to grow into."""
    page_size = rng.choice((1, 3, 16, 64))
    crowd = rng.random() < 0.3
    longest = 400 if crowd else rng.choice((page_size, 30, 100, 400))
    numbers = list(range(4000))
    rng.shuffle(numbers)

    def take(tokens: int) -> list[int]:
        count = -(-tokens // page_size)
        taken = numbers[:count]
        del numbers[:count]
        return taken

    nodes = []
    for _ in range(rng.randint(1, 4)):
        tokens = rng.randint(1, longest)
        nodes.append((take(tokens), tokens, rng.randint(0, 40)))
    sequences, growing = [], []
    for _ in range(rng.randint(5, 20) if crowd else rng.randint(0, 9)):
        rows = 1 if crowd else rng.choice((0, 1, 1, 1, 1, 2, 3, 9, 40))
        view, spans = rng.choice((0, 0, 7)), []
        for _ in range(rng.randint(0, 5)):
            node, tokens, stored = rng.choice(nodes)
            start = rng.choice((0, 0, rng.randrange(tokens)))
            stop = rng.choice((tokens, tokens, rng.randint(start + 1, tokens)))
            delta = view - stored - start
            if rng.random() < 0.3 and spans:
                delta = max(spans[-1][4], -stored - start)
            cut = rng.randint(start, stop) if rng.random() < 0.3 else start
            parts = [(node, start, cut, stored + start, delta), (node, cut, stop, stored + cut, delta)]
            spans += [part for part in parts if part[1] < part[2]]
            view = max(view, stored + stop + delta)
        first = max(view - rng.choice((0, 0, 1, 5)), 0)
        own = rng.choice((0, rows, rows, rows + 5))
        if own:
            skipped = rng.choice((0, 0, rng.randrange(page_size)))
            delta = rng.choice((0, 2))
            spans.append((take(skipped + own), skipped, skipped + own, view, delta))
            first = max(view + own + delta - max(rows, 1), 0)
        sequences.append(SequenceSpans(first, rows, spans))
        growing.append(take(page_size * rng.randint(0, 3)) if rows == 1 and spans else [])
    return SpanTable.from_sequences(sequences, page_size=page_size), rng.choice((None, growing))


def random_parameters(rng: random.Random) -> PlanParameters:
    group = rng.choice((1, 2, 3, 4, 8))
    lowest = group * rng.choice((1, 2, 5))
    heights = rng.choice(((lowest,), (lowest, 2 * lowest), (lowest, 3 * lowest + 1)))
    return PlanParameters(
        group=group,
        num_kv_heads=rng.choice((1, 2, 3)),
        rows_per_tile=heights,
        workers=tuple(rng.choice((1, 2, 7, 30)) for _ in heights),
        boxes=rng.choice((1, 2, 4)),
        window=rng.choice((None, None, 1, 10, 60)),
        min_chunk=rng.choice((1, 2, 4)),
        work_cost=rng.choice((0, 1, 3)),
        run_cost=rng.choice((0, 0, 1, 2)),
        wide_cost=rng.choice((0.5, 1.15, 2.0)),
    )


seeds = st.integers(0, 2**63)
example = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def visible(table: SpanTable, window: int | None, later: np.ndarray | None = None) -> list[Counter]:
    """Per row the tokens that it sees as (page, row of the page, stored, delta), by the table's definition."""
    rows = [Counter() for _ in range(table.num_rows)]
    size = table.page_size
    for b in range(table.num_sequences):
        for which, start, stop, stored, delta in table.spans[
            table.span_indptr[b] : table.span_indptr[b + 1]
        ].tolist():
            pages = table.list_pages[table.list_indptr[which] :]
            for row in range(table.q_indptr[b], table.q_indptr[b + 1]):
                p = int(table.q_positions[row])
                for t in range(start, stop):
                    view = stored + t - start + delta
                    if view <= p and (window is None or view > p - window):
                        rows[row][int(pages[t // size]), t % size, stored + t - start, delta] += 1
    return rows


def walked(
    arrays: PlanArrays, parameters: PlanParameters, positions: np.ndarray, num_rows: int
) -> list[list[Counter]]:
    """Per row and kv head the tokens that the works, directly or by the merge lists, bring to it."""
    heads, boxes = parameters.num_kv_heads, parameters.boxes
    found = [[Counter() for _ in range(heads)] for _ in range(num_rows)]
    direct = set()
    parts: dict[int, Counter] = {}
    for one in arrays.classes:
        slots = one.rows_per_tile // parameters.group
        assert one.tile_rows.shape[1] == slots
        for tile, head, begin, end, part in one.works.tolist():
            assert begin < end
            for slot, row in enumerate(one.tile_rows[tile].tolist()):
                if row < 0:
                    assert (one.tile_rows[tile, slot:] < 0).all()
                    break
                tokens = Counter()
                for page, packed, pos0, run in arrays.entries[begin * boxes : end * boxes].tolist():
                    delta, vec = arrays.runs[run].tolist()
                    if vec >= 0:
                        delta = int(arrays.deltas[vec : vec + slots][slot])
                    if delta == INVISIBLE:
                        continue
                    p = int(positions[row])
                    for r in range(packed & 0xFFFF, packed >> 16):
                        view = pos0 + r + delta
                        if view <= p and (parameters.window is None or view > p - parameters.window):
                            tokens[page, r, pos0 + r, delta] += 1
                if part < 0:
                    assert (row, head) not in direct
                    direct.add((row, head))
                    found[row][head] = tokens
                else:
                    assert part + slot not in parts
                    parts[part + slot] = tokens
    assert set(parts) == set(range(arrays.num_parts))
    used = set()
    keys = arrays.merge_rows.tolist()
    assert keys == sorted(
        {row * heads + head for row in range(num_rows) for head in range(heads)}
        - {row * heads + head for row, head in direct}
    )
    for j, key in enumerate(keys):
        listed = arrays.merge_parts[arrays.merge_indptr[j] : arrays.merge_indptr[j + 1]].tolist()
        for part in listed:
            assert part not in used
            used.add(part)
            found[key // heads][key % heads] += parts[part]
    for part, tokens in parts.items():
        assert part in used or not tokens
    return found


def share_a_walk(one: PlanClass) -> bool:
    """Whether some query tiles of a class walk the same KV tiles."""
    ranges = {}
    for tile, _, begin, end, _ in one.works.tolist():
        low, high = ranges.get(tile, (begin, end))
        ranges[tile] = (min(low, begin), max(high, end))
    ordered = sorted(ranges.values())
    return any(second[0] < first[1] for first, second in pairwise(ordered))


def check_shape(arrays: PlanArrays, parameters: PlanParameters) -> None:
    """What kernels rely on besides visibility."""
    boxes = parameters.boxes
    assert len(arrays.entries) % boxes == 0
    runs_of_tiles = arrays.entries[:, 3].reshape(-1, boxes)
    assert (runs_of_tiles == runs_of_tiles[:, :1]).all()
    null = arrays.entries[:, 0] < 0
    assert (arrays.entries[null, 1] == 0).all()
    for one, (makespan, _) in zip(arrays.classes, balance(arrays, parameters), strict=True):
        assert len(one.tile_rows) and makespan > 0
        assert one.work_indptr[0] == 0 and one.work_indptr[-1] == len(one.works)
        assert (np.diff(one.work_indptr) >= 0).all()
        lengths = one.works[:, 3] - one.works[:, 2]
        cut = one.works[:, 4] >= 0
        assert (lengths[cut] >= (1 if share_a_walk(one) else parameters.min_chunk)).all()
    heights = [one.rows_per_tile for one in arrays.classes]
    assert heights == sorted(set(heights)) and set(heights) <= set(parameters.rows_per_tile)


@example
@given(seeds)
def test_a_plan_walks_exactly_what_each_row_sees(seed):
    rng = random.Random(seed)
    table, reserve = random_batch(rng)
    parameters = random_parameters(rng)
    arrays = plan_spans(table, parameters, reserve=reserve)
    check_shape(arrays, parameters)
    want = visible(table, parameters.window)
    for row, heads in enumerate(walked(arrays, parameters, table.q_positions, table.num_rows)):
        for tokens in heads:
            assert tokens == want[row]


def assert_equal(one: PlanArrays, other: PlanArrays) -> None:
    for name in PlanArrays.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if name == "classes":
            assert [c.rows_per_tile for c in a] == [c.rows_per_tile for c in b]
            pairs = [
                (getattr(x, part), getattr(y, part))
                for x, y in zip(a, b, strict=True)
                for part in ("tile_rows", "works", "work_indptr")
            ]
        else:
            pairs = [(a, b)]
        for x, y in pairs:
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype == np.int32 and x.shape == y.shape, name
            assert np.array_equal(x, y), name


needs_native = pytest.mark.skipif(implementation() == "twin", reason=f"no C++ planner: {why_missing()}")


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


def batch(*contexts, page_size=64, rows=1) -> SpanTable:
    """Sequences that see (pages, start, stop) one behind the other, the rows at the end."""
    sequences = []
    for context in contexts:
        view, spans = 0, []
        for pages, start, stop in context:
            spans.append((pages, start, stop, start, view - start))
            view += stop - start
        sequences.append(SequenceSpans(max(view - rows, 0), rows, spans))
    return SpanTable.from_sequences(sequences, page_size=page_size)


def pages(first: int, tokens: int, page_size: int = 64) -> list[int]:
    return list(range(first, first + -(-tokens // page_size)))


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
    table, _ = random_batch(rng)
    parameters = random_parameters(rng)
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
        check_shape(arrays, parameters)
        want = visible(now, parameters.window)
        for row, heads in enumerate(walked(arrays, parameters, now.q_positions, now.num_rows)):
            for tokens in heads:
                assert tokens == want[row]


def test_a_tail_ends_with_its_last_reserved_page():
    table = batch([(pages(0, 6, 4), 0, 6)], page_size=4)
    arrays = plan_spans(table, H200, reserve=[[90, 91]])
    (entry, count), filled = arrays.tails[0].tolist(), []
    assert (arrays.entries[entry, 0], count) == (1, 3)
    while arrays.tails[0, 0] >= 0:
        filled.append(int(arrays.entries[arrays.tails[0, 0], 0]))
        planner_twin.advance(arrays)
    assert filled == [1, 1, *[90] * 4, *[91] * 4]
    assert arrays.tails.tolist() == [[-1, 0]]
    assert arrays.entries[entry : entry + 3].tolist() == [
        [1, 4 << 16, 4, 0],
        [90, 4 << 16, 8, 0],
        [91, 4 << 16, 12, 0],
    ]


def test_a_full_last_page_grows_into_the_next_one():
    table = batch([(pages(0, 8, 4), 0, 8)], page_size=4)
    assert plan_spans(table, H200, reserve=[[]]).tails.tolist() == [[-1, 0]]
    arrays = plan_spans(table, H200, reserve=[[90]])
    ((entry, count),) = arrays.tails.tolist()
    assert (arrays.entries[entry].tolist(), count) == ([90, 0, 8, 0], 1)


def test_a_tail_that_others_see_grows_for_its_sequence_only():
    shared = pages(0, 70)
    table = batch([(shared, 0, 70)], [(shared, 0, 70)])
    arrays = plan_spans(table, H200, reserve=[[80], [81]])
    planner_twin.advance(arrays)
    rows = walked(arrays, H200, table.q_positions + 1, 2)
    assert [heads[0].total() for heads in rows] == [71, 71]


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
