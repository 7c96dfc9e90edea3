"""tools/bench/kernels: bars read the right figures, and hold at their bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench import kernels_bars, kernels_cases, kernels_cpu, kernels_merge, kernels_record, kernels_timing
from bench.kernels_record import TIME, Figure, Table


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
