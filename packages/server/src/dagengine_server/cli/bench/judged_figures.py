"""Fractions of right answers as figures, with their intervals, and the table of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .intervals import wilson
from .record import Figure


def fraction(case: str, backend: str, metric: str, hits: int, n: int) -> list[Figure]:
    """The fraction, and its two-sided 95 % interval (Wilson) as figures `METRIC, from` and `METRIC, to`."""
    low, high = wilson(hits, n)
    named = ((metric, hits / n), (f"{metric}, from", low), (f"{metric}, to", high))
    return [replace(Figure.count(case, backend, name, value, "fraction"), n=n) for name, value in named]


def share(hits: int, n: int) -> str:
    """A fraction and its interval for people: `0.88 (0.82-0.92)`."""
    low, high = wilson(hits, n)
    return f"{hits / n:.2f} ({low:.2f}-{high:.2f})"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)
