"""tools/bench/kernels: cases are what they say, checks find faults, bars read the right figures, a lost step is one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import kernels as bench_main
from bench import (
    kernels_bars,
    kernels_baselines,
    kernels_cases,
    kernels_ceilings,
    kernels_checks,
    kernels_cpu,
    kernels_gpu,
    kernels_merge,
    kernels_predictions,
    kernels_record,
    kernels_report,
    kernels_setup,
    kernels_tables,
    kernels_timing,
)
from bench.kernels_journal import Journal, supervise
from bench.kernels_record import TIME, Figure, Table
from dagengine_kernels import DELTA, HI, LO, STORED, Capabilities, SegmentTable, get_backend
from dagengine_kernels.conformance_cases import Case, definition
from dagengine_kernels.segmented import SegmentedBackend

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


LARGE = ("ragged", "many readers", "long decode", "prefills", "window over a prefill")


@pytest.mark.parametrize("name", [n for n in kernels_tables.BATCHES if n not in LARGE])
def test_the_truth_is_the_definition(name: str) -> None:
    config = kernels_checks.Config(torch.float64, 16, 2, 16)
    x = kernels_checks.inputs(kernels_tables.BATCHES[name](16), config, "cpu", seed=1, kv_heads=1)
    out, lse2 = kernels_checks.attend(x, None)
    case = Case(x.batch.table, x.shape, x.rotary, x.q, x.pages, x.sinks)
    want, want_lse2 = definition(case)
    assert np.allclose(out.numpy(), want, atol=1e-5)
    assert np.allclose(lse2.numpy(), want_lse2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["segmented", "reference"])
def test_sound_backends_pass_every_batch(backend: str) -> None:
    """`segmented` rounds every part to bf16 before it merges them, so its errors are only near the bar."""
    config = kernels_checks.Config(torch.bfloat16, 64, 2, 16)
    for name in kernels_tables.BATCHES:
        if backend == "reference" and name in LARGE:
            continue
        found = kernels_checks.check(lambda: get_backend(backend), name, config, "cpu")
        assert found.failed is None
        assert found.refused is None
        assert found.same
        assert found.clean
        assert found.lse2 <= kernels_checks.LSE2
        assert found.ratio <= (1.5 if backend == "segmented" else 1.0)


class Broken(SegmentedBackend):
    """Does one thing wrong."""

    def __init__(self, fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.fault = fault

    def run(self, *arguments: object, **options: object) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.fault(*super().run(*arguments, **options))  # type: ignore[arg-type, misc]


class Narrow(SegmentedBackend):
    """Takes float32 only."""

    capabilities = Capabilities(devices=("cpu",), dtypes=(torch.float32,))


def _one_row_is_nan(out: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    out[-1, -1, -1] = math.nan
    return out, lse2


FAULTS = {
    "1 % off": lambda out, lse2: (out * 1.01, lse2),
    "natural LSE": lambda out, lse2: (out, lse2 * math.log(2)),
    "LSE off by 0.1": lambda out, lse2: (out, lse2 + 0.1),
    "NaN": _one_row_is_nan,
    "other bits": lambda out, lse2: (out * (1 + 1e-2 * (torch.rand(()) < 2) * torch.rand(())), lse2),
    "rows that see nothing": lambda out, lse2: (out, lse2.nan_to_num(neginf=-1e30)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backend_does_not_pass(fault: str) -> None:
    name = "rows that see nothing" if fault == "rows that see nothing" else "own order"
    config = kernels_checks.Config(torch.bfloat16, 64, 2, 16)
    found = kernels_checks.check(lambda: Broken(FAULTS[fault]), name, config, "cpu")
    assert not found.passed
    sound = kernels_checks.check(lambda: Broken(lambda *x: x), name, config, "cpu")
    assert sound.clean
    assert sound.same
    assert sound.ratio < 1.5


def test_what_a_backend_raises_is_a_failure_and_what_it_refuses_is_not() -> None:
    def fail(*_: object) -> tuple[Tensor, Tensor]:
        raise RuntimeError("illegal memory access")

    config = kernels_checks.Config(torch.bfloat16, 64, 2, 16)
    broken = kernels_checks.check(lambda: Broken(fail), "ragged", config, "cpu")
    assert broken.failed == "RuntimeError: illegal memory access"
    assert not broken.passed
    refused = kernels_checks.check(Narrow, "ragged", config, "cpu")
    assert refused.refused is not None
    assert refused.passed
    row = kernels_checks.as_row(refused, "x")
    bars = kernels_bars.evaluate(Table(()), [row])
    assert bars[0].passed is None, "a backend that refuses everything has shown nothing"


def test_configs_cover_dtypes_head_dims_pages_and_groups() -> None:
    listed = kernels_checks.configs((torch.bfloat16, torch.float16))
    assert len(listed) == 8
    assert {c.group for c in listed} == {1, 2, 4, 8}
    assert len(kernels_checks.configs((torch.bfloat16,), every=True)) == 16


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


def times(**values: float) -> list[Figure]:
    """Figures of `case__backend=µs`, backends written fa3, cuda or tilelang."""
    names = {"fa3": "fa3", "cuda": "fused-cuda-sm90", "tilelang": "fused-tilelang-sm90"}
    listed = []
    for key, value in values.items():
        case, _, backend = key.rpartition("__")
        listed.append(Figure.of(case.replace("_", " "), names[backend], TIME, [value], "us"))
    return listed


def verdict(figures: list[Figure], start: str) -> bool | None:
    (bar,) = [b for b in kernels_bars.evaluate(Table(tuple(figures)), []) if b.name.startswith(start)]
    return bar.passed


def test_bars_hold_at_their_bound_and_fail_past_it() -> None:
    speed = "decode 32x8192: speed"
    assert verdict([], speed) is None
    assert verdict(times(decode_32x8192__fa3=97, decode_32x8192__cuda=100), speed) is True
    assert verdict(times(decode_32x8192__fa3=96.9, decode_32x8192__cuda=100), speed) is False
    faster = times(decode_32x8192__fa3=99, decode_32x8192__cuda=110, decode_32x8192__tilelang=100)
    assert verdict(faster, speed) is False, "auto runs CUDA"
    assert verdict(faster, "decode 32x8192: TileLang") is True
    slow = times(decode_32x8192__cuda=100, decode_32x8192__tilelang=111)
    assert verdict(slow, "decode 32x8192: TileLang") is False
    goal = "own-order: one layer"
    own = Figure.of("own-order", "fused-cuda-sm90", TIME, [125.0], "us")
    assert verdict([own], goal) is True
    assert verdict([replace(own, value=125.1)], goal) is False


def test_the_bytes_read_are_the_products_not_those_of_controls() -> None:
    keys = Figure.count("own-order", "fused-triton-keys, keys turned", "read ratio", 1.9, "x")
    plain = replace(keys, backend="fused-triton")
    cuda = replace(keys, backend="fused-cuda-sm90", value=1.15)
    tilelang = replace(keys, backend="fused-tilelang-sm90", value=1.16)
    bar = "own-order: bytes"
    assert verdict([keys, plain], bar) is None
    assert verdict([keys, plain, cuda], bar) is True
    assert verdict([cuda, tilelang], bar) is False, "both implementations of the product keep it"


def test_the_share_of_the_merge_is_a_difference_of_whole_calls() -> None:
    found = kernels_merge.figures("own-order", "fused-cuda-sm90", [100.0, 110.0, 90.0], [95.0] * 3, 2000, 1e9)
    by = {f.metric: f for f in found}
    assert by["merge"].value == 5.0
    assert by["partials, written at the copy rate"].value == 2.0
    assert by[kernels_record.MERGE].value == 7.0
    assert by[kernels_record.MERGE].n == 3
    bar = "own-order: merge"
    assert verdict(found, bar) is True
    assert verdict([replace(by[kernels_record.MERGE], value=7.1)], bar) is False
    old = replace(by[kernels_record.MERGE], metric="merge and partials of all kernels")
    assert verdict([old], bar) is None, "the profiler's shares are no longer read"
    assert verdict(kernels_merge.no_parts("own-order", "fused-cuda-sm90"), bar) is True


def test_the_merge_is_left_out_within_and_there_again_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures run their calls here, so the time of one is how often it merged."""
    from dagengine_kernels.fused.cuda.attend import Merge

    merged: list[int] = []
    monkeypatch.setattr(Merge, "__call__", lambda *_: merged.append(1))
    mine = Merge.__call__
    merge = Merge.__new__(Merge)

    def capture(calls: list[Callable[[], object]], sets: int) -> kernels_timing.Captured:
        before = len(merged)
        for call in calls:
            call()
        return kernels_timing.Captured(None, len(calls), calls, [float(len(merged) - before)])  # type: ignore[arg-type]

    monkeypatch.setattr(kernels_timing, "capture", capture)
    monkeypatch.setattr(kernels_timing, "race", lambda *_: None)
    calls = [lambda: merge(None, None, None, 2)] * 3  # type: ignore[arg-type]
    assert kernels_merge.measure(calls, 3, 7) == ([3.0], [0.0])
    assert Merge.__call__ is mine
    with pytest.raises(RuntimeError, match="no merge"):
        kernels_merge.measure([lambda: None], 1, 7)
    assert Merge.__call__ is mine
    with pytest.raises(ZeroDivisionError), kernels_merge.without_merge():
        raise ZeroDivisionError
    assert Merge.__call__ is mine


def test_the_page_is_written_anew_from_its_lines(tmp_path: Path) -> None:
    where = kernels_record.Circumstances("a GPU", {"torch": "2"}, "abc", "tools/bench/kernels")
    own = Figure.of("own-order", "fused-cuda-sm90", TIME, [120.0], "us")
    row = {
        "backend": "cuda",
        "batch": "ragged",
        "config": "bf16",
        "refused": None,
        "passed": True,
        "failed": None,
    }
    row |= {"ratio": 0.9, "lse2": 0.01, "error": 1e-3, "same": True}
    table = Table((own,))
    bars = kernels_bars.evaluate(table, [row])
    page = kernels_report.page(table, where, bars, [row], ["said | once"], bench_main.GPU_ABOUT)
    (tmp_path / "kernels.md").write_text(page, encoding="utf-8")
    slower = replace(own, value=130.0)
    (tmp_path / "kernels.jsonl").write_text(kernels_record.dump_lines([own], where), encoding="utf-8")
    call = ["--bars-only", "--out", str(tmp_path), "--worker", "0"]
    assert bench_main.main(call) == 0
    assert (tmp_path / "kernels.md").read_text(encoding="utf-8") == page, (
        "nothing changed, notes and checks stay"
    )
    (tmp_path / "kernels.jsonl").write_text(kernels_record.dump_lines([slower], where), encoding="utf-8")
    assert bench_main.main(call) == 1
    again = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert "| own-order: one layer of a decode step | ≤ 125 µs | 130 µs (fused-cuda-sm90) | FAIL |" in again
    assert "- said / once" in again
    assert again.endswith(page[page.index("## Checks") :])
    (tmp_path / "kernels.jsonl").unlink()
    assert bench_main.main(call) == 2


def test_the_committed_page_is_that_of_its_lines(tmp_path: Path) -> None:
    for ending in ("md", "jsonl"):
        text = (ROOT / f"docs/benchmarks/kernels.{ending}").read_text(encoding="utf-8")
        (tmp_path / f"kernels.{ending}").write_text(text, encoding="utf-8")
    before = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    bench_main.main(["--bars-only", "--out", str(tmp_path), "--worker", "0"])
    assert (tmp_path / "kernels.md").read_text(encoding="utf-8") == before


def test_the_command_that_is_recorded_says_what_was_measured() -> None:
    given = ["--quick", "--out", "somewhere", "--cases", "graph", "--commit=abc"]
    assert kernels_record.without(given, ("--out", "--commit")) == ["--quick", "--cases", "graph"]


def test_bars_are_about_what_auto_runs_however_fast_another_is() -> None:
    cuda = Figure.of("artifacts", "fused-cuda-sm90", TIME, [56.0], "us")
    tilelang = Figure.of("artifacts", "fused-tilelang-sm90", TIME, [50.0], "us")
    for figures, passed in (((tilelang, cuda), False), ((tilelang,), True)):
        bars = kernels_bars.evaluate(Table(figures), [])
        (bar,) = [b for b in bars if b.name.startswith("artifacts: one layer")]
        assert bar.passed is passed


def test_bars_read_cases_that_exist() -> None:
    known = {case.name for case in kernels_cases.matrix()}
    known |= {"transform 91424", "append 131072", kernels_bars.PLANNER_CASE}
    asked = set()

    class Asked(Table):
        def find(self, case: str, *rest: object, **more: object) -> None:  # type: ignore[override]
            asked.add(case)

        def fastest(self, case: str, *rest: object) -> None:  # type: ignore[override]
            asked.add(case)

    assert kernels_bars.evaluate(Asked(()), [])
    assert asked - known == set()
    assert set(kernels_bars.BARE) < asked


def test_the_cpu_bars_compare_shared_with_separate() -> None:
    shared = Figure.of("fan-out 8 of 4096, bf16, 1 thread", "fused-cpu", TIME, [10.0], "us")
    separate = Figure.of("decode 8x4352, bf16, 1 thread", "fused-cpu", TIME, [29.0], "us")
    (bar,) = [b for b in kernels_bars.evaluate_cpu(Table((shared, separate)), []) if b.passed is not None]
    assert bar.passed is False
    names = {case.name for case in kernels_cpu.CASES}
    assert {"fan-out 8 of 4096", "decode 8x4352", "own-order 8 of 16x256"} <= names


def test_predictions_get_their_outcomes_and_nothing_else() -> None:
    page = (ROOT / "docs/benchmarks/kernels-predictions.md").read_text(encoding="utf-8")
    row = next(line for line in page.split("\n") if line.startswith("| own-order |"))
    predicted = float(row.split("|")[5])
    figures = [
        Figure.of("own-order", "fused-cuda-sm90", TIME, [2 * predicted], "us"),
        Figure.count("own-order", "fused-cuda-sm90", "read ratio", 1.01, "x"),
    ]
    filled = kernels_predictions.fill(page, Table(tuple(figures))).split("\n")
    changed = [(a, b) for a, b in zip(page.split("\n"), filled, strict=True) if a != b]
    assert len(changed) == 2
    assert changed[0][1].startswith(row.rsplit("|", 3)[0])
    assert changed[0][1].endswith(f"{2 * predicted:.0f} (fused-cuda-sm90) | 2.00 |")
    assert changed[1][1].endswith("| 1.01 |")


def test_every_ratio_that_is_predicted_can_be_filled() -> None:
    page = (ROOT / "docs/benchmarks/kernels-predictions.md").read_text(encoding="utf-8")
    missing = [label for label in kernels_predictions.RATIOS if f"\n| {label} |" not in page]
    assert missing == []


def test_lines_say_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    where = kernels_record.circumstances(
        ["--out", str(ROOT / "docs/benchmarks"), "--commit", str(tmp_path / "x")], f"a CPU, {ROOT}", {}
    )
    assert where.command == "tools/bench/kernels --out docs/benchmarks --commit ~/x"
    assert str(ROOT) not in json.dumps(where.__dict__)
    figure = Figure.of("a", "b", TIME, [3.0, 1.0, 2.0], "us").against("c", 4.0)
    back, again = kernels_record.load_lines(kernels_record.dump_lines([figure], where))
    assert (back, again) == ([figure], where)
    assert figure.value == 2.0
    assert figure.ratio == 0.5


def test_the_page_shows_times_beside_their_floor_and_drops_empty_columns() -> None:
    figures = (
        Figure.count("own-order", "", "floor", 90.0, "us"),
        Figure.of("own-order", "fused-cuda-sm90", TIME, [120.0], "us"),
        Figure.count("own-order", "fused-cuda-sm90", "merge kernels", 5.0, "us"),
    )
    table = Table(figures)
    where = kernels_record.Circumstances("a GPU", {"torch": "2"}, "abc", "tools/bench/kernels")
    bars = kernels_bars.evaluate(table, [])
    page = kernels_report.page(table, where, bars, [], ["a | b"], "about")
    assert "| own-order | fused-cuda-sm90 | 120 | 120 | 1 | 90 | 75.0 % |" in page
    assert "warm µs" not in page
    assert "| own-order | fused-cuda-sm90 | merge kernels | 5 |" in page
    assert "- a / b" in page
    assert "| own-order: one layer of a decode step | ≤ 125 µs | 120 µs (fused-cuda-sm90) | pass |" in page


WORKER = """
import os, sys, time
from pathlib import Path
from bench.kernels_journal import Journal
journal = Journal(Path(sys.argv[1]))
for name in ("one", "dies", "hangs", "two"):
    if name in journal.ended():
        continue
    with journal.step(name):
        if name == "dies":
            os.abort()
        if name == "hangs":
            time.sleep(60)
"""


def test_a_step_that_kills_or_stops_the_worker_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    supervise([sys.executable, "-c", WORKER, str(file)], file, 50, env, step_seconds=4)
    journal = Journal(file)
    assert journal.values("end") == ["one", "two"]
    assert journal.failed() == {"dies", "hangs"}
    assert ["dies" in note for note in journal.values("note")] == [True, False]


def test_a_contender_that_fails_twice_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.add(raised="own-order: tilelang")
    assert not kernels_gpu.dropped(journal, "tilelang")
    journal.add(failed="checks of tilelang: bf16, head 64, group 1, page 16")
    assert kernels_gpu.dropped(journal, "tilelang")
    assert not kernels_gpu.dropped(journal, "cuda")
    assert "tilelang is left out" in journal.values("note")[-1]


def test_one_case_of_the_matrix_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with calls in the place of graphs: what is prepared, checked and recorded is what a GPU's run is."""

    class Graph:
        def __init__(self, calls: list[Callable[[], object]]) -> None:
            self.calls = calls

        def replay(self) -> None:
            for call in self.calls:
                call()

    def capture(calls: list[Callable[[], object]], sets: int) -> kernels_timing.Captured:
        return kernels_timing.Captured(Graph(calls), len(calls), calls)  # type: ignore[arg-type]

    def race(contenders: dict[str, kernels_timing.Captured], replays: int) -> None:
        for captured in contenders.values():
            captured.graph.replay()
            captured.samples += [1.0] * replays

    def make(name: str) -> SegmentedBackend:
        if name == "tilelang":
            raise ZeroDivisionError
        return Broken(lambda out: out * 1.5) if name == "triton" else SegmentedBackend()  # type: ignore[call-arg]

    class Broken(SegmentedBackend):
        def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.fault = fault

        implementation = property(lambda _: "wrong", lambda *_: None)  # type: ignore[assignment]

        def run(self, *arguments: object, **options: object) -> Tensor:  # type: ignore[override]
            return self.fault(super().run(*arguments, **options))  # type: ignore[arg-type]

    for module, name, value in (
        (kernels_timing, "capture", capture),
        (kernels_timing, "race", race),
        (kernels_gpu, "DEVICE", "cpu"),
        (kernels_gpu, "make_backend", make),
        (kernels_gpu, "L2_BYTES", 1 << 16),
        (kernels_gpu, "note_merge", lambda *_: None),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "empty_cache", lambda: None),
    ):
        monkeypatch.setattr(module, name, value)
    journal = Journal(tmp_path / "journal")
    settings = kernels_gpu.Settings(("cuda", "tilelang", "triton"), True, time.monotonic() + 100)
    memory = torch.randn(1 << 22).bfloat16()
    ceilings = kernels_ceilings.Ceilings(1e12, 1e12, 1e14, {})
    bench = kernels_gpu.Bench(journal, settings, memory, torch.zeros(1), ceilings, {})
    case = kernels_cases.Case("judges", "graph", kernels_cases.fan_out(3, 100), rivals=("fa3", "sdpa"))
    kernels_gpu.run_matrix(bench, [case], settings.implementations)
    table, notes = Table(tuple(journal.figures())), "\n".join(journal.values("note"))
    assert table.find("judges", TIME, "torch-cpu-flash").n == settings.replays  # type: ignore[union-attr]
    assert table.find("judges", "error against float64", "torch-cpu-flash").value < 5e-3  # type: ignore[union-attr]
    assert "WRONG RESULT: judges, wrong" in notes
    assert "tilelang: judges failed: ZeroDivisionError" in notes
    assert "vfa3 cannot be imported" in notes
    assert "case judges" in journal.ended()


def test_a_case_that_was_begun_anew_has_its_last_figures(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for value in (1.0, 2.0):
        journal.figure(Figure.count("a", "b", "c", value, ""))
    journal.note("once")
    journal.note("once")
    assert [f.value for f in Journal(journal.file).figures()] == [2.0]
    assert journal.values("note") == ["once"]


def test_sources_alone_register_the_backends(tmp_path: Path) -> None:
    folder = kernels_setup.record(tmp_path)
    code = (
        "import importlib.metadata as m; "
        "print(sorted(p.name for p in m.entry_points(group='dagengine.attention_backends')))"
    )
    env = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert "segmented" in done.stdout


@pytest.mark.slow
def test_the_command_measures_a_cpu(tmp_path: Path) -> None:
    command = [str(ROOT / "tools/bench/kernels"), "--device", "cpu", "--quick", "--budget", "120"]
    command += ["--cases", "decode 1x4096"]
    env = {**os.environ, "DAGENGINE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode in (0, 1), done.stderr
    figures, where = kernels_record.load_lines((tmp_path / "kernels-cpu.jsonl").read_text(encoding="utf-8"))
    table = Table(tuple(figures))
    case = "decode 1x4096, bf16, 1 thread"
    assert table.find(case, TIME, prefix="segmented")
    assert str(ROOT) not in (tmp_path / "kernels-cpu.md").read_text(encoding="utf-8")
    assert where.command.startswith("tools/bench/kernels --device cpu")
    assert not (tmp_path / "kernels-cpu.journal").exists()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_case_that_does_not_exist_is_refused(tmp_path: Path, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU; the CPU's is the twin")
    command = [str(ROOT / "tools/bench/kernels"), "--device", device, "--cases", "decode 2x2"]
    env = {**os.environ, "DAGENGINE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "no case is called decode 2x2" in done.stderr or "no case or group" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_command_measures_a_gpu(tmp_path: Path) -> None:
    """Its twin is the run on the CPU."""
    command = [str(ROOT / "tools/bench/kernels"), "--quick", "--cases", "decode 8x1024", "--budget", "90"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=False)
    figures, _ = kernels_record.load_lines((tmp_path / "kernels.jsonl").read_text(encoding="utf-8"))
    table = Table(tuple(figures))
    assert table.find("ceilings", "read", prefix="torch")
    assert table.fastest("decode 8x1024", "fused-")
