"""tools/bench/kernels: cases are what they say, and their work is counted as one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import kernels_bars, kernels_baselines, kernels_cases, kernels_cpu, kernels_tables
from dagengine_kernels import DELTA, HI, LO, STORED, SegmentTable

ROOT = Path(__file__).resolve().parents[2]


def brute_force(table: SegmentTable) -> tuple[int, int]:
    """Distinct cells, and visible pairs, one by one."""
    cells, pairs = set(), 0
    for b in range(table.num_sequences):
        rows = table.q_positions[table.q_indptr[b] : table.q_indptr[b + 1]]
        for page, lo, hi, stored, delta in table.extents[
            table.extent_indptr[b] : table.extent_indptr[b + 1]
        ].tolist():
            cells |= {(page, r) for r in range(lo, hi)}
            views = np.arange(stored + delta, stored + delta + hi - lo)
            pairs += int((views[None] <= rows[:, None]).sum())
    return len(cells), pairs


@pytest.mark.parametrize("name", kernels_tables.BATCHES)
def test_work_is_counted_as_one_by_one(name: str) -> None:
    table = kernels_tables.BATCHES[name](16).table
    work = kernels_cases.work_of(table)
    assert (work.unique_tokens, work.pairs) == brute_force(table)


def test_the_floor_counts_shared_tokens_once() -> None:
    table = kernels_cases.fan_out(4, 128)(64)
    work, heads = kernels_cases.work_of(table), kernels_cases.LLAMA
    assert work.unique_tokens == 128 + 4 * kernels_cases.OWN
    assert work.bytes(heads) == work.unique_tokens * 4096 + 2 * 4 * 32 * 128 * 2
    assert work.unshared_bytes(heads) - work.bytes(heads) == 3 * 128 * 4096


def test_a_slice_of_a_node_keeps_its_stored_positions() -> None:
    node = kernels_cases.Arena(8).node(20, stored=50, offset=3)
    extents = node.seen_at(7, 4, 15)
    assert sum(hi - lo for _, lo, hi, _, _ in extents) == 11
    assert extents[0] == (0, 7, 8, 54, 7 - 54)
    assert [stored + delta for _, _, _, stored, delta in extents] == [7, 8, 16]
    assert {delta for *_, delta in extents} == {7 - 54}


def test_variants_of_a_decode_case_differ_in_what_their_name_says() -> None:
    plain = kernels_cases.decode([300, 70])(16)
    moved = kernels_cases.decode([300, 70], segment=64, moved=True)(16)
    sliced = kernels_cases.decode([300, 70], moved=True, sliced=True)(16)
    assert not plain.extents[:, DELTA].any()
    assert len(set(moved.extents[:, DELTA].tolist())) == 7
    assert (moved.extents[:, LO] == 0).all()
    assert all(table.extents[first, LO] > 0 for table in [sliced] for first in table.extent_indptr[:-1])
    for table in (plain, moved, sliced):
        assert table.num_tokens == 370
        views = (
            table.extents[:, STORED] + table.extents[:, DELTA] + table.extents[:, HI] - table.extents[:, LO]
        )
        assert views.max() == 300 == table.q_positions.max() + 1


def test_uneven_lengths_add_up() -> None:
    assert sum(kernels_cases.zipf(1000, 7)) == sum(kernels_cases.one_giant(1000, 7)) == 1000
    assert kernels_cases.one_giant(1000, 7)[0] >= 500


def test_every_case_has_one_name_and_a_prediction() -> None:
    names = [case.name for case in kernels_cases.matrix()]
    assert len(names) == len(set(names))
    page = (ROOT / "docs/benchmarks/kernels-predictions.md").read_text(encoding="utf-8")
    cpu = [
        kernels_bars.cpu_case(case.name, dtype, threads)
        for case in kernels_cpu.CASES
        for dtype in kernels_cpu.DTYPES
        for threads in (1, 2)
    ]
    data = ["transform 91424", "pack 91424", "copy 91424", "append 8192", "append 131072"]
    assert [name for name in (*names, *cpu, *data) if f"\n| {name} |" not in page] == []


def test_cases_that_bars_read_come_first_and_unknown_ones_are_refused() -> None:
    bars = [case.bar for case in kernels_cases.matrix()]
    assert bars == sorted(bars, reverse=True)
    assert {case.group for case in kernels_cases.matrix(["graph", "prefill 1024"])} == {"graph", "prefill"}
    with pytest.raises(ValueError, match="prefil 1024"):
        kernels_cases.matrix(["prefil 1024"])


def test_page_lists_say_whether_they_are_the_table() -> None:
    exact = kernels_baselines.Paged.of(kernels_cases.decode([100, 64])(64))
    assert exact.exact
    assert exact.lengths == (100, 64)
    assert [len(p) for p in exact.pages] == [2, 1]
    sliced = kernels_baselines.Paged.of(kernels_cases.decode([100], sliced=True)(64))
    assert not sliced.exact
    assert sum(sliced.lengths) == 100
    shared = kernels_baselines.Paged.of(kernels_cases.fan_out(2, 128)(64))
    assert shared.pages[0][:2] == shared.pages[1][:2]
