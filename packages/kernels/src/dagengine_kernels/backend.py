"""The contract of an attention backend: plan once per batch on the host, run once per layer.

A backend knows tensors and segment tables; not requests, models or policies. It never writes the pages it
reads. Visibility is positional (see segments.py): the rule is also the causal one, because the own tokens of
the current step are appended to their pages before attention runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, POSITION_OVERFLOW, UNSUPPORTED, KernelError
from dagengine_kernels.rotary import RotaryTable, check_head_dim
from dagengine_kernels.segments import DELTA, STORED, SegmentTable


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one group of layers computes.

    Attributes:
        num_heads: query heads Hq, a multiple of num_kv_heads.
        num_kv_heads: Hkv; query head h reads kv head h // (Hq / Hkv).
        head_dim: D.
        scale: factor on q . k.
        window: a row at p sees views in (p - window, p]; None sees all views <= p.
        softcap: c in c * tanh(score / c), after the scale; None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise KernelError(INVALID_ARGUMENT, f"must be at least 1, not {getattr(self, name)}", name)
        if self.num_heads % self.num_kv_heads:
            message = f"must be a multiple of num_kv_heads {self.num_kv_heads}, not {self.num_heads}"
            raise KernelError(INVALID_ARGUMENT, message, "num_heads")
        if not math.isfinite(self.scale):
            raise KernelError(INVALID_ARGUMENT, f"must be finite, not {self.scale}", "scale")
        if self.window is not None and self.window < 1:
            raise KernelError(INVALID_ARGUMENT, f"must be at least 1, not {self.window}", "window")
        if self.softcap is not None and not self.softcap > 0:
            raise KernelError(INVALID_ARGUMENT, f"must be positive, not {self.softcap}", "softcap")

    @property
    def group(self) -> int:
        """G: query heads per kv head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can be asked for. None stands for 'any'.

    batch_invariant: whether it can be made with `batch_invariant=True`. Then out and lse of a row have the same bits
    whatever else is in the batch and however its sequence is cut into steps, as long as the row's q, the extents that
    its sequence lists (page numbers aside) and the K and V there are the same; extents of own tokens come last.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    window: bool = True
    softcap: bool = True
    sinks: bool = True
    lse: bool = True
    in_place: bool = False
    batch_invariant: bool = False

    def check(
        self, name: str, table: SegmentTable, shape: AttentionShape, device: str, dtype: torch.dtype
    ) -> None:
        """Raises KernelError (capability_missing) naming the first thing that backend `name` cannot do."""
        asked = (
            ("device", device, self.devices),
            ("dtype", dtype, self.dtypes),
            ("page_size", table.page_size, self.page_sizes),
            ("head_dim", shape.head_dim, self.head_dims),
        )
        for field, value, allowed in asked:
            if allowed is not None and value not in allowed:
                listed = ", ".join(str(a) for a in allowed)
                raise KernelError(UNSUPPORTED, f"backend {name!r} takes {listed}, not {value}", field)
        for field in ("window", "softcap"):
            if getattr(shape, field) is not None and not getattr(self, field):
                raise KernelError(UNSUPPORTED, f"backend {name!r} has no {field}", field)


@dataclass(frozen=True, eq=False)
class Plan:
    """What `AttentionBackend.plan` returns; backends extend it. It belongs to one batch and one backend."""

    backend: str
    table: SegmentTable
    shape: AttentionShape
    rotary: RotaryTable | None
    device: torch.device
    dtype: torch.dtype


class AttentionBackend(ABC):
    """One way to compute attention over segments.

    Instances may hold caches per sequence; use one per engine. Not thread-safe.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    implementation: str
    """What really runs, for reports: e.g. ``torch-cpu-flash``."""

    def __init__(self) -> None:
        self._temp_bytes = 0

    @abstractmethod
    def plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Plan:
        """Prepare one batch for the layers of one group; called once per step.

        Args:
            table: what each sequence sees.
            rotary: None for layers without positions (deltas are then ignored); else at least as long as any
                p - delta of a visible token needs (2 * the model's maximum is enough).
            device, dtype: of the queries.
        Raises: KernelError (invalid_segment_table, capability_missing, position_overflow, invalid_argument).
        """

    @abstractmethod
    def run(
        self,
        plan: Plan,
        layer: int,
        q: Tensor,
        kv_layer: Tensor,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            plan: from this backend's `plan`.
            layer: index of the layer (caches key on it).
            q: [T, Hq, D] after any qk-norm, *unrotated*.
            kv_layer: [pages, 2, Hkv, page_size, D] contiguous; 0 is K rotated at its stored position, 1 is V.
            sinks: [Hq] logits of learned sinks, which enter the softmax once.
            return_lse: also return the LSE.
        Returns:
            out [T, Hq, D] in q's dtype, and with return_lse: lse2 [T, Hq] float32, base 2, sinks included.
            A row that sees nothing has out 0 and lse2 -inf (with sinks: the sink alone).
        Raises: KernelError (invalid_argument) where tensors do not fit the plan.
        """

    def forget(self, sequence_id: int) -> None:  # noqa: B027  (a backend without caches has nothing to do)
        """Drop whatever is cached for a sequence; unknown ids are fine."""

    @property
    def temp_bytes(self) -> int:
        """Peak bytes of temporaries and caches (not q, out or the pages) of any run since `reset_stats`."""
        return self._temp_bytes

    def reset_stats(self) -> None:
        self._temp_bytes = 0

    def _note_temp(self, count: int) -> None:
        self._temp_bytes = max(self._temp_bytes, count)

    def _check_plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        planner_checks: bool = False,
    ) -> torch.device:
        """What every `plan` starts with. Where the planner checks what the table lists, so that this is not looked at
        twice, `check_reach` is left to the caller, once the table is planned.
        """
        if planner_checks:
            table.check_unplanned()
        else:
            table.validate()
        if not isinstance(device, torch.device):
            device = torch.device(device)
        self.capabilities.check(self.name, table, shape, device.type, dtype)
        if rotary is not None:
            check_head_dim(rotary, shape.head_dim)
            if not planner_checks:
                check_reach(table, rotary.length)
        return device

    def _check_run(
        self, plan: Plan, q: Tensor, kv_layer: Tensor, sinks: Tensor | None, *, pads: bool = False
    ) -> None:
        """What every `run` starts with; where it `pads`, q may have more rows than the plan."""
        shape, table = plan.shape, plan.table
        if plan.backend != self.name:
            message = f"was made by backend {plan.backend!r}, not {self.name!r}"
            raise KernelError(INVALID_ARGUMENT, message, "plan")
        rows = max(q.shape[0], table.num_rows) if pads and q.ndim == 3 else table.num_rows
        if q.shape != (rows, shape.num_heads, shape.head_dim) or q.dtype != plan.dtype:
            want = f"[{rows}, {shape.num_heads}, {shape.head_dim}] {plan.dtype}"
            raise KernelError(INVALID_ARGUMENT, f"must be {want}, is {list(q.shape)} {q.dtype}", "q")
        page = (2, shape.num_kv_heads, table.page_size, shape.head_dim)
        if kv_layer.shape[1:] != page or kv_layer.shape[0] < table.num_pages or not kv_layer.is_contiguous():
            want = f"contiguous [>= {table.num_pages}, {', '.join(map(str, page))}]"
            raise KernelError(INVALID_ARGUMENT, f"must be {want}, is {list(kv_layer.shape)}", "kv_layer")
        if sinks is not None:
            if not self.capabilities.sinks:
                raise KernelError(UNSUPPORTED, f"backend {self.name!r} has no sinks", "sinks")
            if sinks.shape != (shape.num_heads,):
                message = f"must be [{shape.num_heads}], is {list(sinks.shape)}"
                raise KernelError(INVALID_ARGUMENT, message, "sinks")


def check_reach(table: SegmentTable, length: int) -> None:
    """Raises KernelError (position_overflow) if a visible token needs p or p - delta at or past `length`."""
    if not table.num_rows or not len(table.extents):
        return
    if int(table.q_positions.max()) - min(0, int(table.extents[:, DELTA].min())) < length:
        return
    last = last_positions(table)
    counts = np.diff(table.extent_indptr)
    row_last = np.repeat(last, counts)
    needed = np.maximum(row_last, row_last - table.extents[:, DELTA])
    bad = (needed >= length) & (
        row_last >= table.extents[:, STORED].astype(np.int64) + table.extents[:, DELTA]
    )
    if bad.any():
        i = int(bad.argmax())
        message = f"needs the rotary table at {int(needed[i])}, which has {length} positions"
        raise KernelError(POSITION_OVERFLOW, message, f"extents[{i}]")


def last_positions(table: SegmentTable) -> NDArray[np.int64]:
    """View position of the last query row of each sequence [B]; -1 where a sequence has no rows."""
    ends = table.q_indptr[1:]
    if not table.num_rows:
        return np.full(len(ends), -1, np.int64)
    last = table.q_positions[np.maximum(ends - 1, 0)]
    return np.where(ends > table.q_indptr[:-1], last, -1)
