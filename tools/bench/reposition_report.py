"""The Markdown page of `tools/bench/reposition`. Knows figures only."""

from __future__ import annotations

from collections.abc import Sequence

from bench.kernels_record import Circumstances, Figure, Table
from bench.reposition_run import RATE, Shape

ABOUT = """Wall-clock times of `PageMover.run` over all layers: the plan's arrays, their upload, every step, and
waiting for the device. Rates count the tokens asked for, however often a plan moves them; p95 and p99 are the rates of
the slow ends. Planning is pure Python on the host; the last columns say what it takes. Each case's rows were checked
against float64 first. The bound is 10,000 tokens/ms for copies; beside the rates stand 500 tokens/ms, published for
CIDRA and not measured here. Reading with a delta moves nothing and needs none of this. This page is generated from the
JSON lines beside it."""

COLUMNS = (
    ("p50", RATE, "p50"),
    ("p95", RATE, "p95"),
    ("p99", RATE, "p99"),
    ("of the plain copy", "of the plain copy", "value"),
    ("GB/s", "bandwidth", "value"),
    ("steps", "steps", "value"),
    ("spare pages", "spare pages", "value"),
    ("host pages", "host pages", "value"),
    ("bytes written, of those asked for", "bytes written, of those asked for", "value"),
    ("planning, ms", "planning", "value"),
    ("with planning", "tokens/ms with planning", "p50"),
)


def page(figures: Sequence[Figure], where: Circumstances, shape: Shape, notes: Sequence[str]) -> str:
    """The whole page."""
    table = Table(tuple(figures))
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    dtype = str(shape.dtype).removeprefix("torch.")
    parts = [
        "# `tools/bench/reposition`\n",
        f"- Hardware: {where.hardware}\n- Versions: {versions}\n- Commit: {where.commit}\n"
        f"- Command: `{where.command}`\n"
        f"- {shape.layers} layers of {shape.kv_heads} × {shape.head_dim}, {dtype}, pages of {shape.page_size} tokens, "
        f"{shape.token_bytes} bytes a token\n",
        f"{ABOUT}\n",
    ]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes) + "\n")
    rows = [_line(["case", "tokens", "what ran", *(title for title, _, _ in COLUMNS)])]
    rows.append(_line(["---"] * (3 + len(COLUMNS))))
    for case in table.cases():
        tokens = table.find(case, "tokens")
        for backend in dict.fromkeys(f.backend for f in figures if f.case == case):
            found = [(table.find(case, metric, backend), name) for _, metric, name in COLUMNS]
            cells = ["" if figure is None else _cell(figure, name) for figure, name in found]
            rows.append(_line([case, "" if tokens is None else f"{tokens.value:.0f}", backend, *cells]))
    return "\n".join([*parts, *rows]) + "\n"


def _cell(figure: Figure, name: str) -> str:
    value = getattr(figure, name)
    if figure.unit == "x":
        return f"{value:.2f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
