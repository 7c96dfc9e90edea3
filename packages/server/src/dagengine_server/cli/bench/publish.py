"""Where figures go: files, lines of JSON or tables on standard output, and the exit status of a missed bar."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer

from ..console import CommandError, print_json, print_table
from .record import Circumstances, Figure, dump_lines
from .report import Bar, markdown, number, verdicts

COLUMNS = ("backend", "metric", "value", "unit", "n", "p95", "p99", "baseline", "ratio")


@dataclass(frozen=True)
class Destination:
    """Files for lines of JSON and for a page, if any; whether a missed bar is an error; JSON in place of tables."""

    output: Path | None
    page: Path | None
    check: bool
    as_json: bool


def publish(
    bench: str,
    figures: Sequence[Figure],
    where: Circumstances,
    to: Destination,
    bars: Sequence[Bar] = (),
    summary: str = "",
) -> None:
    """Write and print the figures of one run.

    Args:
        summary: Markdown that the page has above its figures.

    Raises:
        typer.Exit: `--check` was asked for and a bar was missed.
        CommandError: it was, and there was nothing to check; a file could not be written.
    """
    named = [replace(figure, bench=bench) for figure in figures]
    judged = [verdict for verdict in verdicts(named, bars) if verdict.figure is not None]
    if to.as_json:
        for figure in named:
            print_json(asdict(figure) | asdict(where), indent=None)
    else:
        _print_figures(named)
        if judged:
            rows = [(v.bar.title, v.goal, v.measured, v.word) for v in judged]
            print_table("bars", ("bar", "goal", "measured", ""), rows)
        print(where.hardware)
    if to.output is not None:
        _write(to.output, dump_lines(named, where))
    if to.page is not None:
        _write(to.page, markdown(named, where, f"`dagengine bench {bench}`", bars, summary))
    if to.check and not judged:
        raise CommandError(f"no bar of `bench {bench}` is about what was measured", "check")
    if to.check and any(verdict.word == "FAIL" for verdict in judged):
        raise typer.Exit(1)


def check_writable(files: Mapping[str, Path | None]) -> None:
    """Raises CommandError for the option whose file cannot be written, before anything is measured for it."""
    for name, path in files.items():
        if path is None:
            continue
        if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise CommandError(f"{path} cannot be written", name)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error}") from None


def _print_figures(figures: Sequence[Figure]) -> None:
    """A table for each case: a column of their long names would be all that a terminal has room for. Columns that are
    empty for all figures are left out.
    """
    rows = [_row(figure) for figure in figures]
    kept = [index for index in range(len(COLUMNS)) if any(row[index] != "" for row in rows)]
    cases: dict[str, list[list[object]]] = {}
    for figure, row in zip(figures, rows, strict=True):
        cases.setdefault(figure.case, []).append([row[index] for index in kept])
    for case, shown in cases.items():
        print_table(case, [COLUMNS[index] for index in kept], shown)


def _row(figure: Figure) -> tuple[object, ...]:
    beside = f"{figure.baseline}: {number(figure.baseline_value)}" if figure.baseline else ""
    return (
        figure.backend,
        figure.metric,
        number(figure.value),
        figure.unit,
        figure.n,
        number(figure.p95),
        number(figure.p99),
        beside,
        number(figure.ratio),
    )
