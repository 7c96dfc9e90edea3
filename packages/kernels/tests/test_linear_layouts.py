"""How a launch of a layer or a norm is laid out; no GPU is needed to decide it."""

from __future__ import annotations

from dagengine_kernels import cuda_linear
from dagengine_kernels.fused.cuda import gemv, norm, skinny, tiled

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


def test_a_forced_layout_is_taken() -> None:
    forced = skinny.layout(2, 4096, 4096, False, False, 132, stages=3)
    assert forced is not None
    assert forced.stages == 3
    chosen = gemv.layout(2, 4096, 4096, False, 132, depth=16, resident=1, rounds=5)
    assert chosen is not None
    assert (chosen.depth, chosen.resident, chosen.rounds) == (16, 1, 5)


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
