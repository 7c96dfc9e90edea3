"""A gated layer on many rows in one launch on sm_90a (csrc/cuda/gated.cu): layout and launch.

cluster   `cluster` blocks, whose tiles follow one another in x and share one of the weight
tile      a block's ROWS rows of x by OUTPUTS outputs
round     a tile of every cluster; of the last round some have none
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda.driver import Kernel, Launch, Variant
from dagengine_kernels.fused.cuda.params import packer
from dagengine_kernels.fused.cuda.products import STEP, Layer, Product, map_of
from dagengine_kernels.fused.cuda.vectors import DTYPES

CAPABILITY = (9, 0)
ROWS = 128
OUTPUTS = 128
THREADS = 384
SHARED_BYTES = 227 * 1024
STORED = 64
"""Rows of a box of y, and outputs, as many as a step has inputs."""

CLUSTER = 2
STAGES = 4
GROUP = 8
"""Cluster rows of x that all columns of outputs are computed for before the next ones."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a launch divides the work.

    Attributes:
        cluster: blocks of a cluster.
        stages: of the ring.
        group: see GROUP.
        row_tiles: of a cluster, over x.
        column_tiles: over the outputs.
        clusters: that work at once.
        busy: rows times outputs, as a share of those that the clusters could take in as many rounds.
    """

    cluster: int
    stages: int
    group: int
    row_tiles: int
    column_tiles: int
    clusters: int
    busy: float

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.column_tiles

    @property
    def blocks(self) -> int:
        return self.clusters * self.cluster

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.stages)

    def macros(self) -> dict[str, int]:
        return {"CLUSTER": self.cluster, "STAGES": self.stages, "GROUP": self.group}

    def tile(self, index: int) -> tuple[int, int]:
        """The first row of x and the first output of a cluster's tile."""
        group, inside = divmod(index, self.group * self.column_tiles)
        rows = min(self.group, self.row_tiles - group * self.group)
        column, row = divmod(inside, rows)
        return (group * self.group + row) * self.cluster * ROWS, column * OUTPUTS


def shared_bytes(stages: int) -> int:
    """Of a block, as gated.cu lays it out: the ring, a tile of y, and two barriers per stage."""
    return stages * ((ROWS + 2 * OUTPUTS) * STEP * 2 + 16) + ROWS * OUTPUTS * 2


@functools.lru_cache(maxsize=4096)
def layout(
    rows: int,
    inputs: int,
    outputs: int,
    sms: int,
    *,
    cluster: int = CLUSTER,
    stages: int = STAGES,
    group: int = GROUP,
) -> Layout | None:
    """The layout for `rows` rows, or None where there is none: rows of y must lie at multiples of 16 bytes, and a tile
    must have as many steps as the ring has stages."""
    if rows < 1 or outputs % 8 or -(-inputs // STEP) < stages or shared_bytes(stages) > SHARED_BYTES:
        return None
    row_tiles, column_tiles = -(-rows // (cluster * ROWS)), -(-outputs // OUTPUTS)
    clusters = min(sms // cluster, row_tiles * column_tiles)
    if not clusters:
        return None
    rounds = -(-row_tiles * column_tiles // (sms // cluster))
    busy = rows * outputs / (rounds * (sms // cluster) * cluster * ROWS * OUTPUTS)
    return Layout(cluster, stages, group, row_tiles, column_tiles, clusters, busy)


class Params(ctypes.Structure):
    """`Launch` of gated.cu."""

    _fields_: ClassVar = [
        ("x", ctypes.c_uint64 * 16),
        ("weight", ctypes.c_uint64 * 16),
        ("y", ctypes.c_uint64 * 16),
        ("outputs", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("padding", ctypes.c_int * 12),
    ]


_PARAMS = packer(Params)


class Gated(Product):
    """The launch of a gated layer without bias on so many rows of x, normed already, into y of x's dtype."""

    def __init__(self, layer: Layer, chosen: Layout, *, pdl: bool = True) -> None:
        weight = layer.weight
        defined = {"DTYPE": DTYPES[weight.dtype], **chosen.macros()}
        launch = _prepared(tuple(defined.items()), weight.device.index, chosen.blocks, pdl)
        super().__init__(layer, launch, chosen.tiles)
        self._chosen = chosen
        rows, columns = weight.shape
        self._weight_map = map_of(weight.data_ptr(), weight.dtype, rows, columns, columns, OUTPUTS)

    def params(self, x: Tensor, residual: Tensor | None, y: Tensor) -> bytes:
        layer, chosen = self.layer, self._chosen
        assert residual is None and layer.bias is None and x.dtype == y.dtype == layer.weight.dtype
        rows, outputs, columns = x.shape[0], layer.num_outputs, -(-layer.num_inputs // 8) * 8
        assert -(-rows // (chosen.cluster * ROWS)) == chosen.row_tiles
        pitch = x.stride(0) if rows > 1 else columns
        return _PARAMS.pack(
            map_of(x.data_ptr(), x.dtype, rows, columns, pitch, ROWS),
            self._weight_map,
            map_of(y.data_ptr(), y.dtype, rows, outputs, outputs, STORED),
            outputs,
            layer.steps,
            chosen.row_tiles,
            chosen.column_tiles,
        )


def multiply(layer: Layer, chosen: Layout, x: Tensor, y: Tensor, *, pdl: bool = True) -> None:
    """One launch of `Gated`."""
    Gated(layer, chosen, pdl=pdl)(x, None, y)


@functools.lru_cache(maxsize=1024)
def _prepared(macros: tuple[tuple[str, int], ...], device: int, blocks: int, pdl: bool) -> Launch:
    defined = dict(macros)
    return _kernel(macros, device).prepare(
        (blocks, 1, 1),
        (THREADS, 1, 1),
        shared_bytes(defined["STAGES"]),
        pdl=pdl,
        cluster=(defined["CLUSTER"], 1, 1),
    )


@functools.cache
def _kernel(macros: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return driver.kernel("gated", "gated", dict(macros), device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    found = []
    for dtype, forced in ((2, {}), (1, {}), (2, {"cluster": 1}), (2, {"stages": 3})):
        chosen = layout(8192, 4096, 14336, 132, **forced)
        assert chosen is not None
        found.append(Variant("gated", "gated", (("DTYPE", dtype), *chosen.macros().items())))
    return tuple(found)
