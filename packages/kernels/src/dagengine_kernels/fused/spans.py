"""SpanTable: what each sequence of a batch sees, as stretches of page lists that sequences share by identity.

Knows integers only, like SegmentTable, of which it is the compact form: one span stands for all the extents that follow
each other through the pages of one list with one delta.

    span (LIST, START, STOP, STORED, DELTA)

    list    | page 7 . . . | page 2 . . . | page 9 . . . |       token t of a list is row t % page_size
                 START ~ ~ ~ ~ ~ ~ ~ ~ ~ ~ STOP                  of its page t // page_size
    stored       STORED + (t - START)                            the position that K was rotated at
    view         STORED + (t - START) + DELTA

Two spans share reads iff they name one list; a page that is in two lists is read for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dagengine_kernels.errors import INVALID_TABLE, KernelError
from dagengine_kernels.segments import SegmentTable

SPAN_LIST, SPAN_START, SPAN_STOP, SPAN_STORED, SPAN_DELTA = range(5)

MAX_PAGE_SIZE = 2**15 - 1
"""A plan's entry holds a page's rows in 16 bits."""


@dataclass(frozen=True, slots=True)
class SequenceSpans:
    """One sequence of a batch, for `SpanTable.from_sequences`.

    Attributes:
        first_position: view position of the first query row of this step.
        num_rows: number of query rows; they are at consecutive view positions.
        spans: (pages, START, STOP, STORED, DELTA) each. One `pages` object is one list: sequences that see the
            same pages must pass the same object.
    """

    first_position: int
    num_rows: int
    spans: Sequence[tuple[Sequence[int], int, int, int, int]]


@dataclass(frozen=True, eq=False)
class SpanTable:
    """One batch on the host.

    Attributes:
        q_indptr: int32 [B+1], rows of sequence b are q_indptr[b]..q_indptr[b+1]-1 of the query tensor.
        q_positions: int64 [T], view positions of the query rows, consecutive within a sequence.
        list_indptr: int32 [L+1], pages of list l are list_indptr[l]..list_indptr[l+1]-1.
        list_pages: int32 [P].
        span_indptr: int32 [B+1], spans of sequence b are span_indptr[b]..span_indptr[b+1]-1.
        spans: int32 [S, 5], columns LIST, START, STOP, STORED, DELTA (see the module).
        page_size: tokens per page.
    """

    q_indptr: NDArray[np.int32]
    q_positions: NDArray[np.int64]
    list_indptr: NDArray[np.int32]
    list_pages: NDArray[np.int32]
    span_indptr: NDArray[np.int32]
    spans: NDArray[np.int32]
    page_size: int

    @property
    def num_sequences(self) -> int:
        return len(self.q_indptr) - 1

    @property
    def num_rows(self) -> int:
        """T: query rows of the batch."""
        return int(self.q_indptr[-1])

    @property
    def num_tokens(self) -> int:
        """Tokens that the spans list, each as often as it is listed."""
        return int((self.spans[:, SPAN_STOP].astype(np.int64) - self.spans[:, SPAN_START]).sum())

    @classmethod
    def from_sequences(cls, sequences: Iterable[SequenceSpans], *, page_size: int) -> SpanTable:
        """Concatenate sequences into a validated table. Raises: KernelError as `validate`."""
        listed = tuple(sequences)
        lists: dict[int, tuple[int, Sequence[int]]] = {}
        spans = []
        for sequence in listed:
            for pages, start, stop, stored, delta in sequence.spans:
                number, _ = lists.setdefault(id(pages), (len(lists), pages))
                spans.append((number, start, stop, stored, delta))
        rows = [range(s.first_position, s.first_position + s.num_rows) for s in listed]
        pages_of = [pages for _, pages in lists.values()]
        table = cls(
            q_indptr=indptr([s.num_rows for s in listed]),
            q_positions=np.array([p for positions in rows for p in positions], np.int64),
            list_indptr=indptr([len(pages) for pages in pages_of]),
            list_pages=np.array([page for pages in pages_of for page in pages], np.int32),
            span_indptr=indptr([len(s.spans) for s in listed]),
            spans=np.array(spans, np.int32).reshape(-1, 5),
            page_size=page_size,
        )
        table.validate()
        return table

    def validate(self) -> None:
        """Check everything that the planner relies on, in time linear in the table (vectorised).

        Raises:
            KernelError: code ``invalid_segment_table``; `field` names the array and the first row at fault.
        """
        check_page_size(self.page_size)
        arrays = (
            ("q_indptr", np.int32, (None,)),
            ("q_positions", np.int64, (None,)),
            ("list_indptr", np.int32, (None,)),
            ("list_pages", np.int32, (None,)),
            ("span_indptr", np.int32, (len(self.q_indptr),)),
            ("spans", np.int32, (None, 5)),
        )
        for name, dtype, shape in arrays:
            array = getattr(self, name)
            fits = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == len(shape)
            if not fits or any(
                want not in (None, have) for want, have in zip(shape, array.shape, strict=True)
            ):
                want = ", ".join("any" if size is None else str(size) for size in shape)
                raise KernelError(INVALID_TABLE, f"must be an array of {np.dtype(dtype).name} [{want}]", name)
        for name, rows in (
            ("q_indptr", "q_positions"),
            ("list_indptr", "list_pages"),
            ("span_indptr", "spans"),
        ):
            _check_indptr(name, getattr(self, name), rows, len(getattr(self, rows)))
        positions = self.q_positions
        _refuse((positions < 0) | (positions >= 2**31), "q_positions[{}]", "must be in [0, 2**31)")
        jumps = np.diff(positions) != 1
        firsts = self.q_indptr[1:-1]
        jumps[firsts[(firsts > 0) & (firsts < len(positions))] - 1] = False
        _refuse(np.append(False, jumps), "q_positions[{}]", "must follow the row before it by 1")
        _refuse(self.list_pages < 0, "list_pages[{}]", "must not be negative")
        which, start, stop, stored, delta = self.spans.astype(np.int64).T
        lists = len(self.list_indptr) - 1
        _refuse((which < 0) | (which >= lists), "spans[{}].LIST", f"must be in [0, {lists})")
        room = np.diff(self.list_indptr).astype(np.int64)[which] * self.page_size
        bad = (start < 0) | (start >= stop) | (stop > room)
        _refuse(bad, "spans[{}].STOP", "0 <= START < STOP <= tokens of the list must hold")
        bad = (stored < 0) | (stored + stop - start >= 2**31)
        _refuse(bad, "spans[{}].STORED", "the span's stored positions must be in [0, 2**31)")
        bad = (stored + delta < 0) | (stored + delta + stop - start >= 2**31)
        _refuse(bad, "spans[{}].DELTA", "the span's view positions must be in [0, 2**31)")

    def to_segments(self) -> SegmentTable:
        """The same batch as a SegmentTable: one extent per page of a span; sequence ids count from 0."""
        which, start, stop, stored, delta = self.spans.astype(np.int64).T
        first = start // self.page_size
        count = (stop - 1) // self.page_size - first + 1
        span = np.repeat(np.arange(len(count)), count)
        index = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count) + first[span]
        lo = np.maximum(start[span] - index * self.page_size, 0)
        hi = np.minimum(stop[span] - index * self.page_size, self.page_size)
        page = self.list_pages[self.list_indptr[which[span]] + index]
        position = stored[span] - start[span] + index * self.page_size + lo
        ends = np.append(0, np.cumsum(count))[self.span_indptr]
        return SegmentTable(
            q_indptr=self.q_indptr,
            q_positions=self.q_positions,
            extent_indptr=ends.astype(np.int32),
            extents=np.stack([page, lo, hi, position, delta[span]], axis=1).astype(np.int32),
            page_size=self.page_size,
            num_pages=int(self.list_pages.max(initial=-1)) + 1,
            sequence_ids=tuple(range(self.num_sequences)),
            static_extents=np.zeros(self.num_sequences, np.int32),
        )


def to_spans(table: SegmentTable) -> SpanTable:
    """The spans of a valid SegmentTable: the definition of what the C++ planner does with one.

    A span is a maximal run of extents with one delta, consecutive stored positions and nothing skipped between them.
    Lists are found from the pages: a page belongs to the list that named it first (as long as it is stored at the
    same positions), a list grows at its end, and a run is split where its pages go on in another list.
    """
    check_page_size(table.page_size)
    size = table.page_size
    lists: list[list[int]] = []
    base: list[int] = []
    place: dict[int, tuple[int, int]] = {}
    spans: list[list[int]] = []
    counts = []
    extents = table.extents.tolist()
    for begin, end in zip(table.extent_indptr[:-1].tolist(), table.extent_indptr[1:].tolist(), strict=True):
        counts.append(-len(spans))
        index = -1
        previous = None
        for page, lo, hi, stored, delta in extents[begin:end]:
            found = place.get(page)
            if found is not None and base[found[0]] + found[1] * size != stored - lo:
                found = None
            step = -1
            if (
                previous is not None
                and previous[4] == delta
                and previous[3] + previous[2] - previous[1] == stored
            ):
                if lo == previous[2] and page == previous[0]:
                    step = 0
                elif lo == 0 and previous[2] == size:
                    step = 1
            previous = (page, lo, hi, stored, delta)
            if step == 1 and found is None and index + 1 == len(lists[spans[-1][0]]):
                found = place[page] = (spans[-1][0], index + 1)
                lists[spans[-1][0]].append(page)
            if step >= 0 and found == (spans[-1][0], index + step):
                index += step
                spans[-1][2] += hi - lo
                continue
            if found is None:
                found = place[page] = (len(lists), 0)
                lists.append([page])
                base.append(stored - lo)
            index = found[1]
            start = index * size + lo
            spans.append([found[0], start, start + hi - lo, stored, delta])
        counts[-1] += len(spans)
    return SpanTable(
        q_indptr=table.q_indptr,
        q_positions=table.q_positions,
        list_indptr=indptr([len(pages) for pages in lists]),
        list_pages=np.array([page for pages in lists for page in pages], np.int32),
        span_indptr=indptr(counts),
        spans=np.array(spans, np.int32).reshape(-1, 5),
        page_size=size,
    )


def indptr(counts: Sequence[int]) -> NDArray[np.int32]:
    """0 and the running sums: int32 [len(counts) + 1]."""
    ends = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    return ends


def check_page_size(page_size: int) -> None:
    """Raises KernelError (invalid_segment_table) where a plan could not hold such pages."""
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise KernelError(INVALID_TABLE, f"must be in [1, {MAX_PAGE_SIZE}], is {page_size}", "page_size")


def _check_indptr(name: str, ends: NDArray[np.int32], rows: str, have: int) -> None:
    if not len(ends) or ends[0] != 0:
        raise KernelError(INVALID_TABLE, "must start with 0", f"{name}[0]")
    _refuse(np.append(False, ends[1:] < ends[:-1]), name + "[{}]", "must not decrease")
    if ends[-1] != have:
        raise KernelError(INVALID_TABLE, f"has {have} rows but its indptr ends at {ends[-1]}", rows)


def _refuse(bad: NDArray[np.bool_], field: str, message: str) -> None:
    if bad.any():
        raise KernelError(INVALID_TABLE, message, field.format(int(bad.argmax())))
