"""The page of `tools/bench/transfers`, and what its figures must reach. Knows figures only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bench.kernels_record import Circumstances, Figure, Table

ABOUT = """A case copies scattered pages, no two of them neighbours on the host: `store` from the GPU to pinned memory,
`load` back. An extent of the first cases is one page of one layer; a page of a model has all its layers together on the
host and apart on the device. Rates are medians, contenders in turns, by a wall clock from before the submit until its
end is known; *submit* is how long the host is busy with it; *on the device* is the rate of the copies alone, all queued
before the first could begin. `TorchTransfer` chooses for itself; `direct`, `staged` and
`kernel` are what it chooses from. The peak is one copy of pinned memory, measured in this run by device events.
Steps are products of 8 GiB of weights with a vector, two queued at a time; *of them alone* is their rate with copies
under way over their rate alone. Every way copied random pages to the host and back before it was timed. Bars of
`TorchTransfer`, by the wall clock: extents of 512 KiB and more at 90% of the peak, others within 10% of the fastest
contender; steps at 95% beside stores *in the background*, which is the rate an engine stores at. Somebody waits for
a load, which takes what it can get. This page is generated from the JSON lines beside it."""

CHOSEN, RATE, DEVICE_RATE, SUBMIT, STEPS = "TorchTransfer", "rate", "device rate", "submit", "steps"
CEILINGS = "ceilings"
BACKGROUND = "TorchTransfer in the background"
LARGE_BYTES = 512 << 10
LEAST_OF_PEAK = 0.90
LEAST_OF_BEST = 0.90
LEAST_OF_STEPS = 0.95
_EXTENT = re.compile(r"extents of (\d+) (KiB|MiB)")


def missed(figures: Sequence[Figure]) -> list[str]:
    """The bars that TorchTransfer misses, in words."""
    table = Table(tuple(figures))
    return [line for case in table.cases() for line in _missed_of(table, case)]


def _missed_of(table: Table, case: str) -> Iterator[str]:
    steps = table.find(case, STEPS, BACKGROUND)
    if steps is not None:
        if steps.ratio is not None and steps.ratio < LEAST_OF_STEPS:
            yield f"Missed: {case}: {steps.ratio:.1%} of the steps alone, not {LEAST_OF_STEPS:.0%}."
        return
    rate = table.find(case, RATE, CHOSEN)
    if rate is None or rate.ratio is None:
        return
    if (size := extent_bytes(case)) is not None and size >= LARGE_BYTES:
        if rate.ratio < LEAST_OF_PEAK:
            yield f"Missed: {case}: {rate.ratio:.1%} of the peak, not {LEAST_OF_PEAK:.0%}."
        return
    best = max((f for f in table.figures if f.case == case and f.metric == RATE), key=lambda f: f.value)
    if rate.value < LEAST_OF_BEST * best.value:
        share = f"{rate.value / best.value:.1%} of {best.backend}"
        yield f"Missed: {case}: {share}, which is the fastest, not {LEAST_OF_BEST:.0%}."


def extent_bytes(case: str) -> int | None:
    """The extent that a case is named for."""
    found = _EXTENT.match(case)
    return None if found is None else int(found[1]) << {"KiB": 10, "MiB": 20}[found[2]]


def page(figures: Sequence[Figure], where: Circumstances, notes: Sequence[str]) -> str:
    """The whole page."""
    table = Table(tuple(figures))
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    parts = [
        "# `tools/bench/transfers`\n",
        f"- Hardware: {where.hardware}\n- Versions: {versions}\n- Commit: {where.commit}\n"
        f"- Command: `{where.command}`\n",
        f"{ABOUT}\n",
    ]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes) + "\n")
    peaks = [f for f in figures if f.case == CEILINGS]
    if peaks:
        parts.append("Peak: " + ", ".join(f"{f.metric} {f.value:.4g} {f.unit}" for f in peaks) + ".\n")
    rows = [
        _line(
            ("case", "what ran", "GB/s", "of the peak", "on the device", "submit, µs", "steps, of them alone")
        ),
        _line(["---"] * 7),
    ]
    for case in table.cases():
        if case != CEILINGS:
            rows += _rows(table, case)
    return "\n".join([*parts, *rows]) + "\n"


def _rows(table: Table, case: str) -> Iterator[str]:
    for backend in dict.fromkeys(f.backend for f in table.figures if f.case == case):
        rate, device, submit, steps = (
            table.find(case, metric, backend) for metric in (RATE, DEVICE_RATE, SUBMIT, STEPS)
        )
        yield _line(
            (
                case,
                backend,
                "" if rate is None else f"{rate.value:.3g}",
                "" if rate is None or rate.ratio is None else f"{rate.ratio:.1%}",
                "" if device is None or device.ratio is None else f"{device.ratio:.1%}",
                "" if submit is None else f"{submit.value:.0f}",
                "" if steps is None or steps.ratio is None else f"{steps.ratio:.1%}",
            )
        )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
