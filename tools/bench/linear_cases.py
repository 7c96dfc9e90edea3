"""What `tools/bench/linear` times: the layers of models at numbers of rows. Knows shapes; no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from dagengine_kernels.fused.cuda import driver, gate, gemv, norm, skinny, streamed, tiled
from dagengine_kernels.fused.cuda.vectors import DTYPES

ROWS = (1, 2, 4, 8, 16, 64, 1024)
INVARIANT_ROWS = (1, 8, 64, 1024)
"""Numbers of rows at which the batch-invariant layers are measured."""

LAYOUTS = {True: ((8, 3), (16, 2), (8, 2)), False: ((8, 2), (16, 2))}
"""Depths and blocks per SM that a sweep tries with at most 2 rows, and with more."""

STREAMED_BLOCKS = (0.7, 2.0)
"""Blocks per SM of the streamed layouts that a sweep tries; more only where no blocks share a tile."""

QUICK_ROWS = (1, 8, 16, 64, 1024)
L2_TIMES_BYTES = 400 << 20
"""Bytes of weights that a round of calls reads at least: what is in L2 is gone when its turn comes again."""


@dataclass(frozen=True)
class Layer:
    """One layer of a model; bfloat16.

    Attributes:
        out, inputs: of the weight [out, inputs]; [2 * out, inputs] if gated.
        normed: x goes through a norm; residual: y gets one added; wide: y is float32.
    """

    model: str
    name: str
    out: int
    inputs: int
    gated: bool = False
    normed: bool = False
    residual: bool = False
    wide: bool = False

    @property
    def weight_rows(self) -> int:
        return self.out * (1 + self.gated)

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.inputs * 2

    @property
    def copies(self) -> int:
        """Weights that a round of calls goes through."""
        return -(-L2_TIMES_BYTES // self.weight_bytes)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else torch.bfloat16

    def case(self, rows: int) -> str:
        return f"{self.model} {self.name}, {rows} rows"

    def fewest_bytes(self, rows: int) -> int:
        """The weight, x and y once each, and what is added."""
        y = rows * self.out * self.out_dtype.itemsize
        return self.weight_bytes + rows * self.inputs * 2 + y * (1 + self.residual)

    def operations(self, rows: int) -> int:
        return 2 * rows * self.weight_rows * self.inputs


def model(
    name: str, hidden: int, heads: int, kv_heads: int, dim: int, inner: int, vocab: int
) -> tuple[Layer, ...]:
    """The layers of a Llama-like model, the head last."""
    return (
        Layer(name, "qkv", (heads + 2 * kv_heads) * dim, hidden, normed=True),
        Layer(name, "out", hidden, heads * dim, residual=True),
        Layer(name, "gate_up", inner, hidden, gated=True, normed=True),
        Layer(name, "down", hidden, inner, residual=True),
        Layer(name, "head", vocab, hidden, wide=True),
    )


LLAMA = model("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256)
QWEN = model("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936)
SMOL = model("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152)
MODELS = {layers[0].model: layers for layers in (LLAMA, QWEN, SMOL)}

Kernel = tuple[str, tuple[tuple[str, int], ...]]


def kernels(layers: Iterable[Layer], rows: Iterable[int], sms: int) -> Iterator[Kernel]:
    """The source and the macros of every kernel that these layers launch with so many rows."""
    rows = tuple(rows)
    for layer in layers:
        base = {
            "DTYPE": DTYPES[torch.bfloat16],
            "OUT_TYPE": DTYPES[layer.out_dtype],
            "GATED": int(layer.gated),
        }
        for count in rows:
            few = gemv.layout(count, layer.inputs, layer.out, layer.gated, sms)
            if few is not None:
                yield "gemv", tuple(gemv.macros(base, few, layer.inputs, layer.normed).items())
            many = streamed.layout(count, layer.inputs, layer.out, layer.gated, sms)
            if many is not None:
                yield "streamed", tuple((base | many.macros()).items())
            if count in INVARIANT_ROWS:
                yield _invariant(layer, base, count, sms)
        lanes, per = norm.shape(layer.inputs)
        yield "norm", (("DTYPE", base["DTYPE"]), ("LANES", lanes), ("PER", per))
        yield "gate", (("DTYPE", base["DTYPE"]), ("VEC", gate.width(layer.out)), ("PER", gate.PER))


def _invariant(layer: Layer, base: dict[str, int], rows: int, sms: int) -> Kernel:
    normed = layer.normed and rows <= skinny.NORM_ROWS
    chosen = skinny.layout(rows, layer.inputs, layer.out, layer.gated, normed, sms)
    if chosen is not None:
        return "skinny", tuple(skinny.macros(base, chosen, layer.inputs, normed).items())
    tile = tiled.tile_for(rows, layer.weight_rows, sms)
    return "tiled", tuple((base | tile.macros()).items())


def layouts(layer: Layer, rows: int, sms: int) -> list[gemv.Layout]:
    """The layouts of gemv.cu that fit: what is under way per lane, blocks per SM, tiles per block."""
    given = (rows, layer.inputs, layer.out, layer.gated, sms)
    found = [gemv.layout(*given)]
    for depth, resident in LAYOUTS[rows <= 2]:
        for split, rounds in ((1, 1), (1, 2), (1, 4), (2, 1)):
            one = gemv.layout(*given, split=split, depth=depth, resident=resident, rounds=rounds)
            if one is not None and one.blocks >= 1.9 * sms:
                found.append(one)
    return list(dict.fromkeys(one for one in found if one is not None))


def streamed_layouts(layer: Layer, rows: int, sms: int) -> list[streamed.Layout]:
    """The layouts of streamed.cu that fill the SMs; of the chosen one and the largest tiles also other rings."""
    given = (rows, layer.inputs, layer.out, layer.gated, sms)
    chosen = streamed.layout(*given)
    if chosen is None:
        return []
    found: list[streamed.Layout | None] = [chosen]
    least, most = (part * sms for part in STREAMED_BLOCKS)
    for tile in streamed.TILES:
        for split in streamed.SPLITS:
            one = streamed.layout(*given, tile=tile, split=split)
            if one is None or one.blocks < least or (one.blocks > most and split > 1):
                continue
            found.append(one)
            if tile == streamed.TILES[-1] or (tile, split) == (chosen.tile, chosen.split):
                for halves, resident in ((2, 2), (1, 1), (2, 1)):
                    found.append(
                        streamed.layout(*given, tile=tile, split=split, halves=halves, resident=resident)
                    )
    return list(dict.fromkeys(one for one in found if one is not None))


def swept_rows(rows: Iterable[int]) -> set[int]:
    """Of the numbers of rows that one streamed kernel is for, the largest."""
    by_columns = {n: count for count in sorted(rows) for n in (_columns(count),) if n is not None}
    return set(by_columns.values())


def _columns(rows: int) -> int | None:
    return next((n for n in streamed.COLUMNS if n >= rows), None)


def compile_all(wanted: Iterable[Kernel], arch: str, workers: int) -> int:
    """Compile what the disk cache lacks, `workers` at a time; how many kernels were asked for."""
    distinct = sorted(set(wanted))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, distinct, [arch] * len(distinct)))
    return len(distinct)


def _compile(one: Kernel, arch: str) -> None:
    driver.cubin(one[0], dict(one[1]), arch)
