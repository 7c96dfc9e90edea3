"""The Markdown page of `tools/bench/linear`: circumstances, models, layers, pieces. Knows figures only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.kernels_record import TIME, Circumstances, Figure, Table

ABOUT = """Times are medians of CUDA graph replays, contenders in turns. A graph's calls go round weights of at least
400 MB in all, so that L2 (60 MB) serves none of them. Bytes are the weight, x, y and the residual once each; the read
and the copy bandwidth and the matmul rate of the floor are measured in this run. `torch.mm` is the product alone,
without norm, gate and residual; `CudaLinear` is the whole layer. Errors are relative L2 against
float64, torch's beside it. This page is generated from the JSON lines beside it."""

COLUMNS = (
    ("µs", TIME),
    ("of the read bandwidth", "of the read bandwidth"),
    ("of the floor", "of the floor"),
    ("of the copy bandwidth", "of the copy bandwidth"),
    ("error", "error"),
)


def page(figures: Sequence[Figure], where: Circumstances, notes: Sequence[str]) -> str:
    """The whole page."""
    table = Table(tuple(figures))
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    parts = [
        "# `tools/bench/linear`\n",
        f"- Hardware: {where.hardware}\n- Versions: {versions}\n- Commit: {where.commit}\n"
        f"- Command: `{where.command}`\n",
        f"{ABOUT}\n",
    ]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes) + "\n")
    counts = [f for f in figures if f.case == "ceilings"]
    if counts:
        parts.append(", ".join(f"{f.metric} {f.value:.4g} {f.unit}" for f in counts) + "\n")
    shown = [(title, metric) for title, metric in COLUMNS if any(f.metric == metric for f in figures)]
    rows = [_line(("case", "what ran", *(title for title, _ in shown))), _line(["---"] * (2 + len(shown)))]
    return "\n".join([*parts, *rows, *_rows(table, [metric for _, metric in shown])]) + "\n"


def _rows(table: Table, metrics: Sequence[str]) -> Iterator[str]:
    for case in table.cases():
        if case == "ceilings":
            continue
        for backend in dict.fromkeys(f.backend for f in table.figures if f.case == case):
            found = (table.find(case, metric, backend) for metric in metrics)
            yield _line([case, backend, *(_cell(figure) for figure in found)])


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.unit == "x":
        return f"{figure.value:.0%}"
    return f"{figure.value:.0f}" if figure.value >= 1000 else f"{figure.value:.4g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
