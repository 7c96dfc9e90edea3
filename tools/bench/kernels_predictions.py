"""Writes what came beside what was predicted, in docs/benchmarks/kernels-predictions.md. Knows figures and that page.

Rows of the first table begin with a case's name and end with two outcome cells; rows of the second begin with a label
of RATIOS and end with one. Everything else on the page is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.kernels_bars import CUDA, PLANNER_CASE, TILELANG, TRITON, fa3, product
from bench.kernels_record import MERGE, TIME, Figure, Table

CASE_CELLS, RATIO_CELLS = 8, 4


def fill(page: str, table: Table) -> str:
    """The page with the outcome cells of what `table` has measured; others are left as they are."""
    return "\n".join(_filled(line, table) for line in page.split("\n"))


def _filled(line: str, table: Table) -> str:
    if not (line.startswith("| ") and line.endswith("|")):
        return line
    cells = [cell.strip() for cell in line[1:-1].split("|")]
    if len(cells) == CASE_CELLS:
        mine = product(table, cells[0]) or table.fastest(cells[0], "fused-")
        if mine is None:
            return line
        shown = f"{mine.value:.0f}" if mine.value >= 100 else f"{mine.value:.1f}"
        cells[-2:] = f"{shown} ({mine.backend})", f"{mine.value / float(cells[4].replace(',', '')):.2f}"
    elif len(cells) == RATIO_CELLS and cells[0] in RATIOS:
        value = RATIOS[cells[0]](table)
        if value is None:
            return line
        cells[-1] = value
    else:
        return line
    return "| " + " | ".join(cells) + " |"


def _over(top: Figure | None, bottom: Figure | None) -> str | None:
    return f"{top.value / bottom.value:.3f}" if top and bottom else None


def _against_fa3(case: str) -> Callable[[Table], str | None]:
    return lambda t: _over(fa3(t, case), product(t, case))


def _value(case: str, metric: str, prefix: str, unit: str) -> Callable[[Table], str | None]:
    def value(table: Table) -> str | None:
        figure = table.find(case, metric, prefix=prefix)
        if figure is None:
            return None
        return f"{figure.value:,.0f}{unit}" if figure.value >= 1000 else f"{figure.value:.4g}{unit}"

    return value


RATIOS: dict[str, Callable[[Table], str | None]] = {
    **{
        f"decode {size}: FA3's time over ours": _against_fa3(f"decode {size}")
        for size in ("32x8192", "1x91424", "64x1024", "1x4096", "8x1024")
    },
    "own-order: merge and partials of the attention": _value("own-order", MERGE, CUDA, " %"),
    "own-order: tokens read over distinct tokens": _value("own-order", "read ratio", CUDA, ""),
    "subsets: tokens read over distinct tokens": _value("subsets", "read ratio", CUDA, ""),
    "own-order, keys turned instead of q (Triton)": lambda t: _over(
        next(
            (f for f in t.figures if f.case == "own-order" and "keys" in f.backend and f.metric == TIME), None
        ),
        next(
            (
                f
                for f in t.figures
                if f.case == "own-order"
                and f.backend.startswith(TRITON)
                and "keys" not in f.backend
                and f.metric == TIME
            ),
            None,
        ),
    ),
    "TileLang decode over CUDA": lambda t: _over(
        t.fastest("decode 32x8192", TILELANG), t.fastest("decode 32x8192", CUDA)
    ),
    "transform, state tokens/ms for 32 layers of Llama-3-8B": _value(
        "transform 91424", "state tokens, 32 layers", "", " tokens/ms"
    ),
    "planner, 64 requests × 64 segments": _value(PLANNER_CASE, "plan", "", " µs"),
    "prefill 8192: FA3's time over ours": _against_fa3("prefill 8192"),
    "prefill 64 over 32x2857 over FA3 contiguous": lambda t: _over(
        product(t, "prefill 64 over 32x2857"), t.find("prefill 64 over 1x91424", TIME, "fa3, contiguous")
    ),
}
