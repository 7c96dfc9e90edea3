"""What the merge of partial results costs a call of the CUDA executor: graphs with it and without it, in turns.

Kernels of a call may overlap (programmatic dependent launch), so the merge's own duration would count its waiting for
the attention. Knows the name of what the executor merges with; not how either works.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench import kernels_timing as timing
from bench.kernels_record import MERGE, Figure

MODULE = "dagengine_kernels.fused.cuda.merge"


@contextmanager
def without_merge() -> Iterator[list[None]]:
    """The CUDA executor launches no merge within; yields a list that grows by one for each that was left out."""
    made = importlib.import_module(MODULE).Merge
    merge = made.__call__
    skipped: list[None] = []

    def skip(*_: object, **__: object) -> None:
        skipped.append(None)

    made.__call__ = skip
    try:
        yield skipped
    finally:
        made.__call__ = merge


def measure(calls: Sequence[timing.Call], sets: int, replays: int) -> tuple[list[float], list[float]]:
    """Microseconds per call with the merge and without, in pairs. Raises RuntimeError where none is launched."""
    whole = timing.capture(calls, sets)
    with without_merge() as skipped:
        rest = timing.capture(calls, sets)
    if not skipped:
        raise RuntimeError("the calls launch no merge that could be left out")
    timing.race({"with": whole, "without": rest}, replays)
    return whole.samples, rest.samples


def figures(
    case: str, backend: str, whole: Sequence[float], rest: Sequence[float], written: int, copy: float
) -> list[Figure]:
    """Figures of paired samples. written: bytes of partial results; copy: bytes a second, read and written."""
    partials = written / copy * 1e6
    merge = [a - b for a, b in zip(whole, rest, strict=True)]
    shares = [100 * (m + partials) / a for m, a in zip(merge, whole, strict=True)]
    return [
        Figure.of(case, backend, "time without the merge", rest, "us"),
        Figure.of(case, backend, "merge", merge, "us"),
        Figure.count(case, backend, "partials, written at the copy rate", partials, "us"),
        Figure.of(case, backend, MERGE, shares, "%"),
    ]


def no_parts(case: str, backend: str) -> list[Figure]:
    """What is known without a measurement of a call that has no partial results."""
    return [Figure.count(case, backend, MERGE, 0.0, "%")]
