"""Merge laws: identity, order, base 2, sinks once."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dagengine_kernels import apply_sinks, merge, merge_many

LOG2E = math.log2(math.e)


def softmax_parts(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [1, D] and lse2 [1] of scores [L] over values [L, D]; (0, -inf) of none."""
    if not len(scores):
        return values.new_zeros(1, values.shape[1]), values.new_full((1,), -math.inf)
    return torch.softmax(scores, 0)[None] @ values, torch.logsumexp(scores, 0)[None] * LOG2E


@given(
    st.lists(st.floats(-50, 50), max_size=12),
    st.lists(st.integers(0, 12), max_size=4),
    st.integers(0, 2**31),
)
def test_any_cut_merges_to_the_whole(scores, cuts, seed):
    scores = torch.tensor(scores, dtype=torch.float64)
    values = torch.randn(len(scores), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    bounds = [0, *sorted(min(c, len(scores)) for c in cuts), len(scores)]
    parts = [softmax_parts(scores[a:b], values[a:b]) for a, b in pairwise(bounds)]
    out, lse2 = merge_many(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    want, want_lse2 = softmax_parts(scores, values)
    assert torch.allclose(out, want, atol=1e-12)
    assert torch.allclose(lse2, want_lse2, atol=1e-12)
    folded = parts[0]
    for part in parts[1:]:
        folded = merge(*folded, *part)
    assert torch.allclose(folded[0], want, atol=1e-12)


def test_two_empty_parts_are_empty_not_nan():
    nothing = torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf)
    out, lse2 = merge(*nothing, *nothing)
    assert not out.any()
    assert (lse2 == -math.inf).all()
    out, lse2 = merge_many(torch.zeros(0, 2, 3, 4), torch.zeros(0, 2, 3))
    assert out.shape == (2, 3, 4)
    assert (lse2 == -math.inf).all()


def test_the_empty_part_is_the_identity_whatever_it_holds():
    out, lse2 = torch.randn(2, 3, 4), torch.randn(2, 3)
    garbage = torch.full_like(out, math.nan)
    merged = merge(out, lse2, garbage, torch.full_like(lse2, -math.inf))
    assert torch.equal(merged[0], out)
    assert torch.equal(merged[1], lse2)


def test_bf16_parts_are_merged_in_float32():
    outs, lse2s = torch.randn(5, 2, 4).bfloat16(), torch.randn(5, 2)
    out, lse2 = merge_many(outs, lse2s)
    assert out.dtype == torch.bfloat16
    assert lse2.dtype == torch.float32
    assert torch.equal(out, merge_many(outs.float(), lse2s)[0].bfloat16())


def test_a_sink_is_one_more_logit_with_the_value_zero():
    scores, values, sinks = torch.randn(6, 2), torch.randn(6, 2, 4), torch.tensor([0.3, -2.0])
    out = torch.einsum("lh,lhd->hd", torch.softmax(scores, 0), values)[None]
    lse2 = torch.logsumexp(scores, 0)[None] * LOG2E
    with_sink = torch.cat((scores, sinks[None]))
    want = torch.einsum("lh,lhd->hd", torch.softmax(with_sink, 0)[:-1], values)[None]
    got, got_lse2 = apply_sinks(out, lse2, sinks)
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.allclose(got_lse2, torch.logsumexp(with_sink, 0)[None] * LOG2E, atol=1e-6)


def test_a_sink_alone_gives_zero_and_its_own_lse():
    out, lse2 = apply_sinks(torch.zeros(1, 1, 4), torch.full((1, 1), -math.inf), torch.tensor([2.0]))
    assert not out.any()
    assert torch.allclose(lse2, torch.tensor([[2.0 * LOG2E]]))


def test_a_sink_of_minus_infinity_takes_nothing_even_where_nothing_is_seen():
    out, lse2 = torch.ones(2, 2, 3), torch.tensor([[0.5, 0.5], [-math.inf, -math.inf]])
    out[1] = 0.0
    have, have_lse2 = apply_sinks(out, lse2, torch.tensor([-math.inf, 0.0]))
    assert torch.equal(have[:, 0], out[:, 0]) and torch.equal(have_lse2[:, 0], lse2[:, 0])
    assert torch.equal(have[1, 1], torch.zeros(3)) and float(have_lse2[1, 1]) == 0.0
