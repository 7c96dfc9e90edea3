"""Rotary tables and rotations. Knows frequencies and positions; not models, not pages.

Tables are built in float64 and held in float32; every rotation is done in float32 (float64 input: float64)
and rounded once. `attention_scaling` (YaRN's factor on cos and sin) belongs to the rotation of an unrotated
q or k. A K that is already rotated contains it, so moving one by a delta uses the *unscaled* rotation.

    pairing "half":        (x[i], x[i + rotary_dim/2]) turn together
    pairing "interleaved": (x[2i], x[2i+1]) turn together
    elements from rotary_dim on are passed through (partial rotary)

Source: Su et al., RoFormer (arXiv:2104.09864), section 3.2; YaRN, arXiv:2309.00071, section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """cos and sin at the positions 0..length-1, times `attention_scaling`.

    Attributes:
        cos, sin: float32 [length, rotary_dim/2].
        rotary_dim: how many leading elements of a head turn.
        pairing: which elements turn together.
        inv_freq: float64 [rotary_dim/2] on the CPU, radians per position.
        attention_scaling: the factor that cos and sin contain; 1.0 unless YaRN.
    """

    cos: Tensor
    sin: Tensor
    rotary_dim: int
    pairing: Pairing
    inv_freq: Tensor
    attention_scaling: float

    @property
    def length(self) -> int:
        return int(self.cos.shape[0])

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, rotary_dim/2], of positions [T] in [0, length)."""
        return self.cos[positions], self.sin[positions]


def build_table(
    inv_freq: Sequence[float] | Tensor,
    attention_scaling: float,
    length: int,
    *,
    pairing: Pairing = "half",
    device: torch.device | str = "cpu",
) -> RotaryTable:
    """Build a table in float64.

    Args:
        inv_freq: [rotary_dim/2] radians per position.
        attention_scaling: factor on cos and sin.
        length: number of positions; turning queries needs 2 * the model's maximum.
    Raises: KernelError (invalid_argument).
    """
    if pairing not in ("half", "interleaved"):
        raise KernelError(INVALID_ARGUMENT, f"must be 'half' or 'interleaved', not {pairing!r}", "pairing")
    if length < 1:
        raise KernelError(INVALID_ARGUMENT, f"must be at least 1, not {length}", "length")
    frequencies = torch.as_tensor(inv_freq, dtype=torch.float64, device="cpu").clone()
    if frequencies.ndim != 1 or not len(frequencies):
        raise KernelError(INVALID_ARGUMENT, "must be a non-empty list of frequencies", "inv_freq")
    cos, sin = _cos_sin(torch.arange(length), frequencies)
    return RotaryTable(
        cos=(cos * attention_scaling).to(device, torch.float32),
        sin=(sin * attention_scaling).to(device, torch.float32),
        rotary_dim=2 * len(frequencies),
        pairing=pairing,
        inv_freq=frequencies,
        attention_scaling=float(attention_scaling),
    )


def exact_rows(table: RotaryTable, positions: Tensor, *, scaled: bool) -> tuple[Tensor, Tensor]:
    """cos and sin computed (not looked up) in float64, [T, rotary_dim/2]; positions may be negative.

    `scaled` says whether they contain `attention_scaling`: True for unrotated q and k, False for a delta.
    """
    cos, sin = _cos_sin(positions, table.inv_freq.to(positions.device))
    factor = table.attention_scaling if scaled else 1.0
    return cos * factor, sin * factor


def expand_rows(cos: Tensor, sin: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Lay cos and sin [T, R/2] out for `turn`: [T, 1, R], an entry per element, and [T, 1, R/2]."""
    both = torch.cat((cos, cos), 1) if pairing == "half" else cos.repeat_interleave(2, 1)
    return both[:, None], sin[:, None]


def turn(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, pairing: Pairing) -> Tensor:
    """Rotate x [T, H, D] by rows from `expand_rows`, in their dtype; a new [T, H, D] of that dtype.

    Any leading axes will do, as long as they broadcast to those of x times cos.
    """
    x = x.to(cos.dtype)
    if rotary_dim == x.shape[-1]:
        turned = x * cos
    else:
        head = x[..., :rotary_dim] * cos
        turned = torch.cat((head, x[..., rotary_dim:].expand(*head.shape[:-1], -1)), -1)
    if pairing == "half":
        first, second = slice(0, rotary_dim // 2), slice(rotary_dim // 2, rotary_dim)
    else:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    turned[..., first].addcmul_(x[..., second], sin, value=-1)
    turned[..., second].addcmul_(x[..., first], sin)
    return turned


def rotate(x: Tensor, positions: Tensor, table: RotaryTable, *, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate unrotated x [T, H, D] at positions [T] (int64, in [0, length)); scaled.

    Done in float32 (float64 where x is), returned in `dtype` (x's own by default).
    Raises: KernelError (invalid_argument) if a head is narrower than rotary_dim.
    """
    check_head_dim(table, x.shape[-1])
    cos, sin = (
        exact_rows(table, positions, scaled=True) if x.dtype == torch.float64 else table.rows(positions)
    )
    return turn(x, *expand_rows(cos, sin, table.pairing), table.rotary_dim, table.pairing).to(
        dtype or x.dtype
    )


def rotate_by_delta(
    x: Tensor, deltas: Tensor, table: RotaryTable, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Move already rotated x [T, H, D] by deltas [T] of any sign; unscaled: YaRN's factor is in x already.

    Done in float32 (float64 where x is) from cos and sin computed in float64, returned in `dtype` (x's own).
    """
    check_head_dim(table, x.shape[-1])
    cos, sin = exact_rows(table, deltas, scaled=False)
    if x.dtype != torch.float64:
        cos, sin = cos.float(), sin.float()
    return turn(x, *expand_rows(cos, sin, table.pairing), table.rotary_dim, table.pairing).to(
        dtype or x.dtype
    )


def check_head_dim(table: RotaryTable, head_dim: int) -> None:
    """Raises KernelError (invalid_argument) unless a head of `head_dim` holds the table's rotary_dim."""
    if table.rotary_dim > head_dim:
        message = f"rotary_dim {table.rotary_dim} exceeds the head dimension {head_dim}"
        raise KernelError(INVALID_ARGUMENT, message, "rotary_dim")


def _cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.to(torch.float64)[:, None] * inv_freq
    return angles.cos(), angles.sin()
