"""Append, transform, merge and advance against float64 definitions: by torch on the CPU, by kernels on a GPU."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dagengine_kernels import KernelError, apply_sinks, build_table, empty_pages, merge_many, plan_append
from dagengine_kernels.append import HeadNorm
from dagengine_kernels.conformance_cases import frequencies
from dagengine_kernels.fused.cuda import advance, merge
from dagengine_kernels.fused.cuda.vectors import alignment, head_layout
from dagengine_kernels.fused.plan import NO_TAIL, PlanArrays
from dagengine_kernels.fused.planner_twin import advance as advance_twin
from dagengine_kernels.rotary import exact_rows, expand_rows, turn
from dagengine_kernels.transform import plan_copy, plan_gather

gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]

HEADS = [
    # head_dim, rotary_dim (0: no positions), pairing
    (128, 128, "half"),
    (64, 64, "interleaved"),
    (128, 64, "half"),
    (80, 32, "interleaved"),
    (24, 24, "half"),
    (256, 256, "half"),
    (20, 6, "half"),
    (96, 0, "half"),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def rotary_of(rotary_dim, pairing, device, scaling=1.2, length=400):
    if not rotary_dim:
        return None
    table = build_table(frequencies(rotary_dim), scaling, length, pairing=pairing)
    return replace(table, cos=table.cos.to(device), sin=table.sin.to(device))


def turned(x, positions, rotary, scaled):
    """x [T, H, D] in float64, turned at `positions` by definition."""
    if rotary is None:
        return x.double()
    rows = exact_rows(rotary, positions, scaled=scaled)
    return turn(x.double(), *expand_rows(*rows, rotary.pairing), rotary.rotary_dim, rotary.pairing)


def normed(x, norm):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def close(have, want, dtype):
    assert have.dtype == dtype
    assert not have.isnan().any()
    error = (have.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error <= TOLERANCE[dtype], float(error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
def test_append_writes_what_is_defined_and_nothing_else(device, dtype, head, norms):
    head_dim, rotary_dim, pairing = head
    rotary = rotary_of(rotary_dim, pairing, device)
    generator = torch.Generator().manual_seed(0)
    for tokens, kv_heads, q_heads, page_size in ((37, 3, 6, 16), (1, 8, 32, 64), (5, 1, 7, 3)):
        # As a fused projection leaves them: views into one tensor.
        width = (q_heads + 2 * kv_heads) * head_dim
        qkv = torch.randn(tokens, width, generator=generator).to(device, dtype)
        q, k, v = (
            x.unflatten(1, (-1, head_dim))
            for x in qkv.split([q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
        )
        pages = 5 + tokens // page_size
        slots = torch.randperm(pages * page_size, generator=generator)[:tokens].to(device)
        positions = torch.randint(0, 400, (tokens,), generator=generator).to(device)
        kv_layer = torch.full_like(
            empty_pages(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device), math.nan
        )
        weights = torch.randn(2, head_dim, generator=generator).to(device)
        k_norm, q_norm = (HeadNorm(w, 1e-5) if norms else None for w in weights)
        plan = plan_append(positions, slots, rotary, page_size)
        out = plan.write(k, v, kv_layer, k_norm=k_norm, q=q, q_norm=q_norm)
        at = kv_layer.permute(0, 3, 1, 2, 4)[slots // page_size, slots % page_size]
        close(at[:, 0], turned(normed(k, k_norm) if norms else k, positions, rotary, True), dtype)
        assert torch.equal(at[:, 1], v)
        assert int((~kv_layer.isnan()).sum()) == 2 * k.numel(), "a neighbour was written"
        if norms:
            close(out, normed(q, q_norm), dtype)
        else:
            assert torch.equal(out, q) and out.is_contiguous()
        again = torch.full_like(kv_layer, math.nan)
        assert plan.write(k, v, again, k_norm=k_norm) is None
        assert torch.equal(again.nan_to_num(9.0), kv_layer.nan_to_num(9.0))


@pytest.mark.parametrize("device", DEVICES)
def test_append_refuses_what_does_not_fit(device):
    kv_layer = empty_pages(2, 1, 4, 8, device=device)
    k, index = torch.zeros(2, 1, 8, device=device), torch.arange(2, device=device)
    plan = plan_append(index, index, None, 4)
    bad_norm = HeadNorm(torch.ones(8, dtype=torch.float64, device=device), 1e-6)
    for field, arguments, named in (
        ("k", (k[:1], k[:1], kv_layer), {}),
        ("kv_layer", (k, k, empty_pages(2, 1, 8, 8, device=device)), {}),
        ("q", (k, k, kv_layer), {"q_norm": bad_norm}),
        ("q", (k, k, kv_layer), {"q": k[:1]}),
        ("k_norm", (k, k, kv_layer), {"k_norm": bad_norm}),
    ):
        with pytest.raises(KernelError) as refused:
            plan.write(*arguments, **named)
        assert refused.value.field == field


def random_extents(generator, pages, page_size, count, delta):
    """Slices of distinct pages, so that any of them can be written while others are read."""
    picked = torch.randperm(pages, generator=generator)[:count].tolist()
    extents = []
    for i, page in enumerate(picked):
        lo = int(torch.randint(0, page_size, (), generator=generator)) if i % 3 else 0
        hi = int(torch.randint(lo + 1, page_size + 1, (), generator=generator)) if i % 2 else page_size
        extents.append((page, lo, hi, 300 + 7 * i, 0 if i % 4 == 3 else delta * (i + 1) - 40))
    return np.array(extents, np.int32)


def extent_tokens(extents):
    """page, row, delta of every token listed."""
    listed = [(page, row, delta) for page, lo, hi, _, delta in extents.tolist() for row in range(lo, hi)]
    return torch.tensor(listed).T


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 5])
def test_gather_and_copy_move_k_by_its_delta(device, dtype, head, page_size):
    head_dim, rotary_dim, pairing = head
    rotary = rotary_of(rotary_dim, pairing, device)
    generator = torch.Generator().manual_seed(page_size)
    extents = random_extents(generator, 24, page_size, 11, 17)
    kv_heads = 3
    pages = torch.randn(24, 2, kv_heads, page_size, head_dim, generator=generator).to(device, dtype)
    page, row, delta = extent_tokens(extents)
    at = pages.permute(0, 3, 1, 2, 4)[page, row]
    want_k, want_v = turned(at[:, 0], delta.to(device), rotary, False), at[:, 1]

    moves = plan_gather(extents, rotary, device=device)
    tokens = moves.num_tokens
    assert tokens == len(page)
    for by_head in (False, True):
        shape = (kv_heads, tokens + 3, head_dim) if by_head else (tokens + 3, kv_heads, head_dim)
        k_out, v_out = (torch.full(shape, math.nan, dtype=dtype, device=device) for _ in "kv")
        if by_head:
            k_out, v_out = k_out.transpose(0, 1), v_out.transpose(0, 1)
        moves.gather(pages, k_out, v_out)
        close(k_out[:tokens], want_k, dtype)
        assert torch.equal(v_out[:tokens], want_v)
        still = delta == 0 if rotary is not None else torch.ones_like(delta, dtype=torch.bool)
        assert torch.equal(k_out[:tokens][still], at[:, 0][still]), "an untouched K kept its bits"
        assert k_out[tokens:].isnan().all()
        k_out.fill_(math.nan)
        v_out.fill_(math.nan)
        moves.gather(pages, k_out, v_out, first=4)
        begin = int(moves.starts[4])
        close(k_out[begin:tokens], want_k[begin:], dtype)
        assert k_out[:begin].isnan().all()

    free = torch.randperm(len(extents), generator=generator).numpy()
    destination = np.stack((free + 30, (page_size - extents[:, 2] + extents[:, 1]) // 2), 1)
    to_layer = torch.full((48, *pages.shape[1:]), math.nan, dtype=dtype, device=device)
    plan_copy(extents, destination, rotary, page_size=page_size, device=device).copy(pages, to_layer)
    to_page = torch.cat(
        [torch.full((hi - lo,), p) for (_, lo, hi, *_), (p, _) in zip(extents, destination, strict=True)]
    )
    to_row = torch.cat(
        [r + torch.arange(hi - lo) for (_, lo, hi, *_), (_, r) in zip(extents, destination, strict=True)]
    )
    copied = to_layer.permute(0, 3, 1, 2, 4)[to_page, to_row]
    close(copied[:, 0], want_k, dtype)
    assert torch.equal(copied[:, 1], want_v)
    assert int((~to_layer.isnan()).sum()) == 2 * want_k.numel(), "a neighbour was written"
    only_k = torch.full_like(to_layer, math.nan)
    plan_copy(extents, destination, rotary, page_size=page_size, device=device).copy(
        pages, only_k, with_v=False
    )
    assert only_k[:, 1].isnan().all()
    assert torch.equal(only_k[:, 0].nan_to_num(9.0), to_layer[:, 0].nan_to_num(9.0))


def test_a_copy_that_leaves_its_page_is_refused():
    extents = np.array([(0, 0, 4, 0, 5)], np.int32)
    with pytest.raises(KernelError) as refused:
        plan_copy(extents, np.array([(1, 1)]), None, page_size=4)
    assert refused.value.field == "destination[0]"


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "kv_heads"),
    [(128, 4, 8), (64, 3, 3), (128, 1, 2), (256, 8, 1), (24, 2, 2), (5, 2, 1)],
)
@pytest.mark.parametrize("half_parts", [False, True], ids=["float-parts", "narrow-parts"])
def test_merge_is_the_merge_of_lse(dtype, head_dim, group, kv_heads, half_parts):
    """Parts from none to more than a warp has lanes; empty ones hold NaN; unlisted rows stay."""
    generator = torch.Generator().manual_seed(head_dim)
    rows, heads = 9, group * kv_heads
    counts = [0, 1, 2, 5, 31, 32, 33, 70, 3, 1]
    listed = np.sort(np.random.default_rng(0).permutation(rows * kv_heads)[: rows * kv_heads - 2])
    per_row = [counts[i % len(counts)] for i in range(len(listed))]
    num_parts = sum(per_row)
    parts = torch.randperm(num_parts, generator=generator)
    part_dtype = dtype if half_parts else torch.float32
    o_part = torch.randn(num_parts, group, head_dim, generator=generator).to(part_dtype)
    lse2_part = 6 * torch.randn(num_parts, group, generator=generator)
    empty = torch.rand(num_parts, group, generator=generator) < 0.2
    lse2_part[empty] = -math.inf
    o_part[empty] = math.nan
    indptr = np.concatenate([[0], np.cumsum(per_row)])
    lists = merge.MergeLists(
        torch.tensor(np.append(listed, -1), dtype=torch.int32, device="cuda"),
        torch.tensor(np.append(indptr, indptr[-1]), dtype=torch.int32, device="cuda"),
        parts.to(torch.int32).cuda(),
    )
    for sinks in (None, torch.randn(heads, generator=generator)):
        out = torch.full((rows, heads, head_dim), 7.0, dtype=dtype, device="cuda")
        lse2 = torch.full((rows, heads), 7.0, device="cuda")
        on_device = None if sinks is None else sinks.cuda()
        merge.merge_parts(lists, o_part.cuda(), lse2_part.cuda(), out, lse2, on_device)
        again = torch.empty_like(out)
        again[:] = 7.0
        merge.merge_parts(lists, o_part.cuda(), lse2_part.cuda(), again, None, on_device)
        assert torch.equal(out, again)
        out, lse2 = out.cpu().unflatten(1, (kv_heads, group)).flatten(0, 1), lse2.cpu().view(-1, group)
        for i, row in enumerate(listed.tolist()):
            mine = parts[indptr[i] : indptr[i + 1]]
            want, want_lse2 = merge_many(o_part[mine].double(), lse2_part[mine].double())
            if sinks is not None:
                own = sinks.view(kv_heads, group)[row % kv_heads]
                want, want_lse2 = apply_sinks(want[None], want_lse2[None], own)
                want, want_lse2 = want[0], want_lse2[0]
            error = (out[row].double() - want).abs().max()
            assert error <= 4 * TOLERANCE[dtype] * max(1.0, float(want.abs().max())), (row, float(error))
            assert torch.allclose(lse2[row].double(), want_lse2, atol=1e-5, rtol=1e-5)
        untouched = sorted(set(range(rows * kv_heads)) - set(listed.tolist()))
        assert (out[untouched] == 7).all()
        assert (lse2[untouched] == 7).all()


@pytest.mark.gpu
@on_gpu
def test_advance_on_the_device_is_the_planners():
    entries = torch.zeros(40, 4, dtype=torch.int32)
    entries[:, 0] = torch.arange(40)
    tails = torch.tensor([NO_TAIL] * 200, dtype=torch.int32)
    growing = {0: (3, 3, 1, 2, 14), 7: (9, 1, 1, 0, 9), 9: (23, 3, 5, 7 << 8, 15), 199: (20, 2, 1, 0, 0)}
    for b, (entry, room, stride, rest, hi) in growing.items():
        tails[b] = torch.tensor((entry, room, stride))
        entries[entry, 1] = rest | hi << 16
    none = np.zeros(0, np.int32)
    want = PlanArrays(
        entries.numpy().copy(), none, none, (), none, none, none, 0, tails.numpy().copy(), 4, 16, 0, 0
    )
    on_device, tails_on_device = entries.cuda(), tails.cuda()
    step = torch.zeros(1, dtype=torch.int32, device="cuda")
    for n in range(40):
        assert int(step) == n
        advance.advance(on_device, tails_on_device, step, 16)
        advance_twin(want)
        assert np.array_equal(on_device.cpu().numpy(), want.entries)
        assert np.array_equal(tails_on_device.cpu().numpy(), want.tails)


@pytest.mark.gpu
@on_gpu
def test_a_captured_graph_replays_append_merge_and_advance():
    """Chained with overlapping launches, the results are those of launches one by one."""
    device = torch.device("cuda")
    rotary = rotary_of(128, "half", device, length=4000)
    positions, slots = torch.arange(32, device=device), 64 * torch.arange(32, device=device)
    plan = plan_append(positions, slots, rotary, 64)
    k, v = torch.randn(2, 32, 8, 128, device=device).bfloat16().unbind(0)
    kv_layer = empty_pages(32, 8, 64, 128, dtype=torch.bfloat16, device=device)
    lists = merge.MergeLists(
        torch.arange(32 * 8, dtype=torch.int32, device=device),
        torch.arange(0, 3 * 256 + 1, 3, dtype=torch.int32, device=device),
        torch.arange(3 * 256, dtype=torch.int32, device=device),
    )
    o_part = torch.randn(3 * 256, 4, 128, device=device)
    lse2_part = torch.randn(3 * 256, 4, device=device)
    out, lse2 = (
        torch.empty(32, 32, 128, dtype=torch.bfloat16, device=device),
        torch.empty(32, 32, device=device),
    )
    entries, tails = (
        torch.zeros(8, 4, dtype=torch.int32, device=device),
        torch.tensor([[0, 8, 1]], dtype=torch.int32, device=device),
    )
    step = torch.zeros(1, dtype=torch.int32, device=device)

    def body():
        for _ in range(3):
            plan.write(k, v, kv_layer)
            merge.merge_parts(lists, o_part, lse2_part, out, lse2)
        advance.advance(entries, tails, step, 64)
        slots.add_(1)
        positions.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        want = out.clone()
        out.zero_()
        for _ in range(9):
            graph.replay()
        stream.synchronize()
    assert int(step) == 10
    assert int(entries[0, 1]) == 10 << 16
    assert torch.equal(out, want)
    expected = torch.stack(
        [turned(k, torch.arange(32, device=device) + n, rotary, True) for n in range(10)], 2
    )
    close(kv_layer[:, 0, :, :10].contiguous(), expected.view(32, 8, 10, 128), torch.bfloat16)
    assert (kv_layer[:, :, :, 10:] == 0).all()


def test_alignment_is_the_largest_power_of_two_that_divides_all():
    x = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    base = x.data_ptr() % 16
    assert base == 0
    assert alignment(x) == 16
    assert alignment(x, 256 + 8) == 8
    assert alignment(x[:, :, 2:]) == 4
    assert alignment(x[:, :, 1:]) == 2
    assert alignment(torch.zeros(4, 6, 6, dtype=torch.bfloat16)) == 4


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_layout_holds_whole_pairs_and_whole_heads(dtype, pairing):
    for head_dim in (8, 20, 24, 64, 80, 96, 128, 256, 512):
        for rotary_dim in {0, 6, head_dim // 4 * 2, head_dim} - {n for n in (6,) if n > head_dim}:
            rotary = rotary_of(rotary_dim, pairing, "cpu", length=2)
            for bytes_aligned in (2, 4, 8, 16):
                if bytes_aligned < dtype.itemsize:
                    continue
                layout = head_layout(dtype, head_dim, rotary, bytes_aligned)
                if layout is None:
                    assert pairing == "interleaved"
                    assert rotary_dim
                    assert bytes_aligned < 2 * dtype.itemsize
                    continue
                assert layout.vec * dtype.itemsize <= bytes_aligned
                assert head_dim % layout.vec == 0
                assert rotary_dim % layout.vec == 0
                if layout.interleaved:
                    assert layout.vec % 2 == 0
                else:
                    assert (rotary_dim // 2) % layout.vec == 0
                assert 1 <= layout.lanes <= 32
    assert head_layout(torch.float64, 128, None) is None
    assert head_layout(torch.bfloat16, 1024, None) is None
