"""The TileLang kernels on a GPU against the float64 definition (test_tilelang.py: what holds without one)."""

import importlib.util
import random

import numpy as np
import pytest
import torch

from dagengine_kernels import SequenceSegments, build_table, get_backend
from dagengine_kernels.conformance_cases import Pages, build_case, definition, frequencies
from dagengine_kernels.fused import planner
from dagengine_kernels.fused.executor import FusedPlan
from dagengine_kernels.fused.tilelang.executor import TileLangExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed"),
]

DEVICE = "cuda"


def sliced(document, first, last, view):
    """Tokens first..last-1 of a placed document, seen at view..."""
    found, at = [], 0
    for page, lo, hi, stored, _ in document:
        begin, end = max(first, at), min(last, at + hi - lo)
        if begin < end:
            moved = stored + begin - at
            found.append((page, lo + begin - at, lo + end - at, moved, view + begin - first - moved))
        at += hi - lo
    return found


def batch(seed, rows, readers):
    """Readers of slices of shared documents, each in its own order and at its own deltas, then their own tokens."""
    r = random.Random(seed)
    pages = Pages(120, 64, seed)
    documents = [
        (pages.place(n, r.randrange(500), 0, offset=r.randrange(64)), n)
        for n in (r.randint(1, 300) for _ in range(4))
    ]
    sequences = []
    for b in range(readers):
        extents, view = [], 0
        for document, n in r.sample(documents, r.randint(1, 4)):
            first = 0 if r.random() < 0.6 else r.randrange(n)
            last = n if r.random() < 0.6 else r.randint(first + 1, n)
            extents += sliced(document, first, last, view)
            view += last - first
        new = r.choice(rows)
        extents += pages.place(new, r.choice((view, 3)), view)
        sequences.append(SequenceSegments(view, new, extents, b))
    return sequences, pages


def run(case, dtype, **options):
    backend = get_backend("fused", implementation="tilelang", **options)
    rotary = case.rotary
    plan = backend.plan(case.table, case.shape, rotary, device=DEVICE, dtype=dtype)
    sinks = None if case.sinks is None else case.sinks.to(DEVICE)
    q, kv_layer = case.q.to(DEVICE, dtype), case.kv_layer.to(DEVICE, dtype)
    found = [backend.run(plan, 0, q, kv_layer, sinks=sinks, return_lse=True) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    return found[0][0].cpu(), found[0][1].cpu()


def hold(out, lse2, case):
    want, want_lse2 = definition(case)
    seen = np.isfinite(want_lse2)
    assert not out.isnan().any()
    assert np.array_equal(seen, np.isfinite(lse2.numpy()))
    assert (
        (out.numpy()[~seen] == 0).all()
        if out.dtype != torch.bfloat16
        else (out[~torch.tensor(seen)] == 0).all()
    )
    error = np.linalg.norm(out.double().numpy() - want) / np.linalg.norm(want)
    assert error <= 8e-3
    assert np.abs(lse2.numpy()[seen] - want_lse2[seen]).max() <= 0.03


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize(("rows", "readers"), [((1,), 3), ((1,), 40), ((1, 5, 130), 4)])
def test_matches_the_definition(keys, rows, readers):
    sequences, pages = batch(readers, rows, readers)
    case = build_case(sequences, pages, heads=(8, 2), head_dim=128)
    hold(*run(case, torch.bfloat16, keys=keys), case)


@pytest.mark.parametrize("keys", [64, 128])
def test_matches_with_every_option(keys):
    sequences, pages = batch(7, (1, 3, 70), 5)
    table = build_table(frequencies(32), 1.139, 4096, pairing="interleaved")
    options = {"window": 90, "softcap": 3.0, "sinks": True}
    case = build_case(sequences, pages, heads=(6, 2), head_dim=64, rotary=table, **options)
    hold(*run(case, torch.float16, keys=keys), case)


@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_any_group_without_positions(group):
    sequences, pages = batch(group, (1, 20), 6)
    case = build_case(sequences, pages, heads=(2 * group, 2), head_dim=64, rotary=None)
    hold(*run(case, torch.bfloat16), case)


def test_rows_that_see_nothing():
    pages = Pages(4, 64, 1)
    sequences = [
        SequenceSegments(4, 1, pages.place(6, 0, 5), 1),
        SequenceSegments(4, 3, [], 2),
        SequenceSegments(4, 6, pages.place(20, 0, 7), 3),
    ]
    case = build_case(sequences, pages, heads=(4, 2), head_dim=64)
    hold(*run(case, torch.bfloat16), case)


def test_a_captured_plan_follows_its_step():
    """Positions, entries and the step counter are read on the device at every replay."""
    pages = Pages(8, 64, 2)
    extents = pages.place(90, 0, 0)
    cases = [build_case([SequenceSegments(60 + n, 1, extents, 1)], pages, head_dim=64) for n in (0, 7)]
    first = cases[0]
    executor = TileLangExecutor()
    parameters = executor.parameters(first.table, first.shape, torch.device(DEVICE, 0))
    arrays = planner.plan_table(first.table, parameters, reserve=[[]])
    plan = FusedPlan(
        "fused",
        first.table,
        first.shape,
        first.rotary,
        torch.device(DEVICE, 0),
        torch.bfloat16,
        arrays,
        "tilelang",
    )
    executor.load(plan)
    q, kv_layer = (x.to(DEVICE, torch.bfloat16) for x in (first.q, first.kv_layer))
    executor.run(plan, q, kv_layer, sinks=None, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse2 = executor.run(plan, q, kv_layer, sinks=None, return_lse=True)
    for case, step in zip(cases, (0, 7), strict=True):
        plan.loaded["step"].fill_(step)
        graph.replay()
        hold(out.cpu(), lse2.cpu(), case)
