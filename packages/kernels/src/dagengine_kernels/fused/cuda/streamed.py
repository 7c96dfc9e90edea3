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
from dagengine_kernels.fused.cuda.products import STEP, Layer, Params

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


class _Launch(ctypes.Structure):
    """`Launch` of streamed.cu."""

    _fields_: ClassVar = [
        ("weight", ctypes.c_uint64 * 16),
        ("x", ctypes.c_uint64 * 16),
        ("layer", Params),
        ("whole", ctypes.c_int),
        ("padding", ctypes.c_int * 7),
    ]


def multiply(
    layer: Layer, chosen: Layout, x: Tensor, residual: Tensor | None, y: Tensor, *, pdl: bool = True
) -> None:
    """Queue y [T, outputs] of x, normed already; `Layer.params` says what they must be.

    Raises: KernelError (invalid_argument) for more rows than the layout has columns.
    """
    if len(x) > chosen.columns:
        raise KernelError(INVALID_ARGUMENT, f"must have at most {chosen.columns} rows, has {len(x)}", "x")
    defined = {**layer.macros(y.dtype), **chosen.macros()}
    found = _kernel(tuple(defined.items()), y.device.index)
    found.launch(
        (chosen.blocks, 1, 1),
        (chosen.threads, 1, 1),
        chosen.shared_bytes,
        torch.cuda.current_stream(y.device).cuda_stream,
        launch_of(layer, chosen, x, residual, y),
        pdl=pdl,
        cluster=(chosen.split, 1, 1),
    )


def launch_of(layer: Layer, chosen: Layout, x: Tensor, residual: Tensor | None, y: Tensor) -> _Launch:
    """What the kernel takes."""
    rows, columns, weight = len(x), -(-layer.num_inputs // 8) * 8, layer.weight
    pitch = x.stride(0) if rows > 1 else columns
    box = chosen.tile // 2 if layer.gated else chosen.tile
    vectors = [y] if residual is None else [y, residual]
    whole = layer.num_outputs % 4 == 0 and all(
        t.data_ptr() % (4 * t.element_size()) == 0 and t.stride(0) % 4 == 0 for t in vectors
    )
    return _Launch(
        weight=_map(weight.data_ptr(), weight.dtype, len(weight), weight.shape[1], weight.shape[1], box),
        x=_map(x.data_ptr(), x.dtype, rows, columns, pitch, chosen.columns),
        layer=layer.params(x, residual, y, chosen.tiles),
        whole=int(whole),
    )


@functools.lru_cache(maxsize=8192)
def _map(
    pointer: int, dtype: torch.dtype, rows: int, columns: int, pitch: int, box: int
) -> ctypes.Array[ctypes.c_uint64]:
    """The tensor map of [rows, columns], rows `pitch` elements apart, in boxes of [box, STEP]; zeros outside."""
    raw = driver.tensor_map(
        pointer,
        dtype,
        dims=(columns, rows),
        strides_bytes=(pitch * dtype.itemsize,),
        box=(STEP, box),
        swizzle_128b=True,
    )
    return (ctypes.c_uint64 * 16).from_buffer_copy(raw)


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
