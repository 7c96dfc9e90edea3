"""What only `segmented` and `packed` promise: bounded temporaries, reads in place, caches given back."""

import math
from dataclasses import replace

import pytest
import torch

from dagengine_kernels import AttentionShape, SegmentTable, SequenceSegments, build_table, get_backend
from dagengine_kernels.conformance_cases import frequencies
from dagengine_kernels.segmented_plan import Call, SlabCall
from dagengine_kernels.tiling import MAX_CALL

SHAPE = AttentionShape(3, 1, 16, 0.25)
ROTARY = build_table(frequencies(16), 1.0, 65536)


def decode(num_sequences: int, tokens: int, page_size: int, deltas: bool = False) -> SegmentTable:
    per = -(-tokens // page_size)
    sequences = []
    for s in range(num_sequences):
        extents = []
        for i in range(per):
            stored, delta = i * page_size, 3 * s if deltas else 0
            extents.append((s * per + i, 0, min(page_size, tokens - stored), stored, delta))
        sequences.append(SequenceSegments(tokens + 3 * s, 1, extents, s))
    return SegmentTable.from_sequences(sequences, page_size=page_size, num_pages=num_sequences * per)


def plan(backend, table, shape=SHAPE):
    return backend.plan(table, shape, ROTARY, device="cpu", dtype=torch.float32)


def test_decode_rows_share_one_call():
    (tiles,) = plan(get_backend("segmented"), decode(16, 200, 16)).classes
    assert [type(call) for call in tiles.calls] == [Call]
    assert tiles.merge is None


def test_long_decode_contexts_are_read_in_place():
    backend = get_backend("segmented")
    table = decode(2, 64 * 40 + 5, 64)
    planned = plan(backend, table)
    assert any(isinstance(call, SlabCall) for call in planned.classes[0].calls)
    kv_layer = torch.randn(table.num_pages, 2, 1, 64, 16)
    backend.run(planned, 0, torch.randn(2, 3, 16), kv_layer)
    assert backend.temp_bytes < kv_layer.nbytes / 8


@pytest.mark.parametrize("rows", [1, 100])
def test_temporaries_do_not_grow_with_the_context(rows):
    backend = get_backend("segmented")
    sizes = []
    for tokens in (3 * MAX_CALL, 9 * MAX_CALL):
        extents = [(i, 0, 16, 16 * i, 0) for i in range(tokens // 16)]
        table = SegmentTable.from_sequences(
            [SequenceSegments(tokens - 1, rows, extents)], page_size=16, num_pages=tokens // 16
        )
        kv_layer = torch.randn(table.num_pages, 2, 1, 16, 16)
        backend.reset_stats()
        backend.run(plan(backend, table), 0, torch.randn(rows, 3, 16), kv_layer)
        sizes.append(backend.temp_bytes)
    assert sizes[1] < 1.1 * sizes[0]
    assert sizes[1] < kv_layer.nbytes / 2


def test_own_tokens_of_a_long_chunk_go_through_the_causal_kernel():
    extents = [(i, 0, 16, 16 * i, 0) for i in range(20)]
    table = SegmentTable.from_sequences([SequenceSegments(120, 200, extents)], page_size=16, num_pages=20)
    (stream,) = plan(get_backend("segmented"), table).streams
    calls = [call for _, calls in stream.tiles for call in calls]
    assert [call.causal for call in calls] == [False, True]
    assert all(call.mask is None for call in calls)


def test_a_float32_query_reads_bf16_pages():
    table = decode(3, 40, 16, deltas=True)
    kv_layer = torch.randn(table.num_pages, 2, 1, 16, 16).bfloat16()
    q = torch.randn(3, 3, 16)
    want = None
    for name in ("reference", "segmented", "packed", "naive", "fused"):
        backend = get_backend(name)
        out = backend.run(plan(backend, table), 0, q, kv_layer)
        assert out.dtype == torch.float32
        want = out if want is None else want
        tolerance = 1e-5 if name in ("segmented", "fused") else 2e-2
        assert math.isclose(float((out - want).norm() / want.norm()), 0, abs_tol=tolerance)


@pytest.mark.parametrize("name", ["reference", "segmented", "packed", "naive", "fused"])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_queries_may_be_a_slice_of_a_fused_projection(name, rows):
    extents = [(i, 0, 16, 16 * i, 0) for i in range(10)]
    table = SegmentTable.from_sequences([SequenceSegments(60, rows, extents)], page_size=16, num_pages=10)
    kv_layer = torch.randn(10, 2, 1, 16, 16)
    q = torch.randn(rows, 5 * 16)[:, 16:64].view(rows, 3, 16)
    backend = get_backend(name)
    planned = plan(backend, table)
    assert torch.equal(
        backend.run(planned, 0, q, kv_layer), backend.run(planned, 0, q.contiguous(), kv_layer)
    )


def test_packed_keeps_static_tokens_until_forgotten():
    backend = get_backend("packed")
    table = decode(2, 40, 16)
    static = replace(table, static_extents=table.static_extents + 2)
    kv_layer = torch.randn(table.num_pages, 2, 1, 16, 16)
    q = torch.randn(2, 3, 16)
    first = backend.run(plan(backend, static), 0, q, kv_layer)
    held = backend.cached_bytes
    assert held > 0
    kv_layer[0] = 1e6
    assert torch.equal(backend.run(plan(backend, static), 0, q, kv_layer), first)
    backend.forget(0)
    assert 0 < backend.cached_bytes < held
    changed = backend.run(plan(backend, static), 0, q, kv_layer)
    assert not torch.equal(changed[0], first[0])
    assert torch.equal(changed[1], first[1])
    backend.forget(0)
    backend.forget(1)
    assert backend.cached_bytes == 0
