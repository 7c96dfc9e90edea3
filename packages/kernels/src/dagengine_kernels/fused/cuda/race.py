"""Drawing tokens by the Gumbel-max trick in one pass over the scores (csrc/cuda/race.cu).

Knows scores, temperatures and keys of random numbers on one CUDA device; not where they come from.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel

SLICE = 2048
"""Tokens per block."""

THREADS = 256
"""Per block, as in race.cu."""

MAX_ROWS = 65535
"""Of one launch: the second dimension of a grid."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("peaks", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("least", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("vocab", ctypes.c_int),
    )


def race(
    scores: Tensor,
    peaks: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    least: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: the argmax of (score - peak) / temperature + Gumbel noise, of equal ones the lowest id.

    The noise of token `id` is -log(-log(1 - u)), where u in (0, 1) is made of the lower 63 bits of SplitMix64's output
    `id` from the row's key.

    Args:
        scores: float32 [R, V] on CUDA, V below 2^31, the last axis contiguous.
        peaks: float32 [n], the greatest score of each row.
        keys: int64 [n].
        temperatures: float32 [n], above 0.
        least: float32 [n], at most 0: tokens whose scaled score is below are not drawn; minus infinity keeps all.
        rows: int64 [n], which rows of `scores`; all in order (n = R) by default.
    Returns: int64 [n]; V - 1 for a row without any score above minus infinity, or with a peak that is no number.
    Raises: KernelError (invalid_argument, backend_not_loadable).
    """
    count, vocab = len(peaks), scores.shape[1]
    _check(scores, peaks, keys, temperatures, least, rows)
    best = torch.zeros(count, dtype=torch.int64, device=scores.device)
    if count:
        params = _Params(
            scores=scores.data_ptr(),
            rows=None if rows is None else rows.data_ptr(),
            peaks=peaks.data_ptr(),
            keys=keys.data_ptr(),
            temperatures=temperatures.data_ptr(),
            least=least.data_ptr(),
            best=best.data_ptr(),
            stride=scores.stride(0),
            vocab=vocab,
        )
        stream = torch.cuda.current_stream(scores.device).cuda_stream
        found = _kernel(scores.device.index)
        found.launch((-(-vocab // SLICE), count, 1), (THREADS, 1, 1), 0, stream, params)
    return (2**32 - 1 - (best & (2**32 - 1))).clamp_(max=vocab - 1)


@functools.cache
def _kernel(device: int) -> Kernel:
    return kernel("race", "race", {"SLICE": SLICE}, device)


def _check(
    scores: Tensor, peaks: Tensor, keys: Tensor, temperatures: Tensor, least: Tensor, rows: Tensor | None
) -> None:
    count = len(scores) if rows is None else len(rows)
    if scores.ndim != 2 or scores.dtype != torch.float32 or scores.stride(1) != 1 or not scores.is_cuda:
        raise KernelError(INVALID_ARGUMENT, "must be float32 [R, V] on CUDA, V contiguous", "scores")
    if count > MAX_ROWS:
        raise KernelError(INVALID_ARGUMENT, f"must have at most {MAX_ROWS} rows, has {count}", "scores")
    want: tuple[tuple[str, Tensor | None, torch.dtype], ...] = (
        ("peaks", peaks, torch.float32),
        ("keys", keys, torch.int64),
        ("temperatures", temperatures, torch.float32),
        ("least", least, torch.float32),
        ("rows", rows, torch.int64),
    )
    for field, tensor, dtype in want:
        if tensor is None:
            continue
        if tensor.shape != (count,) or tensor.dtype != dtype or not tensor.is_contiguous():
            message = f"must be contiguous [{count}] {dtype}, is {list(tensor.shape)} {tensor.dtype}"
            raise KernelError(INVALID_ARGUMENT, message, field)
        if tensor.device != scores.device:
            raise KernelError(INVALID_ARGUMENT, f"must be on {scores.device}, is on {tensor.device}", field)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return (Variant("race", "race", (("SLICE", SLICE),)),)
