"""The implementations of `fused` on an NVIDIA GPU: the kit, shapes of models, and plans that advance by themselves.

Their twins on the CPU are test_fused_cpu.py, test_triton_kernels.py (interpreted) and test_planner.py.
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from dagengine_kernels import (
    AttentionShape,
    KernelError,
    SegmentTable,
    SequenceSegments,
    build_table,
    empty_pages,
)
from dagengine_kernels.conformance_cases import Pages, build_case, frequencies
from dagengine_kernels.errors import UNSUPPORTED
from dagengine_kernels.fused.backend import EXECUTORS, FusedBackend
from dagengine_kernels.reference import ReferenceBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

IMPLEMENTATIONS = ["cuda", "tilelang", "triton"]
SHAPES = {
    "Llama-3-8B": AttentionShape(32, 8, 128, 128**-0.5),
    "SmolLM2": AttentionShape(9, 3, 64, 0.125),
    "Qwen3-30B": AttentionShape(32, 4, 128, 128**-0.5),
    "one kv head": AttentionShape(8, 1, 128, 128**-0.5),
    "no groups": AttentionShape(4, 4, 64, 0.125),
    "five to one": AttentionShape(10, 2, 128, 128**-0.5),
    "window, cap": AttentionShape(8, 2, 128, 0.09, window=70, softcap=20.0),
}


def backend_of(implementation):
    """Skips only what says that it cannot run on this GPU."""
    with skip_what_cannot_run():
        return FusedBackend(implementation)


@contextmanager
def skip_what_cannot_run():
    try:
        yield
    except KernelError as error:
        if error.code != UNSUPPORTED:
            raise
        pytest.skip(str(error))


def batch(page_size, rows, seed=0, readers=12):
    """Readers of parts of three documents, each in an order and at deltas of its own, with own tokens behind."""
    pages = Pages(
        40 + 64 * readers * (1 + rows // page_size) // page_size * 3 + 900 // page_size * 3, page_size, seed
    )
    rng = torch.Generator().manual_seed(seed)
    documents = [pages.place(n, 17 * n, 0, in_order=False) for n in (300, 77, 150)]
    sequences = []
    for b in range(readers):
        view, extents = 0, []
        for which in torch.randperm(3, generator=rng).tolist()[: 1 + b % 3]:
            first = documents[which][0]
            shift = view - first[3]
            for page, lo, hi, stored, _ in documents[which]:
                extents.append((page, lo, hi, stored, shift))
                view += hi - lo
        own = rows if b % 2 else 1
        extents += pages.place(own, view, view)
        sequences.append(SequenceSegments(view, own, extents, b))
    return pages, sequences


def case_of(shape, pages, sequences, rotary):
    return build_case(
        sequences,
        pages,
        heads=(shape.num_heads, shape.num_kv_heads),
        head_dim=shape.head_dim,
        rotary=rotary,
        window=shape.window,
        softcap=shape.softcap,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_an_implementation_is_as_exact_as_its_dtype(implementation, dtype, page_size, shape, rows):
    backend = backend_of(implementation)
    pages, sequences = batch(page_size, rows)
    rotary = build_table(frequencies(shape.head_dim), 1.0, 16384)
    case = case_of(shape, pages, sequences, rotary)
    table = case.table
    with skip_what_cannot_run():
        plan = backend.plan(table, case.shape, rotary, device="cuda", dtype=dtype)
    q, kv = case.q.to("cuda", dtype), case.kv_layer.to("cuda", dtype)
    out, lse2 = backend.run(plan, 0, q, kv, return_lse=True)
    again, lse2_again = backend.run(plan, 0, q, kv, return_lse=True)
    truth = ReferenceBackend()
    exact = truth.plan(table, case.shape, rotary, device="cpu", dtype=torch.float64)
    want, want_lse2 = truth.run(exact, 0, q.double().cpu(), kv.double().cpu(), return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse2, lse2_again)
    assert float((out.double().cpu() - want).norm() / want.norm()) < (
        6e-3 if dtype == torch.bfloat16 else 1e-3
    )
    seen = torch.isfinite(want_lse2)
    assert torch.equal(torch.isfinite(lse2.cpu()), seen)
    assert float((lse2.cpu().double() - want_lse2)[seen].abs().max()) < 0.087
    assert backend.implementation.startswith(f"fused-{implementation}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("shape", ["Llama-3-8B", "one kv head", "no groups", "window, cap"])
@pytest.mark.parametrize("readers", [31, 90])
def test_readers_of_one_state_with_tails_of_their_own(implementation, page_size, shape, readers):
    """Tails lie in KV tiles with those of others, and query tiles that read the state are cut alike."""
    shape, backend = SHAPES[shape], backend_of(implementation)
    rng = torch.Generator().manual_seed(readers)
    pages = Pages(1000 // page_size + readers * (200 // page_size + 2), page_size, 0)
    state = pages.place(900, 0, 0, in_order=False)
    sequences = []
    for b in range(readers):
        own = int(torch.randint(1, 190, (1,), generator=rng))
        extents = [*state, *pages.place(own, 900, 900)]
        sequences.append(SequenceSegments(900 + own - 1, 1, extents, b))
    rotary = build_table(frequencies(shape.head_dim), 1.0, 4096)
    case = case_of(shape, pages, sequences, rotary)
    q, kv = case.q.to("cuda", torch.bfloat16), case.kv_layer.to("cuda", torch.bfloat16)
    with skip_what_cannot_run():
        plan = backend.plan(case.table, case.shape, rotary, device="cuda", dtype=torch.bfloat16)
    out, lse2 = backend.run(plan, 0, q, kv, return_lse=True)
    truth = ReferenceBackend()
    exact = truth.plan(case.table, case.shape, rotary, device="cpu", dtype=torch.float64)
    want, want_lse2 = truth.run(exact, 0, q.double().cpu(), kv.double().cpu(), return_lse=True)
    error = (out.double().cpu() - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(error.max()) < 3e-2 and float(error.mean()) < 6e-3
    assert float((lse2.cpu().double() - want_lse2).abs().max()) < 0.087


@pytest.mark.parametrize("window", [None, 100, 2**31 - 60])
@pytest.mark.parametrize("page_size", [16, 64])
def test_rows_at_the_last_positions_see_the_first_tokens(page_size, window):
    """Where nothing turns, positions go up to 2**31 - 1."""
    far = 2**31 - 2
    pages = Pages(24, page_size, 0)
    first = pages.place(page_size + 5, 0, 0)
    sequences = [
        SequenceSegments(far - b, 1, [*first, *pages.place(3, far - 5, far - 5)], b) for b in range(3)
    ]
    case = build_case(sequences, pages, heads=(8, 2), head_dim=128, rotary=None, window=window)
    backend = backend_of("cuda")
    with skip_what_cannot_run():
        plan = backend.plan(case.table, case.shape, None, device="cuda", dtype=torch.bfloat16)
    out = backend.run(plan, 0, case.q.to("cuda", torch.bfloat16), case.kv_layer.to("cuda", torch.bfloat16))
    truth = ReferenceBackend()
    exact = truth.plan(case.table, case.shape, None, device="cpu", dtype=torch.float64)
    want = truth.run(exact, 0, case.q.double(), case.kv_layer.double())
    assert float((out.double().cpu() - want).norm() / want.norm()) < 6e-3


def test_a_plan_advances_inside_a_graph():
    """Captured once, replayed for 70 steps: what a fresh plan of each step gives. What is not written yet is NaN."""
    shape = AttentionShape(8, 2, 128, 128**-0.5)
    rotary = build_table(frequencies(128), 1.0, 4096)
    size, backend = 64, backend_of("cuda")
    shared = [(p, 0, size, p * size, 100) for p in range(5)]
    tails = [(20 + 4 * b, [21 + 4 * b, 22 + 4 * b]) for b in range(6)]
    starts = [420, 430, 450, 470, 421, 482]

    def table_of(step):
        sequences = []
        for b, ((page, more), start) in enumerate(zip(tails, starts, strict=True)):
            count, extents = 5 + 7 * b + step, [*shared]
            for i, own in enumerate((page, *more)):
                if count > i * size:
                    extents.append((own, 0, min(count - i * size, size), start + i * size, 0))
            sequences.append(SequenceSegments(start + count - 1, 1, extents, b))
        return SegmentTable.from_sequences(sequences, page_size=size, num_pages=48)

    cells = torch.randn(48, 2, 2, size, 128, device="cuda").bfloat16()
    kv = torch.full_like(cells, math.nan)

    def write(table):
        for page, lo, hi, _, _ in table.extents.tolist():
            kv[page, :, :, lo:hi] = cells[page, :, :, lo:hi]

    q = torch.randn(6, 8, 128, device="cuda").bfloat16()
    first = table_of(0)
    write(first)
    torch.cuda.synchronize()
    reserve = [more for _, more in tails]
    with skip_what_cannot_run():
        plan = backend.plan(first, shape, rotary, device="cuda", dtype=torch.bfloat16, reserve=reserve)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.run(plan, 0, q, kv)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = backend.run(plan, 0, q, kv)
            backend.advance(plan)
    fresh = backend_of("cuda")
    for step in range(70):
        write(table_of(step))
        graph.replay()
        stream.synchronize()
        now = fresh.plan(table_of(step), shape, rotary, device="cuda", dtype=torch.bfloat16)
        want = fresh.run(now, 0, q, kv)
        assert torch.allclose(out.float(), want.float(), atol=2e-2, rtol=2e-2), step


def test_what_runs_is_named_and_what_cannot_run_is_refused():
    backend = FusedBackend()
    table = SegmentTable.from_sequences(
        [SequenceSegments(3, 1, [(0, 0, 4, 0, 0)])], page_size=64, num_pages=1
    )
    shape = AttentionShape(4, 2, 128, 0.1)
    kv = empty_pages(1, 2, 64, 128, dtype=torch.bfloat16, device="cuda")
    plan = backend.plan(table, shape, None, device="cuda", dtype=torch.bfloat16)
    backend.run(plan, 0, torch.zeros(1, 4, 128, dtype=torch.bfloat16, device="cuda"), kv)
    assert plan.executor in EXECUTORS and backend.implementation.startswith(f"fused-{plan.executor}")
    named = backend_of("cuda")
    with pytest.raises(KernelError) as refused:
        named.plan(replace(table, page_size=32), shape, None, device="cuda", dtype=torch.bfloat16)
    assert (refused.value.code, refused.value.field) == (UNSUPPORTED, "page_size")
