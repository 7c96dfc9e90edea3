"""The parts decoder models are wired from. No weight names, no config: shapes come in as arguments.

Notation: T rows of a batch, H hidden size, Hq query heads, Hkv KV heads, D head dim, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear import Linear

# attend(layer, q [T, Hq, D] unrotated, k [T, Hkv, D] unrotated, v [T, Hkv, D]) -> [T, Hq, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RMSNorm:
    """Root mean square norm over the last axis, computed in at least float32 (Zhang and Sennrich, 2019)."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention around the paged read: fused projection in, optional per-head q/k norm, out.

    `qkv` gives [(Hq + 2 Hkv) D] per row: queries, keys, values. Rotation happens where pages are written and read.
    """

    layer: int
    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, dim)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(self.layer, q, k, v).reshape(x.shape[0], heads * dim))


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate x) * up x), gate and up fused: `gate_up` gives [2 I] per row (Shazeer, 2020)."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm residual block: x + attention(norm x), then x + mlp(norm x)."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        x = self.attention(self.input_norm(x), attend).add_(x)
        return self.mlp(self.post_norm(x)).add_(x)


@dataclass(frozen=True)
class Decoder:
    """Embedding, decoder layers, final norm, output matrix."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Linear

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, H] after the last layer, before the final norm, of `input_ids` [T] int64."""
        x = F.embedding(input_ids, self.embedding)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab], in float32 or wider, of chosen rows of `forward`'s result [R, H]."""
        values = self.head(self.norm(hidden))
        return values if values.dtype == torch.float64 else values.float()
