"""The RMS norm of many rows by one launch (csrc/cuda/norm.cu), in the order of additions of every kernel that norms."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused import native
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel
from dagengine_kernels.fused.cuda.vectors import DTYPES

THREADS = 256
MAX_INPUTS = 32768


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


def takes(x: Tensor) -> bool:
    """Whether `rms_norm` runs here on x."""
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16) or x.device.type != "cuda":
        return False
    right = x.shape[1] % 8 == 0 and 0 < x.shape[1] <= MAX_INPUTS
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return right and aligned and native.why_missing() is None and _capable(x.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, inputs: int | None = None, pdl: bool = True) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last axis, in float32, rounded once (Zhang and Sennrich, 2019).

    Args:
        x: half or bfloat16 [T, H] on a CUDA device; H a multiple of 8, at most MAX_INPUTS; rows 16-byte aligned.
        weight: float32 [H], contiguous, 16-byte aligned.
        inputs: over how many columns the mean is; those after them are zeros. All by default.
        pdl: may be started before the kernel before it in the stream has ended.
    Returns: [T, H] in x's dtype, contiguous.
    Raises: KernelError (invalid_argument).
    """
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16) or x.device.type != "cuda":
        message = f"must be half or bfloat16 [T, H] on a CUDA device, is {x.dtype} {[*x.shape]} on {x.device}"
        raise KernelError(INVALID_ARGUMENT, message, "x")
    rows, columns = x.shape
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if columns % 8 or not 0 < columns <= MAX_INPUTS or not aligned:
        message = f"must have 16-byte aligned rows of a multiple of 8 up to {MAX_INPUTS}, is {[*x.shape]}"
        raise KernelError(INVALID_ARGUMENT, message, "x")
    inputs = columns if inputs is None else inputs
    if not 0 < inputs <= columns:
        raise KernelError(INVALID_ARGUMENT, f"must be 1 to {columns}, is {inputs}", "inputs")
    fits = weight.shape == (columns,) and weight.dtype == torch.float32 and weight.device == x.device
    if not fits or not weight.is_contiguous() or weight.data_ptr() % 16:
        message = f"must be float32 [{columns}] on {x.device}, is {weight.dtype} {[*weight.shape]}"
        raise KernelError(INVALID_ARGUMENT, message, "weight")
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    lanes, per = shape(columns)
    params = _Params(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        x_row=x.stride(0),
        rows=rows,
        columns=columns,
        inputs=inputs,
        eps=eps,
    )
    found = _kernel(DTYPES[x.dtype], lanes, per, x.device.index)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    found.launch((-(-rows * lanes // THREADS), 1, 1), (THREADS, 1, 1), 0, stream, params, pdl=pdl)
    return y


def shape(columns: int) -> tuple[int, int]:
    """Threads per row, and vectors of 16 bytes that each of them holds."""
    vectors = columns // 8
    lanes = min(THREADS, max(32, 1 << (vectors - 1).bit_length()))
    return lanes, -(-vectors // lanes)


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _kernel(dtype: int, lanes: int, per: int, device: int) -> Kernel:
    return kernel("norm", "rms_norm", {"DTYPE": dtype, "LANES": lanes, "PER": per}, device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return tuple(
        Variant("norm", "rms_norm", (("DTYPE", dtype), ("LANES", lanes), ("PER", per)))
        for dtype, columns in ((2, 4096), (2, 1024), (2, 576), (1, 5120), (2, MAX_INPUTS))
        for lanes, per in (shape(columns),)
    )
