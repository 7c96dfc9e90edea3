"""Moves KV pages of a model's shape by plans, on an arena of its own: rows checked against float64, then plan and run
timed.

A case's rate counts the tokens that were asked for, however often the plan moves them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor

from dagengine.repositioning import PageMover
from dagengine_kernels import RotaryTable, build_table, relocate, rotate_by_delta
from dagengine_kvstore import MovePlan, plan_moves
from dagengine_kvstore.torch_arena import TorchArena

from .moves import Case, cases
from .rates import RATE, rate_of
from .record import Figure

COPY = "plain copy of this run"
WORST_ERROR = {torch.bfloat16: 4e-3, torch.float32: 2e-6}
CHECKED = 12
MOST_STEPS_BY_LAYER = 100
"""Plans of more steps are not timed layer by layer, which takes seconds."""


@dataclass(frozen=True)
class Shape:
    """What is moved: layers, KV heads, head dimension and rows per page, in one dtype.

    Attributes:
        label: of the model, in front of every case.
    """

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    label: str = ""

    @property
    def token_bytes(self) -> int:
        """K and V of a token in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass
class Run:
    """What has been measured: figures, and results that were wrong."""

    shape: Shape
    arena: TorchArena
    rotary: RotaryTable
    repeats: int
    width: int
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(replace(figure, case=f"{self.shape.label}, {figure.case}"))


def measure_moves(
    shape: Shape,
    device: str,
    pages: int,
    repeats: int,
    width: int,
    only: str = "",
    report: Callable[[str], None] | None = None,
) -> Run:
    """All cases whose names contain `only`, on an arena of twice `pages` pages and the spare ones.

    K is turned by angles that are not the model's, which takes as long.
    """
    arena = TorchArena(
        shape.layers, 2 * pages + width, shape.page_size, shape.kv_heads, shape.head_dim, shape.dtype, device
    )
    torch.manual_seed(0)
    for i in range(shape.layers):
        arena.layer(i).normal_()
    frequencies = [5e5 ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)]
    run = Run(shape, arena, build_table(frequencies, 1.0, 1, device=device), repeats, width)
    copied = _plain_copy(run, pages)
    for case in cases(pages, shape.page_size, width):
        if only in case.name:
            if report is not None:
                report(case.name)
            _measure(run, case, pages, copied)
    return run


def _plain_copy(run: Run, pages: int) -> float:
    """Tokens a millisecond of copying the first pages behind themselves, layer by layer."""
    tokens, layers = pages * run.shape.page_size, [run.arena.layer(i) for i in range(run.shape.layers)]

    def copy() -> None:
        for layer in layers:
            layer[pages : 2 * pages].copy_(layer[:pages])
        _wait(layers[0])

    samples = _times(copy, run.repeats)
    _rates(run, "plain copy", "torch", RATE, tokens, samples)
    seconds = median(samples) / 1e3
    bandwidth = 2 * tokens * run.shape.token_bytes / seconds / 1e9
    run.add(Figure.count("plain copy", "torch", "bandwidth", bandwidth, "GB/s"))
    return tokens / median(samples)


def _measure(run: Run, case: Case, pages: int, copied: float) -> None:
    spare = range(2 * pages, 2 * pages + case.spare)
    layers = range(run.shape.layers)
    mover = PageMover(run.arena, [(layers, run.rotary)])
    plan = plan_moves(case.moves, run.shape.page_size, spare=spare, width=run.width)
    error = _check(run, case, mover, plan)
    backend = _implementation(run, plan)
    limit = WORST_ERROR[run.shape.dtype]
    if not error <= limit:
        run.faults.append(f"{case.name}: K's error is {error:.3g}, at most {limit} is rounding; or V changed")
        return
    planning = _times(
        lambda: plan_moves(case.moves, run.shape.page_size, spare=spare, width=run.width), run.repeats
    )
    running = _times(lambda: mover.run(plan), run.repeats)
    _rates(run, case.name, backend, RATE, case.tokens, running, copied)
    both = [a + b for a, b in zip(planning, running, strict=True)]
    _rates(run, case.name, backend, "tokens/ms with planning", case.tokens, both)
    run.add(Figure.of(case.name, backend, "planning", planning, "ms"))
    written = plan.bytes_written(run.shape.token_bytes)
    for metric, value, unit in (
        ("error", error, ""),
        ("tokens", case.tokens, "tokens"),
        ("steps", len(plan.steps), ""),
        ("spare pages", plan.num_spare_pages, "pages"),
        ("host pages", plan.num_host_pages, "pages"),
        ("bytes written", written, "B"),
        ("bytes written, of those asked for", written / (case.tokens * run.shape.token_bytes), "x"),
        ("bandwidth", 2 * written / median(running) / 1e6, "GB/s"),
    ):
        run.add(Figure.count(case.name, backend, metric, value, unit))
    if backend.endswith("concatenated") and len(plan.steps) <= MOST_STEPS_BY_LAYER:
        with _layer_by_layer():
            alone = _times(lambda: mover.run(plan), max(3, run.repeats // 10))
        _rates(run, case.name, "cuda, layer by layer", RATE, case.tokens, alone, copied)


def _rates(
    run: Run,
    case: str,
    backend: str,
    metric: str,
    tokens: int,
    samples: list[float],
    copied: float | None = None,
) -> None:
    """The rate, and beside it that of the plain copy."""
    rate = rate_of(case, backend, metric, tokens, samples)
    run.add(rate)
    if copied is not None:
        run.add(
            Figure.count(case, backend, "of the plain copy", rate.value / copied, "x").against(COPY, copied)
        )


def _check(run: Run, case: Case, mover: PageMover, plan: MovePlan) -> float:
    """Carry the plan out and compare some moves of the first and the last layer; K's relative error, or infinity."""
    picked = case.moves[:: max(1, len(case.moves) // CHECKED)]
    layers = [run.arena.layer(i) for i in {0, run.shape.layers - 1}]
    want: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        for page, lo, hi, _, _, delta in picked:
            k = layer[page, 0, :, lo:hi].double().transpose(0, 1)
            turned = rotate_by_delta(k, torch.full((hi - lo,), delta, device=k.device), run.rotary)
            want.append((turned.transpose(0, 1), layer[page, 1, :, lo:hi].clone()))
    mover.run(plan)
    worst, found = 0.0, iter(want)
    for layer in layers:
        for _, lo, hi, page, to, _ in picked:
            k, v = next(found)
            if not torch.equal(layer[page, 1, :, to : to + hi - lo], v):
                return float("inf")
            have = layer[page, 0, :, to : to + hi - lo].double()
            worst = max(worst, float((have - k).norm() / k.norm()))
    return worst


def _implementation(run: Run, plan: MovePlan) -> str:
    first = next(step for step in plan.steps if step.kind == "move")
    moves = np.array(first.moves)
    layers = [run.arena.layer(i) for i in range(run.shape.layers)]
    return relocate.Relocation(moves, layers, run.rotary).implementation


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    most = relocate.MOST_CONCATENATED
    relocate.MOST_CONCATENATED = 0
    try:
        yield
    finally:
        relocate.MOST_CONCATENATED = most


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of wall clock of a call that waits for what it began."""
    samples = []
    for i in range(repeats + 2):
        begin = time.perf_counter()
        call()
        if i >= 2:
            samples.append((time.perf_counter() - begin) * 1e3)
    return samples


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
