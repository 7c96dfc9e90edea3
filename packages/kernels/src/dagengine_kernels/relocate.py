"""Rows moved between pages of the same arena, batch by batch, in many layers at once, K turned by a delta on the way.

Knows moves and tensors; in which order rows may be moved is the caller's: inside one batch nothing is written that
another move of it reads. What is computed is transform.py's copy.

    layers concatenated     moves [N, layers, 8]: layers whose tensors lie whole pages apart are one address space of
                            pages, so that a batch is one launch, however few rows it has
    layer by layer          where they do not, and where so many moves fill the device anyway
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda import transform as cuda
from dagengine_kernels.fused.cuda.vectors import alignment, head_layout
from dagengine_kernels.rotary import RotaryTable, check_head_dim
from dagengine_kernels.transform import Moves, plan_copy

PAGE, LO, HI, TO_PAGE, TO_ROW, DELTA = range(6)

MOST_CONCATENATED = 2**21
"""Moves times layers up to which a table of them (32 bytes each) is made."""


class Relocation:
    """
    Args:
        moves: int [N, 6]: page, first row, end of rows, page to go to, row to go to, delta in positions.
        layers: [pages, 2, Hkv, page_size, D] each, contiguous, of one shape, dtype and device.
        rotary: that these layers turn by; None for layers without positions.
    Raises: KernelError (invalid_argument).
    """

    def __init__(
        self, moves: NDArray[np.integer], layers: Sequence[Tensor], rotary: RotaryTable | None
    ) -> None:
        if moves.ndim != 2 or moves.shape[1] != 6:
            raise KernelError(INVALID_ARGUMENT, f"must be [N, 6], is {list(moves.shape)}", "moves")
        if not layers:
            raise KernelError(INVALID_ARGUMENT, "must not be empty", "layers")
        first = layers[0]
        for i, layer in enumerate(layers):
            same = (layer.shape, layer.dtype, layer.device) == (first.shape, first.dtype, first.device)
            if not same or layer.ndim != 5 or not layer.is_contiguous():
                message = "must be contiguous [pages, 2, Hkv, page_size, D] like the first one"
                raise KernelError(INVALID_ARGUMENT, message, f"layers[{i}]")
        if rotary is not None:
            check_head_dim(rotary, first.shape[4])
        _check(moves, first.shape[0], first.shape[3])
        self._moves, self._layers, self._rotary = moves, tuple(layers), rotary

    @property
    def implementation(self) -> str:
        """``cuda, layers concatenated``, ``cuda`` or ``torch``."""
        if self._table is not None:
            return "cuda, layers concatenated"
        return self._planned(0, 0).implementation(self._layers[0].dtype)

    def run(self, start: int, stop: int, *, with_v: bool = True) -> None:
        """Queue the moves start..stop-1; those queued before are done when they begin.

        Args:
            with_v: also move V; without, nothing is to be done for layers without positions.
        """
        if start == stop or (self._rotary is None and not with_v):
            return
        if self._table is None:
            planned = self._planned(start, stop)
            for layer in self._layers:
                planned.copy(layer, layer, with_v=with_v)
            return
        moves, angles, layout = self._table
        first = self._layers[0]
        k_out, v_out = first.permute(1, 0, 3, 2, 4).unbind(0)
        listed = moves[start:stop].view(-1, cuda.MOVE_FIELDS)
        cuda.transform(layout, first, listed, angles, k_out, v_out if with_v else None, pdl=False)

    def _planned(self, start: int, stop: int) -> Moves:
        part = self._moves[start:stop]
        extents = np.zeros((len(part), 5), np.int32)
        extents[:, :3], extents[:, 4] = part[:, :3], part[:, DELTA]
        first = self._layers[0]
        return plan_copy(
            extents,
            part[:, TO_PAGE : TO_ROW + 1],
            self._rotary,
            page_size=first.shape[3],
            device=first.device,
        )

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor | None, object] | None:
        """Moves of all layers, int32 [N, layers, 8], the angles and the layout; None to go layer by layer."""
        first, count = self._layers[0], len(self._moves) * len(self._layers)
        if not 0 < count <= MOST_CONCATENATED:
            return None
        planned = self._planned(0, len(self._moves))
        offsets = page_offsets(self._layers)
        if planned.implementation(first.dtype) != "cuda" or offsets is None:
            return None
        moves, angles = planned._on_device
        rotary = self._rotary if angles is not None else None
        k_out, v_out = first.permute(1, 0, 3, 2, 4).unbind(0)
        row = first.shape[4] * first.element_size()
        layout = head_layout(
            first.dtype, first.shape[4], rotary, alignment(k_out, v_out, first.data_ptr(), row)
        )
        if layout is None:
            return None
        shifts = torch.tensor(offsets, dtype=torch.int32).to(first.device)
        table = moves[:, None].repeat(1, len(self._layers), 1)
        table[:, :, 0] += shifts
        table[:, :, 4] += shifts
        return table, angles, layout


def page_offsets(layers: Sequence[Tensor]) -> list[int] | None:
    """How many pages each layer's tensor lies behind the first one's; None if not whole pages, or too many."""
    first = layers[0]
    page = first.stride(0) * first.element_size()
    apart = [layer.data_ptr() - first.data_ptr() for layer in layers]
    most = max(abs(distance) for distance in apart) // page + len(first)
    if any(distance % page for distance in apart) or most >= 2**31:
        return None
    return [distance // page for distance in apart]


def _check(moves: NDArray[np.integer], num_pages: int, page_size: int) -> None:
    page, lo, hi, to_page, to_row, _ = moves.T
    bad = (page < 0) | (page >= num_pages) | (to_page < 0) | (to_page >= num_pages)
    bad |= (lo < 0) | (lo >= hi) | (hi > page_size) | (to_row < 0) | (to_row + hi - lo > page_size)
    if bad.any():
        i = int(bad.argmax())
        message = f"{moves[i].tolist()} leaves its page of {page_size} rows, or the {num_pages} pages"
        raise KernelError(INVALID_ARGUMENT, message, f"moves[{i}]")
