"""The contract between FusedBackend and one implementation of the walk. Knows plans and tensors; not tables' origin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape, Capabilities, Plan
from dagengine_kernels.errors import UNSUPPORTED, KernelError
from dagengine_kernels.fused.cuda.slot import PlanSlot
from dagengine_kernels.fused.plan import PlanArrays, PlanParameters
from dagengine_kernels.segments import SegmentTable


@dataclass(frozen=True, eq=False)
class FusedPlan(Plan):
    """A plan of FusedBackend.

    Attributes:
        arrays: the plan on the host.
        executor: the implementation that it was made for.
        loaded: what that implementation made of it (device arrays, scratch); its own business.
        maker: the instance that loaded it; no other runs it.
        slot: where it was loaded, until the next plan is; None where its memory is its own.
        settled: as `FusedBackend.plan` was told.
    """

    arrays: PlanArrays
    executor: str
    loaded: dict[str, Any] = field(default_factory=dict)
    maker: Executor | None = None
    slot: PlanSlot | None = None
    settled: bool = False

    @property
    def graph_key(self) -> Hashable:
        """Plans of equal keys can take each other's place: `run` and `advance` captured in a CUDA graph with one of
        them do, replayed, what they would for the other once that is the last one loaded into the slot.

        The key stands for the slot and its generation, `settled`, the layers' shape, the tile heights there are,
        whether anything is merged, and the sizes of all grids. Without a slot no other plan has an equal key.
        """
        return self.loaded.get("graph_key", self)


class Executor(ABC):
    """One implementation: cpu, cuda, tilelang, triton."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    advances: ClassVar[bool] = False
    """Whether `advance` works."""
    slots: ClassVar[bool] = False
    """Whether it loads plans into slots."""
    invariant: ClassVar[bool] = False
    """Whether its constructor takes `batch_invariant`: plans are then cut at fixed places (`invariant_chunk`), and a
    row's bits depend on its q and what its sequence lists up to it alone."""

    unchecked: ClassVar[bool] = False
    """Whether `parameters` takes tables of which only `SegmentTable.check_unplanned` is known."""

    @classmethod
    @abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Why it cannot run on that device here (no compiler, no such GPU, not installed); None if it can."""

    @abstractmethod
    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        """What the planner is to plan for. Raises: KernelError (capability_missing)."""

    @abstractmethod
    def load(self, plan: FusedPlan) -> None:
        """Bring `plan.arrays` where the kernels read it; fills `plan.loaded`. Called once per plan."""

    @abstractmethod
    def run(
        self, plan: FusedPlan, q: Tensor, kv_layer: Tensor, *, sinks: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """out [T, Hq, D] in q's dtype and, if asked for, lse2 [T, Hq] float32; as `AttentionBackend.run` says."""

    def advance(self, plan: FusedPlan) -> None:
        """Make a plan with reserved pages the plan of the next decode step, without the host: one token more for every
        sequence that has a tail, every row one position on.

        Raises: KernelError (capability_missing) where the implementation plans every step anew.
        """
        message = f"{self.name!r} plans every step anew"
        raise KernelError(UNSUPPORTED, message, "reserve")

    def temp_bytes(self, plan: FusedPlan) -> int:
        """Bytes of scratch (partials and the like) that `run` uses for this plan."""
        return 0
