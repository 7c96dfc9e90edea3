"""Triton kernels that only move memory, for the ceilings."""

import triton
import triton.language as tl


@triton.jit
def read(pointer, out, per_block: tl.constexpr, width: tl.constexpr):
    """Each program adds up `per_block` × `width` int32 that lie in a row."""
    start = tl.program_id(0).to(tl.int64) * per_block * width
    place = tl.arange(0, width)
    total = tl.zeros((width,), tl.int32)
    for i in range(per_block):
        total += tl.load(pointer + start + i * width + place)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def copy(source, target, per_block: tl.constexpr, width: tl.constexpr):
    """Each program copies `per_block` × `width` int32 that lie in a row."""
    start = tl.program_id(0).to(tl.int64) * per_block * width
    place = start + tl.arange(0, width)
    for i in range(per_block):
        tl.store(target + place + i * width, tl.load(source + place + i * width))
