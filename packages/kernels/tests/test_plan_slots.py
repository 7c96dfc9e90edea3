"""Uploads that the host does not wait for, and memory that plans take turns in. On a GPU: test_gpu_plan_slots.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dagengine_kernels import AttentionShape, KernelError, SegmentTable, SequenceSegments, plan_append
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED
from dagengine_kernels.fused import planner
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.fused.cuda import attend
from dagengine_kernels.fused.cuda.slot import LEAST, PADDING, PlanSlot
from dagengine_kernels.fused.executor import FusedPlan
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.staging import Staging

CPU = torch.device("cpu")
SIZE = 16
SHAPE = AttentionShape(8, 2, 64, 0.125)
UNEVEN = [900, 40, 40, 40, 40]
"""Own tokens of sequences one of which is cut."""


class FakeEvents:
    """Events that say when they are recorded and waited for."""

    def __init__(self):
        self.log = []
        self.made = 0

    def make(self):
        number = self.made
        self.made += 1
        log = self.log

        class Event:
            def record(self, stream):
                log.append(("record", number))

            def synchronize(self):
                log.append(("wait", number))

        return Event()


def test_a_buffer_is_filled_again_only_after_the_copy_from_it():
    events = FakeEvents()
    staging = Staging(CPU, buffers=2, make_event=events.make)
    addresses = []
    for value in range(5):
        host = staging.take(8)
        addresses.append(host.ctypes.data)
        host[:] = value
        to = torch.zeros(8, dtype=torch.int32)
        staging.send(to)
        assert to.tolist() == [value] * 8
    assert addresses[0] == addresses[2] == addresses[4] != addresses[1] == addresses[3]
    assert events.log == [
        ("record", 0),
        ("record", 1),
        ("wait", 0),
        ("record", 0),
        ("wait", 1),
        ("record", 1),
        ("wait", 0),
        ("record", 0),
    ]


def test_a_buffer_grows_and_a_target_that_does_not_fit_is_refused():
    staging = Staging(CPU, torch.int64, buffers=1)
    staging.take(10)[:] = 7
    for wrong in (torch.zeros(9, dtype=torch.int64), torch.zeros(10, dtype=torch.int32)):
        with pytest.raises(KernelError) as refused:
            staging.send(wrong)
        assert (refused.value.code, refused.value.field) == (INVALID_ARGUMENT, "to")
    host = staging.take(100_000)
    host[:] = np.arange(100_000)
    to = torch.zeros(100_000, dtype=torch.int64)
    staging.send(to)
    assert torch.equal(to, torch.arange(100_000))


def ints(*values):
    return np.array(values, np.int32)


def test_a_slot_keeps_its_addresses_until_a_list_outgrows_its_room():
    slot = PlanSlot(CPU, least=8)
    slot.load({"a": (ints(1, 2, 3), 5), "b": (ints(), 0), "c": (ints(9), 1)}, 3, 2, 4)
    first = [slot.address(name) for name in "abc"], slot.o_part.data_ptr()
    assert slot.ints("a", 5).tolist() == [1, 2, 3, PADDING, PADDING]
    assert all(address % 16 == first[0][0] % 16 for address in first[0])
    generation = slot.generation
    slot.kept["made of addresses"] = first
    slot.load({"a": (ints(*range(8)), 8), "b": (ints(4), 1), "c": (ints(5), 1)}, 8, 2, 4)
    assert ([slot.address(name) for name in "abc"], slot.o_part.data_ptr()) == first
    assert (slot.generation, slot.loads) == (generation, 2)
    assert slot.ints("a", 8).tolist() == list(range(8)) and slot.ints("b", 1).tolist() == [4]
    slot.load({"a": (ints(*range(9)), 9), "b": (ints(), 0), "c": (ints(6), 1)}, 8, 2, 4)
    assert slot.generation > generation and not slot.kept
    assert slot.ints("a", 9).tolist() == list(range(9)) and slot.ints("c", 1).tolist() == [6]
    grown = slot.generation
    slot.load({"a": (ints(*range(16)), 16), "b": (ints(), 0), "c": (ints(6), 1)}, 8, 2, 4)
    assert slot.generation == grown, "room doubles"
    slot.load({"a": (ints(), 0), "b": (ints(), 0), "c": (ints(6), 1)}, 16, 2, 4)
    assert slot.generation == grown and len(slot.o_part) == 16, "partial results have twice the room"
    slot.load({"a": (ints(), 0), "b": (ints(), 0), "c": (ints(6), 1)}, 17, 2, 4)
    assert slot.generation > grown and len(slot.o_part) == 32, "the scratch grows too"


def test_a_slot_of_one_plan_has_just_its_size():
    slot = PlanSlot(CPU, least=0)
    slot.load({"a": (ints(1, 2, 3), 3), "b": (ints(5), 1)}, 7, 2, 4)
    assert slot.o_part.shape == (7, 2, 4) and slot.lse2_part.shape == (7, 2)
    assert slot.address("b") - slot.address("a") == 16


def table(lengths, rows=1, shared=2):
    """Sequences that share pages and have own ones behind, each with `rows` query rows at its end."""
    sequences, page = [], shared
    for b, length in enumerate(lengths):
        extents = [(p, 0, SIZE, p * SIZE, 5) for p in range(shared)]
        start = shared * SIZE + 5
        for at in range(0, length, SIZE):
            extents.append((page, 0, min(SIZE, length - at), start + at, 0))
            page += 1
        sequences.append(SequenceSegments(start + length - rows, rows, extents, b))
    return SegmentTable.from_sequences(sequences, page_size=SIZE, num_pages=page + 1)


class FakeKernel:
    def __init__(self, name):
        self.name = name

    def prepare(self, *layout, **options):
        return None


@pytest.fixture
def load(monkeypatch):
    """Plans as on a small GPU, loaded into a slot in the CPU's memory; kernels are not compiled."""
    made = {}
    monkeypatch.setattr(
        attend.driver,
        "kernel",
        lambda source, name, macros, device=None: made.setdefault(
            str(sorted(macros.items())), FakeKernel(name)
        ),
    )
    monkeypatch.setattr(attend, "prepare", lambda device: None)
    executor = attend.CudaExecutor()

    def load(slot, lengths, rows=1, shared=2, workers=6, min_chunk=2):
        batch = table(lengths, rows, shared)
        parameters = PlanParameters(
            group=SHAPE.group,
            num_kv_heads=SHAPE.num_kv_heads,
            rows_per_tile=(64, 128),
            workers=(2 * workers, workers),
            boxes=4,
            min_chunk=min_chunk,
        )
        reserve = [[] for _ in lengths]
        arrays = planner.plan_table(batch, parameters, reserve=reserve)
        plan = FusedPlan(
            "fused", batch, SHAPE, None, CPU, torch.bfloat16, arrays, "cuda", maker=executor, slot=slot
        )
        executor.load(plan)
        return plan

    return load


def read(slot, plan):
    """The plan's lists as they lie in the slot."""
    found = {name: slot.ints(name, getattr(plan.arrays, name).size) for name in ("entries", "runs", "deltas")}
    found["tails"] = slot.ints("tails", plan.arrays.tails.size)
    for c in plan.arrays.classes:
        found[f"work_indptr{c.rows_per_tile}"] = slot.ints(
            f"work_indptr{c.rows_per_tile}", len(c.work_indptr)
        )
    return found


def test_plans_of_one_key_share_their_launches_and_the_slot_holds_the_last(load):
    slot = PlanSlot(CPU)
    first = load(slot, UNEVEN)
    second = load(slot, [217, 590, 33, 1, 364, 18])
    assert first.arrays.entries.size != second.arrays.entries.size
    assert first.graph_key == second.graph_key and hash(first.graph_key) == hash(second.graph_key)
    assert first.loaded["launches"] is second.loaded["launches"]
    for name, have in read(slot, second).items():
        want = (
            second.arrays.classes[0].work_indptr
            if name.startswith("work_indptr")
            else getattr(second.arrays, name)
        )
        assert have.tolist() == want.reshape(-1).tolist(), name
    merge = second.loaded["launches"].merge.lists
    rows, listed = merge.rows.tolist(), second.arrays.merge_rows.tolist()
    assert listed and rows[: len(listed)] == listed
    assert len(rows) > len(listed) and set(rows[len(listed) :]) == {PADDING}
    tails = second.loaded["launches"].tails
    assert len(tails) == attend.TAILS and set(tails[6:].flatten().tolist()) == {PADDING}


def test_a_stale_plan_is_refused(load):
    slot = PlanSlot(CPU)
    first = load(slot, [40] * 5)
    load(slot, [40] * 5)
    q, kv = torch.zeros(5, 8, 64, dtype=torch.bfloat16), torch.zeros(1)
    for use in (
        lambda: first.maker.run(first, q, kv, sinks=None, return_lse=False),
        lambda: first.maker.advance(first),
    ):
        with pytest.raises(KernelError, match="another plan") as refused:
            use()
        assert (refused.value.code, refused.value.field) == (INVALID_ARGUMENT, "plan")


def test_keys_differ_where_a_graph_would(load):
    slot, other = PlanSlot(CPU), PlanSlot(CPU)
    keys = {}
    keys["some"] = load(slot, UNEVEN).graph_key
    keys["another slot"] = load(other, UNEVEN).graph_key
    keys["nothing merged"] = (whole := load(slot, [3] * 24, shared=0, min_chunk=64)).graph_key
    keys["more tails than are padded to"] = load(slot, [3] * 70, shared=0).graph_key
    keys["two heights"] = (two := load(slot, [4] * 40, shared=30)).graph_key
    generation = slot.generation
    load(slot, [LEAST * SIZE])
    assert slot.generation > generation
    keys["grown"] = load(slot, UNEVEN).graph_key
    assert not len(whole.arrays.merge_rows)
    assert [c.rows_per_tile for c in two.arrays.classes] != [64]
    assert len(set(keys.values())) == len(keys), keys
    alone = load(None, [40] * 5)
    assert alone.graph_key is alone and alone.graph_key != load(None, [40] * 5).graph_key


def test_what_has_no_slots_says_so():
    backend = FusedBackend("cpu")
    with pytest.raises(KernelError) as refused:
        backend.plan(table([4]), SHAPE, None, device="cpu", dtype=torch.float32, slot=backend.new_slot("cpu"))
    assert (refused.value.code, refused.value.field) == (UNSUPPORTED, "slot")
    with pytest.raises(KernelError) as refused:
        backend.plan(
            table([4]), SHAPE, None, device="cpu", dtype=torch.float32, slot=PlanSlot(torch.device("meta"))
        )
    assert (refused.value.code, refused.value.field) == (INVALID_ARGUMENT, "slot")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "torch"])
@pytest.mark.parametrize("slots", [[-1, 5, -1, 2], [3, -1, 0, -1], [-1, -1, -1, -1]])
def test_rows_of_negative_slots_are_not_appended(dtype, slots):
    k, v = torch.randn(2, 4, 2, 8, dtype=dtype).unbind(0)
    pages = torch.full((3, 2, 2, 4, 8), 9.0, dtype=dtype)
    plan = plan_append(torch.arange(4), torch.tensor(slots), None, 4)
    plan.write(k, v, pages)
    want = torch.full_like(pages, 9.0)
    for row, slot in enumerate(slots):
        if slot >= 0:
            want[slot // 4, 0, :, slot % 4], want[slot // 4, 1, :, slot % 4] = k[row], v[row]
    assert torch.equal(pages, want)
