"""The parts decoder models are wired from. No weight names, no config: shapes come in as arguments.

Notation: T rows of a batch, H hidden size, Hq query heads, Hkv KV heads, D head dim, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear import Linear
from .norm import RMSNorm


class Attend(Protocol):
    """Writes keys and values into the pages and attends over everything that the batch's rows see."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> Tensor:
        """Attention output [T, Hq, D].

        Args:
            q, k, v: [T, Hq, D], [T, Hkv, D], [T, Hkv, D], not rotated and not normed.
            q_norm, k_norm: norms per head that q and k still need, both or none; applied where K is written.
        """
        ...


@dataclass(frozen=True)
class Attention:
    """x + out(attention(qkv(x))): grouped queries around the paged read, optionally with a norm per head on q and k.

    `qkv` norms x and gives [(Hq + 2 Hkv) D] per row: queries, keys, values. Rotation happens where pages are written
    and read, and so are the norms per head.
    """

    layer: int
    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, x: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        out = attend(self.layer, q, k, v, q_norm=self.q_norm, k_norm=self.k_norm)
        if rows is not None:
            out, x = out.index_select(0, rows), x.index_select(0, rows)
        return self.out(out.reshape(-1, heads * dim), x) if len(x) else x


@dataclass(frozen=True)
class GatedMLP:
    """x + down(gate_up(x)); `gate_up` norms x and gives silu(gate) * up, [I] per row."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x), x) if len(x) else x


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm residual block. Keys and values are those of all rows, the result that of `rows`; None: of all."""

    attention: Attention
    mlp: GatedMLP

    def __call__(self, x: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        return self.mlp(self.attention(x, attend, rows))


@dataclass(frozen=True)
class Decoder:
    """Embedding, decoder layers, final norm, output matrix.

    Attributes:
        batch_invariant: whether a row's results have the same bits in every batch, given such an attention.
    """

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Linear
    batch_invariant: bool = False

    def forward(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, H] after the last layer, before the final norm, of `input_ids` [T] int64."""
        x = F.embedding(input_ids, self.embedding)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def forward_rows(self, input_ids: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Of `forward`'s result these rows, [R] int64, without what the last layer makes of the others: [R, H]."""
        x = F.embedding(input_ids, self.embedding)
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, attend)
        return last(x, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab], in float32 or wider, of chosen rows of `forward`'s result [R, H]."""
        return self.head(self.norm(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
