"""Layers on a CUDA device against the definition in float64; test_linear_layouts.py has how launches are laid out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.errors import KernelError
from dagengine_kernels.fused.cuda import gemv, skinny, streamed, tiled
from dagengine_kernels.norm import rms_norm, silu_mul

from .test_linear_layouts import MODEL_LAYERS

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

EPS = 1e-5
HALVES = (torch.bfloat16, torch.float16)
SHAPES = [(96, 64), (70, 33), (6, 3), (1, 8), (576, 576), (130, 1000), (512, 4096)]
ROWS = [1, 3, 8, 9, 17, 64, 65, 300]


@pytest.fixture(autouse=True)
def _exact_sums() -> Iterator[None]:
    """cuBLAS adds up in float32, as the engine has it do."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def random(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def definition(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """y, computed in `dtype`."""
    x, weight = x.to(dtype), weight.to(dtype)
    if weights is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weights.to(dtype)
    y = x @ weight.t()
    if bias is not None:
        y = y + bias.to(dtype)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.to(dtype)


def distance(y: Tensor, want: Tensor) -> float:
    """Relative L2; infinite where something is not finite."""
    if not y.isfinite().all():
        return float("inf")
    return float((y.double() - want).norm() / want.norm())


def make(
    out: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    gated: bool,
    extras: bool,
    few_rows: int | None = gemv.MAX_ROWS,
    streamed_rows: int | None = None,
) -> tuple[dict, CudaLinear]:
    """The tensors of a layer as `definition` takes them, and the layer."""
    rows = out * (1 + gated)
    tensors = {"weight": random(1, rows, inputs, dtype=dtype, scale=inputs**-0.5), "gated": gated}
    if extras:
        tensors["bias"] = random(2, rows, dtype=dtype)
        tensors["weights"] = 1 + random(3, inputs, dtype=dtype, scale=0.2)
    layer = CudaLinear(
        tensors["weight"],
        tensors.get("bias"),
        norm=tensors.get("weights"),
        eps=EPS,
        gated=gated,
        few_rows=few_rows,
        streamed_rows=streamed_rows,
    )
    return tensors, layer


def magnitude(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The sum of the magnitudes that go into each element, float64."""
    given = {"bias": bias, "weights": weights, "residual": residual}
    sizes = {name: None if t is None else t.abs() for name, t in given.items()}
    y = definition(x.abs(), weight.abs(), bias=sizes["bias"], weights=sizes["weights"])
    if gated:
        gate, up = y.chunk(2, -1)
        y = gate * up + gate + up
    return y if residual is None else y + residual.double().abs()


def hold(layer: CudaLinear, tensors: dict, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> None:
    """The layer's result is no further from float64 than torch's own; a sum alone is right to float32 rounding."""
    y = layer(x, residual, dtype=dtype)
    assert y.dtype == dtype
    assert y.shape == (len(x), layer.num_outputs)
    want = definition(x, residual=residual, **tensors)
    told = (x.shape, tensors["weight"].shape, dtype)
    normed, eps = tensors.get("weights") is not None, torch.finfo(x.dtype).eps
    if y.numel() < 4096:
        gates = tensors["gated"] and not layer.batch_invariant
        share = eps if normed or gates else 4e-6
        bound = (
            torch.finfo(dtype).eps * want.abs() + share * magnitude(x, residual=residual, **tensors) + 1e-7
        )
        assert ((y - want).abs() <= bound).all(), told
        return
    plain = definition(x, residual=residual, **tensors, dtype=x.dtype)
    assert distance(y, want) <= 1.25 * distance(plain, want) + 1e-6, told
    if dtype == torch.float32 and not normed:
        assert distance(y, want) <= 2e-5, told


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_result_is_the_definition(
    batch_invariant: bool, gated: bool, extras: bool, dtype: torch.dtype
) -> None:
    for out, inputs in SHAPES:
        tensors, layer = make(out, inputs, dtype, gated=gated, extras=extras)
        layer.batch_invariant = batch_invariant
        for rows in ROWS:
            x = random(rows, rows, inputs, dtype=dtype)
            for y_dtype in (dtype, torch.float32) if rows in (3, 9, 65) else (dtype,):
                residual = random(5, rows, out, dtype=y_dtype) if extras else None
                hold(layer, tensors, x, residual, y_dtype)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("out", "inputs", "gated"), MODEL_LAYERS)
def test_the_layers_of_models(out: int, inputs: int, gated: bool) -> None:
    dtype = torch.bfloat16
    tensors, layer = make(out, inputs, dtype, gated=gated, extras=False)
    tensors["weights"] = 1 + random(3, inputs, dtype=dtype, scale=0.2)
    normed = CudaLinear(
        tensors["weight"], norm=tensors["weights"], eps=EPS, gated=gated, few_rows=gemv.MAX_ROWS
    )
    without = {name: value for name, value in tensors.items() if name != "weights"}
    for rows in (1, 3, 8, 16, 100):
        x, residual = random(rows, rows, inputs, dtype=dtype), random(5, rows, out, dtype=dtype)
        hold(layer, without, x, None, torch.float32)
        hold(layer, without, x, residual, dtype)
        hold(normed, tensors, x, None, dtype)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("out", "inputs", "gated"), [(512, 4096, True), (576, 1536, False), (70, 200, False)]
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(
    with_norm: bool, out: int, inputs: int, gated: bool
) -> None:
    weight = random(1, out * (1 + gated), inputs, dtype=torch.bfloat16, scale=inputs**-0.5)
    weights = random(2, inputs, dtype=torch.bfloat16) if with_norm else None
    layer = CudaLinear(weight, norm=weights, eps=EPS, gated=gated, batch_invariant=True)
    x = random(3, 3000, inputs, dtype=torch.bfloat16)
    residual = random(4, 3000, out, dtype=torch.bfloat16)
    alone = torch.cat([layer(x[i : i + 1], residual[i : i + 1]) for i in range(70)])
    for rows in (2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 70, 300, 3000):
        assert torch.equal(layer(x[:rows], residual[:rows])[:70], alone[:rows]), rows
    moved = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).cuda()
    y = layer(x[moved], residual[moved])
    assert torch.equal(y[moved.argsort()][:70], alone)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("stages", [2, 5, 9])
def test_bits_do_not_depend_on_the_layout(stages: int) -> None:
    weight = random(1, 1000, 2048, dtype=torch.bfloat16)
    layer = CudaLinear(weight)._layer
    for rows in (1, 7, 16):
        x = random(rows, rows, 2048, dtype=torch.bfloat16)
        results = []
        for sms in (132, 7):
            chosen = skinny.layout(rows, 2048, 1000, False, False, sms, stages=stages)
            assert (chosen is None) == (rows == 16 and stages == 9)
            if chosen is not None:
                around = torch.full((rows + 2, 1000), torch.nan, dtype=torch.bfloat16, device="cuda")
                skinny.multiply(layer, chosen, x, None, around[1:-1], norm=False)
                assert around[[0, -1]].isnan().all()
                results.append(around[1:-1])
        for tile in (tiled.SMALL, tiled.LARGE):
            around = torch.full((rows + 2, 1000), torch.nan, dtype=torch.bfloat16, device="cuda")
            tiled.multiply(layer, tile, x, None, around[1:-1])
            assert around[[0, -1]].isnan().all()
            results.append(around[1:-1])
        assert results[0].isfinite().all()
        assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("out", "inputs", "gated", "with_norm"),
    [(1000, 2048, False, True), (700, 4096, True, True), (500, 1000, False, False), (75, 576, True, True)],
)
def test_a_row_has_the_same_bits_among_few_and_by_every_layout(
    out: int, inputs: int, gated: bool, with_norm: bool
) -> None:
    weight = random(1, out * (1 + gated), inputs, dtype=torch.bfloat16, scale=inputs**-0.5)
    norm_weight = random(2, inputs, dtype=torch.bfloat16) if with_norm else None
    layer = CudaLinear(weight, norm=norm_weight, eps=EPS, gated=gated)._layer
    x = random(3, gemv.MAX_ROWS, inputs, dtype=torch.bfloat16)
    residual = random(4, gemv.MAX_ROWS, out, dtype=torch.bfloat16)
    first = None
    for rows in (1, 2, 3, 8):
        for depth, resident, rounds in ((8, 3, 1), (8, 2, 3), (16, 2, 4), (2, 1, 50)):
            chosen = gemv.layout(rows, inputs, out, gated, 132, depth=depth, resident=resident, rounds=rounds)
            assert chosen is not None
            around = torch.full((rows + 2, out), torch.nan, dtype=torch.bfloat16, device="cuda")
            gemv.multiply(layer, chosen, x[:rows], residual[:rows], around[1:-1], norm=with_norm)
            assert around[[0, -1]].isnan().all()
            first = around[1:2] if first is None else first
            assert torch.equal(around[1:2], first), (rows, depth)
            assert around[1:-1].isfinite().all()


@pytest.mark.gpu
@on_gpu
def test_repetition_gives_equal_bits_and_graphs_replay() -> None:
    layers = [CudaLinear(random(i, 4096, 4096, dtype=torch.bfloat16, scale=1 / 64)) for i in range(4)]
    for rows in (1, 4, 32):
        x = random(9, rows, 4096, dtype=torch.bfloat16)

        def chain(x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x, x)
            return x

        want = chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(x)
        for _ in range(20):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, want)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("rows", [1, 17, 65, 300])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_outside_is_read_into_the_result_or_written(batch_invariant: bool, rows: int) -> None:
    out, inputs = 70, 200
    poisoned = torch.full((rows + 2, inputs + 16), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = poisoned[1:-1, 8:-8]
    x.copy_(random(1, rows, inputs, dtype=torch.bfloat16))
    wide = torch.full((out + 2, inputs + 16), torch.nan, dtype=torch.bfloat16, device="cuda")
    weight = wide[1:-1, 8:-8]
    weight.copy_(random(2, out, inputs, dtype=torch.bfloat16))
    layer = CudaLinear(weight, batch_invariant=batch_invariant)
    want = definition(x, weight)
    assert distance(layer(x), want) < 5e-3
    columns = random(1, inputs, rows, dtype=torch.bfloat16).t()
    assert torch.equal(layer(columns), layer(columns.contiguous()))
    strided = CudaLinear(wide[1:-1, 8:72], batch_invariant=batch_invariant)
    assert torch.equal(
        strided(x[:, :64]),
        CudaLinear(weight[:, :64].contiguous(), batch_invariant=batch_invariant)(x[:, :64]),
    )
    shifted = torch.empty(rows * inputs + 1, dtype=torch.bfloat16, device="cuda")[1:].view(rows, inputs)
    shifted.copy_(x)
    assert torch.equal(layer(shifted), layer(x))
    residual = random(3, rows, 2 * out, dtype=torch.bfloat16)[:, ::2]
    assert torch.equal(layer(x, residual), layer(x, residual.contiguous()))


@pytest.mark.gpu
@on_gpu
def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    layer = CudaLinear(torch.ones(40, 128, dtype=torch.bfloat16, device="cuda"))
    for rows in (3, 20, 100):
        x = torch.ones(rows, 128, dtype=torch.bfloat16, device="cuda")
        x[1, 5], x[2, 100] = torch.nan, torch.inf
        y = layer(x)
        assert y[1].isnan().all()
        assert (y[2] == torch.inf).all()
        assert (y[0] == 128).all()
        assert (y[3:] == 128).all()


@pytest.mark.gpu
@on_gpu
def test_y_over_the_residual_is_y() -> None:
    weight = random(1, 512, 512, dtype=torch.bfloat16, scale=1 / 32)
    apart, over = CudaLinear(weight), CudaLinear(weight, over_residual=True)
    for rows in (1, 4, 5, 64, 300):
        x, residual = (random(seed, rows, 512, dtype=torch.bfloat16) for seed in (2, 3))
        kept = residual.clone()
        want = apart(x, residual)
        assert torch.equal(residual, kept)
        assert torch.equal(over(x, residual.clone()), want)
        assert torch.equal(over(x, x), apart(x, x))
        assert torch.equal(x, random(2, rows, 512, dtype=torch.bfloat16))
    y = over(x, kept)
    assert y.data_ptr() == kept.data_ptr()


@pytest.mark.gpu
@on_gpu
def test_no_rows_give_no_rows() -> None:
    layer = CudaLinear(random(1, 8, 64, dtype=torch.bfloat16))
    y = layer(torch.empty(0, 64, dtype=torch.bfloat16, device="cuda"), dtype=torch.float32)
    assert y.shape == (0, 8)
    assert y.dtype == torch.float32


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("inputs", [8, 64, 576, 1024, 4096, 5120, 16384])
def test_the_norm_alone_is_its_definition(inputs: int, dtype: torch.dtype) -> None:
    weight = 1 + random(1, inputs, dtype=torch.float32, scale=0.2)
    for rows in (1, 5, 300):
        x = random(rows, rows, inputs + 8, dtype=dtype)[:, :inputs]
        want = F.rms_norm(x.double(), (inputs,), weight.double(), EPS)
        y = rms_norm(x, weight, EPS)
        assert y.dtype == dtype
        assert ((y - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-6).all()
    assert rms_norm(x[:0], weight, EPS).shape == (0, inputs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs", [1, 6, 1536, 14336])
def test_the_gate_alone_is_its_definition(outputs: int, dtype: torch.dtype) -> None:
    for rows in (1, 5, 300):
        x = random(rows, rows, 2 * outputs, dtype=dtype, scale=4)
        gate, up = x.double().chunk(2, -1)
        want = F.silu(gate) * up
        y = silu_mul(x)
        assert y.dtype == dtype
        assert ((y - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-6).all()
    assert silu_mul(x[:0]).shape == (0, outputs)


@pytest.mark.gpu
@on_gpu
def test_what_does_not_fit_is_refused_by_name() -> None:
    weight = random(1, 6, 4, dtype=torch.bfloat16)
    layer, x = CudaLinear(weight), random(2, 3, 4, dtype=torch.bfloat16)
    refused = [
        ("weight", lambda: CudaLinear(weight.float())),
        ("weight", lambda: CudaLinear(weight[:5], gated=True)),
        ("bias", lambda: CudaLinear(weight, torch.zeros(5, device="cuda"))),
        ("bias", lambda: CudaLinear(weight, torch.zeros(6))),
        ("norm", lambda: CudaLinear(weight, norm=torch.zeros(5, device="cuda"))),
        ("few_rows", lambda: CudaLinear(weight, few_rows=gemv.MAX_ROWS + 1)),
        ("streamed_rows", lambda: CudaLinear(weight, streamed_rows=streamed.MAX_ROWS + 1)),
        ("x", lambda: layer(x[:, :3])),
        ("x", lambda: layer(x.half())),
        ("x", lambda: layer(x.cpu())),
        ("dtype", lambda: layer(x, dtype=torch.float16)),
        ("residual", lambda: layer(x, x)),
        ("residual", lambda: layer(x, torch.zeros(3, 6, device="cuda"))),
        ("weight", lambda: rms_norm(random(1, 2, 8, dtype=torch.bfloat16), torch.ones(8), EPS)),
    ]
    for field, call in refused:
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.field == field


def test_what_is_not_on_a_gpu_is_refused_by_name() -> None:
    weight = torch.zeros(6, 4, dtype=torch.bfloat16)
    for field, call in (
        ("weight", lambda: CudaLinear(weight)),
        ("weight", lambda: CudaLinear(weight.float())),
        ("x", lambda: rms_norm(weight, torch.ones(4), EPS)),
        ("x", lambda: silu_mul(weight)),
    ):
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.field == field
        assert caught.value.code == "invalid_argument"
