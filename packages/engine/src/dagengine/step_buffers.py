"""What replayed steps read, at fixed addresses. Knows chunks as ids, positions and slots; not what a step computes.

    rows [C] | source [C] | positions [C] | slots [C] | ids [C] | pending ids [most]          int64
             |<------------- one upload a decode step --------->|<- from the launch before
    |<----------------- one upload a mixed step --------------->|

The id of row i is (ids, pending ids)[source[i]]; `rows` are those whose logits are wanted. Rows that pad have id 0,
position 0 and slot -1; wanted rows that pad are row 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.staging import Staging

from .runner import Chunk


class StepBuffers:
    """The buffers of all graphs of one capacity C.

    Args:
        most: ids that may be pending.
    """

    def __init__(self, capacity: int, most: int, device: torch.device) -> None:
        self.capacity = capacity
        ints = torch.zeros(5 * capacity + most, dtype=torch.int64, device=device)
        self._mixed, self._decode = ints[: 5 * capacity], ints[capacity : 5 * capacity]
        self.rows, self.source, self.positions, self.slots, _ = self._mixed.view(5, capacity).unbind(0)
        self._choices, self._pending = ints[4 * capacity :], ints[5 * capacity :]
        self._own = np.arange(capacity)

    def ids(self) -> Tensor:
        """The ids of all rows [C], taken on the device."""
        return self._choices.index_select(0, self.source)

    def fill_decode(
        self,
        chunks: Sequence[Chunk],
        positions: NDArray[np.int64],
        pending: Tensor | None,
        staging: Staging,
    ) -> None:
        """Queue the upload of a step of one token for each chunk, and the copy of the ids that are pending."""
        count, capacity = len(chunks), self.capacity
        source, to_positions, slots, ids = staging.take(4 * capacity).reshape(4, capacity)
        rows = [-1 if chunk.pending is None else chunk.pending for chunk in chunks]
        source[:] = self._own
        taken = np.array(rows)
        is_pending = taken >= 0
        if is_pending.all():
            np.add(taken, capacity, out=source[:count])
            ids[:] = 0
        else:
            np.copyto(source[:count], taken + capacity, where=is_pending)
            works = [chunk.work for chunk in chunks]
            ids[:count] = [
                work.tokens[work.computed] if row < 0 else 0 for work, row in zip(works, rows, strict=True)
            ]
            ids[count:] = 0
        to_positions[:count], to_positions[count:] = positions, 0
        slots[:count], slots[count:] = [chunk.slots[0] for chunk in chunks], -1
        staging.send(self._decode)
        if is_pending.any():
            self._take(pending)

    def fill_mixed(
        self,
        chunks: Sequence[Chunk],
        positions: NDArray[np.int64],
        wanted: Sequence[int],
        pending: Tensor | None,
        staging: Staging,
    ) -> None:
        """Queue the upload of a step of any chunks, at most C tokens in all, and the copy of the ids that are pending.

        Args:
            positions: int64 [T], of all tokens in order.
            wanted: rows whose logits are asked for, at most C.
        """
        capacity, total = self.capacity, len(positions)
        rows, source, to_positions, slots, ids = staging.take(5 * capacity).reshape(5, capacity)
        source[:] = self._own
        is_pending = False
        end = 0
        for chunk in chunks:
            begin, end = end, end + chunk.count
            known = pack(chunk, ids[begin:end], slots[begin:end])
            if chunk.pending is not None:
                source[begin + known] = capacity + chunk.pending
                is_pending = True
        ids[total:], slots[total:] = 0, -1
        to_positions[:total], to_positions[total:] = positions, 0
        rows[: len(wanted)], rows[len(wanted) :] = wanted, 0
        staging.send(self._mixed)
        if is_pending:
            self._take(pending)

    def _take(self, pending: Tensor | None) -> None:
        assert pending is not None, "a token is pending, but the previous launch sampled nothing"
        assert len(pending) <= len(self._pending), "more rows were sampled than sequences may run"
        self._pending[: len(pending)].copy_(pending)


def pack(chunk: Chunk, ids: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
    """The ids and slots of a chunk into [count] each, 0 for an id that is pending. Returns how many are known."""
    work, known = chunk.work, chunk.count - (chunk.pending is not None)
    ids[:known] = work.tokens[work.computed : work.computed + known]
    ids[known:] = 0
    slots[:] = chunk.slots
    return known
