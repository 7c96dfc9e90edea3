"""Gated layers of many rows (csrc/cuda/gated.cu), on a GPU; test_gated_layouts.py has the layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.fused.cuda import gated

from .test_cuda_linear import (
    EPS,
    HALVES,
    _exact_sums,  # noqa: F401
    definition,
    distance,
    hold,
    make,
    random,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != gated.CAPABILITY,
        reason="needs an NVIDIA GPU of compute capability 9.0",
    ),
]

BLOCKS = 132
"""For which launches are laid out; fewer than the tiles of the larger shapes, so that blocks take several."""


def multiplied(layer: CudaLinear, x: Tensor, sms: int = BLOCKS, **forced: int) -> Tensor:
    """y by gated.cu, of which no row around it is written."""
    chosen = gated.layout(len(x), layer.num_inputs, layer.num_outputs, sms, **forced)
    assert chosen is not None
    around = torch.full((len(x) + 2, layer.num_outputs), torch.nan, dtype=x.dtype, device="cuda")
    gated.multiply(layer._layer, chosen, x, around[1:-1])
    assert around[[0, -1]].isnan().all()
    return around[1:-1]


def hold_sums(layer: CudaLinear, tensors: dict, x: Tensor, **forced: int) -> None:
    """No further from float64 than torch's own, and nowhere far from it."""
    y = multiplied(layer, x, **forced)
    want = definition(x, **tensors)
    plain = definition(x, **tensors, dtype=x.dtype)
    told = (x.shape, layer.num_outputs, forced)
    assert y.numel() < 4096 or distance(y, want) <= 1.25 * distance(plain, want) + 1e-6, told
    assert ((y - want).abs() <= 0.02 * want.abs() + 0.02).all(), told


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("out", "inputs"), [(8, 256), (72, 576), (136, 1003), (200, 705), (1536, 576), (3072, 1024)]
)
def test_the_result_is_the_definition(out: int, inputs: int, dtype: torch.dtype) -> None:
    tensors, layer = make(out, inputs, dtype, gated=True, extras=False)
    for rows in (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 1000, 4099):
        padded = torch.nn.functional.pad(random(rows, rows, inputs, dtype=dtype), (0, -inputs % 8))
        hold_sums(layer, tensors, padded[:, :inputs])


def test_a_layer_of_a_large_model() -> None:
    tensors, layer = make(14336, 4096, torch.bfloat16, gated=True, extras=False)
    for rows in (257, 2048, 4099, 8192):
        hold_sums(layer, tensors, random(rows, rows, 4096, dtype=torch.bfloat16))


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_layout_gives_the_same_bits(stages: int, cluster: int) -> None:
    tensors, layer = make(1000, 1984, torch.bfloat16, gated=True, extras=False)
    x = random(1, 1500, 1984, dtype=torch.bfloat16)
    want = multiplied(layer, x)
    assert distance(want, definition(x, **tensors)) < 5e-3
    for group, sms in ((1, 132), (3, 20), (16, 2), (8, 132)):
        given = {"cluster": cluster, "stages": stages, "group": group}
        assert torch.equal(multiplied(layer, x, sms, **given), want), given


def test_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    _, layer = make(640, 2048, torch.bfloat16, gated=True, extras=False)
    x = random(1, 3000, 2048, dtype=torch.bfloat16)
    whole = multiplied(layer, x)
    for rows in (1, 70, 129, 1025, 2999):
        assert torch.equal(multiplied(layer, x[:rows]), whole[:rows]), rows
    moved = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).cuda()
    assert torch.equal(multiplied(layer, x[moved]), whole[moved])


def test_inputs_beyond_the_layers_are_not_read() -> None:
    poisoned = torch.full((1502, 1016), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = poisoned[1:-1, 8:-8]
    x.copy_(random(1, 1500, 1000, dtype=torch.bfloat16))
    _, layer = make(136, 1000, torch.bfloat16, gated=True, extras=False)
    assert torch.equal(multiplied(layer, x), multiplied(layer, x.contiguous()))


def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    _, layer = make(136, 512, torch.bfloat16, gated=True, extras=False)
    x = random(1, 1500, 512, dtype=torch.bfloat16)
    want = multiplied(layer, x)
    x[700, 5] = torch.nan
    y = multiplied(layer, x)
    assert y[700].isnan().all()
    assert torch.equal(y[:700], want[:700])
    assert torch.equal(y[701:], want[701:])


def test_gates_far_from_zero_are_open_or_shut() -> None:
    weight = torch.zeros(2 * 128, 256, dtype=torch.bfloat16, device="cuda")
    weight[:128, 0], weight[128:, 1] = 1, 1
    gates = torch.tensor([-1e30, -1000, -90, -1, -0.0, 1, 90, 1000], dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(8, 256, dtype=torch.bfloat16, device="cuda")
    x[:, 0], x[:, 1] = gates, 2
    y = multiplied(CudaLinear(weight, gated=True), x)
    want = definition(x, weight, gated=True)
    assert ((y - want).abs() <= torch.finfo(torch.bfloat16).eps * want.abs() + 1e-30).all()


@pytest.mark.parametrize("extras", [False, True])
def test_a_layer_uses_it_for_many_rows(extras: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def told(*args, params=gated.Gated.params) -> bytes:
        seen.append(args[1].shape[0])
        return params(*args)

    monkeypatch.setattr(gated.Gated, "params", told)
    out, inputs = 3072, 1024
    weight = random(1, 2 * out, inputs, dtype=torch.bfloat16, scale=inputs**-0.5)
    tensors = {"weight": weight, "gated": True}
    if extras:
        tensors["weights"] = 1 + random(3, inputs, dtype=torch.bfloat16, scale=0.2)
    layer = CudaLinear(weight, norm=tensors.get("weights"), eps=EPS, gated=True)
    for rows in (64, 65, 2048, 4001):
        x = random(rows, rows, inputs, dtype=torch.bfloat16)
        hold(layer, tensors, x, None, torch.bfloat16)
    assert seen == [2048, 4001]
    x, residual = (random(s, 2048, n, dtype=torch.bfloat16) for s, n in ((1, inputs), (2, out)))
    hold(layer, tensors, x, residual, torch.bfloat16)
    hold(layer, tensors, x, None, torch.float32)
    assert seen == [2048, 4001]


def test_launches_back_to_back_wait_for_one_another_and_graphs_replay() -> None:
    layers = [
        CudaLinear(
            random(i, 2 * 2048, 2048, dtype=torch.bfloat16, scale=2048**-0.5),
            norm=torch.ones(2048, device="cuda"),
            eps=EPS,
            gated=True,
        )
        for i in range(6)
    ]
    x = random(9, 4096, 2048, dtype=torch.bfloat16)

    def chain(x: Tensor, *, apart: bool = False) -> Tensor:
        for layer in layers:
            x = layer(x)
            if apart:
                torch.cuda.synchronize()
        return x

    want = chain(x, apart=True)
    assert want.isfinite().all()
    for _ in range(20):
        assert torch.equal(chain(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(50):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, want)
