"""The CUDA executor: a plan's arrays on the device, one launch of csrc/cuda/attend.cu per tile height, one merge.

Knows plans, tensors and launches; not how the kernel walks. For GPUs of compute capability 9.0.

A plan is always in a slot (slot.py): the caller's, where the next one replaces it, or one of its own. What a launch is
made of besides the lists in the slot is in the plan's `graph_key`, so that plans of one key share their launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from operator import sub
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape, Capabilities
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda.advance import advance, prepare
from dagengine_kernels.fused.cuda.merge import Merge, MergeLists, split_of
from dagengine_kernels.fused.cuda.params import address, packer
from dagengine_kernels.fused.cuda.slot import Listed, PlanSlot
from dagengine_kernels.fused.executor import Executor, FusedPlan
from dagengine_kernels.fused.plan import ENTRY_RUN, WORK_BEGIN, PlanArrays, PlanClass, PlanParameters
from dagengine_kernels.lse import LOG2E
from dagengine_kernels.rotary import RotaryTable
from dagengine_kernels.segments import PAGE, SegmentTable
from dagengine_kernels.staging import Staging

THREADS = 384
SHARED_BYTES = 227 * 1024
NARROW, WIDE = 64, 128

MERGE_ROWS = 1024
"""Up to this many, the grid of a slot's merge is for all rows of the batch: it depends on their number alone."""

TAILS = 64
"""What a slot's lists of tails are padded to at least."""

INVARIANT_CHUNK_KEYS = 4096
"""Keys that a batch-invariant plan has in a part."""

MAX_MAPS = 4096
"""Layers of which the tensor map is remembered."""


class AttendParams(ctypes.Structure):
    """`Params` of attend.cu."""

    _fields_: ClassVar = [
        ("kv", ctypes.c_uint64 * 16),
        ("q", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("lse2_out", ctypes.c_uint64),
        ("o_part", ctypes.c_uint64),
        ("lse2_part", ctypes.c_uint64),
        ("rotary", ctypes.c_uint64),
        ("sinks", ctypes.c_uint64),
        ("entries", ctypes.c_uint64),
        ("runs", ctypes.c_uint64),
        ("deltas", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("works", ctypes.c_uint64),
        ("work_indptr", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("score_scale", ctypes.c_float),
        ("cap_log2", ctypes.c_float),
        ("rotary_length", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("settled", ctypes.c_int32),
        ("padding", ctypes.c_int32 * 14),
    ]


_PARAMS = packer(AttendParams)


@dataclass(frozen=True, slots=True)
class Geometry:
    """One compiled kernel.

    Attributes:
        rows: M, 64 or 128.
        page: page size.
        boxes: entries per KV tile.
        head_dim: D.
    """

    rows: int
    page: int
    boxes: int
    head_dim: int

    @property
    def streams(self) -> int:
        """Workers per CTA: two of one consumer warpgroup or one of two."""
        return 128 // self.rows

    @property
    def stages(self) -> int:
        """Tiles in flight: as many as shared memory holds, up to 8."""
        return max(s for s in range(1, 9) if self._bytes(s) <= SHARED_BYTES)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self._bytes(self.stages)

    def _bytes(self, stages: int) -> int:
        """As attend.cu lays it out: K and V tiles, headers and boxes, barriers, turned q."""
        tile = self.page * self.boxes * self.head_dim * 2
        barriers = (2 * stages * tile + stages * (32 + 16 * self.boxes) + 15) // 16 * 16
        query = self.rows * self.head_dim * 2
        return self.streams * ((barriers + 32 * stages + 1023) // 1024 * 1024 + query)


def macros(
    geometry: Geometry,
    shape: AttentionShape,
    rotary: RotaryTable | None,
    dtype: torch.dtype,
    invariant: bool = False,
) -> dict[str, int | str]:
    """What attend.cu is compiled with."""
    return {
        "HEAD_DIM": geometry.head_dim,
        "GROUP": shape.group,
        "ROWS": geometry.rows,
        "PAGE": geometry.page,
        "BOXES": geometry.boxes,
        "STAGES": geometry.stages,
        "HALF_FLOAT": int(dtype == torch.float16),
        "ROTARY_DIM": rotary.rotary_dim if rotary is not None else 0,
        "INTERLEAVED": int(rotary is not None and rotary.pairing == "interleaved"),
        "SOFTCAP": int(shape.softcap is not None),
        "WINDOW": int(shape.window is not None),
        "INVARIANT": int(invariant),
    }


@dataclass(frozen=True, eq=False)
class Launches:
    """What plans of one graph key have in common.

    Attributes:
        attend: a launch by tile height, and its parameters between `lse2_out` and `sinks` and behind these.
        merge: None where no row was cut.
        tails: int32 [B or more, 3].
        step: int32 [1].
        rotary: what the parameters hold the address of.
    """

    attend: tuple[tuple[driver.Launch, tuple[int, ...], tuple[float, ...]], ...]
    merge: Merge | None
    tails: Tensor
    step: Tensor
    rotary: Tensor | None


class CudaExecutor(Executor):
    """Attention on sm_90a.

    Args:
        keys: keys per KV tile, 64 or 128; None chooses by the batch: 128 for long sequences and for pages whose readers
            fill tiles of 128 rows, where registers suffice.
        batch_invariant: see `Executor.invariant`; None for `keys` is then 64.
    """

    name: ClassVar[str] = "cuda"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        page_sizes=(16, 64),
        head_dims=(64, 128),
        in_place=True,
    )
    implementation: ClassVar[str] = "fused-cuda-sm90"
    advances: ClassVar[bool] = True
    slots: ClassVar[bool] = True
    invariant: ClassVar[bool] = True
    unchecked: ClassVar[bool] = True

    def __init__(self, keys: int | None = None, *, batch_invariant: bool = False) -> None:
        if keys not in (None, 64, 128):
            raise KernelError(INVALID_ARGUMENT, f"must be 64 or 128, not {keys}", "keys")
        self._keys = keys
        self.batch_invariant = batch_invariant
        self._rotary: dict[int, tuple[RotaryTable, Tensor]] = {}
        self._staging: dict[torch.device, Staging] = {}
        self._maps: dict[tuple[object, ...], bytes] = {}
        self._parameters: dict[tuple[object, ...], PlanParameters] = {}

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"runs on CUDA devices, not on {device.type}"
        reason = driver.unavailable()
        if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            reason = f"its code is for compute capability 9.0, the device has {found}"
        return reason

    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        if shape.group > NARROW:
            raise KernelError(
                UNSUPPORTED, f"takes up to {NARROW} query heads per kv head, not {shape.group}", "num_heads"
            )
        ends = table.q_indptr.tolist()
        long = max(map(sub, ends[1:], ends), default=0) * shape.group > NARROW
        shares = not self.batch_invariant and (long or _mostly_shared(table, shape.group))
        wide = _may_be_wide(shape) and shares
        keys = self._keys or (128 if wide else 64)
        heights = (WIDE,) if long or keys == 128 else (NARROW, WIDE)
        asked = (shape, device, table.page_size, heights, keys)
        if asked not in self._parameters:
            self._parameters[asked] = self._plan_parameters(*asked)
        return self._parameters[asked]

    def _plan_parameters(
        self, shape: AttentionShape, device: torch.device, page_size: int, heights: tuple[int, ...], keys: int
    ) -> PlanParameters:
        """Of tiles of these heights, and of so many keys."""
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return PlanParameters(
            group=shape.group,
            num_kv_heads=shape.num_kv_heads,
            rows_per_tile=heights,
            workers=tuple(sms * (WIDE // rows) for rows in heights),
            boxes=keys // page_size,
            window=shape.window,
            min_chunk=max(1, 64 // keys),
            work_cost=256 // keys,
            run_cost=1,
            owners=not self.batch_invariant,
            invariant_chunk=INVARIANT_CHUNK_KEYS // keys if self.batch_invariant else None,
        )

    def load(self, plan: FusedPlan) -> None:
        arrays, shape = plan.arrays, plan.shape
        if plan.rotary is not None and plan.rotary.rotary_dim % 16:
            raise KernelError(
                UNSUPPORTED, f"takes multiples of 16, not {plan.rotary.rotary_dim}", "rotary_dim"
            )
        slot = plan.slot or PlanSlot(plan.device, staging=self._staging_to(plan.device), least=0)
        merge_rows, tails = _padded(plan) if plan.slot else (len(arrays.merge_rows), len(arrays.tails))
        slot.load(_lists(plan, merge_rows, tails), max(arrays.num_parts, 1), shape.group, shape.head_dim)
        key = _graph_key(plan, slot, merge_rows, tails)
        launches = slot.kept.get(key)
        if launches is None:
            launches = slot.kept[key] = self._launches(plan, slot, merge_rows, tails)
        plan.loaded.update(slot=slot, load=slot.loads, launches=launches)
        if plan.slot is not None:
            plan.loaded["graph_key"] = key

    def run(
        self, plan: FusedPlan, q: Tensor, kv_layer: Tensor, *, sinks: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        launches = self._current(plan)
        q = q.contiguous()
        out = torch.empty_like(q)
        lse2 = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        sinks = None if sinks is None else sinks.to(q.device, torch.float32).contiguous()
        stream = driver.current_stream(q.get_device())
        pages = self._map_of(kv_layer)
        changing = q.data_ptr(), out.data_ptr(), address(lse2)
        for launch, before, behind in launches.attend:
            launch(stream, _PARAMS.pack(pages, *changing, *before, address(sinks), *behind))
        if launches.merge is not None:
            launches.merge(out, lse2, sinks, stream)
        return out, lse2

    def advance(self, plan: FusedPlan) -> None:
        launches, slot = self._current(plan), plan.loaded["slot"]
        entries = slot.ints("entries", plan.arrays.entries.size).view(-1, 4)
        advance(entries, launches.tails, launches.step, plan.table.page_size)

    def _current(self, plan: FusedPlan) -> Launches:
        """The launches of a plan. Raises: KernelError (invalid_argument) where another one took its slot."""
        if plan.loaded["slot"].loads != plan.loaded["load"]:
            raise KernelError(INVALID_ARGUMENT, "another plan was loaded into its slot since", "plan")
        launches: Launches = plan.loaded["launches"]
        return launches

    def _launches(self, plan: FusedPlan, slot: PlanSlot, merge_rows: int, tails: int) -> Launches:
        arrays, shape, device = plan.arrays, plan.shape, plan.device
        rotary = self._rotary_on(plan.rotary, device)
        attend = []
        for c in arrays.classes:
            rows = c.rows_per_tile
            geometry = Geometry(rows, plan.table.page_size, arrays.boxes, shape.head_dim)
            kernel = driver.kernel(
                "attend",
                "attend",
                macros(geometry, shape, plan.rotary, plan.dtype, self.batch_invariant),
                device.index,
            )
            launch = kernel.prepare((_grid(c), 1, 1), (THREADS, 1, 1), geometry.smem_bytes)
            lists = (
                "entries",
                "runs",
                "deltas",
                f"slots{rows}",
                f"works{rows}",
                f"work_indptr{rows}",
                "step",
            )
            before = slot.o_part.data_ptr(), slot.lse2_part.data_ptr(), address(rotary)
            behind = (
                *map(slot.address, lists),
                shape.scale / shape.softcap if shape.softcap else shape.scale * LOG2E,
                (shape.softcap or 0.0) * LOG2E,
                0 if plan.rotary is None else plan.rotary.length,
                shape.window or 0,
                shape.num_kv_heads,
                int(plan.settled),
            )
            attend.append((launch, before, behind))
        merge = None
        if merge_rows:
            merge = Merge(
                MergeLists(
                    slot.ints("merge_rows", merge_rows),
                    slot.ints("merge_indptr", merge_rows + 1),
                    slot.ints("merge_parts", len(arrays.merge_parts)),
                    split_of(len(arrays.merge_parts), len(arrays.merge_rows)),
                    self.batch_invariant,
                ),
                slot.o_part,
                slot.lse2_part,
                plan.dtype,
                shape.num_heads,
            )
        if plan.slot is not None:
            prepare(device.index)
        return Launches(
            tuple(attend), merge, slot.ints("tails", 3 * tails).view(-1, 3), slot.ints("step", 1), rotary
        )

    def temp_bytes(self, plan: FusedPlan) -> int:
        return 4 * plan.arrays.num_parts * plan.shape.group * (plan.shape.head_dim + 1)

    def _staging_to(self, device: torch.device) -> Staging:
        """What plans without a slot are uploaded from."""
        if device not in self._staging:
            self._staging[device] = Staging(device)
        return self._staging[device]

    def _rotary_on(self, table: RotaryTable | None, device: torch.device) -> Tensor | None:
        """float32 [length, R/2, 2], cos and sin side by side; kept as long as the executor."""
        if table is None:
            return None
        held = self._rotary.get(id(table))
        if held is None:
            held = (table, torch.stack((table.cos, table.sin), -1).to(device).contiguous())
            self._rotary[id(table)] = held
        return held[1]

    def _map_of(self, kv_layer: Tensor) -> bytes:
        """The tensor map of a layer's pages, [pages, 2 * Hkv, page size, D] in boxes of [page size, 64]."""
        key = (kv_layer.data_ptr(), kv_layer.shape, kv_layer.dtype)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            pages, _, heads, page, dim = kv_layer.shape
            size = kv_layer.element_size()
            found = self._maps[key] = driver.tensor_map(
                kv_layer.data_ptr(),
                kv_layer.dtype,
                dims=(dim, page, 2 * heads, pages),
                strides_bytes=(dim * size, page * dim * size, 2 * heads * page * dim * size),
                box=(64, page, 1, 1),
                swizzle_128b=True,
                l2_bytes=0,
            )
        return found


def _may_be_wide(shape: AttentionShape) -> bool:
    """Whether KV tiles of 128 keys leave enough registers: other shapes would spill some."""
    return (
        shape.head_dim == 128 and shape.group in (2, 4, 8) and shape.window is None and shape.softcap is None
    )


def _mostly_shared(table: SegmentTable, group: int) -> bool:
    """Whether a page has on average more query rows than a tile of the lower height takes."""
    most = NARROW // group
    if table.num_sequences <= most:
        return False
    pages = table.extents[:, PAGE]
    if len(pages) and not 0 <= pages.min() <= pages.max() < table.num_pages:
        return False  # the planner refuses it
    readers = np.bincount(pages)
    return len(table.extents) > most * np.count_nonzero(readers)


def _slots(c: PlanClass, q_positions: np.ndarray) -> np.ndarray:
    """int32 [tiles, slots, 2]: table row and its view position."""
    slots = np.empty((*c.tile_rows.shape, 2), np.int32)
    slots[..., 0] = c.tile_rows
    slots[..., 1] = q_positions.take(c.tile_rows, mode="clip")  # what pads has that of row 0
    return slots


def _works(c: PlanClass, arrays: PlanArrays) -> np.ndarray:
    """int32 [W, 8]: the works and the run of the first tile of each: RUN, DELTA, VEC."""
    works = np.empty((len(c.works), 8), np.int32)
    works[:, :5] = c.works
    works[:, 5] = runs = arrays.entries[:, ENTRY_RUN].take(c.works[:, WORK_BEGIN] * arrays.boxes)
    works[:, 6:] = arrays.runs.take(runs, axis=0)
    return works


def _lists(plan: FusedPlan, merge_rows: int, tails: int) -> dict[str, Listed]:
    """A plan's lists as a slot takes them, those of absent tile heights too: their places are then there already."""
    arrays = plan.arrays
    lists: dict[str, Listed] = {
        "step": (_ZERO, 1),
        "tails": (arrays.tails, 3 * tails),
        "merge_rows": (arrays.merge_rows, merge_rows),
        "merge_indptr": (arrays.merge_indptr, merge_rows + 1),
    }
    heights = {c.rows_per_tile: c for c in arrays.classes}
    for rows in (NARROW, WIDE):
        c = heights.get(rows)
        for name, array in (
            ("slots", _NONE if c is None else _slots(c, plan.table.q_positions)),
            ("works", _NONE if c is None else _works(c, arrays)),
            ("work_indptr", _NONE if c is None else c.work_indptr),
        ):
            lists[f"{name}{rows}"] = (array, array.size)
    for name in ("runs", "deltas", "merge_parts", "entries"):
        array = getattr(arrays, name)
        lists[name] = (array, array.size)
    return lists


_NONE, _ZERO = np.zeros(0, np.int32), np.zeros(1, np.int32)


def _padded(plan: FusedPlan) -> tuple[int, int]:
    """Lengths of the lists of merged rows and of tails in a slot: few different ones, since grids depend on them."""
    arrays, table = plan.arrays, plan.table
    merged, tails = len(arrays.merge_rows), len(arrays.tails)
    if merged > MERGE_ROWS:
        merged = -(-merged // MERGE_ROWS) * MERGE_ROWS
    elif merged:
        merged = min(_bucket(table.num_rows * plan.shape.num_kv_heads), MERGE_ROWS)
    return merged, max(_bucket(tails), TAILS)


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def _grid(c: PlanClass) -> int:
    """CTAs of a height: WIDE // rows workers share one."""
    return (len(c.work_indptr) - 1) // (WIDE // c.rows_per_tile)


def _graph_key(plan: FusedPlan, slot: PlanSlot, merge_rows: int, tails: int) -> Hashable:
    arrays = plan.arrays
    return (
        slot,
        slot.generation,
        plan.shape,
        plan.rotary,
        plan.dtype,
        plan.settled,
        plan.table.page_size,
        arrays.boxes,
        tuple((c.rows_per_tile, _grid(c)) for c in arrays.classes),
        (merge_rows, split_of(len(arrays.merge_parts), len(arrays.merge_rows))) if merge_rows else None,
        tails,
    )


def variants() -> Iterable[driver.Variant]:
    """What the compile gate builds: the commonest shape at every height, page size and tile width, others at two."""
    table = torch.zeros(1, 1)

    def rotary_of(dim: int, pairing: str) -> RotaryTable:
        return RotaryTable(table, table, dim, pairing, table, 1.0)  # type: ignore[arg-type]

    for dim, group, dtype, pairing, rotary_dim, softcap, window in (
        (128, 4, torch.bfloat16, "half", 128, None, None),
        (128, 4, torch.float16, "half", 128, None, None),
        (128, 4, torch.bfloat16, "interleaved", 128, None, None),
        (128, 8, torch.bfloat16, "half", 128, None, 4096),
        (128, 2, torch.bfloat16, "half", 64, 50.0, None),
        (64, 3, torch.bfloat16, "half", 64, None, None),
        (64, 1, torch.bfloat16, "interleaved", 64, 30.0, 1024),
        (128, 5, torch.bfloat16, "half", 0, None, None),
    ):
        shape = AttentionShape(group, 1, dim, 1.0, window, softcap)
        rotary = rotary_of(rotary_dim, pairing) if rotary_dim else None
        geometries = [(64, 64, 64), (128, 64, 128 if _may_be_wide(shape) else 64)]
        if (dim, group, dtype, pairing) == (128, 4, torch.bfloat16, "half"):
            geometries += [(64, 16, 64), (128, 64, 64), (128, 16, 64), (128, 16, 128)]
        for rows, page, keys in geometries:
            geometry = Geometry(rows, page, keys // page, dim)
            for invariant in (False, True)[: 1 + (keys == 64)]:
                defined = tuple(sorted(macros(geometry, shape, rotary, dtype, invariant).items()))
                yield driver.Variant("attend", "attend", defined)
