"""Drawing tokens by the Gumbel-max trick, of all tokens or of those that top-p keeps (csrc/cuda/draw.cu).

Knows scores, temperatures and keys of random numbers on one CUDA device; not where they come from. A row's token
depends on nothing of the other rows.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel

SLICE = 2048
"""Tokens of a row per block."""

THREADS, DIGITS, BINS = 256, 14, 16
"""As in draw.cu: threads per block, digits of a place, values of a digit."""

MAX_ROWS = 65535
"""Of one launch: the second dimension of a grid."""

MAX_VOCAB = 1 << 24
"""A place has 24 bits for the id."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("peaks", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("least", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("cuts", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("vocab", ctypes.c_int),
        ("count", ctypes.c_int),
        ("digit", ctypes.c_int),
    )


def draw(
    scores: Tensor,
    peaks: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    least: Tensor,
    top_p: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: the argmax of (score - peak) / temperature + Gumbel noise, of equal ones the lowest id.

    The noise of token `id` is -log(-log(1 - u)), where u in (0, 1) is made of the lower 63 bits of SplitMix64's output
    `id` from the row's key.

    Args:
        scores: float32 [R, V] on CUDA, V at most 2^24, the last axis contiguous.
        peaks: float32 [n], the greatest score of each row.
        keys: int64 [n].
        temperatures: float32 [n], above 0.
        least: float32 [n], at most 0: tokens whose scaled score is below are not drawn; minus infinity keeps all.
        top_p: float64 [n]: of these, only the likeliest are drawn whose mass reaches this share, of equal ones the
            lowest ids; infinity keeps all. None does so for all rows, and costs nothing.
        rows: int64 [n], which rows of `scores`; all in order (n = R) by default.
    Returns: int64 [n]; V - 1 for a row without any score above minus infinity, or with a peak that is no number.
    Raises: KernelError (invalid_argument, backend_not_loadable).
    """
    _check(scores, peaks, keys, temperatures, least, top_p, rows)
    count, vocab, device = len(peaks), scores.shape[1], scores.device
    best = torch.zeros(count, dtype=torch.int64, device=device)
    if not count:
        return best
    params = _Params(
        scores=scores.data_ptr(),
        rows=None if rows is None else rows.data_ptr(),
        peaks=peaks.data_ptr(),
        temperatures=temperatures.data_ptr(),
        least=least.data_ptr(),
        keys=keys.data_ptr(),
        best=best.data_ptr(),
        stride=scores.stride(0),
        vocab=vocab,
        count=count,
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    grid, block = (-(-vocab // SLICE), count, 1), (THREADS, 1, 1)
    if top_p is not None:
        sums = torch.zeros((count, DIGITS, BINS), dtype=torch.int64, device=device)
        cuts = torch.empty(count, dtype=torch.int64, device=device)
        params.top_p, params.sums, params.cuts = top_p.data_ptr(), sums.data_ptr(), cuts.data_ptr()
        narrow = _kernel("narrow", device.index)
        for digit in range(DIGITS):
            params.digit = digit
            narrow.launch(grid, block, 0, stream, params)
        warps = THREADS // 32
        _kernel("settle", device.index).launch((-(-count // warps), 1, 1), block, 0, stream, params)
    _kernel("race", device.index).launch(grid, block, 0, stream, params)
    return (2**32 - 1 - (best & (2**32 - 1))).clamp_(max=vocab - 1)


@functools.cache
def _kernel(name: str, device: int) -> Kernel:
    return kernel("draw", name, {"SLICE": SLICE}, device)


def _check(
    scores: Tensor,
    peaks: Tensor,
    keys: Tensor,
    temperatures: Tensor,
    least: Tensor,
    top_p: Tensor | None,
    rows: Tensor | None,
) -> None:
    count = len(scores) if rows is None else len(rows)
    if scores.ndim != 2 or scores.dtype != torch.float32 or scores.stride(1) != 1 or not scores.is_cuda:
        raise KernelError(INVALID_ARGUMENT, "must be float32 [R, V] on CUDA, V contiguous", "scores")
    if count > MAX_ROWS or not 0 < scores.shape[1] <= MAX_VOCAB:
        message = f"must be at most {MAX_ROWS} rows of 1 to {MAX_VOCAB}, is {count} of {scores.shape[1]}"
        raise KernelError(INVALID_ARGUMENT, message, "scores")
    want: tuple[tuple[str, Tensor | None, torch.dtype], ...] = (
        ("peaks", peaks, torch.float32),
        ("keys", keys, torch.int64),
        ("temperatures", temperatures, torch.float32),
        ("least", least, torch.float32),
        ("top_p", top_p, torch.float64),
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
    return tuple(Variant("draw", name, (("SLICE", SLICE),)) for name in ("narrow", "settle", "race"))
