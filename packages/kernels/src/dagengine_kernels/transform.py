"""Moving cached K and V: gathered into contiguous rows, or copied to other pages, K turned by a delta on the way.

Knows extents and where they go; not why. K contains its rotation at the stored position already, so it is turned
by the *unscaled* rotation of the extent's delta (float32, from cos and sin computed in float64) and rounded once.
V, and K whose delta is 0 or that has no positions, keep their bits.

    gather     extents one after another             rows 0, 1, 2, ...
    copy       extent i to rows destination[i] ..    of pages that no extent of the call reads
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda import transform as cuda
from dagengine_kernels.fused.cuda.vectors import alignment, head_layout
from dagengine_kernels.rotary import RotaryTable, check_head_dim, exact_rows, expand_rows, turn
from dagengine_kernels.segments import DELTA, HI, LO, PAGE


@dataclass(frozen=True, eq=False)
class Moves:
    """What to move and where to; made by `plan_gather` or `plan_copy`, used for every layer of a group.

    Attributes:
        extents: int32 [E, 5], PAGE, LO, HI, STORED, DELTA.
        destination: int64 [E, 2], page and row that the first token of an extent goes to; gathers have one page.
        rotary: None for layers without positions.
        device: of the tensors that are moved.
        contiguous: the extents go to rows 0, 1, 2, ... one after another.
    """

    extents: NDArray[np.int32]
    destination: NDArray[np.int64]
    rotary: RotaryTable | None
    device: torch.device
    contiguous: bool

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[E + 1], tokens of the extents before each extent."""
        length = self.extents[:, HI].astype(np.int64) - self.extents[:, LO]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def implementation(self, dtype: torch.dtype) -> str:
        """``cuda`` where the kernel moves elements of `dtype`, else ``torch``."""
        on_device = self.device.type == "cuda" and dtype != torch.float64 and driver.unavailable() is None
        return "cuda" if on_device else "torch"

    def gather(self, kv_layer: Tensor, k_out: Tensor, v_out: Tensor, first: int = 0) -> None:
        """Bring the extents from number `first` on to their rows of k_out and v_out.

        Args:
            kv_layer: [pages, 2, Hkv, page_size, D] contiguous.
            k_out, v_out: [num_tokens or more, Hkv, D] of its dtype, any strides but the last.
        Raises: KernelError (invalid_argument).
        """
        for field, out in (("k_out", k_out), ("v_out", v_out)):
            if len(out) < self.num_tokens or out.shape[1:] != kv_layer.shape[2::2]:
                want = [self.num_tokens, kv_layer.shape[2], kv_layer.shape[4]]
                message = f"must be {want} or longer, is {list(out.shape)}"
                raise KernelError(INVALID_ARGUMENT, message, field)
        self._move(kv_layer, k_out[None], v_out[None], first)

    def copy(self, kv_layer: Tensor, to_layer: Tensor, *, with_v: bool = True) -> None:
        """Bring all extents to their pages of `to_layer`, which may be `kv_layer` itself.

        Args:
            kv_layer, to_layer: [pages, 2, Hkv, page_size, D] contiguous, of one dtype.
            with_v: also copy V.
        Raises: KernelError (invalid_argument).
        """
        if to_layer.shape[1:] != kv_layer.shape[1:]:
            message = f"has pages of {list(to_layer.shape[1:])}, kv_layer of {list(kv_layer.shape[1:])}"
            raise KernelError(INVALID_ARGUMENT, message, "to_layer")
        k_out, v_out = to_layer.permute(1, 0, 3, 2, 4).unbind(0)
        self._move(kv_layer, k_out, v_out if with_v else None, 0)

    def _move(self, kv_layer: Tensor, k_out: Tensor, v_out: Tensor | None, first: int) -> None:
        """k_out, v_out: [pages', rows, Hkv, D] of any strides but the last."""
        outs = [k_out] if v_out is None else [k_out, v_out]
        for field, tensor in (("kv_layer", kv_layer), *(("k_out", out) for out in outs)):
            if tensor.dtype != kv_layer.dtype or tensor.device != self.device or tensor.stride(-1) != 1:
                message = f"must be contiguous {kv_layer.dtype} on {self.device}"
                raise KernelError(INVALID_ARGUMENT, message, field)
        if self.rotary is not None:
            check_head_dim(self.rotary, kv_layer.shape[4])
        if self.implementation(kv_layer.dtype) == "cuda":
            moves, table = self._on_device
            rotary = self.rotary if table is not None else None
            row = kv_layer.shape[4] * kv_layer.element_size()
            layout = head_layout(
                kv_layer.dtype, kv_layer.shape[4], rotary, alignment(*outs, kv_layer.data_ptr(), row)
            )
            same = v_out is None or v_out.stride() == k_out.stride()
            if layout is not None and same:
                cuda.transform(layout, kv_layer, moves[first:], table, k_out, v_out)
                return
        self._move_by_torch(kv_layer, k_out, v_out, first)

    def _move_by_torch(self, kv_layer: Tensor, k_out: Tensor, v_out: Tensor | None, first: int) -> None:
        pages, rows, turns, to_pages, to_rows = (x[int(self.starts[first]) :] for x in self._tokens)
        heads, size, dim = kv_layer.shape[2:]
        # As rows of D elements: far faster than indexing three axes.
        at = (pages * (2 * heads * size) + rows)[:, None] + torch.arange(heads, device=self.device) * size
        flat = kv_layer.view(-1, dim)
        k = flat.index_select(0, at.ravel()).view(-1, heads, dim)
        if self._turning is not None and self.rotary is not None:
            dtype = torch.promote_types(kv_layer.dtype, torch.float32)
            cos, sin = (x.to(dtype).index_select(0, turns) for x in self._turning)
            k = turn(k, cos, sin, self.rotary.rotary_dim, self.rotary.pairing).to(kv_layer.dtype)
        self._put(k_out, first, to_pages, to_rows, k)
        if v_out is not None:
            v = flat.index_select(0, (at + heads * size).ravel()).view(-1, heads, dim)
            self._put(v_out, first, to_pages, to_rows, v)

    def _put(self, out: Tensor, first: int, to_pages: Tensor, to_rows: Tensor, x: Tensor) -> None:
        if self.contiguous:
            out[0, int(self.starts[first]) : self.num_tokens] = x
        else:
            out[to_pages, to_rows] = x

    @cached_property
    def _deltas(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The distinct deltas, and which of them each extent has."""
        deltas, of_extent = np.unique(self.extents[:, DELTA].astype(np.int64), return_inverse=True)
        return deltas, of_extent

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """int64 [num_tokens] each: page, row, index of the delta, destination page and row."""
        length = np.diff(self.starts)
        within = np.arange(self.num_tokens) - np.repeat(self.starts[:-1], length)
        per_token = (
            np.repeat(self.extents[:, PAGE].astype(np.int64), length),
            np.repeat(self.extents[:, LO].astype(np.int64), length) + within,
            np.repeat(self._deltas[1], length),
            np.repeat(self.destination[:, 0], length),
            np.repeat(self.destination[:, 1], length) + within,
        )
        a, b, c, d, e = (torch.from_numpy(x).to(self.device) for x in per_token)
        return a, b, c, d, e

    @cached_property
    def _turning(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the distinct deltas as `turn` takes them, float64; None if nothing turns."""
        deltas = self._deltas[0]
        if self.rotary is None or not deltas.any():
            return None
        rows = exact_rows(self.rotary, torch.from_numpy(deltas), scaled=False)
        return expand_rows(*(x.to(self.device) for x in rows), self.rotary.pairing)

    @cached_property
    def _on_device(self) -> tuple[Tensor, Tensor | None]:
        """The kernel's moves, int32 [E, 8], and the table of the deltas, float32 [.., R/2, 2]."""
        deltas, of_extent = self._deltas
        table = None
        if self.rotary is not None and deltas.any():
            cos, sin = exact_rows(self.rotary, torch.from_numpy(deltas), scaled=False)
            table = torch.stack((cos, sin), -1).float().to(self.device)
        moves = np.zeros((len(self.extents), cuda.MOVE_FIELDS), np.int32)
        moves[:, 0], moves[:, 1] = self.extents[:, PAGE], self.extents[:, LO]
        moves[:, 2] = np.diff(self.starts)
        moves[:, 3] = np.where(deltas[of_extent] == 0, -1, of_extent)
        moves[:, 4:6] = self.destination
        return torch.from_numpy(moves).to(self.device), table


def plan_gather(
    extents: NDArray[np.int32], rotary: RotaryTable | None, *, device: torch.device | str = "cpu"
) -> Moves:
    """Plan to bring `extents` (int32 [E, 5]) to contiguous rows, in order."""
    device = _concrete(device)
    length = extents[:, HI].astype(np.int64) - extents[:, LO]
    destination = np.zeros((len(extents), 2), np.int64)
    destination[:, 1] = np.cumsum(length) - length
    return Moves(extents, destination, rotary, device, True)


def plan_copy(
    extents: NDArray[np.int32],
    destination: NDArray[np.int64],
    rotary: RotaryTable | None,
    *,
    page_size: int,
    device: torch.device | str = "cpu",
) -> Moves:
    """Plan to bring each of `extents` (int32 [E, 5]) to page and row `destination` ([E, 2]), turned by its delta.

    Raises: KernelError (invalid_argument) if an extent does not fit behind its destination row.
    """
    if destination.shape != (len(extents), 2):
        message = f"must be [{len(extents)}, 2], is {list(destination.shape)}"
        raise KernelError(INVALID_ARGUMENT, message, "destination")
    ends = destination[:, 1] + extents[:, HI] - extents[:, LO]
    bad = (destination < 0).any(1) | (ends > page_size)
    if bad.any():
        i = int(bad.argmax())
        message = f"rows {destination[i, 1]} .. {ends[i]} are not within a page of {page_size}"
        raise KernelError(INVALID_ARGUMENT, message, f"destination[{i}]")
    return Moves(extents, destination.astype(np.int64), rotary, _concrete(device), False)


def _concrete(device: torch.device | str) -> torch.device:
    """`device` with its index, as tensors have it."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
