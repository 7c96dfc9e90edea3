"""What a sequence has seen and sampled, counted on the device, and the penalties that follow from it.

One row of int32 [vocab] for each sequence with penalties, in a slab that grows and shrinks by their number:

    bit 30        the request sees the token, or was given it
    bits 0-29     how often the sequence has sampled it

The ids just sampled are counted on the device, so the host may lag behind. Each row knows how many tokens it has
counted; a sequence that comes back with another number (it was preempted, or a step is run again) is counted anew from
the host's list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sampling_rows import SamplingRow
from .transfer import to_device

SEEN = 1 << 30
SMALLEST = 4
"""Rows of the smallest slab."""


class PenaltyCounts:
    """Counts of all live sequences with penalties.

    Args:
        vocab_size: ids at or past it are not counted.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device, self._vocab = device, vocab_size
        self._slots: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._free: list[int] = []
        self._slab = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return self._slab.numel() * self._slab.element_size()

    def slots(self, rows: Iterable[SamplingRow]) -> list[int]:
        """The slab's row of each row, counted up to its `step`."""
        anew: list[tuple[int, SamplingRow]] = []
        slots: list[int] = []
        for row in rows:
            slot = self._slots.get(row.key)
            if slot is None:
                slot = self._slots[row.key] = self._take_slot()
            if self._steps.get(row.key) != row.step:
                assert len(row.sampled) == row.step, "the host lacks ids that a sequence's counts need"
                self._steps[row.key] = row.step
                anew.append((slot, row))
            slots.append(slot)
        if anew:
            self._count(anew)
        return slots

    def add(self, rows: Sequence[SamplingRow], slots: Tensor, ids: Tensor) -> None:
        """Count the ids just sampled: int64 [n] on the device for n rows whose slots are `slots`, int64 [n]."""
        ones = torch.ones_like(ids, dtype=torch.int32)
        self._slab.view(-1).scatter_add_(0, slots * self._vocab + ids, ones)
        for row in rows:
            self._steps[row.key] = row.step + 1

    def forget(self, key: int) -> None:
        """Drop a sequence's counts. Unknown keys are no error: most sequences have none."""
        slot = self._slots.pop(key, None)
        self._steps.pop(key, None)
        if slot is None:
            return
        self._free.append(slot)
        if not self._slots:
            self._free = []
            self._slab = self._slab.new_zeros((0, self._vocab))

    def repeat(self, scores: Tensor, slots: Tensor, repetition: Tensor) -> None:
        """The repetition penalty of `scores`, in place.

        Args:
            scores: logits [n, V].
            slots: int64 [n].
            repetition: [n, 1] of the scores' dtype; 1 leaves a row's bits as they are.
        """
        known = self._slab.index_select(0, slots).clamp_(max=1).to(scores.dtype)
        # clamp and lerp, exact at the ends 0 and 1, are many times faster on a CPU than where with a mask
        divisor = torch.lerp(torch.ones_like(repetition), repetition, known)
        negative = scores.clamp(max=0.0).mul_(divisor)
        scores.clamp_(min=0.0).div_(divisor).add_(negative)

    def subtract(self, scores: Tensor, slots: Tensor, presence: Tensor, frequency: Tensor) -> None:
        """The presence and frequency penalties of `scores`, in place; arguments as for `repeat`, 0 changes nothing."""
        times = self._slab.index_select(0, slots).bitwise_and_(SEEN - 1).to(scores.dtype)
        scores.sub_(times.clamp(max=1.0).mul_(presence).add_(times.mul_(frequency)))

    def _take_slot(self) -> int:
        if not self._free:
            old = self._slab
            size = max(SMALLEST, 2 * len(old))
            self._slab = old.new_zeros((size, self._vocab))
            self._slab[: len(old)] = old
            self._free = list(range(size - 1, len(old) - 1, -1))
        return self._free.pop()

    def _count(self, rows: list[tuple[int, SamplingRow]]) -> None:
        seen: list[NDArray[np.int64]] = []
        sampled: list[NDArray[np.int64]] = []
        times: list[NDArray[np.int32]] = []
        for slot, row in rows:
            begin = slot * self._vocab
            if row.params.repetition_penalty != 1.0:
                seen.append(begin + self._known(row.seen))
            ids, counts = np.unique(self._known(row.sampled), return_counts=True)
            sampled.append(begin + ids)
            times.append(counts.astype(np.int32))
        cleared = np.array([slot for slot, _ in rows], np.int64)
        self._slab.index_fill_(0, to_device(cleared, self._device), 0)
        flat = self._slab.view(-1)
        if any(map(len, seen)):
            flat.index_fill_(0, to_device(np.concatenate(seen), self._device), SEEN)
        if any(map(len, sampled)):
            places = to_device(np.concatenate(sampled), self._device)
            flat.scatter_add_(0, places, to_device(np.concatenate(times), self._device))

    def _known(self, ids: Sequence[int]) -> NDArray[np.int64]:
        array = np.array(ids, np.int64)
        return array[array < self._vocab]
