"""A linear layer on few rows with the bits of many (csrc/cuda/skinny.cu): how a launch is laid out, and the launch.

shared memory of a block      barriers | ring of stages | sums | x
blocks                        one per SM; of at most HALF_SM bytes, so that the next kernel's blocks find room
                              beside them and fill their rings while this one ends, unless x leaves no room
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel
from dagengine_kernels.fused.cuda.products import SEGMENTS, STEP, Layer, Product

WARPS = 8
TILE = 16
"""Rows of the weight per tile."""

MAX_ROWS = 16
NORM_ROWS = 8
"""Rows that a launch norms itself."""

STAGE_BYTES = TILE * (SEGMENTS * STEP * 2 + 64)
BARRIER_BYTES = 256
SHARED_BYTES = 227 * 1024 - 1024
"""Of a block at most, less what the norm keeps there."""

HALF_SM = 113 * 1024 - 512
MOST_STAGES = 12
FEWEST_STAGES = 4
"""64 KiB per SM in flight hide the latency of memory."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a launch divides the work.

    Attributes:
        nt: 8-row tiles of x.
        stages: of the ring, 16 KiB of the weight each.
        tiles: of the whole weight; blocks: that take them in turns.
        shared_bytes: per block.
    """

    nt: int
    stages: int
    tiles: int
    blocks: int
    shared_bytes: int

    def macros(self) -> dict[str, int]:
        return {"NT": self.nt, "STAGES": self.stages}


@functools.lru_cache(maxsize=4096)
def layout(
    rows: int,
    inputs: int,
    outputs: int,
    gated: bool,
    norm: bool,
    sms: int,
    *,
    stages: int | None = None,
) -> Layout | None:
    """The layout for `rows` rows, or None where x does not fit; `stages` leaves no choice of it.

    Args:
        norm: the launch norms x itself.
    """
    if not 0 < rows <= (NORM_ROWS if norm else MAX_ROWS):
        return None
    nt = -(-rows // 8)
    tiles = -(-outputs // (TILE // 2 if gated else TILE))
    steps = -(-inputs // STEP)
    for limit in (HALF_SM, SHARED_BYTES):
        most = stages or min(MOST_STAGES, (limit - shared_bytes(rows, steps, 0)) // STAGE_BYTES)
        needed = shared_bytes(rows, steps, most)
        if most >= (stages or FEWEST_STAGES) and needed <= limit:
            return Layout(nt, most, tiles, min(tiles, sms), needed)
    return None


def shared_bytes(rows: int, steps: int, stages: int) -> int:
    """Of a block, as skinny.cu lays it out."""
    sums = 2 * WARPS * rows * (TILE + 4) * 4
    return BARRIER_BYTES + stages * STAGE_BYTES + sums + rows * (steps * STEP * 2 + 64)


def norm_vectors(inputs: int) -> int:
    """Vectors of a row that a thread holds."""
    return -(-(-(-inputs // STEP) * STEP // 8) // (WARPS * 32))


def macros(base: dict[str, int], chosen: Layout, inputs: int, norm: bool) -> dict[str, int]:
    """base: of the layer."""
    return base | chosen.macros() | {"NORM": norm_vectors(inputs) if norm else 0}


class Skinny(Product):
    """The launches of a layer.

    Args:
        dtype: of y.
        norm: x is yet to be normed.
    """

    def __init__(
        self, layer: Layer, chosen: Layout, dtype: torch.dtype, *, norm: bool, pdl: bool = True
    ) -> None:
        defined = macros(layer.macros(dtype), chosen, layer.num_inputs, norm)
        found = _kernel(tuple(defined.items()), layer.weight.device.index)
        block = (WARPS * 32 + 32, 1, 1)
        launch = found.prepare((chosen.blocks, 1, 1), block, chosen.shared_bytes, pdl=pdl)
        super().__init__(layer, launch, chosen.tiles)
        self._most = NORM_ROWS if norm else MAX_ROWS

    def params(self, x: Tensor, residual: Tensor | None, y: Tensor) -> bytes:
        if x.shape[0] > self._most:
            raise KernelError(INVALID_ARGUMENT, f"takes at most {self._most} rows, not {x.shape[0]}", "x")
        return super().params(x, residual, y)


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
    """One launch of `Skinny`."""
    Skinny(layer, chosen, y.dtype, norm=norm, pdl=pdl)(x, residual, y)


@functools.cache
def _kernel(defined: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return kernel("skinny", "skinny", dict(defined), device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds: the layers of Llama-3.1-8B, and others' corners."""
    found: dict[Variant, None] = {}
    for dtype, rows, outputs, inputs, gated, norm, out_type in (
        *((2, rows, 6144, 4096, 0, 1, 2) for rows in (1, 4, 8)),
        *((2, rows, 14336, 4096, 1, 1, 2) for rows in (1, 4, 8)),
        *((2, rows, 4096, 14336, 0, 0, 2) for rows in (1, 4)),
        *((2, rows, 128256, 4096, 0, 0, 0) for rows in (1, 8, 16)),
        (2, 16, 14336, 4096, 1, 0, 2),
        (2, 8, 4096, 8192, 0, 1, 2),
        (1, 2, 576, 576, 0, 1, 1),
    ):
        chosen = layout(rows, inputs, outputs, bool(gated), bool(norm), 132)
        assert chosen is not None
        base = {"DTYPE": dtype, "OUT_TYPE": out_type, "GATED": gated}
        found[Variant("skinny", "skinny", tuple(macros(base, chosen, inputs, bool(norm)).items()))] = None
    return tuple(found)
