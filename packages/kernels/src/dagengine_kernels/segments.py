"""SegmentTable: which rows of which pages each sequence of a batch sees, and where it sees them.

A table knows integers only: no tensors, no models, no requests. Visibility is positional: the query row at
view position p sees a token iff the token's view position is <= p (and > p - window in a windowed layer).

    extent (PAGE, LO, HI, STORED, DELTA)

    page   | . . . LO ~ ~ ~ ~ HI . . |      rows LO..HI-1 are read, the others may hold anything, NaN included
    stored           STORED + (r - LO)      the position that K was rotated at
    view             STORED + (r - LO) + DELTA
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dagengine_kernels.errors import INVALID_TABLE, KernelError

PAGE, LO, HI, STORED, DELTA = range(5)

_LARGEST = 2**31 - 1

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class SequenceSegments:
    """One sequence of a batch, for `SegmentTable.from_sequences`.

    Attributes:
        first_position: view position of the first query row of this step.
        num_rows: number of query rows; they are at consecutive view positions.
        extents: (PAGE, LO, HI, STORED, DELTA) each.
        sequence_id: names the sequence from step to step (caches key on it).
        static_extents: how many leading extents will be the same in the next step.
    """

    first_position: int
    num_rows: int
    extents: Sequence[tuple[int, int, int, int, int]]
    sequence_id: int = 0
    static_extents: int = 0


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """One batch on the host.

    Attributes:
        q_indptr: int32 [B+1], rows of sequence b are q_indptr[b]..q_indptr[b+1]-1 of the query tensor.
        q_positions: int64 [T], view positions of the query rows, consecutive within a sequence.
        extent_indptr: int32 [B+1], extents of sequence b are extent_indptr[b]..extent_indptr[b+1]-1.
        extents: int32 [E, 5], columns PAGE, LO, HI, STORED, DELTA (see the module).
        page_size: tokens per page.
        num_pages: pages of the arena that the table points into.
        sequence_ids: one id per sequence, distinct within a batch.
        static_extents: int32 [B], leading extents that stay the same from step to step (0 is always right).
    """

    q_indptr: NDArray[np.int32]
    q_positions: NDArray[np.int64]
    extent_indptr: NDArray[np.int32]
    extents: NDArray[np.int32]
    page_size: int
    num_pages: int
    sequence_ids: tuple[int, ...]
    static_extents: NDArray[np.int32]

    @property
    def num_sequences(self) -> int:
        return len(self.q_indptr) - 1

    @property
    def num_rows(self) -> int:
        """T: query rows of the batch."""
        return int(self.q_indptr[-1])

    @property
    def num_tokens(self) -> int:
        """Tokens that the extents list, each as often as it is listed."""
        return int((self.extents[:, HI] - self.extents[:, LO]).sum())

    @classmethod
    def from_sequences(
        cls, sequences: Iterable[SequenceSegments], *, page_size: int, num_pages: int
    ) -> SegmentTable:
        """Concatenate sequences into a validated table. Raises: KernelError as `validate`."""
        listed = tuple(sequences)
        rows = [s.num_rows for s in listed]
        q_indptr = np.zeros(len(listed) + 1, np.int32)
        extent_indptr = np.zeros(len(listed) + 1, np.int32)
        np.cumsum(rows, out=q_indptr[1:])
        np.cumsum([len(s.extents) for s in listed], out=extent_indptr[1:])
        positions = [np.arange(s.first_position, s.first_position + s.num_rows) for s in listed]
        table = cls(
            q_indptr=q_indptr,
            q_positions=np.concatenate([np.zeros(0, np.int64), *positions]).astype(np.int64),
            extent_indptr=extent_indptr,
            extents=np.array([e for s in listed for e in s.extents], np.int32).reshape(-1, 5),
            page_size=page_size,
            num_pages=num_pages,
            sequence_ids=tuple(s.sequence_id for s in listed),
            static_extents=np.array([s.static_extents for s in listed], np.int32),
        )
        table.validate()
        return table

    def validate(self) -> None:
        """Check everything that a kernel relies on, in time linear in the table (vectorised).

        Raises:
            KernelError: code ``invalid_segment_table``; `field` names the array and the first row at fault.
        """
        self._check_page_size()
        self._check_arrays()
        for name in ("q_indptr", "extent_indptr"):
            self._check_start(name)
            indptr = getattr(self, name)
            _refuse(indptr[1:] < indptr[:-1], lambda i, n=name: (f"{n}[{i + 1}]", "must not decrease"))
        for name, end, have in (
            ("q_positions", self.q_indptr[-1], len(self.q_positions)),
            ("extents", self.extent_indptr[-1], len(self.extents)),
        ):
            if end != have:
                raise KernelError(INVALID_TABLE, f"has {have} rows but its indptr ends at {end}", name)
        self._check_ids()
        self._check_positions()
        if not self._fit_together():
            self._check_each_extent()
        self._check_static()

    def check_unplanned(self) -> None:
        """Of `validate` what does not bear on what is seen: for a planner that checks the rest. Raises as it."""
        try:
            self._check_page_size()
            self._check_arrays()
            self._check_start("extent_indptr")  # a planner looks at what lies between its entries
            self._check_ids()
            self._check_static()
        except KernelError:
            self.validate()
            raise

    def _check_page_size(self) -> None:
        if self.page_size < 1:
            raise KernelError(INVALID_TABLE, f"must be at least 1, not {self.page_size}", "page_size")

    def _check_start(self, name: str) -> None:
        first = getattr(self, name)[0]
        if first != 0:
            raise KernelError(INVALID_TABLE, f"must start with 0, not {first}", f"{name}[0]")

    def _check_ids(self) -> None:
        sequences = len(self.q_indptr) - 1
        if len(self.sequence_ids) != sequences:
            message = f"must name {sequences} sequences, names {len(self.sequence_ids)}"
            raise KernelError(INVALID_TABLE, message, "sequence_ids")
        if len(set(self.sequence_ids)) != sequences:
            raise KernelError(INVALID_TABLE, "must be distinct within a batch", "sequence_ids")

    def _check_static(self) -> None:
        listed = pairwise(self.extent_indptr.tolist())
        for i, (static, (begin, end)) in enumerate(zip(self.static_extents.tolist(), listed, strict=True)):
            if not 0 <= static <= end - begin:
                message = f"must be in [0, {end - begin}], is {static}"
                raise KernelError(INVALID_TABLE, message, f"static_extents[{i}]")

    def _check_arrays(self) -> None:
        arrays = (
            ("q_indptr", _INT32, 1, None),
            ("q_positions", _INT64, 1, None),
            ("extent_indptr", _INT32, 1, len(self.q_indptr)),
            ("extents", _INT32, 2, None),
            ("static_extents", _INT32, 1, len(self.q_indptr) - 1),
        )
        for name, dtype, ndim, length in arrays:
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
                want = f"must be a numpy array of {dtype.name} with {ndim} axes"
                raise KernelError(INVALID_TABLE, want, name)
            if length is not None and len(array) != length:
                raise KernelError(INVALID_TABLE, f"must have {length} entries, has {len(array)}", name)
        if not len(self.q_indptr):
            raise KernelError(INVALID_TABLE, "must hold at least the leading 0", "q_indptr")
        if self.extents.shape[1] != 5:
            raise KernelError(INVALID_TABLE, "must have columns PAGE, LO, HI, STORED, DELTA", "extents")

    def _check_positions(self) -> None:
        positions = self.q_positions
        _refuse(
            (positions < 0) | (positions > _LARGEST),
            lambda i: (f"q_positions[{i}]", f"must be in [0, 2**31), is {positions[i]}"),
        )
        jumps = np.diff(positions) != 1
        first_rows = self.q_indptr[1:-1]
        jumps[first_rows[(first_rows > 0) & (first_rows < len(positions))] - 1] = False
        _refuse(jumps, lambda i: (f"q_positions[{i + 1}]", "must follow the row before it by 1"))

    def _check_each_extent(self) -> None:
        page, lo, hi, stored, delta = self.extents.T
        bad = (page < 0) | (page >= self.num_pages) | (lo < 0) | (lo >= hi) | (hi > self.page_size)
        bad |= (stored < 0) | (stored.astype(np.int64) + delta < 0)
        if bad.any():
            i = int(bad.argmax())
            row = f"extents[{i}]"
            if not 0 <= page[i] < self.num_pages:
                message = f"must be in [0, {self.num_pages}), is {page[i]}"
                raise KernelError(INVALID_TABLE, message, f"{row}.PAGE")
            if not 0 <= lo[i] < hi[i] <= self.page_size:
                message = f"0 <= LO < HI <= {self.page_size} must hold, not LO {lo[i]}, HI {hi[i]}"
                raise KernelError(INVALID_TABLE, message, f"{row}.HI")
            if stored[i] < 0:
                raise KernelError(INVALID_TABLE, f"must not be negative, is {stored[i]}", f"{row}.STORED")
            message = f"view position {int(stored[i]) + int(delta[i])} is negative"
            raise KernelError(INVALID_TABLE, message, f"{row}.DELTA")

    def _fit_together(self) -> bool:
        """Whether all extents are good, told by the least and the greatest of each column; False where that cannot."""
        if not len(self.extents):
            return True
        columns = np.ascontiguousarray(self.extents.T)
        page, lo, _, stored, delta = columns.min(axis=1).tolist()
        most_page, _, most_hi, _, _ = columns.max(axis=1).tolist()
        return bool(
            min(page, lo, stored) >= 0
            and most_page < self.num_pages
            and most_hi <= self.page_size
            and stored + delta >= 0
            and (columns[LO] < columns[HI]).all()
        )


def _refuse(bad: NDArray[np.bool_], describe: object) -> None:
    if bad.any():
        field, message = describe(int(bad.argmax()))  # type: ignore[operator]
        raise KernelError(INVALID_TABLE, message, field)
