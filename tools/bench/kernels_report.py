"""The Markdown page of a run: circumstances, bars, notes, a row per case and contender, checks. Knows figures only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.kernels_bars import ERRORS, WORDS, Bar, fa3
from bench.kernels_record import TIME, WARM, Circumstances, Table

COLUMNS = (
    "case",
    "what ran",
    "µs",
    "p95",
    "n",
    "MB",
    "GFLOP",
    "floor µs",
    "of the floor",
    "FA3 / this",
    "over segmented",
    "warm µs",
    "plan µs",
    "read ratio",
    "temporary MB",
    "error",
)


BARS, NOTES, CHECKS = "## Bars\n", "## Notes of the run\n", "## Checks against float64\n"


def page(
    table: Table,
    where: Circumstances,
    bars: Sequence[Bar],
    checked: Sequence[dict[str, Any]],
    notes: Sequence[str],
    about: str,
) -> str:
    """The whole page. about: a paragraph on how times were taken."""
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    parts = [
        "# `tools/bench/kernels`\n",
        f"- Hardware: {where.hardware}\n- Versions: {versions}\n- Commit: {where.commit}\n"
        f"- Command: `{where.command}`\n",
        f"{about}\n",
    ]
    if bars:
        parts += [BARS, _table(("bar", "goal", "measured", ""), [_bar(b) for b in bars])]
    if notes:
        parts += [NOTES, "\n".join(f"- {_cell(note)}" for note in notes) + "\n"]
    parts += ["## Times\n", _table(*_filled(COLUMNS, list(_rows(table))))]
    others = [f for f in table.figures if f.metric not in SHOWN]
    if others:
        parts += [
            "## Other figures\n",
            _table(
                ("case", "what ran", "metric", "value", "unit", "n", "baseline", "ratio"),
                [
                    (
                        f.case,
                        f.backend,
                        f.metric,
                        number(f.value),
                        f.unit,
                        f.n,
                        f.baseline or "",
                        number(f.ratio),
                    )
                    for f in others
                ],
            ),
        ]
    if checked:
        head = ("what ran", "batch", "configs", "worst error", "over ordinary", "worst lse2", "same bits", "")
        parts += [CHECKS, _table(head, list(_checks(checked)))]
    return "\n".join(parts)


def rewritten(old: str, table: Table, where: Circumstances, bars: Sequence[Bar], about: str) -> str:
    """The page from its JSON lines alone. What these do not hold is taken from the `old` page: its notes, its checks
    against float64 and the bars of these."""
    found = [bar for bar in bars if not bar.name.startswith(ERRORS)]
    errors = [bar for bar in _bars_of(old) if bar.name.startswith(ERRORS)]
    notes = [line[2:] for line in _section(old, NOTES).splitlines() if line.startswith("- ")]
    text = page(table, where, [*(errors or bars[: len(bars) - len(found)]), *found], [], notes, about)
    checks = _section(old, CHECKS)
    return f"{text}\n{CHECKS}{checks}" if checks else text


def _section(text: str, head: str) -> str:
    """What follows a heading, up to the next one."""
    _, _, rest = text.partition(f"\n{head}")
    return rest.partition("\n## ")[0]


def _bars_of(text: str) -> Iterator[Bar]:
    for line in _section(text, BARS).splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if len(cells) == 4 and cells[3] in WORDS:
            yield Bar(cells[0], cells[1], cells[2], WORDS[cells[3]])


SHOWN = (
    TIME,
    f"{TIME}{WARM}",
    "floor",
    "fewest bytes",
    "operations",
    "plan and load",
    "read ratio",
    "temporary",
    "error against float64",
)


def _filled(head: Sequence[str], rows: Sequence[Sequence[object]]) -> tuple[list[str], list[list[object]]]:
    """Without the columns that are empty in all rows."""
    kept = [i for i in range(len(head)) if any(row[i] != "" for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def number(value: float | None) -> str:
    """Four significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bar(bar: Bar) -> tuple[object, ...]:
    return bar.name, bar.goal, bar.measured, bar.word


def _rows(table: Table) -> Iterator[tuple[object, ...]]:
    for case in table.cases():
        floor, size, count = (
            table.find(case, metric, "") for metric in ("floor", "fewest bytes", "operations")
        )
        rival = fa3(table, case)
        for f in table.figures:
            if f.case != case or f.metric != TIME:
                continue
            found = {
                metric: table.find(case, metric, f.backend)
                for metric in (f"{TIME}{WARM}", "plan and load", "read ratio", "temporary")
            }
            shown = {metric: number(g.value) if g else "" for metric, g in found.items()}
            error = table.find(case, "error against float64", f.backend)
            yield (
                case,
                f.backend,
                number(f.value),
                number(f.p95),
                f.n,
                number(size.value) if size else "",
                number(count.value) if count else "",
                number(floor.value) if floor else "",
                f"{100 * floor.value / f.value:.1f} %" if floor else "",
                f"{rival.value / f.value:.3f}" if rival else "",
                f"{f.ratio:.3f}" if f.ratio and f.baseline == "segmented" else "",
                *shown.values(),
                f"{error.value:.2e}" if error else "",
            )


def _checks(checked: Sequence[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for backend, batch in dict.fromkeys((row["backend"], row["batch"]) for row in checked):
        rows = [r for r in checked if r["backend"] == backend and r["batch"] == batch]
        ran = [r for r in rows if r["refused"] is None]
        if not ran:
            yield backend, batch, f"0 of {len(rows)}", "", "", "", "", "refused by capability"
            continue
        wrong = [r for r in ran if not r["passed"]]
        yield (
            backend,
            batch,
            f"{len(ran)} of {len(rows)}",
            f"{max(r['error'] for r in ran):.2e}",
            f"{max(r['ratio'] for r in ran):.2f}",
            f"{max(r['lse2'] for r in ran):.4f}",
            "yes" if all(r["same"] for r in ran) else "NO",
            "pass" if not wrong else f"FAIL: {wrong[0]['config']}: {wrong[0]['failed'] or 'beyond its bar'}",
        )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(str(c)) for c in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
