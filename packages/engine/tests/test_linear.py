"""A linear layer gives the product rounded once, however its weight is laid out and however many rows it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dagengine.models import linear
from dagengine.models.linear import WIDE_ROWS, Linear

OUT, IN = 96, 64


def parts(rows: int, dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return random(rows, IN), random(OUT, IN), random(OUT) if bias else None


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 17, WIDE_ROWS - 1, WIDE_ROWS, WIDE_ROWS + 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_product_is_rounded_once(dtype: torch.dtype, rows: int, bias: bool) -> None:
    x, weight, b = parts(rows, dtype, bias)
    y = Linear.from_checkpoint(weight, b)(x)
    want = exact(x, weight, b)
    assert y.dtype == dtype
    assert y.shape == (rows, OUT)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * exact(x.abs(), weight.abs(), None)
    assert ((y - want).abs() <= torch.finfo(dtype).eps * want.abs() + 4 * sums).all()


@pytest.mark.skipif(not linear.can_pack(), reason="oneDNN has no bfloat16 products on this machine")
@pytest.mark.parametrize("wide", [False, True])
def test_both_ways_to_multiply_many_rows_agree(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "prefers_float32", lambda: wide)
    x, weight, bias = parts(WIDE_ROWS, torch.bfloat16, True)
    y = Linear.from_checkpoint(weight, bias)(x)
    torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=2**-7, atol=1e-2)


def test_a_shared_weight_is_not_copied_where_it_is_not_packed() -> None:
    _, weight, _ = parts(1, torch.float32, False)
    assert Linear.sharing(weight).weight.data_ptr() == weight.data_ptr()
