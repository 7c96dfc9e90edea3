"""Triton's merge and append against their torch versions, and the cutting of works into pieces."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from dagengine_kernels import KernelError, append_kv, build_table, empty_pages
from dagengine_kernels.append import HeadNorm
from dagengine_kernels.conformance_cases import frequencies, random_case
from dagengine_kernels.fused.plan import INVISIBLE, PlanParameters
from dagengine_kernels.fused.planner import plan_table
from dagengine_kernels.fused.triton.append import append
from dagengine_kernels.fused.triton.merge import merge
from dagengine_kernels.fused.triton.pieces import RAGGED, SEEN, WHOLE, cut_works, one_delta_each
from dagengine_kernels.lse import apply_sinks, merge_many

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("sinks", [False, True])
def test_merge_is_that_of_torch(sinks):
    """Rows with none, one and more parts than are loaded at once; parts that saw nothing hold NaN."""
    torch.manual_seed(0)
    heads, group, dim, counts = 2, 3, 24, (0, 1, 3, 9)
    o_part, lse2_part = torch.randn(16, group, dim), torch.randn(16, group) * 20
    lse2_part[torch.rand(16, group) < 0.3] = -torch.inf
    o_part[lse2_part == -torch.inf] = torch.nan
    parts, indptr = torch.randperm(13), torch.tensor([0, *np.cumsum(counts)])
    rows = torch.tensor([0, 3, 4, 7])
    logits = torch.randn(heads * group) if sinks else None
    out, lse2 = torch.full((4, heads * group, dim), 7.0), torch.full((4, heads * group), 7.0)
    on_device = [x.to(DEVICE) for x in (o_part, lse2_part, rows.int(), indptr.int(), parts.int(), out, lse2)]
    merge[(4, group)](
        *on_device,
        logits if logits is None else logits.to(DEVICE),
        HKV=heads,
        GROUP=group,
        D=dim,
        BLOCK_D=32,
        PARTS=4,
    )
    have, have_lse2 = (x.cpu() for x in on_device[5:])
    for j, key in enumerate(rows.tolist()):
        row, at = key // heads, slice(key % heads * group, (key % heads + 1) * group)
        mine = parts[indptr[j] : indptr[j + 1]]
        want, want_lse2 = merge_many(o_part[mine], lse2_part[mine])
        if logits is not None:
            want, want_lse2 = (x[0] for x in apply_sinks(want[None], want_lse2[None], logits[at]))
        assert torch.allclose(have[row, at], want, atol=1e-6)
        assert torch.allclose(have_lse2[row, at], want_lse2, atol=1e-5)
        have[row, at], have_lse2[row, at] = 7.0, 7.0
    assert (have == 7).all(), "a row was written that is not merged"
    assert (have_lse2 == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "pairing", "page_size", "normed"),
    [
        (32, 32, "half", 16, True),
        (24, 24, "interleaved", 3, True),
        (24, 12, "half", 16, False),
        (16, 0, "half", 1, False),
    ],
)
def test_append_is_that_of_torch(dtype, head_dim, rotary_dim, pairing, page_size, normed):
    torch.manual_seed(0)
    tokens, heads, pages = 21, 2, 30
    rotary = (
        build_table(frequencies(rotary_dim), 1.1, 100, pairing=pairing, device=DEVICE) if rotary_dim else None
    )
    k, v = torch.randn(2, tokens, heads, head_dim, device=DEVICE).to(dtype)
    k = torch.cat((k, k), 1)[:, :heads]
    positions = torch.randint(0, 100, (tokens,), device=DEVICE)
    slots = torch.randperm(pages * page_size)[:tokens].to(DEVICE)
    slots[4::7] = -1
    norm = HeadNorm(torch.rand(head_dim, device=DEVICE), 1e-6) if normed else None
    have = torch.full_like(
        empty_pages(pages, heads, page_size, head_dim, dtype=dtype, device=DEVICE), torch.nan
    )
    want = have.clone()
    append(k, v, positions, slots, rotary, have, k_norm=norm)
    append_kv(k.float() if norm is None else norm(k), v.float(), positions, slots, rotary, want)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert torch.allclose(have.float(), want.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(have[:, 1].nan_to_num(7.0), want[:, 1].nan_to_num(7.0))


def test_append_refuses_what_does_not_fit():
    kv_layer = empty_pages(2, 1, 4, 16)
    k, three = torch.zeros(2, 1, 16), torch.arange(3)
    for field, arguments in (
        ("k", (k, k[:1], three[:2], three[:2], None, kv_layer)),
        ("slots", (k, k, three[:2], three, None, kv_layer)),
        ("kv_layer", (k, k, three[:2], three[:2], None, kv_layer.expand(2, 2, 1, 4, 16)[:, :, :, ::2])),
        ("rotary_dim", (k, k, three[:2], three[:2], build_table(frequencies(32), 1.0, 9), kv_layer)),
    ):
        with pytest.raises(KernelError) as refused:
            append(*arguments)
        assert refused.value.field == field
    append(k[:0], k[:0], three[:0], three[:0], None, kv_layer)
    assert not kv_layer.any()


def cuts(seed):
    """A random case's plan, and its works in pieces."""
    case = random_case(seed)
    table, group, window = case.table, case.shape.group, case.shape.window
    parameters = PlanParameters(
        group, case.shape.num_kv_heads, (8, 24), (3, 3), max(1, 64 // table.page_size), window, min_chunk=1
    )
    arrays = plan_table(table, parameters)
    positions = table.q_positions.astype(np.int32)
    for tiles in arrays.classes:
        cut = cut_works(arrays, tiles, positions, group=group, window=window)
        yield arrays, tiles, positions, window, cut


@pytest.mark.parametrize("seed", range(25))
def test_pieces_cover_works_and_their_kinds_are_true(seed):
    for arrays, tiles, positions, window, cut in cuts(seed):
        want = sorted(map(tuple, tiles.works.tolist()))
        have = []
        entries = arrays.entries.reshape(-1, arrays.boxes, 4)
        for tile, head, first, last, part in cut.works.tolist():
            mine = cut.pieces[first:last].tolist()
            have.append((tile, head, mine[0][2], mine[-1][3], part))
            assert all(a[3] == b[2] for a, b in pairwise(mine))
            for delta, vec, begin, end, kind, _ in mine:
                rows = tiles.tile_rows[tile]
                seen_at = [delta if vec < 0 else arrays.deltas[vec + i] for i in range((rows >= 0).sum())]
                for kv_tile in range(begin, end):
                    assert {tuple(arrays.runs[e[3]]) for e in entries[kv_tile]} == {(delta, vec)}
                    pages, packed, pos0, _ = entries[kv_tile].T
                    full = ((packed == arrays.page_size << 16) & (pages >= 0)).all()
                    stored = [p + r for p in pos0.tolist() for r in range(arrays.page_size)]
                    sees = all(
                        d != INVISIBLE
                        and max(stored) <= positions[row] - d
                        and (window is None or min(stored) > positions[row] - d - window)
                        for row, d in zip(rows.tolist(), seen_at, strict=False)
                    )
                    assert kind == (RAGGED if not full else SEEN if sees else WHOLE)
        assert sorted(have) == want


@pytest.mark.parametrize("seed", range(25))
def test_pieces_of_one_delta_show_each_slot_what_it_saw(seed):
    def seen(cut, slots):
        """(work, slot) -> what it sees at which delta, as often as it does."""
        found = {}
        for w, (_, _, first, last, _) in enumerate(cut.works.tolist()):
            for delta, vec, begin, end, _, _ in cut.pieces[first:last].tolist():
                for slot in range(slots):
                    own = delta if vec < 0 else int(cut.deltas[vec + slot])
                    if own != INVISIBLE:
                        found.setdefault((w, slot), []).extend((t, own) for t in range(begin, end))
        return {key: sorted(value) for key, value in found.items()}

    for _, tiles, _, _, cut in cuts(seed):
        slots = tiles.tile_rows.shape[1]
        split = one_delta_each(cut, slots)
        for delta, vec, *_ in split.pieces.tolist():
            if vec >= 0:
                assert set(split.deltas[vec : vec + slots].tolist()) <= {delta, INVISIBLE}
        assert seen(split, slots) == seen(cut, slots)
