"""How a launch of a layer or a norm is laid out; no GPU is needed to decide it."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch

from dagengine_kernels import cuda_linear
from dagengine_kernels.errors import KernelError
from dagengine_kernels.fused.cuda import driver, gemv, norm, skinny, streamed, tiled
from dagengine_kernels.fused.cuda.products import STEP, Layer, map_of

MODEL_LAYERS = [
    (6144, 4096, False),
    (4096, 4096, False),
    (14336, 4096, True),
    (4096, 14336, False),
    (128256, 4096, False),
    (3072, 1024, True),
    (1024, 3072, False),
    (1536, 576, True),
    (49152, 576, False),
]
"""(outputs, inputs, gated) of Llama-3.1-8B, Qwen3-0.6B and SmolLM2-135M."""


def test_few_rows_of_the_models_layers_fit() -> None:
    for out, inputs, gated in MODEL_LAYERS:
        for rows in range(1, skinny.MAX_ROWS + 1):
            for normed in (False, True):
                chosen = skinny.layout(rows, inputs, out, gated, normed, 132)
                if rows * inputs > 65_536 or (normed and rows > skinny.NORM_ROWS):
                    continue
                assert chosen is not None
                assert chosen.stages >= skinny.FEWEST_STAGES
                assert chosen.shared_bytes <= skinny.SHARED_BYTES
                assert chosen.blocks <= min(chosen.tiles, 132)
                assert 8 * chosen.nt >= rows
                assert out <= chosen.tiles * (8 if gated else 16) < out + 16


def test_every_output_is_in_one_tile_and_every_tile_in_one_block() -> None:
    for out, inputs, gated in MODEL_LAYERS:
        for rows in range(1, gemv.MAX_ROWS + 1):
            for rounds in (1, 3):
                chosen = gemv.layout(rows, inputs, out, gated, 132, rounds=rounds)
                if chosen is None:
                    assert rows * inputs > 100_000
                    continue
                outputs = gemv.WARPS // chosen.split * (1 if gated else 2)
                assert out <= chosen.tiles * outputs < out + outputs
                assert chosen.tiles <= chosen.blocks * rounds < chosen.tiles + rounds
                assert chosen.shared_bytes + gemv.BLOCK_BYTES <= gemv.SM_BYTES // chosen.resident


def test_what_does_not_fit_has_no_layout() -> None:
    assert skinny.layout(skinny.MAX_ROWS + 1, 64, 4096, False, False, 132) is None
    assert skinny.layout(skinny.NORM_ROWS + 1, 64, 4096, False, True, 132) is None
    assert skinny.layout(0, 64, 4096, False, False, 132) is None
    assert skinny.layout(8, 32768, 64, False, True, 132) is None
    assert gemv.layout(gemv.MAX_ROWS + 1, 64, 4096, False, 132) is None
    assert gemv.layout(0, 64, 4096, False, 132) is None
    assert gemv.layout(8, 16384, 4096, False, 132) is None
    assert max(cuda_linear.FEW_ROWS.values()) <= gemv.MAX_ROWS
    assert max(cuda_linear.STREAMED_ROWS.values()) <= streamed.MAX_ROWS
    assert streamed.layout(streamed.MAX_ROWS + 1, 64, 4096, False, 132) is None
    assert streamed.layout(0, 64, 4096, False, 132) is None
    assert streamed.layout(8, 128, 4096, False, 132, split=4) is None


def test_a_forced_layout_is_taken() -> None:
    forced = skinny.layout(2, 4096, 4096, False, False, 132, stages=3)
    assert forced is not None
    assert forced.stages == 3
    chosen = gemv.layout(2, 4096, 4096, False, 132, depth=16, resident=1, rounds=5)
    assert chosen is not None
    assert (chosen.depth, chosen.resident, chosen.rounds) == (16, 1, 5)


def test_blocks_of_a_streamed_layer_have_every_tile_and_unit_once() -> None:
    for (out, inputs, gated), rows in product([*MODEL_LAYERS, (1, 3, False), (70, 200, True)], (1, 9, 64)):
        for tile, halves, split in product((None, *streamed.TILES), (1, 2), (None, *streamed.SPLITS)):
            chosen = streamed.layout(rows, inputs, out, gated, 132, tile=tile, halves=halves, split=split)
            if chosen is None:
                too_large = tile == 256 and halves == 2
                assert too_large or (split is not None and split > -(-inputs // (STEP * halves)))
                continue
            outputs = chosen.tile // (2 if gated else 1)
            assert out <= chosen.tiles * outputs < out + outputs
            assert inputs <= chosen.units * halves * STEP < inputs + halves * STEP
            stretches = [chosen.stretch(rank) for rank in range(chosen.split)]
            assert all(stretches)
            assert [unit for stretch in stretches for unit in stretch] == list(range(chosen.units))
            assert chosen.blocks == chosen.tiles * chosen.split


def test_blocks_of_a_streamed_layer_fit() -> None:
    for tile, halves, resident, rows in product(streamed.TILES, (1, 2), (1, 2), (1, 16, 17, 64)):
        chosen = streamed.layout(rows, 4096, 4096, False, 132, tile=tile, halves=halves, resident=resident)
        if chosen is None:
            assert tile * halves == 512
            assert resident == 2
            continue
        assert chosen.columns >= rows
        assert chosen.stages >= 2
        assert resident * (chosen.shared_bytes + 1024) + 4096 <= 228 * 1024
        sums = chosen.columns * (tile + 4) * 4
        assert sums <= chosen.shared_bytes - 16 * chosen.stages


def test_a_streamed_layer_of_a_model_has_a_block_for_most_processors() -> None:
    for out, inputs, gated in MODEL_LAYERS:
        chosen = streamed.layout(64, inputs, out, gated, 132)
        assert chosen is not None
        assert chosen.blocks >= 0.9 * 132 or chosen.split in (8, chosen.units)


class Maps:
    """Stands in for the driver: the arguments of every tensor map, by a mark that its first word holds."""

    def __init__(self) -> None:
        self.made: list[dict] = []

    def __call__(self, pointer: int, dtype: torch.dtype, **given: object) -> bytes:
        self.made.append({"pointer": pointer, "dtype": dtype, **given})
        return len(self.made).to_bytes(8, "little") + bytes(120)

    def of(self, words: ctypes.Array) -> dict:
        return self.made[words[0] - 1]


class NoKernel:
    def prepare(self, *layout: object, **options: object) -> None:
        return None


def streamed_params(layer: Layer, chosen: streamed.Layout, *tensors: torch.Tensor | None) -> streamed.Launch:
    made = streamed.Streamed(layer, chosen, tensors[-1].dtype)
    return streamed.Launch.from_buffer_copy(made.params(*tensors))


@pytest.mark.parametrize("gated", [False, True])
def test_a_streamed_launch_holds_the_maps_of_its_tensors(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = Maps()
    monkeypatch.setattr(driver, "tensor_map", maps)
    monkeypatch.setattr(streamed, "_kernel", lambda *given: NoKernel())
    map_of.cache_clear()
    weight = torch.zeros(72 * (1 + gated), 256, dtype=torch.bfloat16)
    layer = Layer(weight, 203, 72, gated, None, None, 0.0)
    x, y = torch.zeros(5, 3 * 256, dtype=torch.bfloat16)[:, :208], torch.zeros(5, 72)
    chosen = streamed.layout(5, 203, 72, gated, 132, tile=128)
    assert chosen is not None
    launch = streamed_params(layer, chosen, x, None, y)
    assert launch.whole == 1
    assert (launch.layer.rows, launch.layer.outputs, launch.layer.steps) == (5, 72, 4)
    of_weight, of_x = maps.of(launch.weight), maps.of(launch.x)
    assert of_weight["pointer"] == weight.data_ptr()
    assert of_weight["dims"] == (256, 72 * (1 + gated))
    assert of_weight["box"] == (64, 64 if gated else 128)
    assert of_weight["strides_bytes"] == (512,)
    assert of_x["pointer"] == x.data_ptr()
    assert of_x["dims"] == (208, 5)
    assert of_x["box"] == (64, 8)
    assert of_x["strides_bytes"] == (3 * 512,)
    streamed_params(layer, chosen, x, None, y)
    assert len(maps.made) == 2
    one = streamed_params(layer, chosen, x[:1], y[:1], y[:1])
    assert maps.of(one.x)["strides_bytes"] == (416,)
    aside = torch.zeros(5, 75)[:, :72]
    assert streamed_params(layer, chosen, x, aside, y).whole == 0
    odd = Layer(weight, 203, 71, gated, None, None, 0.0)
    assert streamed_params(odd, chosen, x, None, torch.zeros(5, 71)).whole == 0
    assert ctypes.sizeof(launch) == 384
    with pytest.raises(KernelError, match="at most 8 rows"):
        streamed_params(layer, chosen, torch.zeros(9, 208, dtype=torch.bfloat16), None, y)
    map_of.cache_clear()


def test_threads_of_a_norm_hold_a_row_once() -> None:
    for columns in (8, 64, 576, 1024, 2048, 2056, 4096, 5120, norm.MAX_INPUTS):
        lanes, per = norm.shape(columns)
        assert lanes % 32 == 0
        assert lanes <= norm.THREADS
        assert lanes * per >= columns // 8 > lanes * (per - 1)
        assert lanes == norm.THREADS or per == 1


def test_small_tiles_where_large_ones_would_leave_processors_idle() -> None:
    assert tiled.tile_for(65, 4096, 132) == tiled.SMALL
    assert tiled.tile_for(4096, 4096, 132) == tiled.LARGE
    for tile in (tiled.SMALL, tiled.LARGE):
        assert tile.shared_bytes <= 227 * 1024
