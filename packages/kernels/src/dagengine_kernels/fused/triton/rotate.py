"""Rotations inside kernels. Knows rotary tables as pointers and element numbers; not pages, not plans.

    cos, sin   float32 [length, HALF] each, times the attention scaling
    HALF       rotary_dim / 2; elements from 2 * HALF on pass through; 0 for heads that do not turn
    left       elements 0 .. C-1 of a head, right: C .. 2C-1; from D on they are padding

Everything is float32 and rounded once, by the caller.
"""

import triton
import triton.language as tl


@triton.jit
def load_turned(
    heads,
    weight,
    cos,
    sin,
    at,
    D: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The heads at pointers `heads` [M], times `weight` [D] (None: 1), rotated at positions `at` [M].

    Returns: left and right, float32 [M, C] each, 0 in the padding.
    """
    c = tl.arange(0, C)
    if HALF == C and not INTERLEAVED:
        # What turns together is one element of left and one of right.
        a = tl.load(heads[:, None] + c[None, :]).to(tl.float32)
        b = tl.load(heads[:, None] + C + c[None, :]).to(tl.float32)
        if weight is not None:
            a, b = a * tl.load(weight + c)[None, :], b * tl.load(weight + C + c)[None, :]
        cell = at.to(tl.int64)[:, None] * HALF + c[None, :]
        cos, sin = tl.load(cos + cell), tl.load(sin + cell)
        return a * cos - b * sin, b * cos + a * sin
    else:
        return (
            load_elements(heads, weight, cos, sin, at, c, D, HALF, INTERLEAVED),
            load_elements(heads, weight, cos, sin, at, c + C, D, HALF, INTERLEAVED),
        )


@triton.jit
def load_elements(
    heads, weight, cos, sin, at, d, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Elements d [C] of heads as `load_turned` takes them, rotated: float32 [M, C]."""
    x = tl.load(heads[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
    if weight is not None:
        x *= tl.load(weight + d, mask=d < D, other=0.0)[None, :]
    if HALF > 0:
        if INTERLEAVED:
            partner, angle, sign = d ^ 1, d // 2, tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner, angle = tl.where(d < HALF, d + HALF, d - HALF), d % HALF
            sign = tl.where(d < HALF, -1.0, 1.0)
        turning = (d < 2 * HALF)[None, :]
        y = tl.load(heads[:, None] + partner[None, :], mask=turning, other=0.0).to(tl.float32)
        if weight is not None:
            y *= tl.load(weight + partner, mask=d < 2 * HALF, other=0.0)[None, :]
        cell = at.to(tl.int64)[:, None] * HALF + angle[None, :]
        x = x * tl.load(cos + cell, mask=turning, other=1.0)
        x += y * (tl.load(sin + cell, mask=turning, other=0.0) * sign[None, :])
    return x


@triton.jit
def load_move(cos, sin, delta, scaling, HALF: tl.constexpr):
    """cos and sin [HALF] that move rotated keys by `delta` of any sign; without `scaling`, the table's factor."""
    cell = tl.abs(delta).to(tl.int64) * HALF + tl.arange(0, HALF)
    sin = tl.load(sin + cell) / scaling
    return tl.load(cos + cell) / scaling, tl.where(delta < 0, -sin, sin)


@triton.jit
def move_keys(k, cos, sin, N: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Whole rotated heads k [N, 2 * HALF], moved by cos and sin from `load_move`: float32."""
    c, s = cos[None, :], sin[None, :]
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(k, (N, HALF, 2)).to(tl.float32))
        return tl.reshape(tl.join(a * c - b * s, b * c + a * s), (N, 2 * HALF))
    else:
        a, b = tl.split(tl.permute(tl.reshape(k, (N, 2, HALF)), (0, 2, 1)).to(tl.float32))
        both = tl.join(a * c - b * s, b * c + a * s)
        return tl.reshape(tl.permute(both, (0, 2, 1)), (N, 2 * HALF))
