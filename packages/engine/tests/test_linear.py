"""A layer gives norm, product, gate and residual, however its weight is laid out and whatever multiplies it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dagengine.errors import DagError
from dagengine.models import linear
from dagengine.models.linear import DenseLinear, OneDnnLinear, make_linear
from dagengine.models.norm import RMSNorm
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.linear import PackedLinear

OUT, IN, EPS = 96, 64, 1e-5


def random(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def definition(
    x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, residual: Tensor, gated: bool
) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sum of the magnitudes that went into each element."""
    x, weight, bias, norm, residual = (t.double() for t in (x, weight, bias, norm, residual))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm
    y, size = x @ weight.t() + bias, x.abs() @ weight.abs().t() + bias.abs()
    if gated:
        (gate, up), (a, b) = y.chunk(2, -1), size.chunk(2, -1)
        y, size = F.silu(gate) * up, a * b + a + b
    return y + residual, size + residual.abs()


@pytest.mark.parametrize("path", ["best", "oneDNN"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 17, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_is_its_definition(
    dtype: torch.dtype, rows: int, gated: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "oneDNN":
        monkeypatch.setattr(linear, "_has_matrix_units", lambda: True)
    weight, bias, norm = (random(i, *s, dtype=dtype) for i, s in enumerate([(OUT, IN), (OUT,), (IN,)]))
    layer = make_linear(weight, bias, norm=RMSNorm(norm, EPS), gated=gated)
    x, residual = random(rows, rows, IN, dtype=dtype), random(7, rows, OUT // (1 + gated), dtype=dtype)
    kept = residual.clone()
    y = layer(x, residual)
    want, size = definition(x, weight, bias, norm, residual, gated)
    assert y.dtype == dtype
    assert ((y - want).abs() <= 4 * torch.finfo(dtype).eps * (size + want.abs())).all()
    assert torch.equal(residual, kept)
    wide = layer(x, dtype=torch.float64) if isinstance(layer, DenseLinear) else layer(x, dtype=torch.float32)
    assert wide.dtype != torch.bfloat16


def test_bfloat16_is_packed_by_the_kernels_and_by_onednn_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = random(1, OUT, IN, dtype=torch.bfloat16)
    if PackedLinear.unavailable() is None:
        monkeypatch.setattr(linear, "_has_matrix_units", lambda: False)
        assert isinstance(make_linear(weight), PackedLinear)
    if linear._onednn_multiplies_bfloat16():
        monkeypatch.setattr(linear, "_has_matrix_units", lambda: True)
        assert isinstance(make_linear(weight), OneDnnLinear)


def test_what_no_path_promises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DagError) as refused:
        make_linear(random(1, OUT, IN, dtype=torch.float32), batch_invariant=True)
    assert refused.value.field == "batch_invariant"
    if PackedLinear.unavailable() is None:
        monkeypatch.setattr(linear, "_has_matrix_units", lambda: True)
        made = make_linear(random(1, OUT, IN, dtype=torch.bfloat16), batch_invariant=True)
        assert isinstance(made, PackedLinear)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_takes_its_own_kernels(dtype: torch.dtype, gated: bool) -> None:
    weight, bias, norm = (random(i, *s, dtype=dtype).cuda() for i, s in enumerate([(OUT, IN), (OUT,), (IN,)]))
    layer = make_linear(weight, bias, norm=RMSNorm(norm, EPS), gated=gated)
    assert isinstance(layer, CudaLinear)
    for rows in (1, 17, 130):
        x, residual = random(rows, rows, IN, dtype=dtype), random(7, rows, OUT // (1 + gated), dtype=dtype)
        want, size = definition(x, weight.cpu(), bias.cpu(), norm.cpu(), residual, gated)
        y = layer(x.cuda(), residual.cuda()).cpu()
        assert ((y - want).abs() <= 4 * torch.finfo(dtype).eps * (size + want.abs())).all()
    with pytest.raises(DagError):
        make_linear(weight.float(), batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_norm_on_a_gpu_is_that_of_the_cpu() -> None:
    norm = RMSNorm(1 + random(1, 64, dtype=torch.bfloat16) / 4, EPS)
    on_gpu = RMSNorm(norm.weight.cuda(), EPS)
    for x in (random(2, 5, 64, dtype=torch.bfloat16), random(3, 5, 4, 64, dtype=torch.bfloat16)):
        y = on_gpu(x.cuda()).cpu()
        assert ((y - norm(x)).abs() <= torch.finfo(torch.bfloat16).eps * norm(x).abs()).all()


def test_a_shared_weight_is_not_copied_where_it_is_not_packed() -> None:
    weight = random(1, OUT, IN, dtype=torch.float32)
    layer = make_linear(weight, shared=True)
    assert isinstance(layer, DenseLinear)
    assert layer.weight.data_ptr() == weight.data_ptr()
