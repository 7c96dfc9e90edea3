"""A linear layer on up to 64 rows at the speed of its weight on sm_90a (csrc/cuda/streamed.cu): layout and launch.

    tile      rows of the weight (gated: half of them the gate's)    one cluster of `split` blocks
    rank      a stretch of the tile's units, of `halves` * 64 inputs    one block

Blocks of at most HALF_SM bytes leave room for the next kernel's, which fill their rings while these end.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda.driver import Kernel, Variant
from dagengine_kernels.fused.cuda.params import packer
from dagengine_kernels.fused.cuda.products import STEP, Layer, Params, Product, map_of

CAPABILITY = (9, 0)
MAX_ROWS = 64
COLUMNS = (8, 16, 32, 64)
"""Rows of x that a kernel is made for."""

TILES = (64, 128, 256)
SPLITS = (1, 2, 4, 8)
"""Blocks per cluster; 8 are the most that every device of this capability takes."""

TILE = 128
SMALL_TILE = 64
"""Of weights of which larger tiles, each by one block, would be fewer than FULL times the SMs."""

HALVES = 1
RESIDENT = 2
HALF_SM = 110 * 1024
"""Of shared memory per block, so that two and the small kernels between them fit on an SM."""

WHOLE_SM = 224 * 1024
MOST_STAGES = 12
FULL = 1.5
FILLED = 0.9
"""Blocks that a layout has at least, as a part of the SMs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a launch divides the work.

    Attributes:
        columns: rows of x that the kernel is made for.
        tile: rows of the weight per block.
        halves: steps of 64 inputs per stage.
        split: blocks of a cluster.
        resident: blocks that an SM must have room for.
        stages: of the ring.
        tiles: of the whole weight.
        units: stages' worth of inputs.
    """

    columns: int
    tile: int
    halves: int
    split: int
    resident: int
    stages: int
    tiles: int
    units: int

    @property
    def blocks(self) -> int:
        return self.tiles * self.split

    @property
    def threads(self) -> int:
        """The consumers and the producer's warp."""
        return (256 if self.tile > 64 else 128) + 32

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.columns, self.tile, self.halves, self.stages)

    def macros(self) -> dict[str, int]:
        return {
            "COLUMNS": self.columns,
            "TILE": self.tile,
            "HALVES": self.halves,
            "SPLIT": self.split,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
        }

    def stretch(self, rank: int) -> range:
        """The units of a block."""
        return range(self.units * rank // self.split, self.units * (rank + 1) // self.split)


def shared_bytes(columns: int, tile: int, halves: int, stages: int) -> int:
    """Of a block, as streamed.cu lays it out: the ring and two barriers per stage."""
    return stages * (halves * (tile + columns) * STEP * 2 + 16)


@functools.lru_cache(maxsize=4096)
def layout(
    rows: int,
    inputs: int,
    outputs: int,
    gated: bool,
    sms: int,
    *,
    tile: int | None = None,
    halves: int | None = None,
    split: int | None = None,
    resident: int | None = None,
) -> Layout | None:
    """The layout for `rows` rows, or None where there is none; the keywords leave no choice of theirs.

    Tiles are of SMALL_TILE rows unless there are many. As few blocks share a tile as give FILLED of the SMs one.
    """
    if not 0 < rows <= MAX_ROWS:
        return None
    columns = next(n for n in COLUMNS if n >= rows)
    per_output = 2 if gated else 1
    if tile is None:
        tile = TILE if _tiles(outputs, TILE // per_output) >= FULL * sms else SMALL_TILE
    halves, resident = halves or HALVES, resident or RESIDENT
    tiles = _tiles(outputs, tile // per_output)
    units = -(-inputs // (STEP * halves))
    if split is None:
        fitting = [s for s in SPLITS if s <= units]
        split = next((s for s in fitting if tiles * s >= FILLED * sms), fitting[-1])
    stages = min(
        MOST_STAGES,
        (HALF_SM if resident == 2 else WHOLE_SM) // shared_bytes(columns, tile, halves, 1),
    )
    if split > units or stages < 2:
        return None
    return Layout(columns, tile, halves, split, resident, stages, tiles, units)


def _tiles(outputs: int, per_tile: int) -> int:
    return -(-outputs // per_tile)


class Launch(ctypes.Structure):
    """`Launch` of streamed.cu."""

    _fields_: ClassVar = [
        ("weight", ctypes.c_uint64 * 16),
        ("x", ctypes.c_uint64 * 16),
        ("layer", Params),
        ("whole", ctypes.c_int),
        ("padding", ctypes.c_int * 7),
    ]


_LAUNCH = packer(Launch)


class Streamed(Product):
    """The launches of a layer on x normed already, of at most `chosen.columns` rows; `dtype`: of y."""

    def __init__(self, layer: Layer, chosen: Layout, dtype: torch.dtype, *, pdl: bool = True) -> None:
        weight = layer.weight
        defined = {**layer.macros(dtype), **chosen.macros()}
        found = _kernel(tuple(defined.items()), weight.device.index)
        launch = found.prepare(
            (chosen.blocks, 1, 1),
            (chosen.threads, 1, 1),
            chosen.shared_bytes,
            pdl=pdl,
            cluster=(chosen.split, 1, 1),
        )
        super().__init__(layer, launch, chosen.tiles)
        box = chosen.tile // 2 if layer.gated else chosen.tile
        rows, columns = weight.shape
        self._weight_map = map_of(weight.data_ptr(), weight.dtype, rows, columns, columns, box)
        self._dtype, self._most = weight.dtype, chosen.columns
        self._columns = -(-layer.num_inputs // 8) * 8
        self._whole, self._vector = layer.num_outputs % 4 == 0, 4 * dtype.itemsize

    def params(self, x: Tensor, residual: Tensor | None, y: Tensor) -> bytes:
        rows, columns = x.shape[0], self._columns
        if rows > self._most:
            raise KernelError(INVALID_ARGUMENT, f"must have at most {self._most} rows, has {rows}", "x")
        whole = self._whole and self._in_vectors(y) and (residual is None or self._in_vectors(residual))
        pitch = x.stride(0) if rows > 1 else columns
        x_map = map_of(x.data_ptr(), self._dtype, rows, columns, pitch, self._most)
        return _LAUNCH.pack(self._weight_map, x_map, super().params(x, residual, y), whole)

    def _in_vectors(self, tensor: Tensor) -> bool:
        """Whether every fourth element of a row lies at a multiple of four elements' bytes."""
        return tensor.data_ptr() % self._vector == 0 and tensor.stride(0) % 4 == 0


def multiply(
    layer: Layer, chosen: Layout, x: Tensor, residual: Tensor | None, y: Tensor, *, pdl: bool = True
) -> None:
    """One launch of `Streamed`."""
    Streamed(layer, chosen, y.dtype, pdl=pdl)(x, residual, y)


@functools.cache
def _kernel(defined: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return driver.kernel("streamed", "streamed", dict(defined), device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds: the layers of Llama-3.1-8B, and others' corners."""
    found: dict[Variant, None] = {}
    for dtype, rows, outputs, inputs, gated, out_type, forced in (
        *((2, rows, 6144, 4096, 0, 2, {}) for rows in COLUMNS),
        *((2, rows, 14336, 4096, 1, 2, {}) for rows in COLUMNS),
        *((2, rows, 128256, 4096, 0, 0, {}) for rows in COLUMNS),
        (2, 64, 14336, 4096, 1, 2, {"tile": 256}),
        (2, 64, 14336, 4096, 1, 2, {"tile": 256, "split": 2, "halves": 2, "resident": 1}),
        (2, 64, 4096, 14336, 0, 2, {"tile": 256, "split": 8}),
        (2, 64, 4096, 14336, 0, 2, {"split": 8, "halves": 2}),
        (1, 64, 1024, 3072, 0, 1, {}),
        (1, 17, 3072, 1024, 1, 0, {}),
        (2, 5, 96, 64, 1, 2, {}),
    ):
        chosen = layout(rows, inputs, outputs, bool(gated), 132, **forced)
        assert chosen is not None
        base = {"DTYPE": dtype, "OUT_TYPE": out_type, "GATED": gated}
        found[Variant("streamed", "streamed", tuple((base | chosen.macros()).items()))] = None
    return tuple(found)
