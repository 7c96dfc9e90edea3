"""The truth, to be read: one dense attention per sequence, in float64 unless told otherwise.

It is the definition word for word: bring the cached K and V to their view positions, then attend densely. So
K is moved by its delta and the query is rotated at its own position; no query is turned, nothing is merged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan
from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.lse import LOG2E
from dagengine_kernels.rotary import RotaryTable, exact_rows, expand_rows, turn
from dagengine_kernels.segments import SegmentTable


@dataclass(frozen=True, eq=False)
class ReferencePlan(Plan):
    """Per sequence: its rows, and page, row, view and delta of each token it lists (int64 [L] each)."""

    rows: tuple[slice, ...]
    positions: tuple[Tensor, ...]
    tokens: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]


class ReferenceBackend(AttentionBackend):
    """Dense attention in `compute_dtype` (float64 or float32)."""

    name: ClassVar[str] = "reference"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"), dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)
    )

    def __init__(self, compute_dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        if compute_dtype not in (torch.float64, torch.float32):
            message = f"must be torch.float64 or torch.float32, not {compute_dtype}"
            raise KernelError(INVALID_ARGUMENT, message, "compute_dtype")
        self.compute_dtype = compute_dtype
        self.implementation = f"torch-dense-{str(compute_dtype).removeprefix('torch.')}"

    def plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> ReferencePlan:
        device = self._check_plan(table, shape, rotary, device, dtype)
        rows, positions, tokens = [], [], []
        for b in range(table.num_sequences):
            rows.append(slice(int(table.q_indptr[b]), int(table.q_indptr[b + 1])))
            positions.append(torch.from_numpy(table.q_positions[rows[-1]]).to(device))
            pages, page_rows, views, deltas = [], [], [], []
            for page, lo, hi, stored, delta in table.extents[
                table.extent_indptr[b] : table.extent_indptr[b + 1]
            ].tolist():
                for row in range(lo, hi):
                    pages.append(page)
                    page_rows.append(row)
                    views.append(stored + (row - lo) + delta)
                    deltas.append(delta)
            listed = (pages, page_rows, views, deltas)
            tokens.append(tuple(torch.tensor(x, dtype=torch.int64, device=device) for x in listed))
        return ReferencePlan(
            self.name, table, shape, rotary, device, dtype, tuple(rows), tuple(positions), tuple(tokens)
        )

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
        assert isinstance(plan, ReferencePlan)
        out = q.new_zeros(q.shape)
        lse2 = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
        for rows, positions, tokens in zip(plan.rows, plan.positions, plan.tokens, strict=True):
            attended, lse = self._attend(plan, q[rows], positions, kv_layer, tokens, sinks)
            out[rows] = attended.to(q.dtype)
            lse2[rows] = (lse * LOG2E).to(torch.float32)
        return (out, lse2) if return_lse else out

    def _attend(
        self,
        plan: ReferencePlan,
        q: Tensor,
        positions: Tensor,
        kv_layer: Tensor,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """out [n, Hq, D] and natural lse [n, Hq] of one sequence, in the compute dtype."""
        shape, dtype = plan.shape, self.compute_dtype
        page, row, view, delta = tokens
        by_token = kv_layer.permute(0, 3, 1, 2, 4)  # [pages, page_size, 2, Hkv, D]
        k, v = by_token[page, row].to(dtype).unbind(1)  # [L, Hkv, D]
        q = q.to(dtype)
        if plan.rotary is not None:
            q = self._rotate(q, positions, plan.rotary, scaled=True)
            k = self._rotate(k, delta, plan.rotary, scaled=False)
        k = k.repeat_interleave(shape.group, 1)
        v = v.repeat_interleave(shape.group, 1)
        scores = torch.einsum("nhd,lhd->nhl", q, k) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        sees = view[None] <= positions[:, None]
        if shape.window is not None:
            sees &= view[None] > positions[:, None] - shape.window
        scores = scores.masked_fill(~sees[:, None, :], -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype)[None, :, None].expand(len(q), -1, 1)), -1)
            v = torch.cat((v, v.new_zeros(1, *v.shape[1:])))
        if scores.shape[-1] == 0:
            return torch.zeros_like(q), scores.new_full(scores.shape[:2], -math.inf)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        self._note_temp(sum(x.nbytes for x in (k, v, scores, weights)))
        return torch.einsum("nhl,lhd->nhd", weights, v), lse

    def _rotate(self, x: Tensor, positions: Tensor, rotary: RotaryTable, *, scaled: bool) -> Tensor:
        cos, sin = exact_rows(rotary, positions, scaled=scaled)
        cos, sin = cos.to(self.compute_dtype), sin.to(self.compute_dtype)
        return turn(x, *expand_rows(cos, sin, rotary.pairing), rotary.rotary_dim, rotary.pairing)
