"""A packed layer against the definition in float64: every instruction set, shape, epilogue and number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dagengine_kernels.errors import KernelError
from dagengine_kernels.linear import PackedLinear

pytestmark = pytest.mark.skipif(
    PackedLinear.unavailable() is not None, reason="the native module is not built"
)

EPS = 1e-5
SHAPES = [(2, 1), (6, 3), (32, 64), (70, 33), (192, 576)]
ROWS = [1, 2, 3, 7, 8, 9, 17, 50]


def isas() -> list[str]:
    if PackedLinear.unavailable() is not None:
        return []
    from dagengine_kernels.fused import native

    return list(native.load().linear.isas())


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, gated: bool, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y in float64, and the sum of the magnitudes that went into each element."""
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.double()
    y, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    if gated:
        (gate, up), (a, b) = y.chunk(2, -1), size.chunk(2, -1)
        y, size = torch.nn.functional.silu(gate) * up, a * b + a + b
    if residual is not None:
        y, size = y + residual.double(), size + residual.double().abs()
    return y, size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("isa", isas())
def test_the_result_is_the_definition_rounded_once(
    isa: str, gated: bool, extras: bool, dtype: torch.dtype
) -> None:
    for out, inputs in SHAPES:
        weight = random(1, out, inputs, dtype=torch.bfloat16)
        bias, norm = (random(2, out), random(3, inputs)) if extras else (None, None)
        layer = PackedLinear(weight, bias, norm=norm, eps=EPS, gated=gated, isa=isa)
        for rows in ROWS:
            x = random(rows, rows, inputs, dtype=torch.bfloat16)
            residual = random(5, rows, layer.num_outputs, dtype=dtype) if extras else None
            y = layer(x, residual, dtype=dtype)
            want, size = definition(x, weight, bias, norm, gated, residual)
            assert y.dtype == dtype
            assert ((y - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("isa", isas())
def test_a_row_has_the_same_bits_in_every_batch_and_for_every_number_of_threads(isa: str) -> None:
    weight, norm = random(1, 1024, 576, dtype=torch.bfloat16), random(2, 576)
    layer = PackedLinear(weight, norm=norm, eps=EPS, gated=True, isa=isa)
    x = random(3, 400, 576, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        y = layer(x)
        alone = torch.cat([layer(x[i : i + 1]) for i in (0, 7, 8, 399)])
        torch.set_num_threads(2)
        shared = layer(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, y[[0, 7, 8, 399]])
    assert torch.equal(shared, y)


def test_rows_may_lie_apart() -> None:
    layer = PackedLinear(random(1, 40, 24, dtype=torch.bfloat16))
    wide, residual = random(2, 5, 48, dtype=torch.bfloat16), random(3, 5, 80, dtype=torch.bfloat16)
    y = layer(wide[:, 8:32], residual[:, 3:43])
    assert torch.equal(y, layer(wide[:, 8:32].contiguous(), residual[:, 3:43].contiguous()))


def test_values_that_are_not_finite_stay_so() -> None:
    layer = PackedLinear(torch.ones(33, 2, dtype=torch.bfloat16))
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [torch.inf, -torch.inf], [1.0, 2.0]])
    for dtype in (torch.float32, torch.bfloat16):
        y = layer(x, dtype=dtype)
        assert y[0].isnan().all()
        assert (y[1] == torch.inf).all()
        assert y[2].isnan().all()
        assert (y[3] == 3).all()


def test_no_rows_give_no_rows() -> None:
    assert PackedLinear(random(1, 8, 4, dtype=torch.bfloat16))(torch.empty(0, 4)).shape == (0, 8)


def test_what_does_not_fit_is_refused_by_name() -> None:
    weight = random(1, 6, 4, dtype=torch.bfloat16)
    layer, x = PackedLinear(weight), random(2, 3, 4)
    refused = [
        ("weight", lambda: PackedLinear(weight.float())),
        ("weight", lambda: PackedLinear(weight[:5], gated=True)),
        ("bias", lambda: PackedLinear(weight, torch.zeros(5))),
        ("norm", lambda: PackedLinear(weight, norm=torch.zeros(5))),
        ("isa", lambda: PackedLinear(weight, isa="abacus")),
        ("x", lambda: layer(x[:, :3])),
        ("x", lambda: layer(x.double())),
        ("residual", lambda: layer(x, x)),
        ("residual", lambda: layer(x, torch.zeros(3, 6, dtype=torch.bfloat16))),
    ]
    for field, call in refused:
        with pytest.raises(KernelError) as caught:
            call()
        assert caught.value.field == field
