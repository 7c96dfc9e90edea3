"""Appending: K rotated in float32 at its stored position, in place, nothing else touched."""

import pytest
import torch

from dagengine_kernels import KernelError, append_kv, build_table, empty_pages, plan_append, rotate
from dagengine_kernels.append import HeadNorm
from dagengine_kernels.conformance_cases import frequencies
from dagengine_kernels.fused import native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tokens_land_in_their_slots_and_nowhere_else(dtype, page_size):
    rotary = build_table(frequencies(8), 1.1, 100)
    kv_layer = torch.full_like(empty_pages(9, 2, page_size, 8, dtype=dtype), float("nan"))
    slots = torch.randperm(9 * page_size)[:5]
    positions = torch.tensor([0, 99, 7, 7, 30])
    k, v = torch.randn(5, 2, 8, dtype=dtype), torch.randn(5, 2, 8, dtype=dtype)
    append_kv(k, v, positions, slots, rotary, kv_layer)
    at = kv_layer.permute(0, 3, 1, 2, 4)[slots // page_size, slots % page_size]
    eps = torch.finfo(dtype).eps if dtype != torch.float64 else torch.finfo(torch.float32).eps
    torch.testing.assert_close(at[:, 0], rotate(k, positions, rotary), rtol=2 * eps, atol=4 * eps)
    assert torch.equal(at[:, 1], v)
    assert int((~kv_layer.isnan()).sum()) == 5 * 2 * 2 * 8


def test_without_positions_k_is_stored_as_it_is():
    kv_layer = empty_pages(2, 1, 4, 8)
    k, v = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    append_kv(k, v, torch.arange(3), torch.tensor([6, 1, 2]), None, kv_layer)
    assert torch.equal(kv_layer[1, 0, :, 2], k[0])
    assert torch.equal(kv_layer[0, 1, 0, 1:3], v[1:, 0])


def test_one_plan_serves_all_layers():
    rotary = build_table(frequencies(8), 1.0, 100)
    positions, slots = torch.tensor([4, 5]), torch.tensor([3, 4])
    plan = plan_append(positions, slots, rotary, 4)
    for _ in range(2):
        k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        planned, direct = empty_pages(2, 1, 4, 8), empty_pages(2, 1, 4, 8)
        plan.write(k, v, planned)
        append_kv(k, v, positions, slots, rotary, direct)
        assert torch.equal(planned, direct)


def test_no_tokens_is_no_write():
    kv_layer = empty_pages(2, 1, 4, 8)
    nothing = torch.zeros(0, dtype=torch.int64)
    append_kv(torch.zeros(0, 1, 8), torch.zeros(0, 1, 8), nothing, nothing, None, kv_layer)
    assert not kv_layer.any()


def test_shapes_that_do_not_fit_are_refused():
    kv_layer = empty_pages(2, 1, 4, 8)
    k = torch.zeros(2, 1, 8)
    with pytest.raises(KernelError) as refused:
        append_kv(k, k, torch.arange(2), torch.arange(3), None, kv_layer)
    assert refused.value.field == "slots"
    with pytest.raises(KernelError) as refused:
        append_kv(k[:, :, :4], k[:, :, :4], torch.arange(2), torch.arange(2), None, kv_layer)
    assert refused.value.field == "k"


@pytest.mark.skipif(native.why_missing() is not None, reason="the native module is not built")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("pairing", "rotary_dim"), [("half", 16), ("half", 8), ("interleaved", 16), (None, 0)]
)
@pytest.mark.parametrize("pages_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_append_writes_what_torch_writes(
    dtype, pages_dtype, pairing, rotary_dim, normed, monkeypatch
):
    tokens, heads, dim, page_size = 9, 3, 16, 4
    generator = torch.Generator().manual_seed(rotary_dim)
    rotary = None
    if pairing is not None:
        rotary = build_table(frequencies(rotary_dim), 1.0, 64, pairing=pairing)
    qkv = torch.randn(tokens, 3 * heads, dim, generator=generator).to(
        dtype
    )  # heads lie apart, as a model gives them
    _, k, v = qkv.split(heads, dim=1)
    norm = HeadNorm(torch.rand(dim, generator=generator), 1e-5) if normed else None
    positions, slots = (
        torch.arange(5, 5 + tokens),
        torch.randperm(6 * page_size, generator=generator)[:tokens],
    )
    written = {}
    for name in ("cpu", "torch"):
        plan = plan_append(positions, slots, rotary, page_size)
        monkeypatch.setitem(plan.__dict__, "implementation", name)
        written[name] = empty_pages(6, heads, page_size, dim, dtype=pages_dtype).fill_(7.0)
        plan.write(k, v, written[name], k_norm=norm)
    eps = torch.finfo(pages_dtype).eps
    torch.testing.assert_close(written["cpu"], written["torch"], rtol=eps, atol=1e-6)
    assert torch.equal(written["cpu"][:, 1], written["torch"][:, 1])


@pytest.mark.skipif(native.why_missing() is not None, reason="the native module is not built")
def test_what_runs_is_named():
    assert plan_append(torch.arange(2), torch.arange(2), None, 4).implementation == "cpu"
