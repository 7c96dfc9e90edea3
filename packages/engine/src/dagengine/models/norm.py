"""The RMS norm. Knows no names of weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from dagengine_kernels.norm import rms_norm, takes


@dataclass(frozen=True)
class RMSNorm:
    """Root mean square norm over the last axis, computed in at least float32 (Zhang and Sennrich, 2019)."""

    weight: Tensor
    eps: float

    def __post_init__(self) -> None:
        if self.weight.device.type == "cuda":
            _ = self._wide_weight  # made now: a captured graph must find it

    def __call__(self, x: Tensor) -> Tensor:
        if takes(x):
            return rms_norm(x, self._wide_weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    @cached_property
    def _wide_weight(self) -> Tensor:
        return self.weight.to(torch.float32).contiguous()
