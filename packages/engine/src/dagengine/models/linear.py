"""A layer's product and what stands around it, done the way this machine does it fastest. Knows no names of weights.

    y = act(norm(x) W + b) + residual        act: the identity, or silu(gate) * up of a gated layer (Shazeer, 2020)

    bfloat16 on a CPU     `PackedLinear` of the kernels, which does all of it in one pass over the weight;
                          oneDNN's packed product on CPUs with matrix units, or where the kernels are not compiled
    half, bfloat16 on a GPU
                          `CudaLinear` of the kernels, where it runs
    anything else         `DenseLinear`

Sums are in float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.linear import PackedLinear

from ..errors import DagError
from .norm import RMSNorm


class Linear(Protocol):
    """y [T, out] of x [T, in]; `residual` [T, out] is added, and y is in `dtype`, by default x's own."""

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor: ...


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    gated: bool = False,
    shared: bool = False,
    batch_invariant: bool = False,
    over_residual: bool = False,
) -> Linear:
    """The layer of a weight [out, in], the layout of checkpoints.

    Args:
        bias: [out].
        norm: what x goes through first.
        gated: the weight holds the gate's rows, then up's; y has half as many outputs.
        shared: something else holds the weight too; it is copied only where that pays.
        batch_invariant: a row's result must have the same bits in every batch.
        over_residual: nothing reads the residual after a call, so that y may be written over it.
    Raises: DagError (unsupported) where nothing is batch_invariant.
    """
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    if CudaLinear.unavailable(weight) is None:
        return CudaLinear(
            weight,
            bias,
            norm=norm_weight,
            eps=eps,
            gated=gated,
            batch_invariant=batch_invariant,
            over_residual=over_residual,
        )
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        if PackedLinear.unavailable() is None and (batch_invariant or not _has_matrix_units()):
            return PackedLinear(weight, bias, norm=norm_weight, eps=eps, gated=gated)
        if not batch_invariant and _onednn_multiplies_bfloat16():
            return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias, norm, gated)
    if batch_invariant:
        raise DagError("unsupported", _depends_on_rows(weight.dtype, weight.device), "batch_invariant")
    return DenseLinear(weight.t() if shared else weight.t().contiguous(), bias, norm, gated)


def why_not_invariant(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no layer of such weights gives a row the same bits among any number of others; None if they do."""
    if CudaLinear.unavailable(torch.empty(0, dtype=dtype, device=device)) is None:
        return None
    if device.type == "cpu" and dtype == torch.bfloat16 and PackedLinear.unavailable() is None:
        return None
    return _depends_on_rows(dtype, device)


def _depends_on_rows(dtype: torch.dtype, device: torch.device) -> str:
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu" and dtype != torch.bfloat16:
        reason = "; set dtype to bfloat16"
    elif device.type == "cpu":
        reason = f"; {PackedLinear.unavailable()}"
    else:
        reason = f"; {CudaLinear.unavailable(torch.empty(0, dtype=dtype, device=device))}"
    return f"products of {name} on {device.type} depend on how many rows there are{reason}"


@dataclass(frozen=True)
class DenseLinear:
    """In torch's own operations.

    Attributes:
        weight: [in, out]; contiguous, a CPU multiplies 2 to 64 rows by it up to twice as fast as by the transpose.
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: RMSNorm | None = None
    gated: bool = False

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        y = self.multiply(x if self.norm is None else self.norm(x))
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate).mul_(up)
        if residual is not None:
            y = y.add_(residual)
        return y if dtype is None else y.to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)


class OneDnnLinear(DenseLinear):
    """With a weight that oneDNN packed."""

    def multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


@cache
def _has_matrix_units() -> bool:
    """AMX: oneDNN uses it, and nothing else is as fast with many rows."""
    return bool(torch.cpu._is_amx_tile_supported())


@cache
def _onednn_multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
