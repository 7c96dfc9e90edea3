"""The RMS norm. Knows no names of weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RMSNorm:
    """Root mean square norm over the last axis, computed in at least float32 (Zhang and Sennrich, 2019)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
