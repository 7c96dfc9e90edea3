"""Writing new tokens into pages. Knows slots and positions; not who owns a page.

    slot = page * page_size + row          K goes to kv_layer[page, 0, :, row], V to kv_layer[page, 1, :, row]

K is rotated in float32 at its stored position by tables built in float64, rounded once to the pages'
dtype and never rewritten. V is stored as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.rotary import RotaryTable, check_head_dim, expand_rows, turn


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """Where one step's tokens go, for every layer of a group; made by `plan_append`.

    Attributes:
        page, row: int64 [T].
        cos, sin: laid out by `expand_rows`, or None for layers without positions.
    """

    page: Tensor
    row: Tensor
    rotary: RotaryTable | None
    cos: Tensor | None
    sin: Tensor | None

    def write(self, k: Tensor, v: Tensor, kv_layer: Tensor) -> None:
        """Rotate k and write k, v [T, Hkv, D] into kv_layer [pages, 2, Hkv, page_size, D] in place."""
        if k.shape != v.shape or k.shape[0] != len(self.page) or k.shape[1:] != kv_layer.shape[2::2]:
            want = [len(self.page), kv_layer.shape[2], kv_layer.shape[4]]
            raise KernelError(
                INVALID_ARGUMENT, f"k and v must be {want}, are {[*k.shape]}, {[*v.shape]}", "k"
            )
        if self.rotary is not None and self.cos is not None and self.sin is not None:
            check_head_dim(self.rotary, k.shape[-1])
            k = turn(k, self.cos, self.sin, self.rotary.rotary_dim, self.rotary.pairing)
        by_token = kv_layer.permute(0, 3, 1, 2, 4)
        by_token[self.page, self.row, 0] = k.to(kv_layer.dtype)
        by_token[self.page, self.row, 1] = v.to(kv_layer.dtype)


def plan_append(positions: Tensor, slots: Tensor, rotary: RotaryTable | None, page_size: int) -> AppendPlan:
    """Look up once per step what `AppendPlan.write` needs in every layer.

    Args:
        positions: int64 [T] stored positions, in [0, rotary.length).
        slots: int64 [T], page * page_size + row; distinct.
    Raises: KernelError (invalid_argument).
    """
    if positions.shape != slots.shape or positions.ndim != 1:
        message = f"positions {[*positions.shape]} and slots {[*slots.shape]} must both be [T]"
        raise KernelError(INVALID_ARGUMENT, message, "slots")
    cos = sin = None
    if rotary is not None:
        cos, sin = expand_rows(*rotary.rows(positions), rotary.pairing)
    return AppendPlan(slots // page_size, slots % page_size, rotary, cos, sin)


def append_kv(
    k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, rotary: RotaryTable | None, kv_layer: Tensor
) -> None:
    """`plan_append` and `AppendPlan.write` in one call.

    Args:
        k: [T, Hkv, D] unrotated, after any qk-norm; v: [T, Hkv, D].
        positions: int64 [T] stored positions.
        slots: int64 [T], page * page_size + row; distinct.
        rotary: None stores k as it is.
        kv_layer: [pages, 2, Hkv, page_size, D], written in place.
    Raises: KernelError (invalid_argument).
    """
    plan_append(positions, slots, rotary, kv_layer.shape[3]).write(k, v, kv_layer)


def empty_pages(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The pages of one layer, [pages, 2, Hkv, page_size, D], zeroed."""
    return torch.zeros(num_pages, 2, num_kv_heads, page_size, head_dim, dtype=dtype, device=device)
