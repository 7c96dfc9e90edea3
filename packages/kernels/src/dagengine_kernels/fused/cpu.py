"""The CPU implementation: C++ that walks a plan in vectors of the machine's widest instruction set.

Knows plans and how to hand tensors to the native module; what a walk does is in csrc/attend_cpu_kernel.h. Rows that do
not see a run cost nothing in it, so tiles are tall and shared reads are free. The number of workers that a plan is cut
for depends on the work alone: the bits of a result are the same for every number of threads, and from run to run.
Made with `batch_invariant` it cuts plans at fixed places and scores the same keys at once in the same way for few rows
and for many.
"""

from __future__ import annotations

import math
import os
import threading
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape, Capabilities
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused import native
from dagengine_kernels.fused.executor import Executor, FusedPlan
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.segments import HI, LO, PAGE, SegmentTable

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As attend_cpu.h numbers them."""

TILE_ROWS = 128
STRIP_ROWS = 6
"""Rows that the kernels score at once: tiles of a multiple leave no strip half empty."""

WORKER_COST = 2048.0
MAX_WORKERS = 256
MIN_CHUNK_TOKENS = 512
WORK_COST_TOKENS = 64

INVARIANT_KEYS = 64
"""Keys that a batch-invariant walk scores at once: a KV tile of a plan, or as many rows of a page that is larger."""

INVARIANT_CHUNK_TOKENS = 4096
"""About how many keys a batch-invariant plan has in a part."""

ISA_VARIABLE = "DAGENGINE_CPU_ISA"
"""Names the instruction set to use where the constructor does not."""


class CpuExecutor(Executor):
    """Attention on the CPU.

    Args:
        isa: "avx512", "avx2" or "portable"; None takes what the variable `DAGENGINE_CPU_ISA` names, else the
            widest that the machine has.
        batch_invariant: see `Executor.invariant`.
    Raises: KernelError (invalid_argument, or capability_missing without the native module).
    """

    name: ClassVar[str] = "cpu"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=("cpu",), dtypes=tuple(DTYPES), in_place=True)

    invariant: ClassVar[bool] = True

    def __init__(self, isa: str | None = None, *, batch_invariant: bool = False) -> None:
        missing = native.why_missing()
        if missing is not None:
            raise KernelError(UNSUPPORTED, missing, "implementation")
        self._native = native.load().cpu
        isas = self._native.isas()
        wanted = isa or os.environ.get(ISA_VARIABLE) or isas[0]
        if wanted not in isas:
            message = f"this machine runs {', '.join(isas)}, not {wanted!r}"
            raise KernelError(INVALID_ARGUMENT, message, "isa")
        self.isa = wanted
        self.batch_invariant = batch_invariant
        self.implementation = f"fused-cpu-{wanted}"
        self._workspace = self._native.Workspace()
        self._one_launch = threading.Lock()

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        return native.why_missing()

    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        tokens = WORK_COST_TOKENS // table.page_size
        boxes = max(1, INVARIANT_KEYS // table.page_size) if self.batch_invariant else 1
        return PlanParameters(
            group=shape.group,
            num_kv_heads=shape.num_kv_heads,
            rows_per_tile=(tile_rows(shape.group),),
            workers=(workers(table, shape),),
            boxes=boxes,
            window=shape.window,
            min_chunk=-(-MIN_CHUNK_TOKENS // table.page_size),
            work_cost=max(1, tokens // boxes),
            invariant_chunk=(
                -(-INVARIANT_CHUNK_TOKENS // (boxes * table.page_size)) if self.batch_invariant else None
            ),
        )

    def load(self, plan: FusedPlan) -> None:
        shape, rotary = plan.shape, plan.rotary
        cos = sin = None
        if rotary is not None:
            cos, sin = (x.to("cpu", torch.float32).contiguous() for x in (rotary.cos, rotary.sin))
        plan.loaded["tables"] = (cos, sin)
        plan.loaded["native"] = self._native.CpuPlan(
            isa=self.isa,
            arrays=plan.arrays,
            q_positions=plan.table.q_positions,
            head_dim=shape.head_dim,
            group=shape.group,
            num_kv_heads=shape.num_kv_heads,
            scale=shape.scale,
            softcap=shape.softcap or 0.0,
            window=shape.window or 0,
            cos=0 if cos is None else cos.data_ptr(),
            sin=0 if sin is None else sin.data_ptr(),
            rotary_length=0 if rotary is None else rotary.length,
            half=0 if rotary is None else rotary.rotary_dim // 2,
            interleaved=rotary is not None and rotary.pairing == "interleaved",
            invariant=self.batch_invariant,
        )

    def run(
        self, plan: FusedPlan, q: Tensor, kv_layer: Tensor, *, sinks: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        pages = DTYPES.get(kv_layer.dtype)
        if pages is None:
            listed = ", ".join(map(str, DTYPES))
            raise KernelError(UNSUPPORTED, f"takes pages of {listed}, not {kv_layer.dtype}", "kv_layer")
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        lse2 = torch.empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        if sinks is not None:
            sinks = sinks.to("cpu", torch.float32).contiguous()
        native_plan: Any = plan.loaded["native"]
        launch = (
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            DTYPES[q.dtype],
            kv_layer.data_ptr(),
            pages,
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            0 if lse2 is None else lse2.data_ptr(),
            torch.get_num_threads(),
        )
        with self._one_launch:
            native_plan.run(self._workspace, *launch)
        return out, lse2

    def temp_bytes(self, plan: FusedPlan) -> int:
        return int(plan.loaded["native"].temp_bytes(torch.get_num_threads()))


def tile_rows(group: int) -> int:
    """The height of a tile: about `TILE_ROWS`, whole table rows, and whole strips if that is possible."""
    slots = max(1, TILE_ROWS // group)
    step = STRIP_ROWS // math.gcd(STRIP_ROWS, group)
    return (slots - slots % step if slots >= step else slots) * group


def workers(table: SegmentTable, shape: AttentionShape) -> int:
    """How many workers the work of a batch is worth: by its pages, tokens and rows, never by the machine.

    The cost is in tokens of one kv head: reading one counts 1, and each row that sees it 1/8.
    """
    lengths = np.append(0, np.cumsum(table.extents[:, HI] - table.extents[:, LO], dtype=np.int64))
    tokens = np.diff(lengths[table.extent_indptr])
    read = np.zeros(table.num_pages, np.bool_)
    read[table.extents[:, PAGE]] = True
    distinct = min(int(np.count_nonzero(read)) * table.page_size, int(lengths[-1]))
    cost = distinct + float((tokens * np.diff(table.q_indptr)).sum()) * shape.group / 8
    return int(min(max(cost * shape.num_kv_heads // WORKER_COST, 1), MAX_WORKERS))
