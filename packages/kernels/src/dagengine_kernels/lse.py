"""Merging attention results over disjoint parts of a context. Knows outputs and their LSE, nothing else.

Every LSE here is base 2: lse2 = log2(sum(exp(score))) = ln(sum(exp(score))) / ln 2. The identity of the merge
is (0, -inf): a part in which a row sees nothing. Arithmetic is float32 (float64 where an lse2 is float64).

    lse2 = log2(2^lse2_a + 2^lse2_b)         out = (2^lse2_a * out_a + 2^lse2_b * out_b) / 2^lse2

Source: FlashAttention (arXiv:2205.14135) section 3.1; cascade merging as in FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def merge(out_a: Tensor, lse2_a: Tensor, out_b: Tensor, lse2_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts.

    Args:
        out_a, out_b: [..., D] of one dtype.
        lse2_a, lse2_b: [...] float32 or float64, base 2.
    Returns: out [..., D] in out_a's dtype, lse2 [...]. Two empty parts give (0, -inf).
    """
    return merge_many(torch.stack((out_a, out_b)), torch.stack((lse2_a, lse2_b)))


def merge_many(outs: Tensor, lse2s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N parts along axis 0.

    Args:
        outs: [N, ..., D].
        lse2s: [N, ...] float32 or float64, base 2; -inf where a row saw nothing (its out is then ignored).
    Returns: out [..., D] in the dtype of outs, lse2 [...]. No parts, or only empty ones, give (0, -inf).
    """
    if outs.shape[0] == 0:
        return outs.new_zeros(outs.shape[1:]), lse2s.new_full(lse2s.shape[1:], -math.inf)
    top = lse2s.amax(0)
    finite_top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp2(lse2s - finite_top)
    total = weights.sum(0)
    shares = weights / total.masked_fill(total == 0, 1.0)
    safe = outs.to(shares.dtype).masked_fill((shares == 0).unsqueeze(-1), 0.0)
    out = torch.einsum("n...d,n...->...d", safe, shares)
    return out.to(outs.dtype), finite_top + torch.log2(total)


def apply_sinks(out: Tensor, lse2: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let learned sinks take their share of the softmax; call once, after every part is merged.

    Args:
        out: [T, H, D]; lse2: [T, H] base 2; sinks: [H] logits (base e, as models store them).
    Returns: out in its dtype, and the lse2 of scores and sink together (finite even where a row saw nothing).
        A sink of -inf takes nothing.
    """
    sinks2 = sinks.to(lse2.dtype) * LOG2E
    total = torch.logaddexp2(lse2, sinks2.expand_as(lse2))
    share = torch.exp2(lse2 - total.masked_fill(total == -math.inf, 0.0)).unsqueeze(-1)
    return (out.to(share.dtype) * share).to(out.dtype), total
