"""Work stepped by hand: a tiny model, pages, chunks as the scheduler makes them; a backend with slots for the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dagengine.models.llama import LlamaForCausalLM
from dagengine.runner import Chunk, Runner
from dagengine.weights import DummySource
from dagengine.work import Work
from dagengine_kernels import DELTA, HI, LO, PAGE, STORED, SegmentTable
from dagengine_kernels.reference import ReferenceBackend
from dagengine_kvstore import KVStore
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import geometry_from_config

NUM_PAGES = 160
MAX_POSITIONS = 1024
VOCAB = 320


def geometry_of(head_dim=64, heads=(4, 2), windows=(None, None), qk_norm=False):
    """Two layers of 256; with different windows they are two groups."""
    config = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": len(windows),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    geometry = geometry_from_config(config)
    (group,) = geometry.groups
    groups = []
    for window in dict.fromkeys(windows):
        layers = tuple(layer for layer, one in enumerate(windows) if one == window)
        groups.append(replace(group, layers=layers, window=window))
    return replace(geometry, groups=tuple(groups))


def runner_of(
    make, geometry, *, page_size, device="cpu", dtype=torch.float32, batch_invariant=False, **options
):
    """A runner with the same seeded weights, rounded to bfloat16, in `dtype`."""
    device = torch.device(device)
    source = RoundedSource(7, dtype=torch.float32, device=torch.device("cpu"), tied=False)
    source.target = (device, dtype)
    model = LlamaForCausalLM.load(geometry, source, batch_invariant=batch_invariant)
    group = geometry.groups[0]
    arena = TorchArena(
        geometry.num_layers, NUM_PAGES, page_size, group.num_kv_heads, group.head_dim, dtype, device
    )
    return make(model, geometry, arena, max_positions=MAX_POSITIONS, device=device, **options)


class RoundedSource(DummySource):
    def take(self, name, shape):
        device, dtype = self.target
        return super().take(name, shape).bfloat16().to(device, dtype)

    def take_fused(self, names, shapes):
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])


class Stepper:
    """Makes work and steps; every runner under test launches the same chunks."""

    def __init__(self, page_size, seed=0):
        self.store = KVStore(NUM_PAGES, page_size)
        self.rng = np.random.default_rng(seed)
        self.made = 0

    def work(self, num_tokens, context=(), context_delta=0):
        """Work with random tokens behind what other work has written, seen `context_delta` on from where it is."""
        extents = [
            (page, lo, hi, stored, context_delta)
            for other in context
            for page, lo, hi, stored in other.extents()
        ]
        rows = np.array(extents, np.int32).reshape(-1, 5)
        own_start = 0
        if len(rows):
            own_start = int((rows[:, STORED] + rows[:, HI] - rows[:, LO] + rows[:, DELTA]).max())
        writer = self.store.begin([], [], own_start, signature={"model": str(self.made)})
        self.made += 1
        return Work(
            id=self.made,
            order=(0, self.made, 0),
            backend="any",
            own_start=own_start,
            tokens=self.rng.integers(0, VOCAB, num_tokens).tolist(),
            writer=writer,
            context=rows,
        )

    def chunks(self, works, counts=None, pending=None):
        """The next tokens of each work: one of each, or `counts`. `pending`: rows of ids that are not known."""
        listed = []
        for i, work in enumerate(works):
            count = 1 if counts is None else counts[i]
            row = None if pending is None else pending[i]
            known = work.tokens[work.computed : work.computed + count]
            assert len(known) == count - (row is not None)
            work.writer.reserve(count)
            slots = work.writer.append(known, count - len(known))
            samples = work.computed + count == len(work.tokens) + (row is not None)
            listed.append(Chunk(work, count, tuple(slots), samples=samples, pending=row))
        return listed

    @staticmethod
    def done(chunks):
        """The step is launched."""
        for chunk in chunks:
            chunk.work.computed += chunk.count

    @staticmethod
    def give(works, ids):
        """Tokens become known."""
        for work, token in zip(works, ids, strict=True):
            if work.writer.num_known < work.writer.num_tokens:
                work.writer.fill([token])
            work.tokens.append(token)


@dataclass
class TwinSlot:
    plan: object = None
    generation: int = 0


class TwinPlan:
    def __init__(self, inner, key):
        self.inner, self.graph_key = inner, key


def with_slots(base):
    """A backend of the CPU as one whose plans take turns in slots."""

    class Twin(base):
        """With slots: what runs is what was loaded last, and it advances."""

        def __init__(self):
            super().__init__()
            self.num_plans = 0
            self.advanced = 0

        def new_slot(self, device):
            return TwinSlot()

        def plan(self, table, shape, rotary, *, device, dtype, reserve=None, slot=None, settled=False):
            self.num_plans += 1
            arguments = (shape, rotary, device, dtype)
            inner = super().plan(table, shape, rotary, device=device, dtype=dtype)
            if slot is None:
                return inner
            slot.plan = (
                inner,
                table,
                None if reserve is None else [list(pages) for pages in reserve],
                arguments,
            )
            return TwinPlan(slot, (id(slot), slot.generation, shape))

        def run(self, plan, layer, q, kv_layer, **options):
            if not isinstance(plan, TwinPlan):
                return super().run(plan, layer, q, kv_layer, **options)
            inner, table, *_ = plan.inner.plan
            out = torch.full_like(q, 7.0)
            out[: table.num_rows] = super().run(inner, layer, q[: table.num_rows], kv_layer, **options)
            return out

        def advance(self, plan):
            self.advanced += 1
            _, table, reserve, (shape, rotary, device, dtype) = plan.inner.plan
            grown = grow(table, reserve)
            inner = super().plan(grown, shape, rotary, device=device, dtype=dtype)
            plan.inner.plan = (inner, grown, reserve, (shape, rotary, device, dtype))

    return Twin


TwinBackend = with_slots(ReferenceBackend)


def grow(table, reserve):
    """The table of the next decode step; what has no room left stays as it is."""
    extents, counts = [], []
    for b in range(table.num_sequences):
        mine = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]].copy()
        last = mine[-1]
        if last[HI] < table.page_size:
            last[HI] += 1
        elif reserve[b]:
            page = reserve[b].pop(0)
            stored = last[STORED] - last[LO] + table.page_size
            mine = np.concatenate([mine, np.array([[page, 0, 1, stored, last[DELTA]]], np.int32)])
        extents.append(mine)
        counts.append(len(mine))
    assert PAGE == 0
    return SegmentTable(
        q_indptr=table.q_indptr,
        q_positions=table.q_positions + 1,
        extent_indptr=np.cumsum([0, *counts], dtype=np.int32),
        extents=np.concatenate(extents),
        page_size=table.page_size,
        num_pages=table.num_pages,
        sequence_ids=table.sequence_ids,
        static_extents=table.static_extents,
    )


class FakeGraph:
    """Replays a function; unlike a device's graph it could notice other objects, so slots decide what it runs."""

    def __init__(self, body):
        self.replay = body


class FakeCapture:
    def __init__(self):
        self.num_captured = 0

    def __call__(self, warm_up, body):
        self.num_captured += 1
        warm_up()
        return FakeGraph(body)


def base_runner(geometry, page_size):
    """The truth: the plain runner in float32 on the CPU."""
    return runner_of(Runner, geometry, page_size=page_size)
