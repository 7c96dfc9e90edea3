"""What the kernels of linear layers take (csrc/cuda/products.cuh), and their launches. Knows tensors; no models."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda.driver import Launch, current_stream
from dagengine_kernels.fused.cuda.params import address, packer
from dagengine_kernels.fused.cuda.vectors import DTYPES

STEP = 64
"""Inputs per step: a weight's rows have a whole number of steps."""

SEGMENTS = 8
"""Parts of the steps (every eighth one) that are summed apart, then in order."""


class Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("residual_row", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


@functools.lru_cache(maxsize=8192)
def map_of(pointer: int, dtype: torch.dtype, rows: int, columns: int, pitch: int, box: int) -> bytes:
    """The tensor map of [rows, columns], rows `pitch` elements apart, in boxes of [box, STEP]; zeros outside."""
    return driver.tensor_map(
        pointer,
        dtype,
        dims=(columns, rows),
        strides_bytes=(pitch * dtype.itemsize,),
        box=(STEP, box),
        swizzle_128b=True,
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's tensors, on one device.

    Attributes:
        weight: half or bfloat16 [outputs, steps * STEP], contiguous and 16-byte aligned; zeros past the inputs. Gated:
            [2 * outputs, steps * STEP], the gate's rows first.
        bias: float32 [outputs] or [2 * outputs].
        norm: float32 [inputs rounded up to a multiple of 8], 16-byte aligned.
    """

    weight: Tensor
    num_inputs: int
    num_outputs: int
    gated: bool
    bias: Tensor | None
    norm: Tensor | None
    eps: float

    @property
    def steps(self) -> int:
        return self.weight.shape[1] // STEP

    def macros(self, out_dtype: torch.dtype) -> dict[str, int]:
        return {
            "DTYPE": DTYPES[self.weight.dtype],
            "OUT_TYPE": DTYPES[out_dtype],
            "GATED": int(self.gated),
        }


class Product:
    """The launches of one layer in one layout: what they have in common is taken once.

    Args:
        launch: prepared on the layer's device.
        tiles, rounds: as `Params` has them.
    """

    def __init__(self, layer: Layer, launch: Launch, tiles: int, rounds: int = 1) -> None:
        self.layer = layer
        self._launch, self._device = launch, layer.weight.device.index
        self._tensors = layer.weight.data_ptr(), address(layer.norm), address(layer.bias)
        self._sizes = layer.num_inputs, layer.steps, layer.num_outputs, tiles, rounds, layer.eps

    def __call__(self, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
        """Queue y [T, outputs] of x.

        x [T, at least the inputs rounded up to a multiple of 8], zeros there, rows 16-byte aligned; y contiguous.
        Raises: KernelError (invalid_argument) for a number of rows that the layout is not for.
        """
        self._launch(current_stream(self._device), self.params(x, residual, y))

    def params(self, x: Tensor, residual: Tensor | None, y: Tensor) -> bytes:
        """The kernel's struct."""
        return _PARAMS.pack(
            x.data_ptr(),
            *self._tensors,
            0 if residual is None else residual.data_ptr(),
            y.data_ptr(),
            x.stride(0),
            0 if residual is None else residual.stride(0),
            x.shape[0],
            *self._sizes,
        )


_PARAMS = packer(Params)
