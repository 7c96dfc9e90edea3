"""K and V of new tokens into pages: norm, rotation, paged write. Knows slots and positions; not plans.

`dagengine_kernels.append` says in torch what is computed here: K is normed and rotated in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dagengine_kernels.append import HeadNorm
from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.triton.rotate import load_turned
from dagengine_kernels.rotary import RotaryTable, check_head_dim

TOKENS = 16
"""Tokens of a program."""


def append(
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    rotary: RotaryTable | None,
    kv_layer: Tensor,
    *,
    k_norm: HeadNorm | None = None,
) -> None:
    """Write one step's K and V, in one launch.

    Args:
        k, v: [T, Hkv, D] unrotated; any strides of the first two axes.
        positions: int64 [T] stored positions, in [0, rotary.length).
        slots: int64 [T], page * page_size + row, distinct; negative ones are passed over.
        rotary: None stores k as it is.
        kv_layer: [pages, 2, Hkv, page_size, D] contiguous, written in place.
        k_norm: applied to k before its rotation.
    Raises: KernelError (invalid_argument).
    """
    tokens, heads, head_dim = k.shape
    page_size = kv_layer.shape[3]
    if v.shape != k.shape or kv_layer.shape[2::2] != k.shape[1:]:
        want = [tokens, kv_layer.shape[2], kv_layer.shape[4]]
        raise KernelError(INVALID_ARGUMENT, f"k and v must be {want}, are {[*k.shape]}, {[*v.shape]}", "k")
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise KernelError(INVALID_ARGUMENT, f"positions and slots must be [{tokens}]", "slots")
    if not kv_layer.is_contiguous():
        raise KernelError(INVALID_ARGUMENT, "must be contiguous", "kv_layer")
    if rotary is not None:
        check_head_dim(rotary, head_dim)
    if tokens == 0:
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    append_kernel[(triton.cdiv(tokens, TOKENS), heads)](
        k,
        v,
        positions.contiguous(),
        slots.contiguous(),
        None if rotary is None else rotary.cos.to(k.device),
        None if rotary is None else rotary.sin.to(k.device),
        None if k_norm is None else k_norm.weight.to(k.device, torch.float32).contiguous(),
        kv_layer,
        tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0.0 if k_norm is None else k_norm.eps,
        HKV=heads,
        D=head_dim,
        C=max(16, 1 << (head_dim - 1).bit_length() - 1),
        PAGE=page_size,
        HALF=0 if rotary is None else rotary.rotary_dim // 2,
        INTERLEAVED=rotary is not None and rotary.pairing == "interleaved",
        TOKENS=TOKENS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens"])
def append_kernel(
    k,
    v,
    positions,
    slots,
    cos,
    sin,
    weight,
    kv_layer,
    tokens,
    k_token,
    k_head,
    v_token,
    v_head,
    eps,
    HKV: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Up to TOKENS tokens of kv head program_id(1); the arguments are those of `append`, strides in elements."""
    head = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = (t < tokens)[:, None]
    # Rows past the last token do as it does, and are not stored; nor are those without a slot.
    t = tl.minimum(t, tokens - 1).to(tl.int64)
    slot = tl.load(slots + t)
    real = real & (slot >= 0)[:, None]
    to = kv_layer + (((slot // PAGE) * (2 * HKV) + head) * PAGE + slot % PAGE)[:, None] * D
    c = tl.arange(0, C)
    d = tl.arange(0, 2 * C)

    heads = k + t * k_token + head * k_head
    left, right = load_turned(heads, weight, cos, sin, tl.load(positions + t), D, C, HALF, INTERLEAVED)
    if weight is not None:
        x = tl.load(heads[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        left, right = left * factor, right * factor
    dtype = kv_layer.dtype.element_ty
    tl.store(to + c[None, :], left.to(dtype), mask=real & (c < D)[None, :])
    tl.store(to + C + c[None, :], right.to(dtype), mask=real & (c + C < D)[None, :])

    x = tl.load(v + (t * v_token + head * v_head)[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    tl.store(to + HKV * PAGE * D + d[None, :], x.to(dtype), mask=real & (d < D)[None, :])
