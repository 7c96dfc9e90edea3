"""How a head of elements is cut into vectors for threads: the macros of csrc/cuda/vectors.cuh and rotary.cuh.

Knows dtypes, head dimensions, pairings and alignments; not tensors' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.rotary import RotaryTable

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""DTYPE of the device code."""

MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A head of `head_dim` elements, the first `rotary_dim` of which turn (0: none).

    Attributes:
        vec: elements per vector.
        lanes: threads per head, a power of two.
    """

    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    interleaved: bool
    vec: int
    lanes: int

    def macros(self) -> dict[str, int]:
        return {
            "DTYPE": DTYPES[self.dtype],
            "HEAD_DIM": self.head_dim,
            "ROTARY_DIM": self.rotary_dim,
            "INTERLEAVED": int(self.interleaved),
            "VEC": self.vec,
            "LANES": self.lanes,
        }


def head_layout(
    dtype: torch.dtype, head_dim: int, rotary: RotaryTable | None, alignment: int = 16
) -> HeadLayout | None:
    """The widest layout for heads whose addresses are multiples of `alignment` bytes.

    Returns: None where no kernel takes such heads (dtype, size, or pairs that no vector holds).
    """
    if dtype not in DTYPES or head_dim > MAX_HEAD_DIM:
        return None
    interleaved = rotary is not None and rotary.pairing == "interleaved"
    rotary_dim = 0 if rotary is None else rotary.rotary_dim
    part = rotary_dim if interleaved else rotary_dim // 2
    vec = min(16, alignment) // dtype.itemsize
    while vec > 1 and (head_dim % vec or part % vec):
        vec //= 2
    if vec < (2 if interleaved else 1):
        return None
    pairs = part // vec if rotary_dim and not interleaved else 0
    units = pairs + (head_dim // vec - 2 * pairs + 1) // 2
    lanes = min(32, 1 << (units - 1).bit_length())
    return HeadLayout(dtype, head_dim, rotary_dim, interleaved, vec, lanes)


def alignment(*places: Tensor | int) -> int:
    """The largest power of two up to 16 that divides all addresses and numbers of bytes.

    A tensor stands for its address and the strides of all axes but the last, in bytes.
    """
    bits = 16
    for place in places:
        if isinstance(place, int):
            bits |= place
        else:
            size = place.element_size()
            bits |= place.data_ptr()
            for stride in place.stride()[:-1]:
                bits |= stride * size
    return bits & -bits
