"""Control path B: attention per segment with turned queries, then an LSE merge. K stays as it is stored.

The plan (segmented_plan.py) says which calls to make. The parts of a tile class are merged together; the
chunks of a stream are attended one after another and merged as they come, so that temporaries stay bounded.
A call reads only tokens of the slices; padding repeats such a token, so what lies beside a slice is never
touched. Decode rows read runs of whole pages in place.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan
from dagengine_kernels.dense import attend
from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.lse import LOG2E, apply_sinks
from dagengine_kernels.rotary import RotaryTable
from dagengine_kernels.segmented_plan import (
    CPU_LIMITS,
    CUDA_LIMITS,
    Planner,
    Scratch,
    SegmentedPlan,
    Stream,
    TileClass,
)
from dagengine_kernels.segments import SegmentTable

T = TypeVar("T")

IN_PLACE_GROUP = 16
"""Up to this many query heads per kv head, decode rows may read whole pages in place."""


class SegmentedBackend(AttentionBackend):
    """Attention per segment over torch's flash kernels, merged by LSE.

    Args:
        in_place_tokens: decode rows read whole pages in place where these make runs of this many tokens (with
            some other pages between them); shorter runs are faster gathered.
        in_place_page_size: and only from this page size on, for the same reason.
    """

    name: ClassVar[str] = "segmented"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        in_place=True,
    )
    implementation = "torch-cpu-flash"

    def __init__(self, in_place_tokens: int = 2048, in_place_page_size: int = 64) -> None:
        super().__init__()
        for field, value in (
            ("in_place_tokens", in_place_tokens),
            ("in_place_page_size", in_place_page_size),
        ):
            if value < 1:
                raise KernelError(INVALID_ARGUMENT, f"must be at least 1, not {value}", field)
        self.in_place_tokens, self.in_place_page_size = in_place_tokens, in_place_page_size
        self._scratch = Scratch()

    def plan(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> SegmentedPlan:
        device = self._check_plan(table, shape, rotary, device, dtype)
        in_place_pages = None
        if table.page_size >= self.in_place_page_size and shape.group <= IN_PLACE_GROUP:
            in_place_pages = -(-self.in_place_tokens // table.page_size)
        on_cuda = device.type == "cuda"
        self.implementation = "torch-cuda-flash" if on_cuda else "torch-cpu-flash"
        limits = CUDA_LIMITS if on_cuda else CPU_LIMITS
        planner = Planner(table, shape, rotary, dtype, in_place_pages, limits)
        classes, streams = planner.classes(), planner.streams()
        if on_cuda:
            classes, streams = _on(classes, device), _on(streams, device)
        rows = sum(c.n * c.num_sequences for c in classes) + sum(s.rows.stop - s.rows.start for s in streams)
        covered = rows == table.num_rows
        return SegmentedPlan(self.name, table, shape, rotary, device, dtype, classes, streams, covered)

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
        assert isinstance(plan, SegmentedPlan)
        with_lse = return_lse or sinks is not None
        if plan.covered and len(plan.classes) == 1 and not plan.streams:
            out, lse = self._run_class(plan, plan.classes[0], q, kv_layer, with_lse)
        else:
            out, lse = self._run_all(plan, q, kv_layer, with_lse)
        if lse is None:
            return out
        lse2 = lse * LOG2E
        if sinks is not None:
            out, lse2 = apply_sinks(out, lse2, sinks)
        return (out, lse2.float()) if return_lse else out

    def _run_all(
        self, plan: SegmentedPlan, q: Tensor, kv_layer: Tensor, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = torch.empty_like(q) if plan.covered else torch.zeros_like(q)
        dtype = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype) if with_lse else None
        for tile_class in plan.classes:
            part, part_lse = self._run_class(plan, tile_class, q, kv_layer, with_lse)
            rows = tile_class.rows if tile_class.rows is not None else slice(None)
            out[rows] = part
            if lse is not None and part_lse is not None:
                lse[rows] = part_lse
        for stream in plan.streams:
            part, part_lse = self._run_stream(plan, stream, q[stream.rows], kv_layer)
            out[stream.rows] = part
            if lse is not None:
                lse[stream.rows] = part_lse
        return out, lse

    def _run_class(
        self, plan: SegmentedPlan, tiles: TileClass, q: Tensor, kv_layer: Tensor, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """out [rows, Hq, D] in q's dtype and the natural lse [rows, Hq] of the rows of a class."""
        shape = plan.shape
        heads, group, n = shape.num_kv_heads, shape.group, tiles.n
        x = q if tiles.rows is None else q.index_select(0, tiles.rows)
        x = x.view(tiles.num_sequences, n, heads, group, shape.head_dim).transpose(1, 2)
        if tiles.tile_sequences is not None:
            x = x.index_select(0, tiles.tile_sequences)
        x = tiles.turn(x, plan.rotary).reshape(tiles.num_tiles, heads, n * group, shape.head_dim)
        outs, lses = [], []
        temp = x.nbytes
        for call in tiles.calls:
            kv, copied = call.keys_values(kv_layer, q.dtype, self._scratch)
            if call.tiles is not None:
                tile = x.index_select(0, call.tiles)
            else:
                tile = x if tiles.num_tiles == call.size[0] else x.expand(call.size[0], -1, -1, -1)
            out, lse = attend(tile, kv[0], kv[1], call.mask, shape.scale, shape.softcap)
            if call.blind is not None:
                lse = lse.masked_fill(call.blind, -math.inf)
            outs.append(out)
            lses.append(lse)
            temp += out.nbytes
            self._note_temp(temp + copied)
        out, lse = self._merge(tiles, outs, lses, with_lse)
        if tiles.unseen is not None:
            out = out.masked_fill(tiles.unseen.unsqueeze(-1), 0.0)
            lse = lse if lse is None else lse.masked_fill(tiles.unseen, -math.inf)
        out = out.to(q.dtype)
        rows = tiles.num_sequences * n
        if n == 1:
            out = out.reshape(rows, shape.num_heads, shape.head_dim)
            return out, None if lse is None else lse.reshape(rows, shape.num_heads)
        out = out.view(-1, heads, n, group, shape.head_dim).transpose(1, 2)
        if lse is not None:
            lse = lse.reshape(-1, heads, n, group).transpose(1, 2).reshape(rows, shape.num_heads)
        return out.reshape(rows, shape.num_heads, shape.head_dim), lse

    def _merge(
        self, tiles: TileClass, outs: list[Tensor], lses: list[Tensor], with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """out [S, Hkv, R, D] and lse [S, Hkv, R] of a class from the parts of its calls."""
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        lse = lses[0] if len(lses) == 1 else torch.cat(lses)
        if tiles.merge is not None:
            out = out.index_select(0, tiles.merge)
            lse = lse.index_select(0, tiles.merge)
        if tiles.parts == 1:
            return out, lse
        out = out.unflatten(0, (tiles.num_sequences, tiles.parts))
        lse = lse.unflatten(0, (tiles.num_sequences, tiles.parts))
        if tiles.padding is not None:
            lse = lse.masked_fill(tiles.padding, -math.inf)
        weights = torch.softmax(lse, 1).unsqueeze(-1)
        return (weights * out).sum(1), lse.logsumexp(1) if with_lse else None

    def _run_stream(
        self, plan: SegmentedPlan, stream: Stream, q: Tensor, kv_layer: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out [n, Hq, D] in q's dtype and the natural lse [n, Hq] of one sequence.

        Rows that all see a chunk are attended as [1, Hkv, G*n, D]; with a mask as [G, Hkv, n, D], K and V
        repeated by a stride of 0, so that one [n, L] mask serves every head.
        """
        shape = plan.shape
        heads, group, n = shape.num_kv_heads, shape.group, q.shape[0]
        total: Tensor | None = None
        total_lse: Tensor | None = None
        for turned, calls in stream.tiles:
            x = turned(q, plan.rotary).view(n, heads, group, shape.head_dim).permute(1, 2, 0, 3)
            for call in calls:
                kv, copied = call.keys_values(kv_layer, q.dtype, self._scratch)
                if call.mask is None and not call.causal:
                    out, lse = attend(
                        x.reshape(1, heads, group * n, shape.head_dim),
                        kv[0],
                        kv[1],
                        None,
                        shape.scale,
                        shape.softcap,
                    )
                    out = out.view(heads, group, n, shape.head_dim)
                    lse = lse.reshape(heads, group, n)
                else:
                    k, v = kv.expand(-1, group, -1, -1, -1)
                    out, lse = attend(
                        x.transpose(0, 1), k, v, call.mask, shape.scale, shape.softcap, call.causal
                    )
                    out, lse = out.transpose(0, 1), lse.transpose(0, 1)
                if call.blind is not None:
                    lse = lse.masked_fill(call.blind, -math.inf)
                self._note_temp(x.nbytes * 2 + copied + 3 * out.numel() * 4)
                if total is None or total_lse is None:
                    total, total_lse = out, lse
                else:
                    total, total_lse = _merge_pair(total, total_lse, out, lse)
        assert total is not None
        assert total_lse is not None
        out = total.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)
        return out, total_lse.permute(2, 0, 1).reshape(q.shape[:2])


def _on(planned: T, device: torch.device) -> T:
    """What a planner made, with every tensor on `device`."""
    if isinstance(planned, Tensor):
        return planned.to(device)
    if isinstance(planned, tuple):
        return tuple(_on(x, device) for x in planned)  # type: ignore[return-value]
    if is_dataclass(planned) and not isinstance(planned, type):
        moved = {f.name: _on(getattr(planned, f.name), device) for f in fields(planned) if f.init}
        return replace(planned, **moved)
    return planned


def _merge_pair(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -math.inf, 0.0)
    share_a, share_b = (lse_a - base).exp_().unsqueeze(-1), (lse_b - base).exp_().unsqueeze(-1)
    return torch.addcmul(out_a * share_a, out_b.to(share_b.dtype), share_b), lse
