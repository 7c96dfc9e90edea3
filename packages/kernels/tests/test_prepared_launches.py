"""Launches that were prepared are those that fresh ones would be, whatever was launched before them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dagengine_kernels import AttentionShape, SegmentTable, SequenceSegments, build_table, plan_append
from dagengine_kernels.append import HeadNorm
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.fused.cuda import append, attend, merge, norm, products, streamed
from dagengine_kernels.fused.cuda.slot import PlanSlot
from dagengine_kernels.lse import LOG2E

from .recorded import STREAM, Launched, Recorder, recording

CPU = torch.device("cpu")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as made:
        yield made


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr() or None


def rows_of(rng: random.Random, rows: int, columns: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """[rows, columns], contiguous, or rows apart, at a multiple of 16 bytes or `offset` elements behind."""
    apart = rng.choice((0, 8, 64))
    whole = torch.zeros(rows * (columns + apart) + offset + 8, dtype=dtype)[offset:]
    return whole[: rows * (columns + apart)].view(rows, columns + apart)[:, :columns]


LAYERS = [
    (256, 136, False, False),
    (256, 136, True, False),
    (128, 72, True, True),
    (203, 71, True, True),
    (203, 71, False, False),
]
"""inputs, outputs, norm, gated; also inputs and outputs that do not fill vectors."""


@pytest.mark.parametrize("invariant", [False, True], ids=["fastest", "invariant"])
@pytest.mark.parametrize("inputs, outputs, normed, gated", LAYERS)
def test_a_layer_launches_what_a_new_one_would(
    recorder: Recorder, inputs: int, outputs: int, normed: bool, gated: bool, invariant: bool
) -> None:
    rng = random.Random(f"{inputs} {normed} {gated} {invariant}")
    weight = torch.zeros(outputs * (1 + gated), inputs, dtype=torch.bfloat16)
    bias = torch.zeros(len(weight))

    def make() -> CudaLinear:
        return CudaLinear(
            weight,
            bias if normed else None,
            norm=torch.ones(inputs) if normed else None,
            eps=1e-5,
            gated=gated,
            batch_invariant=invariant,
            few_rows=3,
        )

    layer = make()
    counts = (1, 2, 3, 4, 8, 9, 16, 17, 64, *((65, 200) if invariant else ()))
    for _ in range(60):
        rows = rng.choice(counts)
        dtype = rng.choice((torch.bfloat16, torch.float32))
        x = rows_of(rng, rows, inputs, torch.bfloat16, rng.choice((0, 0, 8, 1)))
        residual = rng.choice((None, rows_of(rng, rows, outputs, dtype, rng.choice((0, 1)))))
        y = layer(x, residual, dtype=dtype)
        launched = recorder.take()
        make()(x, residual, dtype=dtype)
        fresh = recorder.take()
        assert [(one.kernel, one.layout) for one in launched] == [(one.kernel, one.layout) for one in fresh]
        assert all(one.stream == STREAM for one in launched)
        of_norm, last = launched[:-1], launched[-1]
        whole = None
        if last.kernel[0] == "streamed":
            whole = streamed.Launch.from_buffer_copy(last.params)
            found = whole.layer
        else:
            found = products.Params.from_buffer_copy(last.params)
        held = layer._layer
        straight = not of_norm and inputs % 8 == 0 and x.data_ptr() % 16 == 0
        if straight:
            assert (found.x, found.x_row) == (x.data_ptr(), x.stride(0))
        assert (found.weight, found.y) == (held.weight.data_ptr(), y.data_ptr())
        assert (found.norm, found.bias) == (pointer(held.norm), pointer(held.bias))
        given = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        assert (found.residual, found.residual_row) == given
        assert (found.rows, found.inputs, found.outputs) == (rows, inputs, outputs)
        again = fresh[-1].params[-len(bytes(found)) :] if whole is None else fresh[-1].params[256:]
        want = products.Params.from_buffer_copy(again)
        for name in ("steps", "tiles", "rounds", "eps", "x_row", "rows"):
            assert getattr(found, name) == getattr(want, name), name
        if of_norm:
            (one,) = of_norm
            params = norm._Params.from_buffer_copy(one.params)
            assert (params.y, params.rows, params.inputs) == (found.x, rows, inputs)
            assert params.weight == held.norm.data_ptr()
            if inputs % 8 == 0 and x.data_ptr() % 16 == 0:
                assert (params.x, params.x_row) == (x.data_ptr(), x.stride(0))
        if whole is not None:
            check_maps(recorder, whole, held, rows, y, residual)


def check_maps(
    recorder: Recorder,
    whole: streamed.Launch,
    layer: products.Layer,
    rows: int,
    y: Tensor,
    residual: Tensor | None,
) -> None:
    """The maps are those of the tensors that the parameters name, at their sizes now."""
    padded = -(-layer.num_inputs // 8) * 8
    of_x, of_weight = recorder.map_of(whole.x), recorder.map_of(whole.weight)
    pitch = whole.layer.x_row if rows > 1 else padded
    columns = next(n for n in streamed.COLUMNS if n >= rows)
    assert (of_x[0], of_x[2], of_x[3], of_x[4][1]) == (whole.layer.x, [padded, rows], [2 * pitch], columns)
    assert (of_weight[0], of_weight[2]) == (layer.weight.data_ptr(), [*layer.weight.shape[::-1]])
    given = [y] if residual is None else [y, residual]
    vectors = all(t.data_ptr() % (4 * t.element_size()) == 0 and t.stride(0) % 4 == 0 for t in given)
    assert whole.whole == (layer.num_outputs % 4 == 0 and vectors)


SIZE = 16
SHAPE = AttentionShape(8, 2, 64, 0.125)


def table(lengths: list[int], rows: int) -> SegmentTable:
    """Sequences with pages of their own, the last `rows` of each one's tokens as queries."""
    sequences, page = [], 0
    for b, length in enumerate(lengths):
        cuts = [*range(0, length, SIZE), length]
        extents = [(page + i, 0, end - begin, begin, 0) for i, (begin, end) in enumerate(pairwise(cuts))]
        page += len(extents)
        sequences.append(SequenceSegments(length - rows, rows, extents, b))
    return SegmentTable.from_sequences(sequences, page_size=SIZE, num_pages=page)


def attend_params(plan: Any, q: Tensor, out: Tensor, lse2: Tensor | None, sinks: Tensor | None) -> list[dict]:
    """What attend.cu takes for a plan, but for the map, by tile height."""
    slot, shape = plan.loaded["slot"], plan.shape
    return [
        {
            "q": q.data_ptr(),
            "out": out.data_ptr(),
            "lse2_out": 0 if lse2 is None else lse2.data_ptr(),
            "o_part": slot.o_part.data_ptr(),
            "lse2_part": slot.lse2_part.data_ptr(),
            "rotary": plan.loaded["launches"].rotary.data_ptr(),
            "sinks": 0 if sinks is None else sinks.data_ptr(),
            **{name: slot.address(name) for name in ("entries", "runs", "deltas", "step")},
            **{name: slot.address(f"{name}{c.rows_per_tile}") for name in ("slots", "works", "work_indptr")},
            "score_scale": torch.tensor(shape.scale * LOG2E, dtype=torch.float32).item(),
            "cap_log2": 0.0,
            "rotary_length": plan.rotary.length,
            "window": 0,
            "num_kv_heads": shape.num_kv_heads,
            "settled": int(plan.settled),
        }
        for c in plan.arrays.classes
    ]


def check_attend(recorder: Recorder, one: Launched, want: dict, kv: Tensor) -> None:
    found = attend.AttendParams.from_buffer_copy(one.params)
    assert {name: getattr(found, name) for name in want} == want
    assert recorder.map_of(found.kv)[0] == kv.data_ptr()
    assert one.stream == STREAM


def test_attention_launches_what_its_plan_says(recorder: Recorder) -> None:
    rng = random.Random(5)
    backend = FusedBackend("cuda")
    rotary = build_table([0.5] * 32, 1.0, 8192)
    slots = [PlanSlot(CPU, least=64), PlanSlot(CPU, least=64), None]
    layers = [torch.zeros(400, 2, 2, SIZE, 64, dtype=torch.bfloat16) for _ in range(3)]
    merged = 0
    for _ in range(40):
        rows = rng.choice((1, 1, 5, 40))
        lengths = [rng.choice((rows, 40, 300, 2000)) for _ in range(rng.randint(1, 3))]
        batch = table([max(length, rows) for length in lengths], rows)
        settled = rows == 1 and rng.random() < 0.5
        plan = backend.plan(
            batch,
            SHAPE,
            rotary,
            device=CPU,
            dtype=torch.bfloat16,
            slot=rng.choice(slots),
            settled=settled,
        )
        for layer in rng.choices(range(3), k=3):
            q = torch.zeros(batch.num_rows, 8, 64, dtype=torch.bfloat16)
            sinks = rng.choice((None, torch.zeros(8)))
            with_lse = rng.random() < 0.5
            found = backend.run(plan, layer, q, layers[layer], sinks=sinks, return_lse=with_lse)
            out, lse2 = found if with_lse else (found, None)
            launched = recorder.take()
            wanted = attend_params(plan, q, out, lse2, sinks)
            for one, want in zip(launched, wanted, strict=False):
                check_attend(recorder, one, want, layers[layer])
            behind = launched[len(wanted) :]
            held = plan.loaded["launches"].merge
            assert len(behind) == (held is not None)
            for one in behind:
                merged += 1
                params = merge._Params.from_buffer_copy(one.params)
                slot = plan.loaded["slot"]
                tensors = (slot.o_part, slot.lse2_part, held.lists.rows, held.lists.indptr, held.lists.parts)
                names = ("o_part", "lse2_part", "rows", "indptr", "parts")
                assert [getattr(params, name) for name in names] == [t.data_ptr() for t in tensors]
                assert (params.out, params.lse2) == (out.data_ptr(), pointer(lse2))
                assert params.sinks == pointer(sinks)
                assert (params.num_rows, params.kv_heads) == (len(held.lists.rows), 2)
                assert held.lists.rows[: len(plan.arrays.merge_rows)].tolist() == [*plan.arrays.merge_rows]
    assert merged


def test_tokens_are_appended_as_by_a_new_plan(recorder: Recorder) -> None:
    rng = random.Random(9)
    rotary = build_table([0.5] * 32, 1.0, 512)
    layers = [torch.zeros(8, 2, 2, SIZE, 64, dtype=torch.bfloat16) for _ in range(3)]
    norms = [HeadNorm(torch.ones(64), eps) for eps in (1e-5, 1e-6)]
    for tokens in (1, 20, 0):
        positions = slots = torch.arange(tokens)
        plan = plan_append(positions, slots, rotary, SIZE)
        for _ in range(30):
            joined = torch.zeros(tokens, 12, 64 + rng.choice((0, 8, 2)), dtype=torch.bfloat16)[..., :64]
            q, k, v = joined.split([8, 2, 2], dim=1)
            with_q = rng.random() < 0.7
            k_norm = rng.choice((None, *norms))
            q_norm = rng.choice((None, *norms)) if with_q else None
            kv = rng.choice(layers)
            given = {"k_norm": k_norm, "q": q if with_q else None, "q_norm": q_norm}
            out = plan.write(k, v, kv, **given)
            launched = recorder.take()
            plan_append(positions, slots, rotary, SIZE).write(k, v, kv, **given)
            fresh = recorder.take()
            assert len(launched) == len(fresh) == (tokens > 0)
            assert (out is not None) == with_q
            for one, other in zip(launched, fresh, strict=True):
                assert (one.kernel, one.layout) == (other.kernel, other.layout)
                found, want = (append._Params.from_buffer_copy(x.params) for x in (one, other))
                for name, _ in append._Params._fields_:
                    if name != "q_out":
                        assert getattr(found, name) == getattr(want, name), name
                assert found.q_out == pointer(out)
                assert (found.k, found.v, found.pages) == (k.data_ptr(), v.data_ptr(), kv.data_ptr())
                assert (found.slots, found.positions) == (slots.data_ptr(), positions.data_ptr())
                assert found.k_weight == (None if k_norm is None else k_norm.weight.data_ptr())
                assert found.q_weight == (None if q_norm is None else q_norm.weight.data_ptr())
                assert (found.k_token, found.k_head) == k.stride()[:2]
                if with_q:
                    assert (found.q, found.q_token, found.q_head) == (q.data_ptr(), *q.stride()[:2])
