"""One dense attention over gathered or strided K and V, with its LSE: torch's CPU flash kernel or matmuls.

Knows blocks of tensors; not pages, positions or segments. The flash kernel serves everything but soft caps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of blocks.

    Args:
        q: [C, H, R, D]; k, v: [C, H, L, D], L >= 1, of q's dtype; any strides but the last.
        mask: additive, in q's dtype, broadcastable to [C, 1, R, L]: 0 or -inf.
        causal: row i sees tokens 0..i (then R = L and no mask).
    Returns: out [C, H, R, D] in q's dtype and the *natural* lse [C, H, R] float32 (float64 for float64 q), of
        any strides. A row whose mask is all -inf gives out 0; its lse is undefined (torch's kernel says 0).
    """
    if softcap is not None:
        return _attend_softcap(q, k, v, mask, scale, softcap, causal)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _attend_softcap(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, causal: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2)
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    out = weights @ v.to(dtype)
    return out.to(q.dtype), lse
