"""A linear layer on many rows with the bits of few (csrc/cuda/tiled.cu): the launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel
from dagengine_kernels.fused.cuda.products import STEP, Layer


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block takes: 32 * warps_m weight rows and 8 * nt * warps_n rows of x."""

    warps_m: int
    warps_n: int
    nt: int
    stages: int

    @property
    def weight_rows(self) -> int:
        return 32 * self.warps_m

    @property
    def x_rows(self) -> int:
        return 8 * self.nt * self.warps_n

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.weight_rows + self.x_rows) * STEP * 2

    def macros(self) -> dict[str, int]:
        return {"WARPS_M": self.warps_m, "WARPS_N": self.warps_n, "NT": self.nt, "STAGES": self.stages}


LARGE = Tile(warps_m=4, warps_n=2, nt=8, stages=4)
SMALL = Tile(warps_m=2, warps_n=4, nt=2, stages=6)


def tile_for(rows: int, weight_rows: int, sms: int) -> Tile:
    """The large tile where there are enough of them for all SMs; the bits are the same with both."""
    blocks = -(-rows // LARGE.x_rows) * -(-weight_rows // LARGE.weight_rows)
    return LARGE if blocks >= sms else SMALL


def multiply(
    layer: Layer, tile: Tile, x: Tensor, residual: Tensor | None, y: Tensor, *, pdl: bool = True
) -> None:
    """Queue y [T, outputs] of x, normed already; `Layer.params` says what they must be."""
    macros = {**layer.macros(y.dtype), **tile.macros()}
    found = _kernel(tuple(macros.items()), y.device.index)
    tiles = -(-layer.weight.shape[0] // tile.weight_rows)
    found.launch(
        (-(-len(x) // tile.x_rows), tiles, 1),
        (tile.warps_m * tile.warps_n * 32, 1, 1),
        tile.shared_bytes,
        torch.cuda.current_stream(y.device).cuda_stream,
        layer.params(x, residual, y, tiles),
        pdl=pdl,
    )


@functools.cache
def _kernel(macros: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return kernel("tiled", "tiled", dict(macros), device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return tuple(
        Variant(
            "tiled",
            "tiled",
            (("DTYPE", dtype), ("OUT_TYPE", out_type), ("GATED", gated), *tile.macros().items()),
        )
        for tile in (LARGE, SMALL)
        for dtype, out_type, gated in ((2, 2, 0), (2, 2, 1), (2, 0, 0), (1, 1, 0))
    )
