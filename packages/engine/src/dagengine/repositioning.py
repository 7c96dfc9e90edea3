"""Carries out the store's move plans on an arena: where pages, rotations and kernels meet for rewriting KV.

Knows layers and their rotations; which rows go where, and in which order, is the plan's. Layers of one group turn by
the same angles and move together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels import RotaryTable
from dagengine_kernels.relocate import Relocation
from dagengine_kvstore import Move, MovePlan, StepKind
from dagengine_kvstore.torch_arena import TorchArena


class PageMover:
    """The store's `Mover` over the layers of an arena, on its device, in the order of its current stream.

    Args:
        groups: layers by number, and what K of these layers is turned by; None: they have no positions.
    """

    def __init__(self, arena: TorchArena, groups: Sequence[tuple[Sequence[int], RotaryTable | None]]) -> None:
        self._groups = [([arena.layer(i) for i in layers], rotary) for layers, rotary in groups]
        self._layers = [layer for layers, _ in self._groups for layer in layers]
        self._device = self._layers[0].device

    @torch.inference_mode()
    def run(self, plan: MovePlan) -> None:
        """As `Mover.run`; waits for the device, also where it raises."""
        try:
            self._run(plan)
        finally:
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _run(self, plan: MovePlan) -> None:
        moves = _array([move for kind, listed in plan.steps if kind is StepKind.MOVE for move in listed])
        relocations = [Relocation(moves, layers, rotary) for layers, rotary in self._groups]
        host = self._host_pages(plan)
        begin = 0
        for step in plan.steps:
            if step.kind is StepKind.SAVE:
                self._save(step.moves, host)
            elif step.kind is StepKind.LOAD:
                self._load(step.moves, host)
            else:
                middle, end = begin + step.num_copies, begin + len(step.moves)
                for relocation in relocations:
                    relocation.run(begin, middle)
                    relocation.run(middle, end, with_v=False)
                begin = end

    def _host_pages(self, plan: MovePlan) -> list[Tensor]:
        """Per layer [host pages, rows, 2, Hkv, D] in host memory."""
        if not plan.num_host_pages:
            return []
        _, _, heads, size, dim = self._layers[0].shape
        shape = (plan.num_host_pages, size, 2, heads, dim)
        dtype = self._layers[0].dtype
        return [torch.empty(shape, dtype=dtype) for _ in self._layers]

    def _save(self, moves: Sequence[Move], host: Sequence[Tensor]) -> None:
        pages, rows, to_pages, to_rows = _rows(moves)
        at, row = pages.to(self._device), rows.to(self._device)
        for layer, saved in zip(self._layers, host, strict=True):
            saved[to_pages, to_rows] = layer.permute(0, 3, 1, 2, 4)[at, row].cpu()

    def _load(self, moves: Sequence[Move], host: Sequence[Tensor]) -> None:
        pages, rows, to_pages, to_rows = _rows(moves)
        at, row = to_pages.to(self._device), to_rows.to(self._device)
        for layer, saved in zip(self._layers, host, strict=True):
            layer.permute(0, 3, 1, 2, 4)[at, row] = saved[pages, rows].to(self._device)


def _array(moves: Sequence[Move]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(moves), np.int64, 6 * len(moves)).reshape(-1, 6)


def _rows(moves: Sequence[Move]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int64 [rows] each, on the CPU: page, row, page to go to, row to go to."""
    page, lo, hi, to_page, to_row, _ = _array(moves).T
    count = hi - lo
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    found = [np.repeat(first, count) for first in (page, lo, to_page, to_row)]
    a, b, c, d = (torch.from_numpy(x) for x in (found[0], found[1] + within, found[2], found[3] + within))
    return a, b, c, d
