"""y = x W + b, with the weight laid out the way this machine multiplies fastest. Knows no names of weights.

    bfloat16 on a CPU     packed once by oneDNN; many rows are multiplied in float32 where that is faster
    anything else         [in, out], the transpose of what checkpoints hold: a CPU multiplies 2 to 64 rows by it up
                          to twice as fast

Sums are in float32 at least, and rounded once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

WIDE_ROWS = 128
"""Rows from which unpacking a weight to float32 costs less than it saves."""


@dataclass(frozen=True)
class Linear:
    """y [T, out] = x [T, in] W + b, in x's dtype.

    Attributes:
        weight: [in, out], or packed from [out, in] (then its layout is `torch._mkldnn`).
        bias: [out].
    """

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def from_checkpoint(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """From a weight [out, in], the layout of checkpoints."""
        if _is_packable(weight):
            return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias)
        return cls(weight.t().contiguous(), bias)

    @classmethod
    def sharing(cls, weight: Tensor) -> Linear:
        """From a weight [out, in] that something else holds too; copied only where it must be packed."""
        if _is_packable(weight):
            return cls.from_checkpoint(weight)
        return cls(weight.t())

    @property
    def packed(self) -> bool:
        return self.weight.is_mkldnn

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if len(x) >= WIDE_ROWS and prefers_float32():
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.to_dense(torch.float32), bias).to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack()


@cache
def can_pack() -> bool:
    """Whether oneDNN multiplies packed bfloat16 weights here."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def prefers_float32() -> bool:
    """Whether many rows are multiplied faster in float32 than in bfloat16: so on CPUs whose bfloat16 products have
    half the rate, such as Intel's without AMX. Measured once; the two differ by far more than the noise."""
    x, weight = torch.ones(256, 512), torch.ones(1024, 512)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16())
    narrow = x.bfloat16()
    with torch.inference_mode():
        return _least_seconds(lambda: F.linear(x, weight)) < _least_seconds(
            lambda: torch.ops.mkldnn._linear_pointwise(narrow, packed, None, "none", [], "")
        )


def _least_seconds(run: Callable[[], Tensor]) -> float:
    least = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - begin)
    return least
