"""What the kernels of linear layers take (csrc/cuda/products.cuh). Knows tensors; no models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def params(self, x: Tensor, residual: Tensor | None, y: Tensor, tiles: int, rounds: int = 1) -> Params:
        """x [T, at least the inputs rounded up to a multiple of 8], zeros there, rows 16-byte aligned; y contiguous."""
        return Params(
            x=x.data_ptr(),
            weight=self.weight.data_ptr(),
            norm=_address(self.norm),
            bias=_address(self.bias),
            residual=_address(residual),
            y=y.data_ptr(),
            x_row=x.stride(0),
            residual_row=0 if residual is None else residual.stride(0),
            rows=len(x),
            inputs=self.num_inputs,
            steps=self.steps,
            outputs=self.num_outputs,
            tiles=tiles,
            rounds=rounds,
            eps=self.eps,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
