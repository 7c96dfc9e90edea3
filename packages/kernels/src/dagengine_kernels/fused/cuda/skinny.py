"""A linear layer on few rows (csrc/cuda/skinny.cu): how a launch is laid out, and the launch.

shared memory of a block      ring of weights | partial sums | x
blocks                        one per SM; with at most HALF_SM bytes the next kernel's blocks find room beside them and
                              begin to read their weights while this one ends
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel
from dagengine_kernels.fused.cuda.products import SEGMENTS, STEP, Layer

WARPS = 8
MAX_ROWS = 64
NORM_ROWS = 8
"""Rows that a launch norms itself."""

UNCLUSTERED = {1: 0, 2: 0, 4: 4, 8: 4}
"""Blocks per cluster, and SMs that are left over where an H200's groups of 16 and 18 SMs are cut into such clusters."""

SHARED_BYTES = 227 * 1024 - 1024
"""Of a block at most, less what the norm keeps there."""

HALF_SM = 113 * 1024 - 512
DEEPEST = 6
"""Steps of 16 weight rows that a warp has under way at most: 96 KiB per block."""

SHALLOWEST = 4
"""And at least: 64 KiB per block in flight hide the latency of memory."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a launch divides the work.

    Attributes:
        cluster: blocks that share a tile's inputs.
        mt: 16-row tiles of the weight per warp; nt: 8-row tiles of x.
        depth: steps that a warp has under way.
        tiles: of the whole weight; clusters: that take them in turns.
        shared_bytes: per block.
    """

    cluster: int
    mt: int
    nt: int
    depth: int
    tiles: int
    clusters: int
    shared_bytes: int

    def macros(self) -> dict[str, int]:
        return {"CLUSTER": self.cluster, "MT": self.mt, "NT": self.nt, "DEPTH": self.depth}


@functools.lru_cache(maxsize=4096)
def layout(
    rows: int,
    steps: int,
    outputs: int,
    gated: bool,
    sms: int,
    *,
    cluster: int | None = None,
    mt: int | None = None,
    depth: int | None = None,
) -> Layout | None:
    """The layout for `rows` rows, or None where x does not fit; `cluster`, `mt`, `depth` leave no choice of theirs.

    Prefers the smallest cluster with which a block takes half an SM's shared memory.
    """
    if not 0 < rows <= MAX_ROWS:
        return None
    nt = next(n for n in (1, 2, 4, 8) if rows <= 8 * n)
    mt = 2 if gated else mt or (1 if nt <= 4 else 2)
    depths = (depth,) if depth else range(DEEPEST // mt, SHALLOWEST // mt - 1, -1)
    for limit in (HALF_SM, SHARED_BYTES):
        for blocks in (cluster,) if cluster else UNCLUSTERED:
            for deep in depths:
                needed = shared_bytes(rows, steps, blocks, mt, nt, deep)
                if needed <= limit:
                    tiles = -(-outputs // (blocks * 16 * (1 if gated else mt)))
                    turns = -(-tiles // max(1, (sms - UNCLUSTERED[blocks]) // blocks))
                    return Layout(blocks, mt, nt, deep, tiles, -(-tiles // turns), needed)
    return None


def shared_bytes(rows: int, steps: int, cluster: int, mt: int, nt: int, depth: int) -> int:
    """Of a block, as skinny.cu lays it out."""
    along = WARPS // cluster
    ring = WARPS * depth * mt * 2048
    sums = (2 if nt <= 2 else 1) * along * rows * (16 * mt * cluster + 4) * 4
    starts = [rank * along * steps // SEGMENTS for rank in range(cluster + 1)]
    widest = max(b - a for a, b in pairwise(starts))
    return ring + -(-sums // 16) * 16 + rows * (widest * STEP * 2 + 64)


def multiply(
    layer: Layer,
    chosen: Layout,
    x: Tensor,
    residual: Tensor | None,
    y: Tensor,
    *,
    norm: bool,
    pdl: bool = True,
) -> None:
    """Queue y [T, outputs] of x; `Layer.params` says what they must be. `norm`: x is yet to be normed."""
    if norm and len(x) > NORM_ROWS:
        raise KernelError(INVALID_ARGUMENT, f"norms at most {NORM_ROWS} rows, not {len(x)}", "x")
    macros = layer.macros(y.dtype) | chosen.macros() | {"NORM": int(norm)}
    found = _kernel(tuple(macros.items()), y.device.index)
    found.launch(
        (chosen.clusters * chosen.cluster, 1, 1),
        (WARPS * 32, 1, 1),
        chosen.shared_bytes,
        torch.cuda.current_stream(y.device).cuda_stream,
        layer.params(x, residual, y, chosen.tiles),
        pdl=pdl,
        cluster=(chosen.cluster, 1, 1),
    )


@functools.cache
def _kernel(macros: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return kernel("skinny", "skinny", dict(macros), device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds: the layers of Llama-3.1-8B, and others' corners."""
    return tuple(dict.fromkeys(_variants()))


def _variants() -> Iterator[Variant]:
    layers = (
        (6144, 4096, False, True, 2),
        (4096, 4096, False, False, 2),
        (14336, 4096, True, True, 2),
        (4096, 14336, False, False, 2),
        (128256, 4096, False, False, 0),
    )
    for rows in (1, 8, 16, 32, 64):
        for outputs, inputs, gated, norm, out_type in layers:
            chosen = layout(rows, inputs // STEP, outputs, gated, 132)
            if chosen is not None:
                yield _variant(chosen, 2, out_type, gated, norm and rows <= NORM_ROWS)
    chosen = layout(2, 9, 576, False, 132)
    assert chosen is not None
    yield _variant(chosen, 1, 1, False, True)


def _variant(chosen: Layout, dtype: int, out_type: int, gated: bool, norm: bool) -> Variant:
    of_layer = {"DTYPE": dtype, "OUT_TYPE": out_type, "GATED": int(gated)}
    macros = of_layer | chosen.macros() | {"NORM": int(norm)}
    return Variant("skinny", "skinny", tuple(macros.items()))
