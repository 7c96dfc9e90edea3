"""The TileLang executor: a plan's arrays on the device, one launch of attend.py's kernel per tile height, one merge.

Knows plans, tensors and launches; not how the kernel walks. For GPUs of compute capability 9.0; TileLang itself is
imported only where a kernel is compiled.
"""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape, Capabilities
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda.merge import MergeLists, merge_parts
from dagengine_kernels.fused.executor import Executor, FusedPlan
from dagengine_kernels.fused.plan import INVISIBLE, WORK_BEGIN, WORK_END, PlanClass, PlanParameters
from dagengine_kernels.fused.tilelang.variant import FARTHEST, PAGE_SIZE, Variant
from dagengine_kernels.lse import LOG2E
from dagengine_kernels.rotary import RotaryTable
from dagengine_kernels.segments import DELTA, PAGE, SegmentTable

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = "0.1.15"
GROUPS = 8
NARROW, WIDE = 64, 128
LARGEST = 2**31 - 1


class TileLangExecutor(Executor):
    """Attention on sm_90a, written in TileLang.

    Args:
        keys: keys per KV tile, 64 or 128; None chooses by the batch.
    Raises: KernelError (invalid_argument).
    """

    name: ClassVar[str] = "tilelang"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        page_sizes=(PAGE_SIZE,),
        head_dims=(64, 128),
        in_place=True,
    )
    implementation: ClassVar[str] = "fused-tilelang-sm90"

    def __init__(self, keys: int | None = None) -> None:
        if keys not in (None, 64, 128):
            raise KernelError(INVALID_ARGUMENT, f"must be 64 or 128, not {keys}", "keys")
        self._keys = keys
        self._rope: dict[int, tuple[RotaryTable, Tensor]] = {}

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device.type}"
        if importlib.util.find_spec("tilelang") is None:
            return "tilelang is not installed (pip install 'dagengine-kernels[tilelang]')"
        reason = driver.unavailable()
        if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            reason = f"its code is for compute capability 9.0, the device has {found}"
        return reason

    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        if shape.group > GROUPS:
            message = f"takes up to {GROUPS} query heads per kv head, not {shape.group}"
            raise KernelError(UNSUPPORTED, message, "num_heads")
        if not shape.scale > 0:
            raise KernelError(UNSUPPORTED, f"takes positive scales, not {shape.scale}", "scale")
        check_distances(table)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        long = bool(len(table.q_indptr) > 1 and np.diff(table.q_indptr).max() * shape.group > NARROW)
        keys = self._keys or (128 if long or widely_shared(table, shape.group) else 64)
        heights = (WIDE,) if long else (NARROW, WIDE)
        return PlanParameters(
            group=shape.group,
            num_kv_heads=shape.num_kv_heads,
            rows_per_tile=heights,
            workers=tuple(sms * ctas_per_sm(rows, keys // PAGE_SIZE, shape.head_dim) for rows in heights),
            boxes=keys // PAGE_SIZE,
            window=shape.window,
        )

    def load(self, plan: FusedPlan) -> None:
        from dagengine_kernels.fused.tilelang.compiled import kernel

        arrays, device, shape = plan.arrays, plan.device, plan.shape
        ints = {
            "positions": plan.table.q_positions.astype(np.int32),
            "step": np.zeros(1, np.int32),
            "entries": arrays.entries,
            "runs": arrays.runs,
            "deltas": arrays.deltas,
            "merge_rows": arrays.merge_rows,
            "merge_indptr": arrays.merge_indptr,
            "merge_parts": arrays.merge_parts,
        }
        for i, tiles in enumerate(arrays.classes):
            ints |= {f"tile_rows{i}": tiles.tile_rows, f"works{i}": longest_first(tiles)}
        loaded = upload(ints, device)
        parts = (max(arrays.num_parts, 1), shape.group)
        if parts[0] * shape.group * shape.head_dim > LARGEST:
            raise KernelError(UNSUPPORTED, f"{parts[0]} partial results are too many", "table")
        loaded["merge"] = MergeLists(*(loaded[n] for n in ("merge_rows", "merge_indptr", "merge_parts")))
        loaded["o_part"] = torch.empty(*parts, shape.head_dim, dtype=torch.float32, device=device)
        loaded["lse2_part"] = torch.empty(parts, dtype=torch.float32, device=device)
        loaded["rope"] = self._rope_on(plan.rotary, device)
        loaded["no_sinks"] = torch.full((shape.num_kv_heads, shape.group), -math.inf, device=device)
        loaded["kernels"] = [
            kernel(variant(plan.dtype, shape, plan.rotary, tiles.rows_per_tile, arrays.boxes))
            for tiles in arrays.classes
        ]
        plan.loaded.update(loaded)

    def run(
        self, plan: FusedPlan, q: Tensor, kv_layer: Tensor, *, sinks: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        loaded, shape = plan.loaded, plan.shape
        q = q.contiguous()
        out = torch.empty_like(q)
        lse2 = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        grouped = (len(q), shape.num_kv_heads, shape.group)
        sinks2 = loaded["no_sinks"]
        if sinks is not None:
            sinks = sinks.to(q.device, torch.float32).contiguous()
            sinks2 = (sinks * LOG2E).view(sinks2.shape)
        cap = shape.softcap
        scale2 = shape.scale * LOG2E if cap is None else 2 * LOG2E * shape.scale / cap
        for i, launch in enumerate(loaded["kernels"]):
            launch(
                q.view(*grouped, shape.head_dim),
                kv_layer,
                loaded["rope"],
                loaded["positions"],
                loaded["step"],
                loaded["entries"],
                loaded["runs"],
                loaded["deltas"],
                loaded[f"tile_rows{i}"],
                loaded[f"works{i}"],
                sinks2,
                out.view(*grouped, shape.head_dim),
                lse2.view(grouped),
                loaded["o_part"],
                loaded["lse2_part"],
                scale2,
                0.0 if cap is None else cap * LOG2E,
                shape.window or 0,
            )
        if len(plan.arrays.merge_rows):
            merge_parts(loaded["merge"], loaded["o_part"], loaded["lse2_part"], out, lse2, sinks)
        return out, lse2 if return_lse else None

    def temp_bytes(self, plan: FusedPlan) -> int:
        lse2 = plan.table.num_rows * plan.shape.num_heads * 4
        return lse2 + sum(plan.loaded[name].nbytes for name in ("o_part", "lse2_part", "indices"))

    def _rope_on(self, table: RotaryTable | None, device: torch.device) -> Tensor:
        """float32 [length, R], cos and sin side by side; kept as long as the executor. [1, 2] without positions."""
        if table is None:
            return torch.zeros(1, 2, device=device)
        held = self._rope.get(id(table))
        if held is None:
            held = (table, torch.stack((table.cos, table.sin), -1).flatten(1).to(device).contiguous())
            self._rope[id(table)] = held
        return held[1]


def variant(
    dtype: torch.dtype, shape: AttentionShape, rotary: RotaryTable | None, rows: int, boxes: int
) -> Variant:
    """The kernel for tiles of that height and KV tiles of that many pages."""
    per_sm = ctas_per_sm(rows, boxes, shape.head_dim)
    return Variant(
        dtype=str(dtype).removeprefix("torch."),
        head_dim=shape.head_dim,
        group=shape.group,
        rows_per_tile=rows,
        boxes=boxes,
        stages=stages(rows, boxes, shape.head_dim, per_sm),
        rotary_dim=0 if rotary is None else rotary.rotary_dim,
        interleaved=rotary is not None and rotary.pairing == "interleaved",
        windowed=shape.window is not None,
        capped=shape.softcap is not None,
        ctas_per_sm=per_sm,
    )


def ctas_per_sm(rows: int, boxes: int, head_dim: int) -> int:
    """How many CTAs share an SM: two of one consumer, whose softmax and products then overlap, or one of two."""
    return 2 if rows == NARROW and boxes == 1 else 1


def stages(rows: int, boxes: int, head_dim: int, per_sm: int) -> int:
    """KV tiles in the ring: as many as shared memory holds, from 2 to 6."""
    room = (228 // per_sm - 1) * 1024 - 3072 - 2 * head_dim * rows
    return min(6, room // (4 * head_dim * boxes * PAGE_SIZE))


def widely_shared(table: SegmentTable, group: int) -> bool:
    """Whether most reads can be shared by more rows than one warpgroup's: then products bound, not bytes."""
    pages = table.extents[:, PAGE]
    if table.num_rows * group <= NARROW or not len(pages):
        return False
    readers = len(pages) / np.count_nonzero(np.bincount(pages))
    return bool(readers * group > NARROW / 2)


def longest_first(tiles: PlanClass) -> np.ndarray:
    """The works of a class by falling length: CTAs take them in that order."""
    lengths = tiles.works[:, WORK_END] - tiles.works[:, WORK_BEGIN]
    assert (lengths > 0).all(), "a work without KV tiles"
    return tiles.works[np.argsort(-lengths, kind="stable")]


def check_distances(table: SegmentTable) -> None:
    """Raises KernelError (capability_missing) for positions and deltas that the kernel takes for its marks."""
    deltas = table.extents[:, DELTA]
    far = (deltas <= -FARTHEST) & (deltas != INVISIBLE) | (deltas >= FARTHEST)
    if far.any():
        i = int(far.argmax())
        raise KernelError(
            UNSUPPORTED, f"takes deltas up to {FARTHEST}, not {deltas[i]}", f"extents[{i}].DELTA"
        )
    if len(table.q_positions) and int(table.q_positions.max()) >= FARTHEST:
        message = f"takes positions under {FARTHEST}, not {int(table.q_positions.max())}"
        raise KernelError(UNSUPPORTED, message, "q_positions")


def upload(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Any]:
    """int32 arrays by name in one copy, each from a multiple of 16 bytes on; "indices" is all of them.

    An array of no elements becomes one of one (its first axis), which nothing points at.
    """
    shapes = {name: array.shape if array.size else (1, *array.shape[1:]) for name, array in arrays.items()}
    starts, length = {}, 0
    for name, shape in shapes.items():
        starts[name] = length
        length += -(-math.prod(shape) // 4) * 4
    host = torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for name, array in arrays.items():
        view[starts[name] : starts[name] + array.size] = array.ravel()
    indices = host.to(device, non_blocking=True)
    views = {n: indices[starts[n] : starts[n] + math.prod(shape)].view(shape) for n, shape in shapes.items()}
    return {"indices": indices, **views}


def variants() -> Sequence[Variant]:
    """What the compile gate builds: shapes of the models that people run, both heights, both KV tiles."""
    made = []
    for head_dim, group, dtype, rotary_dim, interleaved, softcap, window in (
        (128, 4, torch.bfloat16, 128, False, None, None),
        (128, 8, torch.float16, 128, False, None, 4096),
        (128, 2, torch.bfloat16, 64, False, 50.0, None),
        (64, 3, torch.bfloat16, 64, False, None, None),
        (64, 1, torch.bfloat16, 64, True, 30.0, 1024),
        (128, 5, torch.bfloat16, 0, False, None, None),
    ):
        shape = AttentionShape(group, 1, head_dim, 1.0, window, softcap)
        nothing = torch.zeros(1, 1)
        pairing: Any = "interleaved" if interleaved else "half"
        rotary = RotaryTable(nothing, nothing, rotary_dim, pairing, nothing, 1.0) if rotary_dim else None
        made += [
            variant(dtype, shape, rotary, rows, boxes)
            for rows, boxes in ((64, 1), (64, 2), (128, 1), (128, 2))
        ]
    return made
