"""Moves KV pages of a model's shape by plans, on an arena of its own: rows checked against float64, then plan and run
timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels import RotaryTable, build_table, relocate, rotate_by_delta
from dagengine_kvstore import MovePlan, plan_moves
from dagengine_kvstore.torch_arena import TorchArena

from .move_cases import Case, cases
from .repositioning import PageMover

WORST_ERROR = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 2e-6}
CHECKED = 12
MOST_STEPS_BY_LAYER = 100
"""Plans of more steps are not timed layer by layer, which takes seconds."""


@dataclass(frozen=True)
class ArenaShape:
    """What an arena's pages are like."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, arena: TorchArena) -> ArenaShape:
        layer = arena.layer(0)
        _, _, heads, size, dim = layer.shape
        return cls(arena.num_layers, size, heads, dim, layer.dtype, layer.device)

    def make(self, num_pages: int) -> TorchArena:
        """An arena of random rows."""
        arena = TorchArena(
            self.num_layers,
            num_pages,
            self.page_size,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.device,
        )
        torch.manual_seed(0)
        for i in range(self.num_layers):
            arena.layer(i).normal_()
        return arena


@dataclass(frozen=True)
class MoveTrial:
    """One case.

    Attributes:
        implementation: what ran; of the plain copy `torch`.
        plan: None for the plain copy.
        tokens: that were asked for, however often the plan moves them.
        error: of K against float64, relative; infinite where V changed. Nothing was timed where it is above `limit`.
        planning, running, layer_by_layer: milliseconds of wall clock, each waiting for the device; the last with a
            launch for every layer, where there is a choice.
        token_bytes: K and V of a token in all layers.
    """

    case: str
    implementation: str
    plan: MovePlan | None
    tokens: int
    token_bytes: int
    error: float
    limit: float
    planning: tuple[float, ...]
    running: tuple[float, ...]
    layer_by_layer: tuple[float, ...]

    @property
    def right(self) -> bool:
        return self.error <= self.limit

    @property
    def bytes_written(self) -> int:
        return (
            self.tokens * self.token_bytes if self.plan is None else self.plan.bytes_written(self.token_bytes)
        )


def try_moves(shape: ArenaShape, pages: int, repeats: int, width: int, only: str = "") -> Iterator[MoveTrial]:
    """The plain copy, then all cases whose names contain `only`, on an arena of twice `pages` pages and spare ones.

    K is turned by angles that are no model's, which takes as long.

    Args:
        width: pages a step should move, and spare pages.
    """
    arena, dim = shape.make(2 * pages + width), shape.head_dim
    frequencies = [5e5 ** (-2 * i / dim) for i in range(dim // 2)]
    rotary = build_table(frequencies, 1.0, 1, device=shape.device)
    yield _plain_copy(arena, pages, repeats)
    for case in cases(pages, shape.page_size, width):
        if only in case.name:
            yield _try(arena, rotary, case, pages, repeats, width)


def _token_bytes(arena: TorchArena) -> int:
    return arena.page_bytes // arena.page_size


def _plain_copy(arena: TorchArena, pages: int, repeats: int) -> MoveTrial:
    """The first pages copied behind themselves, layer by layer."""
    layers = [arena.layer(i) for i in range(arena.num_layers)]

    def copy() -> None:
        for layer in layers:
            layer[pages : 2 * pages].copy_(layer[:pages])
        _wait(layers[0])

    times = _times(copy, repeats)
    tokens = pages * arena.page_size
    return MoveTrial("plain copy", "torch", None, tokens, _token_bytes(arena), 0.0, 0.0, (), times, ())


def _try(
    arena: TorchArena, rotary: RotaryTable, case: Case, pages: int, repeats: int, width: int
) -> MoveTrial:
    spare = range(2 * pages, 2 * pages + case.spare)
    mover = PageMover(arena, [(range(arena.num_layers), rotary)])

    def make() -> MovePlan:
        return plan_moves(case.moves, arena.page_size, spare=spare, width=width)

    plan = make()
    error = _error(arena, rotary, case, mover, plan)
    name = _implementation(arena, rotary, plan)
    limit = WORST_ERROR[arena.layer(0).dtype]
    planning: tuple[float, ...] = ()
    running: tuple[float, ...] = ()
    alone: tuple[float, ...] = ()
    if error <= limit:
        planning, running = _times(make, repeats), _times(lambda: mover.run(plan), repeats)
        if name.endswith("concatenated") and len(plan.steps) <= MOST_STEPS_BY_LAYER:
            with _layer_by_layer():
                alone = _times(lambda: mover.run(plan), max(3, repeats // 10))
    return MoveTrial(
        case.name, name, plan, case.tokens, _token_bytes(arena), error, limit, planning, running, alone
    )


def _error(arena: TorchArena, rotary: RotaryTable, case: Case, mover: PageMover, plan: MovePlan) -> float:
    """Carry the plan out and compare some moves of the first and the last layer; K's relative error, or infinity."""
    picked = case.moves[:: max(1, len(case.moves) // CHECKED)]
    layers = [arena.layer(i) for i in {0, arena.num_layers - 1}]
    want: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        for page, lo, hi, _, _, delta in picked:
            k = layer[page, 0, :, lo:hi].double().transpose(0, 1)
            turned = rotate_by_delta(k, torch.full((hi - lo,), delta, device=k.device), rotary)
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


def _implementation(arena: TorchArena, rotary: RotaryTable, plan: MovePlan) -> str:
    first = next(step for step in plan.steps if step.kind == "move")
    layers = [arena.layer(i) for i in range(arena.num_layers)]
    return relocate.Relocation(np.array(first.moves), layers, rotary).implementation


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    most = relocate.MOST_CONCATENATED
    relocate.MOST_CONCATENATED = 0
    try:
        yield
    finally:
        relocate.MOST_CONCATENATED = most


def _times(call: Callable[[], object], repeats: int) -> tuple[float, ...]:
    """Milliseconds of wall clock of a call that waits for what it began."""
    samples = []
    for i in range(repeats + 2):
        begin = time.perf_counter()
        call()
        if i >= 2:
            samples.append((time.perf_counter() - begin) * 1e3)
    return tuple(samples)


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
