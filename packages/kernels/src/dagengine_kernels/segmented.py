"""Attention per segment, then an LSE merge."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan
from dagengine_kernels.dense import attend
from dagengine_kernels.lse import LOG2E, apply_sinks, merge
from dagengine_kernels.rotary import RotaryTable, rotate
from dagengine_kernels.segments import SegmentTable


class SegmentedBackend(AttentionBackend):
    name: ClassVar[str] = "segmented"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu",), dtypes=(torch.float64, torch.float32, torch.bfloat16), in_place=True
    )
    implementation = "torch-cpu-flash"

    def plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Plan:
        device = self._check_plan(table, shape, rotary, device, dtype)
        return Plan(self.name, table, shape, rotary, device, dtype)

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
        self._check_run(plan, q, kv_layer, sinks)
        table, shape = plan.table, plan.shape
        out = q.new_zeros(q.shape)
        lse2 = torch.full(q.shape[:2], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for b in range(table.num_sequences):
            rows = slice(int(table.q_indptr[b]), int(table.q_indptr[b + 1]))
            positions = torch.from_numpy(table.q_positions[rows])
            n = len(positions)
            if not n:
                continue
            extents = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]].tolist()
            for page, lo, hi, stored, delta in extents:
                view = torch.arange(stored + delta, stored + delta + hi - lo)
                sees = view[None] <= positions[:, None]
                if shape.window is not None:
                    sees &= view[None] > positions[:, None] - shape.window
                if not sees.any():
                    continue
                turned = q[rows]
                if plan.rotary is not None:
                    turned = rotate(turned, (positions - delta).clamp(0, plan.rotary.length - 1), plan.rotary)
                tiles = (
                    turned.view(n, shape.num_kv_heads, -1, shape.head_dim).permute(1, 0, 2, 3).flatten(1, 2)
                )
                mask = torch.zeros(sees.shape, dtype=q.dtype).masked_fill_(~sees, -math.inf)
                mask = mask.repeat_interleave(shape.group, 0)[None, None]
                k, v = (kv_layer[page, i, :, lo:hi].to(q.dtype)[None] for i in (0, 1))
                part, lse = attend(tiles[None], k, v, mask, shape.scale, shape.softcap)
                part = part[0].unflatten(1, (n, -1)).transpose(0, 1).flatten(1, 2)
                lse = lse[0].unflatten(1, (n, -1)).transpose(0, 1).flatten(1, 2) * LOG2E
                lse[~sees.any(1)] = -math.inf
                out[rows], lse2[rows] = merge(out[rows], lse2[rows], part, lse)
        if sinks is not None:
            out, lse2 = apply_sinks(out, lse2, sinks)
        return (out, lse2.float()) if return_lse else out
