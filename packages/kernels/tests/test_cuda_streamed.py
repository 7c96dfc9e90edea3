"""Layers whose weight is streamed (csrc/cuda/streamed.cu), on a GPU; test_linear_layouts.py has the layouts."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.fused.cuda import gemv, streamed
from dagengine_kernels.norm import rms_norm

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
from .test_linear_layouts import MODEL_LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != streamed.CAPABILITY,
        reason="needs an NVIDIA GPU of compute capability 9.0",
    ),
]

SHAPES = [(96, 64), (70, 33), (6, 3), (1, 8), (576, 576), (131, 1000), (512, 4096), (130, 4032)]
ROWS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)


def streams(
    out: int, inputs: int, dtype: torch.dtype, *, gated: bool, extras: bool
) -> tuple[dict, CudaLinear]:
    """A layer that streams whatever it can."""
    return make(out, inputs, dtype, gated=gated, extras=extras, few_rows=0, streamed_rows=streamed.MAX_ROWS)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_result_is_the_definition(gated: bool, extras: bool, dtype: torch.dtype) -> None:
    for out, inputs in SHAPES:
        tensors, layer = streams(out, inputs, dtype, gated=gated, extras=extras)
        for rows in ROWS:
            x = random(rows, rows, inputs, dtype=dtype)
            for y_dtype in (dtype, torch.float32) if rows in (3, 33, 64) else (dtype,):
                residual = random(5, rows, out, dtype=y_dtype) if extras else None
                hold(layer, tensors, x, residual, y_dtype)


@pytest.mark.parametrize(("out", "inputs", "gated"), MODEL_LAYERS)
def test_the_layers_of_models(out: int, inputs: int, gated: bool) -> None:
    tensors, layer = streams(out, inputs, torch.bfloat16, gated=gated, extras=False)
    for rows in (3, 16, 30, 64):
        x, residual = (random(s, rows, n, dtype=torch.bfloat16) for s, n in ((rows, inputs), (5, out)))
        hold(layer, tensors, x, None, torch.float32)
        hold(layer, tensors, x, residual, torch.bfloat16)


@pytest.mark.parametrize("tile", streamed.TILES)
@pytest.mark.parametrize("gated", [False, True])
def test_every_layout_gives_the_result_and_writes_nothing_else(gated: bool, tile: int) -> None:
    out, inputs = 1000, 1984
    tensors, layer = streams(out, inputs, torch.bfloat16, gated=gated, extras=True)
    held = layer._layer
    for rows in (4, 64):
        x, residual = (random(s, rows, n, dtype=torch.bfloat16) for s, n in ((rows, inputs), (5, out)))
        normed = rms_norm(x, held.norm, EPS)
        want = definition(x, residual=residual, **tensors)
        most = 1.25 * distance(definition(x, residual=residual, **tensors, dtype=x.dtype), want)
        for halves, split in product((1, 2), streamed.SPLITS):
            given = {"tile": tile, "halves": halves, "split": split, "resident": 3 - halves}
            chosen = streamed.layout(rows, inputs, out, gated, 132, **given)
            assert chosen is not None
            around = torch.full((rows + 2, out), torch.nan, dtype=torch.bfloat16, device="cuda")
            streamed.multiply(held, chosen, normed, residual, around[1:-1])
            assert around[[0, -1]].isnan().all()
            assert distance(around[1:-1], want) <= most, given


def test_a_row_has_the_same_bits_among_as_many_columns() -> None:
    _, layer = streams(640, 2048, torch.bfloat16, gated=False, extras=True)
    x, residual = (random(s, 64, n, dtype=torch.bfloat16) for s, n in ((1, 2048), (2, 640)))
    whole = layer(x, residual)
    for rows in (33, 50, 63):
        assert torch.equal(layer(x[:rows], residual[:rows]), whole[:rows])
    moved = torch.randperm(64, generator=torch.Generator().manual_seed(0)).cuda()
    assert torch.equal(layer(x[moved], residual[moved]), whole[moved])


def test_inputs_beyond_the_layers_are_not_read_and_rows_may_overlap() -> None:
    poisoned = torch.full((66, 216), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = poisoned[1:-1, 8:-8]
    x.copy_(random(1, 64, 200, dtype=torch.bfloat16))
    tensors, layer = streams(70, 200, torch.bfloat16, gated=False, extras=False)
    for rows in (5, 64):
        assert torch.equal(layer(x[:rows]), layer(x[:rows].contiguous()))
        assert distance(layer(x[:rows]), definition(x[:rows], **tensors)) < 5e-3
    same = random(2, 1, 200, dtype=torch.bfloat16)
    assert torch.equal(layer(same.expand(9, 200)), layer(same.repeat(9, 1)))


def chain_of(count: int) -> tuple[list[CudaLinear], list[dict], int]:
    """Layers of several shapes and kinds, each as wide as the next one takes; the tensors; the first one's inputs."""
    widths = [(640, 1024, 192, 2048, 1536)[i % 5] for i in range(count + 1)]
    layers, tensors = [], []
    for i, (inputs, out) in enumerate(pairwise(widths)):
        gated = i % 3 == 1
        weight = random(i, out * (1 + gated), inputs, dtype=torch.bfloat16, scale=inputs**-0.5)
        norm = 1 + random(i + 100, inputs, dtype=torch.bfloat16, scale=0.1)
        tensors.append({"weight": weight, "weights": norm if i % 2 == 0 else None, "gated": gated})
        layers.append(
            CudaLinear(
                weight,
                norm=tensors[-1]["weights"],
                eps=EPS,
                gated=gated,
                few_rows=0,
                streamed_rows=streamed.MAX_ROWS,
            )
        )
    return layers, tensors, widths[0]


@pytest.mark.parametrize("rows", [3, 16, 64])
def test_layers_back_to_back_wait_for_one_another(rows: int) -> None:
    layers, tensors, inputs = chain_of(20)
    x = random(9, rows, inputs, dtype=torch.bfloat16)

    def chain(x: Tensor, *, apart: bool = False) -> Tensor:
        for layer in layers:
            x = layer(x)
            if apart:
                torch.cuda.synchronize()
        return x

    want = chain(x, apart=True)
    exact, plain = x.double(), x
    for given in tensors:
        exact = definition(exact, **given)
        plain = definition(plain, **given, dtype=torch.bfloat16)
    assert distance(want, exact) <= 1.25 * distance(plain, exact)
    for _ in range(20):
        assert torch.equal(chain(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(200):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, want)


def test_two_streams_at_once_do_not_disturb_one_another() -> None:
    layers, _, inputs = chain_of(10)
    given = [random(seed, rows, inputs, dtype=torch.bfloat16) for seed, rows in ((1, 64), (2, 20))]

    def chain(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    want = [chain(x) for x in given]
    torch.cuda.synchronize()
    queues = [torch.cuda.Stream() for _ in given]
    for _ in range(10):
        found: list[list[Tensor]] = [[], []]
        for _ in range(10):
            for queue, x, results in zip(queues, given, found, strict=True):
                with torch.cuda.stream(queue):
                    results.append(chain(x))
        torch.cuda.synchronize()
        for results, one in zip(found, want, strict=True):
            assert all(torch.equal(y, one) for y in results)


def test_which_kernel_runs_follows_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = random(1, 64, 128, dtype=torch.bfloat16), []
    for name, made in (("gemv", gemv.Gemv), ("streamed", streamed.Streamed)):

        def told(*args, params=made.params, name=name) -> bytes:
            seen.append(name)
            return params(*args)

        monkeypatch.setattr(made, "params", told)
    layer = CudaLinear(weight, few_rows=4, streamed_rows=40)
    for rows in (4, 5, 40, 41, 64):
        layer(random(2, rows, 128, dtype=torch.bfloat16))
    assert seen == ["gemv", "streamed", "streamed"]
