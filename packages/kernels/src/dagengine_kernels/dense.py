"""One dense attention over gathered or strided K and V, with its LSE: torch's flash kernels or matmuls.

Knows blocks of tensors; not pages, positions or segments.

                     no mask, causal      mask                    soft cap
    CPU              flash                flash                   matmuls
    CUDA, 2 bytes    flash (cuDNN's for   memory-efficient        matmuls
                     long causal squares)
    CUDA, 4, 8       matmuls              matmuls                 matmuls
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention

_LARGEST_HEAD = 256
"""Of torch's CUDA kernels, which take multiples of 8."""

_CUDNN_ROWS = 256
"""From this many rows on cuDNN takes a causal square: twice as fast at 8192 rows, but it plans each shape anew."""

_MASK_ALIGNMENT = 8
"""Elements that a row of a mask must be a multiple of for the memory-efficient kernel."""


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
        causal: row i sees tokens 0..i + L - R (then there is no mask; on the CPU R = L).
    Returns: out [C, H, R, D] in q's dtype and the *natural* lse [C, H, R] float32 (float64 for float64 q), of
        any strides. A row whose mask is all -inf gives out 0; its lse is undefined.
    """
    fused = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= _LARGEST_HEAD
    if softcap is not None or (q.is_cuda and not fused):
        return _attend_by_matmul(q, k, v, mask, scale, softcap, causal)
    if not q.is_cuda:
        out, lse = _flash_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    if causal and _CUDNN_ROWS <= q.shape[2] == k.shape[2] and q.shape[-1] <= 128:
        out, lse = _cudnn(q, k, v, None, True, 0.0, True, False, scale=scale)[:2]
        return out, lse[..., 0]
    if mask is None:
        out, lse = _flash_cuda(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse[..., : q.shape[2]]
    return _attend_masked(q, k, v, mask, scale)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    length = k.shape[2]
    hidden = (mask == -math.inf).all(-1, keepdim=True)
    padded = -(-length // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    # A row that sees nothing would be NaN: it is shown its first token, and its result dropped.
    first = torch.arange(padded, device=q.device) == 0
    mask = torch.nn.functional.pad(mask, (0, padded - length)).masked_fill(hidden & first, 0.0)[..., :length]
    mask = mask.expand(*q.shape[:3], length)
    out, lse = _efficient_cuda(q, k, v, mask, True, scale=scale)[:2]
    return out.masked_fill(hidden, 0.0), lse[..., : q.shape[2]]


def _attend_by_matmul(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2)
    if softcap is None:
        scores *= scale
    else:
        scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
            1 + k.shape[2] - q.shape[2]
        )
        scores.masked_fill_(later, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp_()
    out = weights @ v.to(dtype)
    return out.to(q.dtype), lse
