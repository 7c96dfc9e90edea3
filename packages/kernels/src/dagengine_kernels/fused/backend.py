"""FusedBackend: one planner, several implementations that walk its plans; picks one and says which.

Knows which implementations there are and what each says of itself. They are imported when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan, check_reach
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused import planner
from dagengine_kernels.fused.cuda.slot import PlanSlot
from dagengine_kernels.fused.executor import Executor, FusedPlan
from dagengine_kernels.rotary import RotaryTable
from dagengine_kernels.segments import SegmentTable

EXECUTORS = {
    "cpu": "dagengine_kernels.fused.cpu:CpuExecutor",
    "cuda": "dagengine_kernels.fused.cuda.attend:CudaExecutor",
    "tilelang": "dagengine_kernels.fused.tilelang.executor:TileLangExecutor",
    "triton": "dagengine_kernels.fused.triton.executor:TritonExecutor",
}

AUTO = {"cpu": ("cpu",), "cuda": ("cuda", "tilelang", "triton")}
"""By device type, what `auto` chooses from, the fastest first."""

POSITIONS = 2**31
"""View positions are below this, so a window of as many keys hides none."""


@dataclass(frozen=True, slots=True)
class Reads:
    """What the walks of one plan read in one layer.

    Attributes:
        tokens: tokens in the pages that are read, every reading counted.
        unique_tokens: distinct tokens that are seen.
        bytes, unique_bytes: of their K and V in all heads, in pages of the plan's dtype.
    """

    tokens: int
    unique_tokens: int
    bytes: int
    unique_bytes: int


class FusedBackend(AttentionBackend):
    """Shared reads, planned once per batch.

    Args:
        implementation: "cpu", "cuda", "tilelang" or "triton"; "auto" takes, for each plan, the first of `AUTO` that
            runs on its device and does not refuse it.
        batch_invariant: promise what `Capabilities.batch_invariant` says, at the price of shared reads: every sequence
            is then planned by itself. Implementations that cannot are refused, and `auto` passes over them; learned
            sinks are refused when they are given.
        options: of that implementation's constructor; none with "auto".
    Raises: KernelError (invalid_argument; capability_missing where a named implementation cannot run).
    """

    name: ClassVar[str] = "fused"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        in_place=True,
        batch_invariant=True,
    )

    def __init__(
        self, implementation: str = "auto", *, batch_invariant: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self._executors: dict[str, Executor] = {}
        self._on: dict[torch.device, list[Executor]] = {}
        self._named: Executor | None = None
        self.last_plan: FusedPlan | None = None
        if implementation == "auto":
            if options:
                message = f"{', '.join(options)}: name the implementation that they are for"
                raise KernelError(INVALID_ARGUMENT, message, "options")
        else:
            self._named = self._make(implementation, options)
            self.capabilities = self._named.capabilities  # type: ignore[misc]

    @classmethod
    def unavailable(cls, device: torch.device | str) -> str | None:
        """Why no implementation runs on that device here; None if one does."""
        device = torch.device(device)
        reasons = []
        for name in AUTO.get(device.type, ()):
            reason = _why_not(name, device)
            if reason is None:
                return None
            reasons.append(f"{name}: {reason}")
        return "; ".join(reasons) or f"there is none for {device.type}"

    @property
    def implementation(self) -> str:  # type: ignore[override]
        """What the last plan is for; before the first, what would run on the first device of this machine."""
        if self.last_plan is not None:
            return _label(self._executors[self.last_plan.executor])
        if self._named is not None:
            return _label(self._named)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        for name in AUTO[device.type]:
            if self.batch_invariant and not _executor_class(name).invariant:
                continue
            if _why_not(name, device) is None:
                return _label(self._make(name, {}))
        return f"none ({self.unavailable(device)})"

    @property
    def reads(self) -> Reads | None:
        """What the last plan reads; None before the first."""
        plan = self.last_plan
        if plan is None:
            return None
        each = 2 * plan.shape.num_kv_heads * plan.shape.head_dim * plan.dtype.itemsize
        read, unique = plan.arrays.tokens_read, plan.arrays.tokens_unique
        return Reads(read, unique, read * each, unique * each)

    def plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        reserve: Sequence[Sequence[int]] | None = None,
        slot: PlanSlot | None = None,
        settled: bool = False,
    ) -> FusedPlan:
        """As `AttentionBackend.plan`.

        Args:
            reserve: per sequence the pages that its own tokens will grow into, for a plan that `advance` takes from
                decode step to decode step; rotary tables must then reach as far as the rows will.
            slot: device memory that the plan is loaded into, by an upload on the current stream that the host does
                not wait for; see `FusedPlan.graph_key`. The plan that was in it before cannot be run any more. Without
                one the plan has memory of its own, and stays valid as long as it lives.
            settled: a promise that whatever `run` reads was complete when the last kernel that waits for all before it
                started, except q and the K and V stored at the positions of the table's rows. Then pages, and the plan
                itself, are read while the kernel before `run` ends. Only for tables of one row per sequence.
        Raises: also KernelError (capability_missing, field `reserve` or `slot`) where no implementation that takes the
            batch can do that.
        """
        unchecked = self._plans_unchecked(device)
        device = self._check_plan(table, shape, rotary, device, dtype, planner_checks=unchecked)
        _check_factors(shape)
        if slot is not None and not _same_device(device, slot.device):
            raise KernelError(INVALID_ARGUMENT, f"must be on {device}, is on {slot.device}", "slot")
        if shape.window is not None and shape.window >= POSITIONS:
            shape = replace(shape, window=None)
        refusal: KernelError | None = None
        for executor in self._able(device):
            if unchecked and not executor.unchecked:
                self._check_plan(table, shape, rotary, device, dtype)
                unchecked = False
            try:
                executor.capabilities.check(f"{self.name}-{executor.name}", table, shape, device.type, dtype)
                if reserve is not None and not executor.advances:
                    raise KernelError(UNSUPPORTED, f"{executor.name!r} plans every step anew", "reserve")
                if slot is not None and not executor.slots:
                    raise KernelError(UNSUPPORTED, f"{executor.name!r} loads plans into no slots", "slot")
                arrays = planner.plan_table(table, executor.parameters(table, shape, device), reserve=reserve)
                if unchecked and rotary is not None:
                    check_reach(table, rotary.length)
                if settled and (np.diff(table.q_indptr) != 1).any():
                    raise KernelError(INVALID_ARGUMENT, "is for tables of one row per sequence", "settled")
                plan = FusedPlan(
                    self.name,
                    table,
                    shape,
                    rotary,
                    device,
                    dtype,
                    arrays,
                    executor.name,
                    maker=executor,
                    slot=slot,
                    settled=settled,
                )
                executor.load(plan)
            except KernelError as error:
                if self._named is not None or error.code != UNSUPPORTED:
                    raise
                refusal = refusal or error
                continue
            self.last_plan = plan
            return plan
        assert refusal is not None
        raise refusal

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
        """As `AttentionBackend.run`; can be captured in a CUDA graph once it has run with such tensors.

        With a plan in a slot q may have more rows than the plan: those behind, which pad a captured batch, are read by
        nothing, and hold anything in out and lse2.
        Raises: KernelError (invalid_argument) also where another plan has taken the slot.
        """
        if self.batch_invariant and sinks is not None:
            message = "are taken in at another place where a row is merged: not batch-invariant"
            raise KernelError(UNSUPPORTED, message, "sinks")
        self._check_run(plan, q, kv_layer, sinks, pads=isinstance(plan, FusedPlan) and plan.slot is not None)
        executor = self._maker(plan)
        assert isinstance(plan, FusedPlan)
        _check_devices(plan.device, q, kv_layer, sinks)
        out, lse2 = executor.run(plan, q, kv_layer, sinks=sinks, return_lse=return_lse)
        self._note_temp(executor.temp_bytes(plan))
        if not return_lse:
            return out
        assert lse2 is not None
        return out, lse2

    def new_slot(self, device: torch.device | str) -> PlanSlot:
        """A slot for `plan`; see there. Whether there is an implementation that takes it is said by `plan`."""
        return PlanSlot(torch.device(device))

    def advance(self, plan: FusedPlan) -> None:
        """Make a plan with reserved pages that of the next decode step: can be captured in a CUDA graph.

        Every sequence of one row that has room has one token more, at the end of its own; every row is one position on.
        Raises: KernelError (capability_missing where the implementation plans every step anew; invalid_argument for
            a plan of another backend).
        """
        self._maker(plan).advance(plan)

    def _maker(self, plan: Plan) -> Executor:
        """The implementation that made a plan. Raises: KernelError (invalid_argument) where it is not of this one."""
        if not isinstance(plan, FusedPlan) or self._executors.get(plan.executor) is not plan.maker:
            made = f"for {plan.executor!r}" if isinstance(plan, FusedPlan) else f"a {type(plan).__name__}"
            raise KernelError(INVALID_ARGUMENT, f"was made by another backend, {made}", "plan")
        assert plan.maker is not None
        return plan.maker

    def _plans_unchecked(self, device: torch.device | str) -> bool:
        """Whether the first implementation to try leaves it to the planner to check what a table lists."""
        on = torch.device(device)
        return on.type == "cuda" and planner.checks_tables() and self._able(on)[0].unchecked

    def _able(self, device: torch.device) -> list[Executor]:
        """The implementations to try on a device, at least one. Raises: KernelError (capability_missing)."""
        if self._named is not None:
            reason = type(self._named).unavailable(device)
            if reason is not None:
                raise KernelError(UNSUPPORTED, f"{self._named.name!r}: {reason}", "implementation")
            return [self._named]
        found = self._on.get(device)
        if found is None:
            reason = self.unavailable(device)
            if reason is not None:
                raise KernelError(UNSUPPORTED, reason, "implementation")
            names = [name for name in AUTO[device.type] if _why_not(name, device) is None]
            if self.batch_invariant:
                ran, names = names, [name for name in names if _executor_class(name).invariant]
                if not names:
                    message = f"{', '.join(ran)} cannot: a row's bits depend on its batch"
                    raise KernelError(UNSUPPORTED, message, "batch_invariant")
            found = self._on[device] = [self._make(name, {}) for name in names]
        return found

    def _make(self, name: str, options: dict[str, Any]) -> Executor:
        made = _executor_class(name)
        if self.batch_invariant:
            if not made.invariant:
                message = f"{name!r} cannot: a row's bits depend on its batch"
                raise KernelError(UNSUPPORTED, message, "batch_invariant")
            options = {**options, "batch_invariant": True}
        if name not in self._executors:
            self._executors[name] = made(**options)
        return self._executors[name]


def _executor_class(name: str) -> type[Executor]:
    if not isinstance(name, str) or name not in EXECUTORS:
        listed = ", ".join(("auto", *EXECUTORS))
        raise KernelError(INVALID_ARGUMENT, f"must be one of {listed}, not {name!r}", "implementation")
    module, _, attribute = EXECUTORS[name].partition(":")
    try:
        loaded: type[Executor] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise KernelError(UNSUPPORTED, f"{name!r} cannot be imported: {error}", "implementation") from error
    return loaded


def _why_not(name: str, device: torch.device) -> str | None:
    try:
        return _executor_class(name).unavailable(device)
    except KernelError as error:
        return error.message


def _label(executor: Executor) -> str:
    return getattr(executor, "implementation", f"fused-{executor.name}")


def _check_factors(shape: AttentionShape) -> None:
    """Raises KernelError (capability_missing) for factors that float32, in which all walks compute, does not hold."""
    limits = torch.finfo(torch.float32)
    if not abs(shape.scale) <= limits.max:
        message = f"must be within +-{limits.max:.3g} (float32), not {shape.scale}"
        raise KernelError(UNSUPPORTED, message, "scale")
    if shape.softcap is not None and not limits.tiny <= shape.softcap <= limits.max:
        message = f"must be in [{limits.tiny:.3g}, {limits.max:.3g}] (float32), not {shape.softcap}"
        raise KernelError(UNSUPPORTED, message, "softcap")


def _same_device(device: torch.device, other: torch.device) -> bool:
    """Whether `other` is the device named; without an index any of its type is."""
    return other.type == device.type and device.index in (None, other.index or 0)


def _check_devices(device: torch.device, q: Tensor, kv_layer: Tensor, sinks: Tensor | None) -> None:
    """Raises KernelError (invalid_argument) for tensors that are not on the plan's device; sinks are moved to it."""
    for name, tensor in (("q", q), ("kv_layer", kv_layer)):
        if tensor.device != device and not _same_device(device, tensor.device):
            raise KernelError(INVALID_ARGUMENT, f"must be on {device}, is on {tensor.device}", name)
    if kv_layer.device != q.device:
        raise KernelError(INVALID_ARGUMENT, f"must be on {q.device}, is on {kv_layer.device}", "kv_layer")
    if sinks is not None and sinks.device.type not in ("cpu", device.type):
        raise KernelError(INVALID_ARGUMENT, f"must be on {device}, is on {sinks.device}", "sinks")
