"""A linear layer on up to 8 rows at the speed of its weight (csrc/cuda/gemv.cu): how a launch is laid out, and it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel
from dagengine_kernels.fused.cuda.products import STEP, Layer, Product

WARPS = 8
MAX_ROWS = 8
SM_BYTES = 228 * 1024
BLOCK_BYTES = 1792
"""Of shared memory beside x that a block takes at most, the system's part included."""

DEPTH = 8
RESIDENT = 2
"""64 KiB per SM under way: 128 take 3 to 15 % longer with one row."""

WAVES = 3
"""Blocks that start as others end even out what memory gives to each SM."""

SEVERAL_ROWS = 3
"""From here on a block of a large weight takes several tiles: loading x weighs more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a launch divides the work.

    Attributes:
        rows: of x.
        split: warps that share two weight rows.
        depth: vectors of 16 bytes that a lane has under way.
        resident: blocks that an SM must have registers for.
        rounds: tiles that a block takes one after another.
        tiles: of the whole weight.
        shared_bytes: per block.
    """

    rows: int
    split: int
    depth: int
    resident: int
    rounds: int
    tiles: int
    shared_bytes: int

    @property
    def blocks(self) -> int:
        return -(-self.tiles // self.rounds)

    def macros(self) -> dict[str, int]:
        return {"ROWS": self.rows, "SPLIT": self.split, "DEPTH": self.depth, "BLOCKS": self.resident}


@functools.lru_cache(maxsize=4096)
def layout(
    rows: int,
    inputs: int,
    outputs: int,
    gated: bool,
    sms: int,
    *,
    split: int | None = None,
    depth: int | None = None,
    resident: int | None = None,
    rounds: int | None = None,
) -> Layout | None:
    """The layout for `rows` rows, or None where x does not fit; the keywords leave no choice of theirs.

    The more warps share two weight rows, the more blocks there are: as few share as give every SM two blocks, and two
    at least with one row of x. A block takes one tile; with SEVERAL_ROWS so many that blocks for WAVES times what
    fits at once are left.
    """
    if not 0 < rows <= MAX_ROWS:
        return None
    steps = -(-inputs // STEP)
    shared_bytes = rows * steps * STEP * 2
    fit = SM_BYTES // (shared_bytes + BLOCK_BYTES)
    if fit == 0:
        return None
    depth = depth or DEPTH
    resident = min(resident or RESIDENT, fit)
    pairs = outputs if gated else -(-outputs // 2)
    if split is None:
        shared = (2, 4) if rows == 1 else (1, 2, 4)
        split = next((s for s in shared if -(-pairs // (WARPS // s)) >= 1.9 * sms), WARPS)
    tiles = -(-pairs // (WARPS // split))
    if rounds is None:
        several = (4, 2) if rows >= SEVERAL_ROWS else ()
        rounds = next((n for n in several if tiles // n >= WAVES * RESIDENT * sms), 1)
    return Layout(rows, split, depth, resident, rounds, tiles, shared_bytes)


def macros(base: dict[str, int], chosen: Layout, inputs: int, norm: bool) -> dict[str, int]:
    """base: of the layer."""
    return base | chosen.macros() | {"STEPS": -(-inputs // STEP), "NORM": int(norm)}


class Gemv(Product):
    """The launches of a layer, x's rows as many as the layout's.

    Args:
        dtype: of y.
        norm: x is yet to be normed.
    """

    def __init__(
        self, layer: Layer, chosen: Layout, dtype: torch.dtype, *, norm: bool, pdl: bool = True
    ) -> None:
        defined = macros(layer.macros(dtype), chosen, layer.num_inputs, norm)
        found = _kernel(tuple(defined.items()), layer.weight.device.index)
        block = (WARPS * 32, 1, 1)
        launch = found.prepare((chosen.blocks, 1, 1), block, chosen.shared_bytes, pdl=pdl)
        super().__init__(layer, launch, chosen.tiles, chosen.rounds)
        self._rows = chosen.rows

    def params(self, x: Tensor, residual: Tensor | None, y: Tensor) -> bytes:
        if x.shape[0] != self._rows:
            raise KernelError(INVALID_ARGUMENT, f"must have {self._rows} rows, has {x.shape[0]}", "x")
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
    """One launch of `Gemv`."""
    Gemv(layer, chosen, y.dtype, norm=norm, pdl=pdl)(x, residual, y)


@functools.cache
def _kernel(defined: tuple[tuple[str, int], ...], device: int) -> Kernel:
    return kernel("gemv", "gemv", dict(defined), device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds: the layers of Llama-3.1-8B, and others' corners."""
    found: dict[Variant, None] = {}
    for dtype, rows, outputs, inputs, gated, norm, out_type in (
        *((2, rows, 6144, 4096, 0, 1, 2) for rows in (1, 2, 4, 8)),
        *((2, rows, 14336, 4096, 1, 1, 2) for rows in (1, 2, 4, 8)),
        *((2, rows, 4096, 14336, 0, 0, 2) for rows in (1, 2, 4, 7)),
        *((2, rows, 128256, 4096, 0, 0, 0) for rows in (1, 4, 8)),
        (2, 4, 1536, 576, 1, 1, 2),
        (2, 3, 1024, 3072, 0, 0, 2),
        (2, 1, 8192, 28672, 0, 0, 2),
        (1, 2, 5120, 5120, 0, 1, 1),
    ):
        chosen = layout(rows, inputs, outputs, bool(gated), 132)
        assert chosen is not None
        base = {"DTYPE": dtype, "OUT_TYPE": out_type, "GATED": gated}
        found[Variant("gemv", "gemv", tuple(macros(base, chosen, inputs, bool(norm)).items()))] = None
    return tuple(found)
