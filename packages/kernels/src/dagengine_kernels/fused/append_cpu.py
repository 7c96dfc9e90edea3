"""Append on the CPU in one native call. Knows how to hand tensors over; what is written where is append.py's."""

from __future__ import annotations

import torch
from torch import Tensor

from dagengine_kernels.fused import native
from dagengine_kernels.rotary import RotaryTable

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As attend_cpu.h numbers them."""


class CpuAppender:
    """One step's tokens.

    Args:
        slots, positions: int64 [T], contiguous; tokens of negative slots are left out.
    """

    def __init__(self, slots: Tensor, positions: Tensor, rotary: RotaryTable | None, page_size: int) -> None:
        self._append = native.load().append
        self._kept: Tensor | None = None
        if (slots < 0).any():
            self._kept = (slots >= 0).nonzero()[:, 0]
            slots, positions = slots[self._kept], positions[self._kept]
        self._slots, self._page_size = slots, page_size
        self._cos, self._sin = (None, None) if rotary is None else rotary.rows(positions)
        self._half = 0 if rotary is None else rotary.rotary_dim // 2
        self._interleaved = rotary is not None and rotary.pairing == "interleaved"

    def takes(self, k: Tensor, v: Tensor, kv_layer: Tensor) -> bool:
        """Whether `write` can: float32, bfloat16 and float16, heads contiguous, pages too."""
        return (
            k.dtype in DTYPES
            and v.dtype in DTYPES
            and kv_layer.dtype in DTYPES
            and k.stride(2) == v.stride(2) == 1
            and k.shape[2] <= self._append.WIDEST
            and kv_layer.is_contiguous()
        )

    def write(
        self, k: Tensor, v: Tensor, kv_layer: Tensor, *, k_weight: Tensor | None = None, k_eps: float = 0.0
    ) -> None:
        """Norm and rotate k and write k and v [T, Hkv, D] into kv_layer [pages, 2, Hkv, page_size, D]."""
        if self._kept is not None:
            k, v = k[self._kept], v[self._kept]
        tokens, heads, dim = k.shape
        self._append.append(
            self._slots.data_ptr(),
            tokens,
            heads,
            dim,
            self._page_size,
            0 if self._cos is None else self._cos.data_ptr(),
            0 if self._sin is None else self._sin.data_ptr(),
            self._half,
            self._interleaved,
            0 if k_weight is None else k_weight.data_ptr(),
            k_eps,
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            DTYPES[k.dtype],
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            DTYPES[v.dtype],
            kv_layer.data_ptr(),
            DTYPES[kv_layer.dtype],
        )
