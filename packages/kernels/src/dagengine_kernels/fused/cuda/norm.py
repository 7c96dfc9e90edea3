"""The RMS norm of many rows by one launch (csrc/cuda/norm.cu), in the order of additions of every kernel that norms."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused import native
from dagengine_kernels.fused.cuda.driver import Launch, Variant, current_stream, kernel
from dagengine_kernels.fused.cuda.params import packer
from dagengine_kernels.fused.cuda.vectors import DTYPES

DEVICE = "cuda"
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
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16) or x.device.type != DEVICE:
        message = f"must be half or bfloat16 [T, H] on a CUDA device, is {x.dtype} {[*x.shape]} on {x.device}"
        raise KernelError(INVALID_ARGUMENT, message, "x")
    columns = x.shape[1]
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
    return Norm(weight, eps, inputs=inputs, pdl=pdl)(x)


_PARAMS = packer(_Params)


class Norm:
    """The launches of `rms_norm` with one weight, which, like x, is as it must be."""

    def __init__(self, weight: Tensor, eps: float, *, inputs: int, pdl: bool = True) -> None:
        self._weight, self._device, self._pdl = weight, weight.device.index, pdl
        self._shape = shape(len(weight))
        self._sizes = len(weight), inputs, eps

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = x.shape[0]
        if rows == 0:
            return y
        params = _PARAMS.pack(
            x.data_ptr(), self._weight.data_ptr(), y.data_ptr(), x.stride(0), rows, *self._sizes
        )
        blocks = -(-rows * self._shape[0] // THREADS)
        launch = _launch(DTYPES[x.dtype], *self._shape, blocks, self._pdl, self._device)
        launch(current_stream(self._device), params)
        return y


def shape(columns: int) -> tuple[int, int]:
    """Threads per row, and vectors of 16 bytes that each of them holds."""
    vectors = columns // 8
    lanes = min(THREADS, max(32, 1 << (vectors - 1).bit_length()))
    return lanes, -(-vectors // lanes)


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.lru_cache(maxsize=4096)
def _launch(dtype: int, lanes: int, per: int, blocks: int, pdl: bool, device: int) -> Launch:
    found = kernel("norm", "rms_norm", {"DTYPE": dtype, "LANES": lanes, "PER": per}, device)
    return found.prepare((blocks, 1, 1), (THREADS, 1, 1), 0, pdl=pdl)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return tuple(
        Variant("norm", "rms_norm", (("DTYPE", dtype), ("LANES", lanes), ("PER", per)))
        for dtype, columns in ((2, 4096), (2, 1024), (2, 576), (1, 5120), (2, MAX_INPUTS))
        for lanes, per in (shape(columns),)
    )
