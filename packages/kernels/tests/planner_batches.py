"""Random batches for the planner's tests, and plans walked by brute force: what the tests of a plan hold it to."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dagengine_kernels.fused.native import why_missing
from dagengine_kernels.fused.plan import ENTRY_OWNER_SHIFT, INVISIBLE, PlanArrays, PlanClass, PlanParameters
from dagengine_kernels.fused.planner import balance, implementation
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable

H200 = PlanParameters(group=4, num_kv_heads=8, rows_per_tile=(64, 128), workers=(264, 132), boxes=1)


def fresh_pages(rng: random.Random, count: int, page_size: int) -> Callable[[int], list[int]]:
    """Takes the pages of so many tokens, in a random order, each once."""
    numbers = list(range(count))
    rng.shuffle(numbers)

    def take(tokens: int) -> list[int]:
        pages = -(-tokens // page_size)
        taken = numbers[:pages]
        del numbers[:pages]
        return taken

    return take


def random_batch(rng: random.Random) -> tuple[SpanTable, list[list[int]] | None]:
    """A batch of shared, sliced, twice quoted, empty and multi-row sequences, and pages to grow into."""
    page_size = rng.choice((1, 3, 16, 64))
    crowd = rng.random() < 0.3
    longest = 400 if crowd else rng.choice((page_size, 30, 100, 400))
    take = fresh_pages(rng, 4000, page_size)

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


def readers_of_states(
    rng: random.Random,
) -> tuple[SpanTable, list[list[int]], PlanParameters]:
    """Readers of one or two states with tails of their own, as many as fill query tiles: the tiles of a state begin
    alike and end apart. Pages to grow into, and parameters with workers enough that walks are cut."""
    page_size = rng.choice((1, 16, 64))
    take = fresh_pages(rng, 9000, page_size)

    slots, width = rng.randint(2, 5), rng.randint(2, 4)
    shared = rng.choice((300, 900)) if page_size > 1 else 300
    sequences, growing = [], []
    for _ in range(rng.choice((1, 1, 2))):
        state = take(shared)
        for _ in range(slots * width):
            own = rng.randint(1, rng.choice((5, 60, shared // 3)))
            spans = [(state, 0, shared, 0, 0), (take(own), 0, own, shared, 0)]
            sequences.append(SequenceSpans(shared + own - 1, 1, spans))
            growing.append(take(page_size * rng.randint(0, 2)))
    group = rng.choice((1, 3))
    heights = rng.choice(((slots,), (slots, 2 * slots)))
    parameters = PlanParameters(
        group=group,
        num_kv_heads=rng.choice((1, 2)),
        rows_per_tile=tuple(group * height for height in heights),
        workers=tuple(rng.randint(4, 40) for _ in heights),
        boxes=rng.choice((1, 2, 4)),
        window=rng.choice((None, None, None, 200)),
        min_chunk=rng.choice((1, 2, 4)),
        work_cost=rng.choice((0, 1, 3)),
        run_cost=rng.choice((0, 1)),
        wide_cost=rng.choice((0.5, 1.15, 3.0)),
        owners=rng.random() < 0.8,
    )
    return SpanTable.from_sequences(sequences, page_size=page_size), growing, parameters


def random_parameters(rng: random.Random) -> PlanParameters:
    group = rng.choice((1, 2, 3, 4, 8))
    lowest = group * rng.choice((1, 2, 5))
    heights = rng.choice(((lowest,), (lowest, 2 * lowest), (lowest, 3 * lowest + 1)))
    invariant_chunk = rng.choice((None, None, None, 1, 3))
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
        owners=invariant_chunk is None and rng.random() < 0.7,
        invariant_chunk=invariant_chunk,
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
                    owner = packed >> ENTRY_OWNER_SHIFT & 0xFF if parameters.owners else 0
                    if owner and owner - 1 != slot:
                        continue
                    low = packed & (0xFF if parameters.owners else 0xFFFF)
                    for r in range(low, packed >> 16):
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


def check_walks(arrays: PlanArrays, parameters: PlanParameters, table: SpanTable) -> None:
    """Every row gets, for every kv head, what it sees by the table's definition."""
    check_shape(arrays, parameters)
    want = visible(table, parameters.window)
    for row, heads in enumerate(walked(arrays, parameters, table.q_positions, table.num_rows)):
        for tokens in heads:
            assert tokens == want[row]


def share_a_walk(one: PlanClass, entries: np.ndarray, boxes: int) -> bool:
    """Whether some query tiles of a class walk the same KV tiles, or walks that begin alike."""
    ranges = {}
    for tile, _, begin, end, _ in one.works.tolist():
        low, high = ranges.get(tile, (begin, end))
        ranges[tile] = (min(low, begin), max(high, end))
    ordered = sorted(ranges.values())
    firsts = [tuple(entries[begin * boxes, :3].tolist()) for begin, _ in ordered]
    return len(set(firsts)) < len(firsts) or any(second[0] < first[1] for first, second in pairwise(ordered))


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
        least = (
            1
            if parameters.invariant_chunk or share_a_walk(one, arrays.entries, boxes)
            else parameters.min_chunk
        )
        assert (lengths[cut] >= least).all()
    heights = [one.rows_per_tile for one in arrays.classes]
    assert heights == sorted(set(heights)) and set(heights) <= set(parameters.rows_per_tile)


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
