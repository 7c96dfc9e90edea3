"""A linear layer on many rows with the bits of few (csrc/cuda/tiled.cu): the launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.fused.cuda.driver import Kernel, Launch, Variant, current_stream, kernel
from dagengine_kernels.fused.cuda.products import STEP, Layer, Product


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


class Tiled(Product):
    """The launches of a layer on x normed already, of any number of rows; `dtype`: of y."""

    def __init__(self, layer: Layer, tile: Tile, dtype: torch.dtype, *, pdl: bool = True) -> None:
        defined = {**layer.macros(dtype), **tile.macros()}
        self._kernel = _kernel(tuple(defined.items()), layer.weight.device.index)
        self._tile, self._tiles = tile, -(-layer.weight.shape[0] // tile.weight_rows)
        self._pdl = pdl
        super().__init__(layer, self._prepared(1), self._tiles)

    def __call__(self, x: Tensor, residual: Tensor | None, y: Tensor) -> None:
        launch = self._prepared(x.shape[0])
        launch(current_stream(self._device), self.params(x, residual, y))

    def _prepared(self, rows: int) -> Launch:
        tile = self._tile
        grid = (-(-rows // tile.x_rows), self._tiles, 1)
        block = (tile.warps_m * tile.warps_n * 32, 1, 1)
        return self._kernel.prepare(grid, block, tile.shared_bytes, pdl=self._pdl)


def multiply(
    layer: Layer, tile: Tile, x: Tensor, residual: Tensor | None, y: Tensor, *, pdl: bool = True
) -> None:
    """One launch of `Tiled`."""
    Tiled(layer, tile, y.dtype, pdl=pdl)(x, residual, y)


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
