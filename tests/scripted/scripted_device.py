"""The scripted model's attention in torch, on any device and without waiting for it.

    slot       positions [C] | counts [C] | limits [C] | page, row, stored, view [C, L]        int64, fixed addresses
               L lists what a row sees, then the own tokens that its reserved pages leave room for;
               `counts` says how many there are already, and `advance` makes them one more

Nothing can be raised on a device that is behind: a row that finds pages which hold something else than the table says
becomes NaN, as do all that read it, and `wrong` counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from device_hash import fold, mix
from numpy.typing import NDArray
from scripted_model import MARK, ScriptedBackend
from torch import Tensor

from dagengine_kernels import AttentionShape, RotaryTable, SegmentTable
from dagengine_kernels.backend import Capabilities, Plan
from dagengine_kernels.segments import HI

INTS = ("positions", "counts", "limits")
LISTS = ("page", "row", "stored", "view")


@dataclass(eq=False)
class Lists:
    """What each row of a batch sees, on a device; see the module.

    Attributes:
        ints: int64 [3, C].
        lists: int64 [4, C, L].
    """

    ints: Tensor
    lists: Tensor

    def __getattr__(self, name: str) -> Tensor:
        if name in INTS:
            return self.ints[INTS.index(name)]
        if name in LISTS:
            return self.lists[LISTS.index(name)]
        raise AttributeError(name)


@dataclass(eq=False)
class Slot:
    """Where plans take turns; one that does not fit makes it larger, at other addresses."""

    device: torch.device
    generation: int = 0
    held: Lists = field(init=False)

    def __post_init__(self) -> None:
        self._make(1, 64)

    def _make(self, rows: int, width: int) -> None:
        ints = torch.zeros(len(INTS), rows, dtype=torch.int64, device=self.device)
        lists = torch.zeros(len(LISTS), rows, width, dtype=torch.int64, device=self.device)
        self.held = Lists(ints, lists)

    def load(self, ints: NDArray[np.int64], lists: NDArray[np.int64]) -> Lists:
        rows, width = lists.shape[1:]
        capacity, held = self.held.lists.shape[1:]
        if rows > capacity or width > held:
            self.generation += 1
            self._make(max(capacity, _power_of_two(rows)), max(held, _power_of_two(width)))
        self.held.ints.zero_()
        if not rows:
            return self.held
        self.held.ints[:, :rows].copy_(_to_device(ints, self.device), non_blocking=True)
        self.held.lists[:, :rows, :width].copy_(_to_device(lists, self.device), non_blocking=True)
        return self.held


@dataclass(frozen=True, eq=False)
class DevicePlan(Plan):
    held: Lists
    graph_key: tuple[object, ...]


class DeviceBackend(ScriptedBackend):
    """As ScriptedBackend, with slots, wherever torch runs.

    Attributes:
        num_plans, advanced: how often a batch was planned, and a plan advanced by a launch that was not replayed.
        wrong: int64 [], reads of pages that held something else.
    """

    name: ClassVar[str] = "scripted-device"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"), dtypes=(torch.float64,), window=False
    )
    implementation = "scripted-device"

    def __init__(self) -> None:
        super().__init__()
        self.num_plans = 0
        self.advanced = 0
        self.wrong: Tensor | None = None

    def new_slot(self, device: torch.device) -> Slot:
        if self.wrong is None:
            self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        return Slot(device)

    def plan(  # type: ignore[override]
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        reserve: Sequence[Sequence[int]] | None = None,
        slot: Slot | None = None,
        settled: bool = False,
    ) -> DevicePlan:
        self.num_plans += 1
        seen = super().plan(table, shape, rotary, device=device, dtype=dtype)
        ints: list[tuple[int, int, int]] = []
        lists: list[NDArray[np.int64]] = []
        for b, (queries, page, row, stored, view) in enumerate(seen.sequences):
            listed = np.stack([np.asarray(x, np.int64) for x in (page, row, stored, view)])
            ahead = listed[:, :0] if reserve is None else _ahead(table, b, listed, reserve[b])
            for position in queries.tolist():
                ints.append((position, listed.shape[1], listed.shape[1] + ahead.shape[1]))
                lists.append(np.concatenate([listed, ahead], 1))
        width = max((one.shape[1] for one in lists), default=0)
        packed = np.zeros((len(LISTS), len(lists), width), np.int64)
        for index, one in enumerate(lists):
            packed[:, index, : one.shape[1]] = one
        target = slot or Slot(torch.device(device))
        held = target.load(np.array(ints, np.int64).reshape(-1, 3).T, packed)
        key = (id(slot), target.generation)
        return DevicePlan(self.name, table, shape, rotary, torch.device(device), dtype, held, key)

    def run(
        self,
        plan: Plan,
        layer: int,
        q: Tensor,
        kv_layer: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor:
        self._check_run(plan, q, kv_layer, sinks, pads=True)
        assert isinstance(plan, DevicePlan) and not return_lse and self.wrong is not None
        if self.fail_at == layer:
            self.fail_at = None
            raise RuntimeError("planted")
        out = torch.zeros_like(q)
        rows = min(len(q), len(plan.held.positions))
        page, row, stored, view = plan.held.lists[:, :rows]  # [T, L]
        position = plan.held.positions[:rows]
        listed = torch.arange(page.shape[1], device=q.device) < plan.held.counts[:rows, None]
        key, value = (kv_layer[:, i, 0][page, row] for i in range(2))  # [T, L, D]
        rotation = torch.stack((stored.double().cos(), stored.double().sin()), -1)
        fine = ((key[..., :2] - rotation).abs() <= 1e-5).all(-1)
        fine &= (value[..., 3] == MARK) & (value[..., 2] == layer) & (key[..., 3] == layer)
        fine &= (key[..., 2] == value[..., 0]) & ~value[..., 1].isnan()
        wrong = (listed & ~fine).sum(-1)
        self.wrong += wrong.sum()
        relative = view - position[:, None]
        facts = value[..., :2].nan_to_num(0.0).to(torch.int64)
        words = mix(facts[..., 0], facts[..., 1], relative)
        seen = fold(words.masked_fill(~(listed & (relative <= 0)), 0)).double()
        out[:rows, 0, 0] = seen.masked_fill(wrong > 0, torch.nan)
        out[:rows, 0, 1] = position.double()
        return out

    def advance(self, plan: DevicePlan) -> None:
        self.advanced += 1
        plan.held.positions.add_(1)
        plan.held.counts.copy_(torch.minimum(plan.held.counts + 1, plan.held.limits))


def _ahead(
    table: SegmentTable, b: int, listed: NDArray[np.int64], reserve: Sequence[int]
) -> NDArray[np.int64]:
    """Page, row, stored and view position [4, room] of the own tokens to come."""
    if not listed.shape[1]:
        return listed
    page, row, stored, view = listed[:, -1].tolist()
    assert row + 1 == table.extents[table.extent_indptr[b + 1] - 1, HI]
    places = [(page, after) for after in range(row + 1, table.page_size)]
    places += [(other, after) for other in reserve for after in range(table.page_size)]
    found = [(*place, stored + i, view + i) for i, place in enumerate(places, 1)]
    return np.array(found, np.int64).reshape(-1, 4).T


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _to_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    found = torch.from_numpy(np.ascontiguousarray(values))
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found
