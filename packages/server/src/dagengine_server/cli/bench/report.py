"""From figures to what people read: a Markdown page with the bars on top, made from the lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .published import WORD
from .record import Circumstances, Figure

COLUMNS = (
    "backend",
    "metric",
    "value",
    "unit",
    "n",
    "p50",
    "p95",
    "p99",
    "baseline",
    "baseline value",
    "ratio",
)


@dataclass(frozen=True)
class Bar:
    """A goal for one figure, in terms of `measured`, which is made from the figure.

    Attributes:
        case: a part of the figure's case. baseline: the figure's; None for a figure that stands alone.
    """

    title: str
    case: str
    metric: str
    baseline: str | None
    measured: Callable[[Figure], float]
    limit: float
    unit: str
    at_least: bool

    def passed(self, figure: Figure) -> bool:
        value = self.measured(figure)
        return value >= self.limit if self.at_least else value <= self.limit

    def find(self, figures: Sequence[Figure]) -> Figure | None:
        for figure in figures:
            if self.case in figure.case and (figure.metric, figure.baseline) == (self.metric, self.baseline):
                return figure
        return None


@dataclass(frozen=True)
class Verdict:
    """A bar and what was measured; `figure` is None where it was not."""

    bar: Bar
    figure: Figure | None

    @property
    def word(self) -> str:
        if self.figure is None:
            return "not measured"
        return "pass" if self.bar.passed(self.figure) else "FAIL"

    @property
    def measured(self) -> str:
        if self.figure is None:
            return ""
        return f"{number(self.bar.measured(self.figure))} {self.bar.unit}".strip()

    @property
    def goal(self) -> str:
        return f"{'≥' if self.bar.at_least else '≤'} {number(self.bar.limit)} {self.bar.unit}".strip()


def ratio_of(figure: Figure) -> float:
    assert figure.ratio is not None
    return figure.ratio


def times_sooner(figure: Figure) -> float:
    return 1 / ratio_of(figure)


def value_of(figure: Figure) -> float:
    return figure.value


BARS = (
    Bar(
        "single-stream decode against transformers generate",
        "1 stream", "decode rate", "transformers", ratio_of, 1.0, "x", True,
    ),
    Bar("16 streams against one", "16 streams", "decode rate", "one stream", ratio_of, 5.0, "x", True),
    Bar(
        "first token over 16 x 256 cached fragments in a new order against a plain prefill by transformers",
        "16 fragments x 256", "first token", "transformers", times_sooner, 40.0, "x sooner", True,
    ),
    Bar(
        "the same against one contiguous cached state of that length",
        "16 fragments x 256", "first token", "one contiguous state", ratio_of, 1.25, "x its time", False,
    ),
    Bar(
        "compile and layout of 100 segments",
        "100 segments", "compile and layout", None, value_of, 1.0, "ms", False,
    ),
    Bar(
        "compile and layout of 1,000 segments",
        "1000 segments", "compile and layout", None, value_of, 10.0, "ms", False,
    ),
    Bar(
        "time per node in a chain of 10,000 against one of 1,000 (linear)",
        "chain of 10000", "add and compile, per node", "chain of 1000", ratio_of, 1.5, "x", False,
    ),
    Bar(
        "KV of 32 readers of one 4k state against one copy and own tails",
        "32 readers", "KV bytes in use", "one copy and own tails", ratio_of, 1.02, "x", False,
    ),
    Bar(
        "KV of 64 readers of one 32k state against one copy and own tails",
        "64 readers of one state of 32768", "KV bytes in use", "one copy and own tails", ratio_of, 1.02, "x", False,
    ),
    Bar(
        "a step of 64 readers of one 32k state against a step of one",
        "64 readers of one state of 32768", "time per token", "one reader", ratio_of, 1.3, "x", False,
    ),
)  # fmt: skip


def verdicts(figures: Sequence[Figure], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    return [Verdict(bar, bar.find(figures)) for bar in bars]


def markdown(
    figures: Sequence[Figure],
    where: Circumstances,
    title: str,
    bars: Sequence[Bar] = BARS,
    summary: str = "",
) -> str:
    """The page: circumstances, bars if there are any, the summary (Markdown), and every figure."""
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    lines = [
        f"# {title}",
        "",
        f"- Hardware: {where.hardware}",
        f"- Versions: {versions}",
        f"- Commit: {where.commit}",
        f"- Command: `{where.command}`",
        "",
        "Each figure is the median of n samples; a baseline was measured in the same run, in turns. "
        "`ratio` is value / baseline. This page is generated from the JSON lines beside it.",
        "",
    ]
    if any((figure.baseline or "").startswith(WORD) for figure in figures):
        lines += [
            f"A baseline called {WORD} was not measured here: it is what its source says of other machines.",
            "",
        ]
    if bars:
        lines += ["## Bars", "", "| bar | goal | measured | |", "|---|---|---|---|"]
        lines += [f"| {v.bar.title} | {v.goal} | {v.measured} | {v.word} |" for v in verdicts(figures, bars)]
        lines.append("")
    if summary:
        lines += ["## Summary", "", summary.rstrip(), ""]
    lines += ["## Figures", ""]
    for case in dict.fromkeys(figure.case for figure in figures):
        lines += [f"### {case}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row(_cells(figure)) for figure in figures if figure.case == case]
        lines.append("")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Four significant digits; whole numbers in full."""
    if value is None:
        return ""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cells(figure: Figure) -> list[str]:
    return [
        figure.backend,
        figure.metric,
        number(figure.value),
        figure.unit,
        str(figure.n),
        number(figure.p50),
        number(figure.p95),
        number(figure.p99),
        figure.baseline or "",
        number(figure.baseline_value),
        number(figure.ratio),
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
