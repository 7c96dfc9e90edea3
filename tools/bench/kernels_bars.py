"""The bars of the kernels: which figures of a run they read, and whether these reach them. Knows figures only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.kernels_cases import BARE, GRAPHS
from bench.kernels_record import MERGE, TIME, Figure, Table

CUDA, TILELANG, TRITON = "fused-cuda", "fused-tilelang", "fused-triton"
GOALS = {"own-order": 125, "same-order": 120, "subsets": 130, "judges": 35, "artifacts": 55}
LARGE = ("decode 32x8192", "decode 1x91424", "decode 64x1024")
READ_RATIO = 1.15
ERRORS = "errors against float64"
PLANNER_CASE = "planner, 64 requests x 64 segments"
WORDS = {"pass": True, "FAIL": False, "not measured": None}


@dataclass(frozen=True)
class Bar:
    """One promise. passed is None where the run has not measured it."""

    name: str
    goal: str
    measured: str
    passed: bool | None

    @property
    def word(self) -> str:
        return next(word for word, passed in WORDS.items() if passed is self.passed)


def product(table: Table, case: str) -> Figure | None:
    """The time of what `auto` runs: CUDA's, however fast another is; TileLang's where the run has none of CUDA."""
    return table.fastest(case, CUDA) or table.fastest(case, TILELANG)


def fa3(table: Table, case: str, *, paged: bool = False) -> Figure | None:
    """FA3's fastest time of a case, scheduled ahead or not, over contiguous K and V too unless `paged`."""
    found = [f for f in table.figures if f.case == case and f.metric == TIME and f.backend.startswith("fa3")]
    found = [f for f in found if not (paged and "contiguous" in f.backend)]
    return min(found, key=lambda f: f.value, default=None)


def evaluate(table: Table, checked: Sequence[dict[str, Any]]) -> list[Bar]:
    """All bars, in the order of the promises."""
    return [
        *_errors(checked),
        *_graphs(table),
        *_decode(table),
        *_prefill(table),
        *_rest(table),
    ]


def evaluate_cpu(table: Table, checked: Sequence[dict[str, Any]]) -> list[Bar]:
    """The bars of the CPU path."""
    bars = list(_errors(checked))
    for threads in (1, 2):
        for dtype in ("bf16", "fp32"):
            shared, separate, order = (
                cpu_case(case, dtype, threads)
                for case in ("fan-out 8 of 4096", "decode 8x4352", "own-order 8 of 16x256")
            )
            mine, copies = (table.fastest(case, "fused") for case in (shared, separate))
            name = f"{shared}: throughput over that of 8 separate copies"
            bars.append(_times(name, copies, mine, 3.0))
            ratio = table.find(order, "read ratio", prefix="fused")
            bars.append(_most(f"{order}: bytes read over unique bytes", ratio, READ_RATIO, "x"))
    bars.append(_most(f"{PLANNER_CASE}: planner", table.find(PLANNER_CASE, "plan"), 150, "µs"))
    return bars


def cpu_case(case: str, dtype: str, threads: int) -> str:
    """A CPU case as figures call it."""
    return f"{case}, {dtype}, {threads} thread{'' if threads == 1 else 's'}"


def _errors(checked: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    goal = "error ≤ 1.25 × ordinary RoPE attention's, lse2 within 0.087, same bits, no NaN"
    backends = list(dict.fromkeys(row["backend"] for row in checked))
    if not backends:
        yield Bar(ERRORS, goal, "", None)
    for backend in backends:
        rows = [row for row in checked if row["backend"] == backend]
        ran = [row for row in rows if row["refused"] is None]
        wrong = [row for row in ran if not row["passed"]]
        sound = [row for row in ran if row["failed"] is None]
        text = f"{len(ran) - len(wrong)} of {len(ran)} batches"
        if sound:
            worst = max(sound, key=lambda row: row["ratio"])
            gap = max(row["lse2"] for row in sound)
            text += f"; worst {worst['ratio']:.2f} × ({worst['batch']}), lse2 {gap:.4f}"
        if len(ran) < len(rows):
            text += f"; {len(rows) - len(ran)} refused by capability"
        yield Bar(f"{ERRORS}, {backend}", goal, text, not wrong if ran else None)


def _graphs(table: Table) -> Iterator[Bar]:
    for case in GRAPHS:
        ratios = [table.find(case, "read ratio", prefix=name) for name in (CUDA, TILELANG)]
        worst = max((f for f in ratios if f is not None), key=lambda f: f.value, default=None)
        yield _most(f"{case}: bytes read over unique bytes", worst, READ_RATIO, "x")
    for case, goal in GOALS.items():
        yield _most(f"{case}: one layer of a decode step", product(table, case), goal, "µs")


def _decode(table: Table) -> Iterator[Bar]:
    for case in BARE:
        least = 0.97 if case in LARGE else 0.90
        name = f"{case}: speed against FA3's paged decode"
        yield _speed(name, product(table, case), fa3(table, case, paged=True), least)
    for case in BARE:
        moved = product(table, f"{case} distinct deltas")
        yield _cost(f"{case}: distinct deltas", moved, product(table, case), 1.02)
        if "x1024" not in case:
            sliced = product(table, f"{case} mid-page slices")
            yield _cost(f"{case}: mid-page slices", sliced, product(table, case), 1.02)
    for kind in ("zipf lengths", "one giant"):
        case = "decode 32x8192"
        yield _cost(f"{case}: {kind}", product(table, f"{case} {kind}"), product(table, case), 1.08)


def _prefill(table: Table) -> Iterator[Bar]:
    for n in (1024, 2048, 4096, 8192, 16384, 32768):
        case = f"prefill {n}"
        name = f"{case}: speed against FA3 (75 % for a first landing)"
        yield _speed(name, product(table, case), fa3(table, case), 0.90)
    ours, one = "prefill 64 over 32x2857", "prefill 64 over 1x91424"
    name = f"{ours}: time over FA3's on one contiguous paged cache"
    yield _cost(name, product(table, ours), fa3(table, one, paged=True), 1.10)
    for n in (64, 1024):
        many, single = (product(table, f"prefill {n} over {kind}") for kind in ("32x2857", "1x91424"))
        yield _speed(f"prefill {n}: 33 segments against itself at one", many, single, 0.95)


def _rest(table: Table) -> Iterator[Bar]:
    for case, least in (("transform 91424", 85), ("append 131072", 90)):
        found = [f for f in table.figures if f.case == case and f.metric == "of copy bandwidth"]
        best = max(found, key=lambda f: f.value, default=None)
        measured = "" if best is None else f"{best.value:.1f} % ({best.backend})"
        passed = None if best is None else best.value >= least
        yield Bar(f"{case}: of the copy bandwidth", f"≥ {least} %", measured, passed)
    for case in ("own-order", "decode 1x91424", "decode 32x8192"):
        share = table.find(case, MERGE, prefix=CUDA)
        yield _most(f"{case}: merge and partials of the attention", share, 7, "%")
    for case in ("own-order", *LARGE):
        mine, other = table.fastest(case, CUDA), table.fastest(case, TILELANG)
        yield _cost(f"{case}: TileLang's time over CUDA's", other, mine, 1.10)
    yield _most(f"{PLANNER_CASE}: planner", table.find(PLANNER_CASE, "plan"), 150, "µs")


def _most(name: str, figure: Figure | None, most: float, unit: str) -> Bar:
    goal = f"≤ {most:g} {unit}"
    if figure is None:
        return Bar(name, goal, "", None)
    shown = f"{figure.value:.4g} {unit}" + (f" ({figure.backend})" if figure.backend else "")
    return Bar(name, goal, shown, figure.value <= most)


def _speed(name: str, mine: Figure | None, other: Figure | None, least: float) -> Bar:
    goal = f"≥ {100 * least:g} %"
    if mine is None or other is None:
        return Bar(name, goal, "", None)
    share = other.value / mine.value
    text = f"{100 * share:.1f} % ({mine.value:.1f} µs {mine.backend}, {other.value:.1f} {other.backend})"
    return Bar(name, goal, text, share >= least)


def _times(name: str, slow: Figure | None, fast: Figure | None, least: float) -> Bar:
    goal = f"≥ {least:g} x"
    if slow is None or fast is None:
        return Bar(name, goal, "", None)
    ratio = slow.value / fast.value
    text = f"{ratio:.2f} x ({slow.value:.1f} µs, {fast.value:.1f} {fast.backend})"
    return Bar(name, goal, text, ratio >= least)


def _cost(name: str, mine: Figure | None, other: Figure | None, most: float) -> Bar:
    goal = f"≤ {most:g} x"
    if mine is None or other is None:
        return Bar(name, goal, "", None)
    ratio = mine.value / other.value
    text = f"{ratio:.3f} x ({mine.value:.1f} µs {mine.backend}, {other.value:.1f} {other.backend})"
    return Bar(name, goal, text, ratio <= most)
