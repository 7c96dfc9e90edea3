"""The greatest score of each row, in one launch (csrc/cuda/greatest.cu). Knows scores on one CUDA device."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel

SLICE = 2048
"""Scores of a row per block."""

THREADS = 256
"""As in greatest.cu: threads per block."""

MAX_ROWS = 65535
"""Of one launch: the second dimension of a grid."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("peaks", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("vocab", ctypes.c_int),
    )


def greatest(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queue, on the current stream, the search for the first of each row's greatest scores; NaN is the greatest.

    Args:
        scores: float32 [R, V] on CUDA, at most MAX_ROWS rows, V from 1 to 2^31 - 1, the last axis contiguous.
    Returns: ids int64 [R], 0 where the greatest is not finite; that score, float32 [R]; whether it is finite, bool [R].
    Raises: KernelError (invalid_argument, backend_not_loadable).
    """
    if scores.ndim != 2 or scores.dtype != torch.float32 or scores.stride(1) != 1 or not scores.is_cuda:
        raise KernelError(INVALID_ARGUMENT, "must be float32 [R, V] on CUDA, V contiguous", "scores")
    count, vocab = scores.shape
    if count > MAX_ROWS or not 0 < vocab < 1 << 31:
        message = f"must be at most {MAX_ROWS} rows of 1 to {2**31 - 1}, is {count} of {vocab}"
        raise KernelError(INVALID_ARGUMENT, message, "scores")
    device = scores.device
    ids = torch.empty(count, dtype=torch.int64, device=device)
    peaks = torch.empty(count, dtype=torch.float32, device=device)
    finite = torch.empty(count, dtype=torch.bool, device=device)
    if not count:
        return ids, peaks, finite
    stream = torch.cuda.current_stream(device).cuda_stream
    best, arrived = _scratch(device.index, stream)
    params = _Params(
        scores=scores.data_ptr(),
        ids=ids.data_ptr(),
        peaks=peaks.data_ptr(),
        finite=finite.data_ptr(),
        best=best.data_ptr(),
        arrived=arrived.data_ptr(),
        stride=scores.stride(0),
        vocab=vocab,
    )
    grid = (-(-vocab // SLICE), count, 1)
    _kernel(device.index).launch(grid, (THREADS, 1, 1), 0, stream, params)
    return ids, peaks, finite


@functools.cache
def _scratch(device: int, stream: int) -> tuple[Tensor, Tensor]:
    """What a launch finds and leaves zero; launches of one stream never overlap."""
    best = torch.zeros(MAX_ROWS, dtype=torch.int64, device=torch.device("cuda", device))
    return best, torch.zeros(MAX_ROWS, dtype=torch.int32, device=best.device)


@functools.cache
def _kernel(device: int) -> Kernel:
    return kernel("greatest", "greatest", {"SLICE": SLICE}, device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return (Variant("greatest", "greatest", (("SLICE", SLICE),)),)
