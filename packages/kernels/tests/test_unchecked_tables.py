"""What FusedBackend refuses where the planner alone checks tables: on a GPU, here with an executor that stands in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dagengine_kernels import AttentionShape, Capabilities, KernelError, RotaryTable, SegmentTable
from dagengine_kernels.errors import INVALID_ARGUMENT, INVALID_TABLE, POSITION_OVERFLOW, UNSUPPORTED
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.fused.executor import Executor, FusedPlan
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.segments import SequenceSegments

from .planner_batches import needs_native

pytestmark = needs_native
SHAPE = AttentionShape(2, 1, 64, 1.0)


class StandIn(Executor):
    name = "stand-in"
    capabilities = Capabilities(devices=("cuda",), dtypes=(torch.bfloat16,))
    unchecked = True

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.loaded = refuses, 0

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        if self.refuses:
            raise KernelError(UNSUPPORTED, "not this one", "num_heads")
        return PlanParameters(shape.group, shape.num_kv_heads, (64,), (4,), boxes=1)

    def load(self, plan: FusedPlan) -> None:
        self.loaded += 1

    def run(self, *arguments: object, **options: object) -> tuple[torch.Tensor, None]:
        raise AssertionError("nothing runs")


class Checked(StandIn):
    """It relies on what it is given."""

    unchecked = False

    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        table.validate()
        np.bincount(table.extents[:, 0])
        return super().parameters(table, shape, device)


def table() -> SegmentTable:
    sequences = [SequenceSegments(5, 2, [(1, 0, 7, 0, 0)]), SequenceSegments(0, 1, [(0, 0, 1, 0, 0)], 1)]
    return SegmentTable.from_sequences(sequences, page_size=16, num_pages=2)


def backend(*executors: Executor) -> FusedBackend:
    made = FusedBackend()
    made._able = lambda device: list(executors)  # type: ignore[method-assign]
    return made


def plan(made: FusedBackend, given: SegmentTable, length: int = 64, **options: object) -> FusedPlan:
    rows = torch.zeros(length, 32)
    rotary = RotaryTable(rows, rows, 64, "half", torch.zeros(32), 1.0)
    return made.plan(given, SHAPE, rotary, device="cuda", dtype=torch.bfloat16, **options)  # type: ignore[arg-type]


def refusal(made: FusedBackend, given: SegmentTable, **options: object) -> tuple[str, str | None]:
    with pytest.raises(KernelError) as error:
        plan(made, given, **options)  # type: ignore[arg-type]
    return error.value.code, error.value.field


def test_a_good_table_is_planned_without_being_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given, executor = table(), StandIn()
    monkeypatch.setattr(SegmentTable, "validate", lambda table: pytest.fail("it was"))
    assert plan(backend(executor), given).table is given and executor.loaded == 1


def test_a_bad_one_is_refused_before_anything_is_loaded() -> None:
    executor = StandIn()
    for row, column, value, field in (
        (0, 0, 2, "PAGE"),
        (1, 0, -1, "PAGE"),
        (0, 2, 17, "HI"),
        (1, 4, -1, "DELTA"),
    ):
        given = table()
        given.extents[row, column] = value
        assert refusal(backend(executor), given) == (INVALID_TABLE, f"extents[{row}].{field}")
    assert refusal(backend(executor), replace(table(), sequence_ids=(3, 3))) == (
        INVALID_TABLE,
        "sequence_ids",
    )
    for name in ("q_indptr", "extent_indptr"):
        given = table()
        getattr(given, name)[0] = 1
        assert refusal(backend(executor), given) == (INVALID_TABLE, f"{name}[0]")
    far = refusal(backend(executor), table(), length=6)
    assert far == (POSITION_OVERFLOW, "extents[0]")
    assert refusal(backend(executor), table(), settled=True) == (INVALID_ARGUMENT, "settled")
    assert executor.loaded == 0


def test_it_is_checked_for_the_next_implementation_that_wants_that() -> None:
    given = table()
    given.extents[1, 0] = -1
    assert refusal(backend(StandIn(refuses=True), Checked()), given) == (INVALID_TABLE, "extents[1].PAGE")
    last = Checked()
    assert plan(backend(StandIn(refuses=True), last), table()).maker is last
