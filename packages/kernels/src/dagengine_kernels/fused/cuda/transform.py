"""K and V moved from pages to other rows by one launch (csrc/cuda/transform.cu), K turned by a delta on the way.

Knows moves and tensors on one CUDA device; dagengine_kernels/transform.py says what is computed, in torch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dagengine_kernels.fused.cuda.driver import Variant, kernel
from dagengine_kernels.fused.cuda.vectors import HeadLayout

MOVE_FIELDS = 8
"""page, row, count, row of the table (-1: leave K as it is), destination page, destination row, two unused."""

THREADS, UNROLL, STREAMING = 128, 1, 1
"""Threads of a block, rows that each of them has under way, and whether stores pass by L2."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("k_out", ctypes.c_void_p),
        ("v_out", ctypes.c_void_p),
        ("moves", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("to_page", ctypes.c_int64),
        ("to_head", ctypes.c_int64),
        ("to_row", ctypes.c_int64),
        ("kv_heads", ctypes.c_int),
        ("page_size", ctypes.c_int),
    )


def transform(
    layout: HeadLayout,
    kv_layer: Tensor,
    moves: Tensor,
    table: Tensor | None,
    k_out: Tensor,
    v_out: Tensor | None,
    *,
    pdl: bool = True,
) -> None:
    """Queue the launch.

    Args:
        layout: of the heads, for the alignment of all tensors; with rotary_dim 0 where nothing turns.
        kv_layer: [pages, 2, Hkv, page_size, D] contiguous.
        moves: int32 [E, 8], contiguous.
        table: float32 [.., rotary_dim / 2, 2], unscaled, or None.
        k_out, v_out: [pages', rows, Hkv, D] views of the destination with equal strides; without v_out only K moves.
        pdl: may be started before the kernel before it in the stream has ended.
    """
    if not len(moves):
        return
    kv_heads, page_size = kv_layer.shape[2:4]
    params = _Params(
        pages=kv_layer.data_ptr(),
        k_out=k_out.data_ptr(),
        v_out=None if v_out is None else v_out.data_ptr(),
        moves=moves.data_ptr(),
        table=None if table is None else table.data_ptr(),
        to_page=k_out.stride(0),
        to_row=k_out.stride(1),
        to_head=k_out.stride(2),
        kv_heads=kv_heads,
        page_size=page_size,
    )
    macros = {**layout.macros(), "THREADS": THREADS, "UNROLL": UNROLL, "STREAMING": STREAMING}
    found = kernel("transform", "transform", macros, kv_layer.device.index)
    rows = UNROLL * THREADS // layout.lanes
    stream = torch.cuda.current_stream(kv_layer.device).cuda_stream
    grid = (len(moves), kv_heads, -(-page_size // rows))
    found.launch(grid, (THREADS, 1, 1), 0, stream, params, pdl=pdl)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    listed = []
    for dtype, head_dim, rotary_dim, interleaved, vec, lanes in (
        (2, 128, 128, 0, 8, 8),
        (2, 128, 128, 1, 8, 8),
        (2, 128, 0, 0, 8, 8),
        (2, 64, 64, 0, 8, 4),
        (2, 256, 64, 0, 8, 16),
        (1, 128, 128, 0, 8, 8),
        (0, 64, 64, 0, 4, 8),
    ):
        macros = (
            ("DTYPE", dtype),
            ("HEAD_DIM", head_dim),
            ("ROTARY_DIM", rotary_dim),
            ("INTERLEAVED", interleaved),
            ("VEC", vec),
            ("LANES", lanes),
            ("THREADS", THREADS),
            ("UNROLL", UNROLL),
            ("STREAMING", STREAMING),
        )
        listed.append(Variant("transform", "transform", macros))
    return tuple(listed)
