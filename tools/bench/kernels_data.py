"""Bandwidth of append, transform, pack and copy, against the copy ceiling. Knows the public API only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench import kernels_timing as timing
from bench.kernels_cases import DOCUMENT, LLAMA, Arena, Extent
from bench.kernels_gpu import DEVICE, Bench
from bench.kernels_record import TIME, Figure
from dagengine_kernels import plan_append, rotate, rotate_by_delta

LAYERS = 32
PAGE_SIZE = 64
CIDRA = "500 tokens/ms, published for CIDRA, not measured here"
CIDRA_RATE = 500.0


def run(bench: Bench) -> None:
    """The cases of group `data`."""
    for name, case in (
        ("transform 91424", partial(_moved, bench, "transform 91424", turned=True, packed=False)),
        ("pack 91424", partial(_moved, bench, "pack 91424", turned=True, packed=True)),
        ("copy 91424", partial(_moved, bench, "copy 91424", turned=False, packed=False)),
        *((f"append {n}", partial(_appended, bench, n)) for n in (131072, 8192, 64)),
    ):
        if name in bench.journal.ended() or bench.settings.left() < 10:
            continue
        with bench.journal.step(name):
            case()


def _moved(bench: Bench, case: str, *, turned: bool, packed: bool) -> None:
    """32 documents, each by a delta of its own (or none), to other pages or to contiguous rows; K and V."""
    from dagengine_kernels.transform import plan_copy, plan_gather

    arena, extents = Arena(PAGE_SIZE), list[Extent]()
    for i in range(32):
        extents += arena.node(DOCUMENT).seen_at(1 + 37 * i if turned else 0)
    listed = np.array(extents, np.int32)
    heads, pages = LLAMA, arena.used
    order = np.random.default_rng(0).permutation(pages)
    destination = np.stack([listed[:, 0], listed[:, 1]], 1).astype(np.int64)
    listed[:, 0] = order[listed[:, 0]]
    size = pages * 2 * heads.kv * PAGE_SIZE * heads.dim
    source, target = (
        bench.memory[i * size : (i + 1) * size].view(pages, 2, heads.kv, PAGE_SIZE, heads.dim) for i in (0, 1)
    )
    rotary = bench.rotary(heads, 1 << 14)
    if packed:
        moves = plan_gather(listed, rotary, device=DEVICE)
        k_out, v_out = (
            half.reshape(-1)[: moves.num_tokens * heads.kv * heads.dim].view(-1, heads.kv, heads.dim)
            for half in target.view(2, -1)
        )

        def call() -> None:
            moves.gather(source, k_out, v_out)
    else:
        moves = plan_copy(listed, destination, rotary, page_size=PAGE_SIZE, device=DEVICE)

        def call() -> None:
            moves.copy(source, target)

    call()
    torch.cuda.synchronize()
    page, lo, hi, _, delta = listed[47].tolist()
    before = source[page, :, :, lo:hi].double()
    if packed:
        start = int(moves.starts[47])
        after = torch.stack([x[start : start + hi - lo].transpose(0, 1) for x in (k_out, v_out)]).double()
    else:
        to = int(destination[47, 0])
        after = target[to, :, :, lo:hi].double()
    deltas = torch.full((hi - lo,), delta, device=DEVICE)
    want = rotate_by_delta(before[0].transpose(0, 1), deltas, rotary).transpose(0, 1)
    error = float((after[0] - want).norm() / want.norm())
    if not error <= 4e-3 or not torch.equal(after[1], before[1]):
        bench.journal.note(f"WRONG RESULT: {case}: K's error {error:.3g}, V equal: {torch.equal(*after)}.")
    shown = f"fused-{moves.implementation(source.dtype)}"
    figure = _bandwidth(bench, case, shown, call, 2 * moves.num_tokens * heads.token_bytes)
    bench.journal.figure(Figure.count(case, shown, "error against float64", error, ""))
    rate = moves.num_tokens / (LAYERS * figure.value / 1000)
    state = Figure.count(case, shown, "state tokens, 32 layers", rate, "tokens/ms")
    bench.journal.figure(state.against(CIDRA, CIDRA_RATE))


def _appended(bench: Bench, tokens: int) -> None:
    """New K and V of one layer into their pages, K rotated."""
    heads, case = LLAMA, f"append {tokens}"
    rotary = bench.rotary(heads, 1 << 17)
    pages = tokens // PAGE_SIZE
    count = tokens * heads.kv * heads.dim
    k, v = (bench.memory[i * count : (i + 1) * count].view(tokens, heads.kv, heads.dim) for i in (0, 1))
    kv_layer = bench.memory[2 * count : 4 * count].view(pages, 2, heads.kv, PAGE_SIZE, heads.dim)
    slots = torch.randperm(pages, device=DEVICE)[:, None] * PAGE_SIZE
    slots = (slots + torch.arange(PAGE_SIZE, device=DEVICE)).view(-1)
    positions = torch.arange(tokens, device=DEVICE)
    plan = plan_append(positions, slots, rotary, PAGE_SIZE)
    call = partial(plan.write, k, v, kv_layer)
    call()
    torch.cuda.synchronize()
    at = slots[:64]
    page, row = at // PAGE_SIZE, at % PAGE_SIZE
    want = rotate(k[:64].double(), positions[:64], rotary)
    error = float((kv_layer[page, 0, :, row].double() - want).norm() / want.norm())
    if not error <= 4e-3 or not torch.equal(kv_layer[page, 1, :, row], v[:64]):
        bench.journal.note(f"WRONG RESULT: {case}: K's error {error:.3g}.")
    shown = f"fused-{plan.implementation}"
    _bandwidth(bench, case, shown, call, 2 * tokens * heads.token_bytes)
    bench.journal.figure(Figure.count(case, shown, "error against float64", error, ""))


def _bandwidth(bench: Bench, case: str, shown: str, call: Callable[[], object], moved: int) -> Figure:
    """Time a call that reads and writes `moved` bytes together; against the copy ceiling."""
    floor = moved / bench.ceilings.copy * 1e6
    bench.journal.figure(Figure.count(case, "", "floor", floor, "us"))
    captured = timing.capture([call], 1)
    timing.race({shown: captured}, bench.settings.replays)
    figure = Figure.of(case, shown, TIME, captured.samples, "us").against("floor", floor)
    bench.journal.figure(figure)
    bench.journal.figure(Figure.count(case, shown, "of copy bandwidth", 100 * floor / figure.value, "%"))
    return figure
