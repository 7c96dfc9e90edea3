"""How a gated layer of many rows is laid out, launched and chosen; no GPU is needed to decide it."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest
import torch

from dagengine_kernels import cuda_linear
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.errors import KernelError
from dagengine_kernels.fused.cuda import gated

from .recorded import SMS, recording


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_every_row_and_output_is_in_one_tile_of_one_block(group: int, cluster: int) -> None:
    for rows, outputs in product((1, 128, 257, 4099), (8, 128, 136, 1536)):
        chosen = gated.layout(rows, 576, outputs, SMS, cluster=cluster, group=group)
        assert chosen is not None
        tiles = [chosen.tile(index) for index in range(chosen.tiles)]
        high = cluster * gated.ROWS
        assert sorted(tiles) == sorted(product(range(0, rows, high), range(0, outputs, gated.OUTPUTS)))
        assert chosen.blocks <= SMS
        assert chosen.clusters <= chosen.tiles
        assert chosen.shared_bytes <= gated.SHARED_BYTES
        for at in range(0, len(tiles) - group * chosen.column_tiles, group * chosen.column_tiles):
            together = tiles[at : at + group * chosen.column_tiles]
            assert len({row for row, _ in together}) == group


def test_the_share_that_is_work_counts_rounds_and_edges() -> None:
    def busy(*shape: int) -> float:
        chosen = gated.layout(*shape, SMS)
        assert chosen is not None
        return chosen.busy

    assert busy(66 * 256, 4096, 128) == 1
    assert busy(66 * 256 + 1, 4096, 128) == pytest.approx(0.5, abs=1e-3)
    assert busy(128, 4096, 128) == pytest.approx(1 / 132)
    assert busy(8192, 4096, 14336) > 0.98
    assert busy(8192, 1024, 3072) > 0.96


def test_what_does_not_fit_has_no_layout() -> None:
    assert gated.layout(0, 4096, 128, SMS) is None
    assert gated.layout(128, 4096, 132, SMS) is None
    assert gated.layout(128, 192, 128, SMS) is None
    assert gated.layout(128, 193, 128, SMS) is not None
    assert gated.layout(128, 4096, 128, SMS, stages=5) is None
    assert gated.layout(128, 4096, 128, 1) is None


def test_a_launch_holds_the_maps_of_its_tensors() -> None:
    weight = torch.zeros(2 * 136, 256, dtype=torch.bfloat16)
    with recording() as recorder:
        layer = CudaLinear(weight[:, :203], gated=True)._layer
        x, y = torch.zeros(301, 3 * 256, dtype=torch.bfloat16)[:, :208], torch.zeros(301, 136).bfloat16()
        chosen = gated.layout(301, 203, 136, SMS)
        assert chosen is not None
        gated.multiply(layer, chosen, x, y)
        gated.multiply(layer, chosen, x, y)
        launched, _ = recorder.take()
        assert len(recorder.maps) == 3
    assert launched.layout == ((8, 1, 1), (384, 1, 1), chosen.shared_bytes, True, (2, 1, 1))
    params = gated.Params.from_buffer_copy(launched.params)
    assert (params.outputs, params.steps, params.row_tiles, params.column_tiles) == (136, 4, 2, 2)
    of_x, of_weight, of_y = (recorder.map_of(words) for words in (params.x, params.weight, params.y))
    assert (of_x[0], *of_x[2:5]) == (x.data_ptr(), [208, 301], [3 * 512], [64, 128])
    assert (of_weight[0], *of_weight[2:5]) == (layer.weight.data_ptr(), [256, 272], [512], [64, 128])
    assert (of_y[0], *of_y[2:5]) == (y.data_ptr(), [136, 301], [272], [64, 64])


def kernels(
    layer: CudaLinear, rows: int, *, residual: bool = False, dtype: torch.dtype | None = None
) -> list:
    """The sources that a call launches; cuBLAS is one of them."""
    x = torch.zeros(rows, layer.num_inputs, dtype=torch.bfloat16)
    given = torch.zeros(rows, layer.num_outputs, dtype=dtype or x.dtype) if residual else None
    others = []
    with recording() as recorder, patch.object(layer, "_by_cublas", lambda *given: others.append("cuBLAS")):
        layer(x, given, dtype=dtype)
        return [one.kernel[0] for one in recorder.take()] + others


def make(out: int = 640, inputs: int = 256, **given: object) -> CudaLinear:
    with recording():
        return CudaLinear(torch.zeros(2 * out, inputs, dtype=torch.bfloat16), gated=True, **given)


def test_many_rows_are_one_launch_and_what_it_is_not_for_is_not() -> None:
    chosen = gated.layout(3328, 256, 640, SMS)
    assert chosen is not None
    assert chosen.busy > cuda_linear.BUSY
    assert kernels(make(), 3328) == ["gated"]
    assert kernels(make(norm=torch.ones(256), eps=1e-5), 3328) == ["norm", "gated"]
    assert kernels(make(), 64) == ["streamed"]
    assert kernels(make(batch_invariant=True), 3328) == ["tiled"]
    for other in (
        kernels(make(), 3328, residual=True),
        kernels(make(), 3328, dtype=torch.float32),
        kernels(make(bias=torch.zeros(1280)), 3328),
        kernels(make(out=644), 3328),
        kernels(make(inputs=192), 3328),
        kernels(make(), 3400),
    ):
        assert other == ["cuBLAS"]


def test_from_how_many_rows_on_is_the_callers_choice() -> None:
    layer = make(out=2816, gated_rows=760)
    assert kernels(layer, 759) == ["cuBLAS"]
    assert kernels(layer, 760) == ["gated"]
    assert kernels(make(out=2816), 760) == ["cuBLAS"]
    with pytest.raises(KernelError) as caught:
        make(gated_rows=cuda_linear.KEPT_ROWS)
    assert caught.value.field == "gated_rows"
