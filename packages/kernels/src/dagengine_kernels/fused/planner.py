"""Segment tables and span tables -> plans. Knows integers only; which kernel runs the plan is in the parameters.

The C++ planner does the work where the package was built with it; otherwise its twin does, with equal results.
What is planned depends on what sequences see, not on the order in which they see it: the steps are in planner_twin.py.
Batch-invariant plans keep each sequence's own order: their steps are in alone_twin.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused import planner_twin
from dagengine_kernels.fused.native import load, why_missing
from dagengine_kernels.fused.plan import (
    ENTRY_RUN,
    WORK_BEGIN,
    WORK_END,
    PlanArrays,
    PlanClass,
    PlanParameters,
)
from dagengine_kernels.fused.spans import SpanTable, check_page_size, indptr, to_spans
from dagengine_kernels.segments import PAGE, SegmentTable

MAX_HEIGHTS = 2
MAX_OWNERS = 254
MAX_OWNED_ROWS = 255


def plan_table(
    table: SegmentTable, parameters: PlanParameters, *, reserve: Sequence[Sequence[int]] | None = None
) -> PlanArrays:
    """Plan a SegmentTable, a valid one unless `checks_tables`: gives what `plan_spans` gives for
    `spans.to_spans(table)`. Raises as `SegmentTable.validate` and `plan_spans`.
    """
    check_parameters(parameters)
    check_page_size(table.page_size)
    check_owners(parameters, table.page_size)
    check_reserve(table.q_indptr, table.extent_indptr, reserve, num_pages=table.num_pages)
    if reserve is not None:
        _check_fresh(table, reserve)
    native = _native()
    if native is None:
        spans = to_spans(table)
        spans.validate()
        return planner_twin.plan_spans(spans, parameters, reserve)
    arrays = (table.q_indptr, table.q_positions, table.extent_indptr, table.extents)
    sizes = (table.page_size, table.num_pages)
    return _call(native.plan_table, table, arrays, sizes, parameters, reserve)


def plan_spans(
    spans: SpanTable, parameters: PlanParameters, *, reserve: Sequence[Sequence[int]] | None = None
) -> PlanArrays:
    """Plan one batch.

    Args:
        spans: what each sequence sees.
        parameters: what the kernels want.
        reserve: for a plan that is used for several decode steps, per sequence the pages that it will grow into
            after the page of its last span's last token. Every sequence of one row that sees anything then has a
            tail, which `advance` makes grow; the others take no pages. What such a sequence lists past its row's
            position is not cut off, since later rows see it.

    Returns:
        The plan; equal arguments give equal arrays.

    Raises:
        KernelError: invalid_argument for parameters or `reserve`, invalid_segment_table for `spans`.
    """
    check_parameters(parameters)
    check_owners(parameters, spans.page_size)
    check_reserve(spans.q_indptr, spans.span_indptr, reserve)
    native = _native()
    if native is None:
        spans.validate()
        return planner_twin.plan_spans(spans, parameters, reserve)
    arrays = (
        spans.q_indptr,
        spans.q_positions,
        spans.list_indptr,
        spans.list_pages,
        spans.span_indptr,
        spans.spans,
    )
    return _call(native.plan_spans, spans, arrays, (spans.page_size,), parameters, reserve)


def checks_tables() -> bool:
    """Whether `plan_table` itself refuses tables that are not valid: not the twin, which takes valid ones only."""
    return _native() is not None


def implementation() -> str:
    """Which planner runs here: ``native`` or ``twin``."""
    return "twin" if _native() is None else "native"


@cache
def _native() -> Any:
    return None if why_missing() else load().planner


def _call(
    function: Callable[..., tuple[Any, ...]],
    table: SpanTable | SegmentTable,
    arrays: tuple[NDArray[Any], ...],
    sizes: tuple[int, ...],
    parameters: PlanParameters,
    reserve: Sequence[Sequence[int]] | None,
) -> PlanArrays:
    """Call the C++ planner. It takes only valid tables: what it refuses is checked again, for a good message."""
    given = (
        parameters.group,
        parameters.num_kv_heads,
        parameters.rows_per_tile,
        parameters.workers,
        parameters.boxes,
        parameters.window,
        parameters.min_chunk,
        parameters.work_cost,
        parameters.run_cost,
        parameters.wide_cost,
        parameters.owners,
        parameters.invariant_chunk,
    )
    pages = None
    if reserve is not None:
        listed = np.array([page for one in reserve for page in one], np.int32)
        pages = (indptr([len(one) for one in reserve]), listed)
    try:
        made = function(*arrays, *sizes, given, pages)
    except (TypeError, ValueError):
        table.validate()
        if isinstance(table, SegmentTable):
            to_spans(table).validate()
        made = function(*map(np.ascontiguousarray, arrays), *sizes, given, pages)
    entries, runs, deltas, classes, merge_rows, merge_indptr, merge_parts, num_parts, tails, read, unique = (
        made
    )
    return PlanArrays(
        entries=entries,
        runs=runs,
        deltas=deltas,
        classes=tuple(PlanClass(*one) for one in classes),
        merge_rows=merge_rows,
        merge_indptr=merge_indptr,
        merge_parts=merge_parts,
        num_parts=num_parts,
        tails=tails,
        boxes=parameters.boxes,
        page_size=table.page_size,
        tokens_read=read,
        tokens_unique=unique,
    )


def balance(arrays: PlanArrays, parameters: PlanParameters) -> list[tuple[int, float]]:
    """Per class of the plan the cost of its largest share, in KV tiles, and that of the mean share."""
    found = []
    changes = np.cumsum(np.diff(arrays.entries[:: arrays.boxes, ENTRY_RUN], prepend=-1) != 0)
    for one in arrays.classes:
        begin, end = one.works[:, WORK_BEGIN], one.works[:, WORK_END]
        cost = end - begin + parameters.work_cost + parameters.run_cost * (changes[end - 1] - changes[begin])
        ends = np.append(0, np.cumsum(cost))[one.work_indptr]
        found.append((int(np.diff(ends).max()), float(ends[-1]) / (len(one.work_indptr) - 1)))
    return found


def check_parameters(parameters: PlanParameters) -> None:
    """Raises KernelError (invalid_argument) for parameters that no plan can have."""
    for name, least in (
        ("group", 1),
        ("num_kv_heads", 1),
        ("boxes", 1),
        ("min_chunk", 1),
        ("work_cost", 0),
        ("run_cost", 0),
    ):
        if getattr(parameters, name) < least:
            message = f"must be at least {least}, not {getattr(parameters, name)}"
            raise KernelError(INVALID_ARGUMENT, message, name)
    heights = parameters.rows_per_tile
    if not 1 <= len(heights) <= MAX_HEIGHTS or list(heights) != sorted(set(heights)):
        raise KernelError(
            INVALID_ARGUMENT, f"must be 1 or 2 ascending heights, not {heights}", "rows_per_tile"
        )
    if heights[0] < parameters.group:
        message = f"must be at least the group of {parameters.group} query heads, not {heights[0]}"
        raise KernelError(INVALID_ARGUMENT, message, "rows_per_tile")
    if len(parameters.workers) != len(heights) or min(parameters.workers) < 1:
        message = f"must name a positive number for each of {len(heights)} heights, not {parameters.workers}"
        raise KernelError(INVALID_ARGUMENT, message, "workers")
    if parameters.window is not None and parameters.window < 1:
        raise KernelError(INVALID_ARGUMENT, f"must be at least 1, not {parameters.window}", "window")
    if parameters.invariant_chunk is not None and parameters.invariant_chunk < 1:
        message = f"must be at least 1, not {parameters.invariant_chunk}"
        raise KernelError(INVALID_ARGUMENT, message, "invariant_chunk")
    if not parameters.wide_cost > 0:
        raise KernelError(INVALID_ARGUMENT, f"must be positive, not {parameters.wide_cost}", "wide_cost")


def check_owners(parameters: PlanParameters, page_size: int) -> None:
    """Raises KernelError (invalid_argument) where a plan cannot have owners, or entries have no place for them."""
    if not parameters.owners:
        return
    if parameters.invariant_chunk is not None:
        message = "a batch-invariant plan has none: every sequence walks by itself"
        raise KernelError(INVALID_ARGUMENT, message, "owners")
    slots = parameters.rows_per_tile[-1] // parameters.group
    if slots > MAX_OWNERS:
        message = f"tiles have at most {MAX_OWNERS} slots then, not {slots}"
        raise KernelError(INVALID_ARGUMENT, message, "owners")
    if page_size > MAX_OWNED_ROWS:
        message = f"pages have at most {MAX_OWNED_ROWS} tokens then, not {page_size}"
        raise KernelError(INVALID_ARGUMENT, message, "owners")


def check_reserve(
    q_indptr: NDArray[np.int32],
    listed_indptr: NDArray[np.int32],
    reserve: Sequence[Sequence[int]] | None,
    *,
    num_pages: int = 2**31,
) -> None:
    """Raises KernelError (invalid_argument) for pages that are none, are named twice, or are reserved for a sequence
    that cannot grow into them."""
    if reserve is None:
        return
    if not isinstance(reserve, Sized):
        raise KernelError(INVALID_ARGUMENT, f"must be lists of pages, not {reserve!r}", "reserve")
    if len(reserve) != len(q_indptr) - 1:
        message = f"must name pages for each of {len(q_indptr) - 1} sequences, names {len(reserve)}"
        raise KernelError(INVALID_ARGUMENT, message, "reserve")
    rows, counts = np.diff(q_indptr), np.diff(listed_indptr)
    if _all_fit(rows, counts, reserve, num_pages):
        return
    named: set[int] = set()
    for sequence, pages in enumerate(reserve):
        if not isinstance(pages, Sized) or not all(isinstance(page, (int, np.integer)) for page in pages):
            message = f"must be a list of page numbers, not {pages!r}"
            raise KernelError(INVALID_ARGUMENT, message, f"reserve[{sequence}]")
        if len(pages) and (rows[sequence] != 1 or not counts[sequence]):
            message = f"has {rows[sequence]} rows and lists {counts[sequence]} spans: it cannot grow"
            raise KernelError(INVALID_ARGUMENT, message, f"reserve[{sequence}]")
        for page in pages:
            if not 0 <= page < num_pages:
                message = f"must be pages in [0, {num_pages}), names {page}"
                raise KernelError(INVALID_ARGUMENT, message, f"reserve[{sequence}]")
            if int(page) in named:
                raise KernelError(INVALID_ARGUMENT, f"page {page} is named twice", f"reserve[{sequence}]")
            named.add(int(page))


def _all_fit(
    rows: NDArray[np.int32], counts: NDArray[np.int32], reserve: Sequence[Sequence[int]], num_pages: int
) -> bool:
    """Whether `check_reserve` finds nothing, decided for all sequences at once; False where that cannot be told."""
    if not all(isinstance(pages, list | tuple) for pages in reserve):
        return False
    lengths = np.array([len(pages) for pages in reserve], np.int64)
    try:
        named = np.array([page for pages in reserve for page in pages] or [0])
    except (TypeError, ValueError):
        return False
    if named.ndim != 1 or named.dtype.kind not in "iu" or named.min() < 0 or named.max() >= num_pages:
        return False
    grows = (rows == 1) & (counts > 0)
    return bool(grows[lengths > 0].all()) and len(np.unique(named)) == len(named)


def _check_fresh(table: SegmentTable, reserve: Sequence[Sequence[int]]) -> None:
    """Raises KernelError (invalid_argument) for a reserved page that holds tokens of the table."""
    held = np.zeros(table.num_pages, np.bool_)
    pages = table.extents[:, PAGE]
    held[pages[(pages >= 0) & (pages < table.num_pages)]] = True
    if not held[np.array([page for named in reserve for page in named], np.int64)].any():
        return
    for sequence, named in enumerate(reserve):
        for page in named:
            if held[page]:
                message = f"page {page} holds tokens that the table lists"
                raise KernelError(INVALID_ARGUMENT, message, f"reserve[{sequence}]")
