"""Captured graphs and plans in slots on an NVIDIA GPU. The twin on the CPU is test_plan_slots.py."""

from __future__ import annotations

import pytest
import torch

from dagengine_kernels import (
    AttentionShape,
    KernelError,
    SegmentTable,
    SequenceSegments,
    build_table,
    plan_append,
)
from dagengine_kernels.conformance_cases import frequencies
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.fused.cuda.slot import PlanSlot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CAPACITY = 16
SIZE = 64
PAGES = 400
SHAPES = {
    "Llama-3-8B": AttentionShape(32, 8, 128, 128**-0.5),
    "window": AttentionShape(8, 2, 64, 0.125, window=150),
}


class Bench:
    """Pages of random K and V, a slot, and graphs by what they depend on."""

    def __init__(self, shape, least=4096):
        self.shape = shape
        self.backend = FusedBackend("cuda")
        self.slot = PlanSlot(torch.device("cuda"), least=least)
        self.rotary = build_table(frequencies(shape.head_dim), 1.0, 32768)
        generator = torch.Generator("cuda").manual_seed(0)
        dims = (shape.num_kv_heads, SIZE, shape.head_dim)
        self.kv = torch.randn(PAGES, 2, *dims, device="cuda", generator=generator).bfloat16()
        self.q = torch.randn(
            CAPACITY, shape.num_heads, shape.head_dim, device="cuda", generator=generator
        ).bfloat16()
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs = {}
        self.replays = {}
        torch.cuda.synchronize()

    def plan(self, table, **options):
        try:
            return self.backend.plan(
                table, self.shape, self.rotary, device="cuda", dtype=torch.bfloat16, **options
            )
        except KernelError as error:
            if error.code != UNSUPPORTED:
                raise
            pytest.skip(str(error))

    def body(self, plan, advances):
        out, lse2 = self.backend.run(plan, 0, self.q, self.kv, return_lse=True)
        if advances:
            self.backend.advance(plan)
        return out, lse2

    def step(self, plan, advances=False):
        """out [CAPACITY, Hq, D] and lse2 of a replay; it is captured with this plan if no graph of its key is there."""
        found = self.graphs.get((plan.graph_key, advances))
        with torch.cuda.stream(self.stream):
            if found is None:
                self.body(plan, False)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream, pool=self.pool):
                    out = self.body(plan, advances)
                found = self.graphs[plan.graph_key, advances] = (graph, *out)
            graph, out, lse2 = found
            out.fill_(7.0)
            graph.replay()
        self.replays[plan.graph_key] = self.replays.get(plan.graph_key, 0) + 1
        self.stream.synchronize()
        return out, lse2

    def fresh(self, table):
        rows = table.num_rows
        return self.backend.run(self.plan(table), 0, self.q[:rows].contiguous(), self.kv, return_lse=True)


def table_of(seed, readers, longest):
    """Readers of a shared document, each from its own delta, with own tokens behind, of very different lengths."""
    rng = torch.Generator().manual_seed(seed)
    page, sequences = 8, []
    for b in range(readers):
        extents = [(p, 0, SIZE, p * SIZE, 7 * b) for p in range(b % 3, 8)]
        start = 8 * SIZE + 7 * b
        count = int(torch.randint(1, longest, (1,), generator=rng))
        for at in range(0, count, SIZE):
            extents.append((page, 0, min(SIZE, count - at), start + at, 0))
            page += 1
        sequences.append(SequenceSegments(start + count - 1, 1, extents, b))
    return SegmentTable.from_sequences(sequences, page_size=SIZE, num_pages=PAGES)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_graph_of_one_plan_runs_the_others_of_its_key(shape):
    bench = Bench(shape)
    tables = [
        table_of(seed, readers, longest)
        for seed, (readers, longest) in enumerate(
            [(9, 500), (16, 900), (12, 100), (10, 1200), (1, 2000), (1, 700), (16, 20), (13, 900), (11, 700)]
        )
    ]
    with torch.cuda.stream(bench.stream):
        plans_and_results = []
        for table in tables:
            plan = bench.plan(table, slot=bench.slot)
            out, lse2 = bench.step(plan)
            plans_and_results.append((table, out[: table.num_rows].clone(), lse2[: table.num_rows].clone()))
            assert (out[table.num_rows :] == 7).all(), "a row that is in no plan was written"
    bench.stream.synchronize()
    for table, out, lse2 in plans_and_results:
        want, want_lse2 = bench.fresh(table)
        assert torch.equal(out, want)
        assert torch.equal(lse2, want_lse2)
    assert len(bench.graphs) < len(tables)
    assert max(bench.replays.values()) >= 3, "no graph was shared: the test would show nothing"


def test_growth_makes_another_key_and_the_new_graph_is_right():
    bench = Bench(SHAPES["Llama-3-8B"], least=64)
    keys = []
    for seed, (readers, longest) in enumerate([(2, 60), (16, 900), (2, 60)]):
        table = table_of(seed, readers, longest)
        with torch.cuda.stream(bench.stream):
            plan = bench.plan(table, slot=bench.slot)
        out, _ = bench.step(plan)
        want, _ = bench.fresh(table)
        assert torch.equal(out[:readers], want)
        keys.append(plan.graph_key)
    assert len(set(keys)) == 3


def growing(step, starts, first, pages, shared=5):
    """Decode step `step` of sequences with `first[b]` own tokens at step 0, in `pages[b]`, behind a shared document."""
    sequences = []
    for b, (start, count, own) in enumerate(zip(starts, first, pages, strict=True)):
        extents = [(p, 0, SIZE, p * SIZE, 100) for p in range(shared)]
        for i, page in enumerate(own):
            rows = min(count + step - i * SIZE, SIZE)
            if rows > 0:
                extents.append((page, 0, rows, start + i * SIZE, 0))
        sequences.append(SequenceSegments(start + count + step - 1, 1, extents, b))
    return SegmentTable.from_sequences(sequences, page_size=SIZE, num_pages=PAGES)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_plan_in_a_slot_advances_inside_its_graph_between_other_plans(shape):
    """70 steps with the sequences crossing pages; before the last ten another batch takes the slot for a step."""
    bench = Bench(shape)
    starts, first = [420, 430, 450, 470, 421, 482], [5 + 9 * b for b in range(6)]
    pages = [[20 + 4 * b + i for i in range(3)] for b in range(6)]

    def plan_from(step):
        reserve = [own[-(-(count + step) // SIZE) :] for count, own in zip(first, pages, strict=True)]
        with torch.cuda.stream(bench.stream):
            return bench.plan(growing(step, starts, first, pages), slot=bench.slot, reserve=reserve)

    plan = plan_from(0)
    for step in range(70):
        if step == 60:
            other = table_of(step, 7, 300)
            with torch.cuda.stream(bench.stream):
                between = bench.plan(other, slot=bench.slot)
            out, _ = bench.step(between, advances=True)
            assert torch.equal(out[:7], bench.fresh(other)[0])
            with pytest.raises(KernelError, match="another plan"):
                bench.backend.run(plan, 0, bench.q, bench.kv)
            plan = plan_from(step)
        out, _ = bench.step(plan, advances=True)
        want, _ = bench.fresh(growing(step, starts, first, pages))
        assert torch.allclose(out[:6].float(), want.float(), atol=2e-2, rtol=2e-2), step
        assert (out[6:] == 7).all()


@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.float32], ids=["kernel", "torch"])
def test_captured_append_passes_over_negative_slots(page_dtype):
    """The slots change between replays. Pages of another dtype than K and V are torch's to write."""
    k, v = torch.randn(2, 6, 2, 64, device="cuda").bfloat16().unbind(0)
    slots = torch.full((6,), -1, device="cuda")
    positions = torch.arange(6, device="cuda")
    pages = torch.full((4, 2, 2, SIZE, 64), 9.0, device="cuda", dtype=page_dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan_append(positions, slots, None, SIZE).write(k, v, pages)
        assert (pages == 9).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            plan_append(positions, slots, None, SIZE).write(k, v, pages)
        want = pages.clone()
        for listed in ([3, -1, 70, -1, 200, -1], [-1] * 6, [-1, 3, 0, 255, 71, 69], [0, 1, 2, 3, 4, 5]):
            slots.copy_(torch.tensor(listed))
            graph.replay()
            for row, slot in enumerate(listed):
                if slot >= 0:
                    want[slot // SIZE, 0, :, slot % SIZE] = k[row].to(page_dtype)
                    want[slot // SIZE, 1, :, slot % SIZE] = v[row].to(page_dtype)
            assert torch.equal(pages, want)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_settled_layers_see_the_rows_that_were_just_appended(rows):
    """Product, append and attention of several layers overlap in a graph; the same one by one gives the same bits."""
    bench = Bench(SHAPES["Llama-3-8B"])
    table = table_of(rows, rows, 900)
    layers = []
    for layer in range(4):
        generator = torch.Generator("cuda").manual_seed(layer)
        weight = torch.randn(6144, 4096, device="cuda", generator=generator).mul(1 / 64).bfloat16()
        out = torch.randn(4096, 4096, device="cuda", generator=generator).mul(1 / 64).bfloat16()
        layers.append((CudaLinear(weight), CudaLinear(out), bench.kv + 0.01 * layer))
    ends = table.extents[table.extent_indptr[1:] - 1].tolist()
    slots = torch.tensor([page * SIZE + hi - 1 for page, _, hi, *_ in ends], device="cuda")
    positions = torch.tensor(table.q_positions.tolist(), device="cuda")
    torch.cuda.synchronize()

    def forward(x, plan, settled):
        for qkv, out, kv in layers:
            write = plan_append(positions, slots, bench.rotary, SIZE, settled=settled)
            q, k, v = qkv(x).split([4096, 1024, 1024], dim=-1)
            q = write.write(k.view(rows, 8, 128), v.view(rows, 8, 128), kv, q=q.view(rows, 32, 128))
            x = out(bench.backend.run(plan, 0, q, kv).view(rows, 4096))
            if not settled:
                torch.cuda.synchronize()
        return x

    inputs = [torch.randn(rows, 4096, device="cuda").bfloat16() for _ in range(30)]
    want = [forward(x, bench.plan(table), False).clone() for x in inputs]
    x = torch.zeros_like(inputs[0])
    with torch.cuda.stream(bench.stream):
        plan = bench.plan(table, slot=bench.slot, settled=True)
        forward(x + 0, plan, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=bench.stream, pool=bench.pool):
            y = forward(x + 0, plan, True)
        for given, right in zip(inputs, want, strict=True):
            x.copy_(given)
            graph.replay()
            assert torch.equal(y, right)
    bench.stream.synchronize()


def test_settled_is_for_one_row_per_sequence():
    bench = Bench(SHAPES["window"])
    two = SegmentTable.from_sequences(
        [SequenceSegments(8, 2, [(0, 0, 10, 0, 0)], 0)], page_size=SIZE, num_pages=PAGES
    )
    with pytest.raises(KernelError) as error:
        bench.plan(two, settled=True)
    assert error.value.code == INVALID_ARGUMENT and error.value.field == "settled"
