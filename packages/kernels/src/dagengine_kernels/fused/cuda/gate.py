"""silu(gate) * up of many rows by one launch (csrc/cuda/gate.cu)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, current_stream, kernel
from dagengine_kernels.fused.cuda.vectors import DTYPES

THREADS = 256
PER = 2
"""Vectors per thread."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("vectors", ctypes.c_int64),
        ("outputs", ctypes.c_int),
    )


def silu_mul(x: Tensor, *, pdl: bool = True) -> Tensor:
    """silu(gate) * up, in float32, rounded once (Shazeer, 2020).

    Args:
        x: half or bfloat16 [T, 2 I] on a CUDA device, contiguous: the gate, then up.
        pdl: may be started before the kernel before it in the stream has ended.
    Returns: [T, I] in x's dtype.
    Raises: KernelError (invalid_argument).
    """
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16) or x.device.type != "cuda":
        message = (
            f"must be half or bfloat16 [T, 2 I] on a CUDA device, is {x.dtype} {[*x.shape]} on {x.device}"
        )
        raise KernelError(INVALID_ARGUMENT, message, "x")
    if x.shape[1] % 2 or not x.is_contiguous() or x.data_ptr() % 16:
        message = "must be contiguous, 16-byte aligned and have an even number of columns"
        raise KernelError(INVALID_ARGUMENT, message, "x")
    rows, outputs = x.shape[0], x.shape[1] // 2
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    vec = width(outputs)
    params = _Params(x=x.data_ptr(), y=y.data_ptr(), vectors=y.numel() // vec, outputs=outputs)
    stream = current_stream(x.device.index)
    blocks = -(-params.vectors // (THREADS * PER))
    found = _kernel(DTYPES[x.dtype], vec, x.device.index)
    found.launch((blocks, 1, 1), (THREADS, 1, 1), 0, stream, params, pdl=pdl)
    return y


def width(outputs: int) -> int:
    """Elements per vector: the most that divide a row."""
    return next(vec for vec in (8, 4, 2, 1) if outputs % vec == 0)


@functools.cache
def _kernel(dtype: int, vec: int, device: int) -> Kernel:
    return kernel("gate", "silu_mul", {"DTYPE": dtype, "VEC": vec, "PER": PER}, device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return tuple(
        Variant("gate", "silu_mul", (("DTYPE", dtype), ("VEC", vec), ("PER", PER)))
        for dtype, vec in ((2, 8), (1, 8), (2, 1))
    )
