"""TritonExecutor: a fused plan and tensors to launches of the kernels here. Knows devices and launch sizes.

On a GPU the kernels are compiled; on the CPU they run in Triton's interpreter, when TRITON_INTERPRET=1 was set
before Triton was imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape, Capabilities
from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused.executor import Executor, FusedPlan
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.fused.triton.pieces import cut_works, one_delta_each
from dagengine_kernels.lse import LOG2E
from dagengine_kernels.segments import SegmentTable

Turn = Literal["query", "keys"]

TILE_TOKENS = 64
"""Tokens of a KV tile: one page, or as many small pages as fit."""

MERGE_PARTS = 32
"""Partial results that the merge loads at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a tile height runs on a GPU.

    Attributes:
        num_warps: warps per program.
        num_stages: KV tiles in flight, where shared memory allows.
        per_sm: programs that share an SM, for the planner.
    """

    num_warps: int
    num_stages: int
    per_sm: int


LAUNCHES = {16: Launch(2, 5, 2), 64: Launch(4, 3, 2), 128: Launch(4, 3, 2)}
"""By tile height, measured on an H200."""


class TritonExecutor(Executor):
    """Decode and prefill over fused plans, in Triton.

    Args:
        turn: "query" turns q by each delta, once per work and run. "keys" turns K inside the kernel instead, which
            needs a walk per distinct delta: the ablation that says what turning q saves. It needs rotary tables
            of the whole head.
        heights: tile heights to plan for, ascending; by default what suits the device.
    Raises: KernelError (invalid_argument).
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dims=tuple(range(8, 257, 8)),
    )

    def __init__(self, *, turn: Turn = "query", heights: tuple[int, ...] | None = None) -> None:
        if turn not in ("query", "keys"):
            raise KernelError(INVALID_ARGUMENT, f"must be 'query' or 'keys', not {turn!r}", "turn")
        if heights is not None and (not heights or any(h not in LAUNCHES for h in heights)):
            listed = ", ".join(map(str, LAUNCHES))
            raise KernelError(INVALID_ARGUMENT, f"must be some of {listed}, not {heights}", "heights")
        self.turn = turn
        self.heights = heights

    @property
    def implementation(self) -> str:
        """For reports: what runs here."""
        keys = "-keys" if self.turn == "keys" else ""
        how = "-interpreted" if importlib.util.find_spec("triton") is not None and interprets() else ""
        return f"fused-triton{keys}{how}"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if device.type == "cpu":
            return None if interprets() else "Triton runs on the CPU only where TRITON_INTERPRET=1 was set"
        if device.type != "cuda":
            return f"Triton's kernels here run on CUDA devices, not on {device.type}"
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        if interprets():
            return "TRITON_INTERPRET=1 is set: kernels would not run on the GPU"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "compute capability 8.0 or higher is needed"
        return None

    def parameters(self, table: SegmentTable, shape: AttentionShape, device: torch.device) -> PlanParameters:
        reason = self.unavailable(device)
        if reason is not None:
            raise KernelError(UNSUPPORTED, reason, "device")
        on_gpu = device.type == "cuda"
        heights = self.heights
        if heights is None:
            many = on_gpu and self.turn == "query" and table.num_rows * shape.group > 64
            heights = (16, 128) if many else (16, 64)
        heights = tuple(h for h in heights if h >= shape.group)
        if not heights:
            message = f"query heads per kv head must be at most {max(LAUNCHES)}, not {shape.group}"
            raise KernelError(UNSUPPORTED, message, "num_heads")
        sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        return PlanParameters(
            group=shape.group,
            num_kv_heads=shape.num_kv_heads,
            rows_per_tile=heights,
            workers=tuple(sms * (LAUNCHES[h].per_sm if on_gpu else 1) for h in heights),
            boxes=max(1, TILE_TOKENS // table.page_size),
            window=shape.window,
        )

    def load(self, plan: FusedPlan) -> None:
        arrays, shape, rotary = plan.arrays, plan.shape, plan.rotary
        if self.turn == "keys" and rotary is not None:
            if not rotary.rotary_dim == shape.head_dim == _block(shape.head_dim):
                message = f"turn='keys' turns whole heads of 2**n >= 32 elements, not {rotary.rotary_dim}"
                raise KernelError(UNSUPPORTED, message, "rotary_dim")
        positions = plan.table.q_positions.astype(np.int32)
        ints = {
            "positions": positions,
            "entries": arrays.entries,
            "merge_rows": arrays.merge_rows,
            "merge_indptr": arrays.merge_indptr,
            "merge_parts": arrays.merge_parts,
        }
        for i, tiles in enumerate(arrays.classes):
            cut = cut_works(arrays, tiles, positions, group=shape.group, window=shape.window)
            if self.turn == "keys":
                cut = one_delta_each(cut, tiles.tile_rows.shape[1])
            ints |= {
                f"works{i}": cut.works,
                f"pieces{i}": cut.pieces,
                f"deltas{i}": cut.deltas,
                f"tile_rows{i}": tiles.tile_rows,
            }
        parts = (arrays.num_parts, shape.group)
        plan.loaded.update(
            _to_device(ints, plan.device),
            cos=None if rotary is None else rotary.cos.to(plan.device).contiguous(),
            sin=None if rotary is None else rotary.sin.to(plan.device).contiguous(),
            o_part=torch.empty(*parts, shape.head_dim, dtype=torch.float32, device=plan.device),
            lse2_part=torch.empty(parts, dtype=torch.float32, device=plan.device),
        )

    def run(
        self, plan: FusedPlan, q: Tensor, kv_layer: Tensor, *, sinks: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        from dagengine_kernels.fused.triton.attend import attend

        if kv_layer.dtype != q.dtype:
            message = f"must be of q's dtype {q.dtype}, is of {kv_layer.dtype}"
            raise KernelError(INVALID_ARGUMENT, message, "kv_layer")
        q = q.contiguous()
        out = torch.empty_like(q)
        lse2 = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        sinks = None if sinks is None else sinks.to(q.device, torch.float32).contiguous()
        shape, rotary, loaded = plan.shape, plan.rotary, plan.loaded
        page_size, head_dim = plan.table.page_size, shape.head_dim
        block_d = _block(head_dim)
        tile_tokens = plan.arrays.boxes * page_size
        pages = _descriptor(kv_layer, block_d)
        softcap = shape.softcap
        for i, tiles in enumerate(plan.arrays.classes):
            height = tiles.rows_per_tile
            block_m = max(16, _power_of_two(height))
            attend[(len(tiles.works),)](
                q,
                kv_layer,
                pages,
                loaded["cos"],
                loaded["sin"],
                loaded["positions"],
                loaded[f"works{i}"],
                loaded[f"pieces{i}"],
                loaded[f"tile_rows{i}"],
                loaded["entries"],
                loaded[f"deltas{i}"],
                out,
                lse2,
                loaded["o_part"],
                loaded["lse2_part"],
                sinks,
                shape.scale / softcap if softcap is not None else shape.scale * LOG2E,
                softcap * LOG2E if softcap is not None else 1.0,
                1.0 if rotary is None else rotary.attention_scaling,
                0 if rotary is None else rotary.length - 1,
                HKV=shape.num_kv_heads,
                GROUP=shape.group,
                M=height,
                BLOCK_M=block_m,
                D=head_dim,
                BLOCK_D=block_d,
                PAGE=page_size,
                BOXES=plan.arrays.boxes,
                N=max(16, _power_of_two(tile_tokens)),
                HALF=0 if rotary is None else rotary.rotary_dim // 2,
                INTERLEAVED=rotary is not None and rotary.pairing == "interleaved",
                WINDOW=shape.window or 0,
                SOFTCAP=softcap is not None,
                TURN_KEYS=self.turn == "keys",
                UPCAST=interprets(),
                num_warps=LAUNCHES[height].num_warps,
                num_stages=_stages(height, block_m, block_d, tile_tokens, q),
            )
        self._merge(plan, out, lse2, sinks)
        return out, lse2 if return_lse else None

    def temp_bytes(self, plan: FusedPlan) -> int:
        lse2 = plan.table.num_rows * plan.shape.num_heads * 4
        return lse2 + sum(plan.loaded[name].nbytes for name in ("o_part", "lse2_part", "indices"))

    def _merge(self, plan: FusedPlan, out: Tensor, lse2: Tensor, sinks: Tensor | None) -> None:
        from dagengine_kernels.fused.triton.merge import merge

        if not len(plan.arrays.merge_rows):
            return
        shape, loaded = plan.shape, plan.loaded
        merge[(len(plan.arrays.merge_rows), shape.group)](
            loaded["o_part"],
            loaded["lse2_part"],
            loaded["merge_rows"],
            loaded["merge_indptr"],
            loaded["merge_parts"],
            out,
            lse2,
            sinks,
            HKV=shape.num_kv_heads,
            GROUP=shape.group,
            D=shape.head_dim,
            BLOCK_D=_block(shape.head_dim),
            PARTS=MERGE_PARTS,
            num_warps=4,
        )


def _descriptor(kv_layer: Tensor, block_d: int) -> Any:
    """The pages as rows, in blocks of one page, where one page is one KV tile; else None."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    page_size, head_dim = kv_layer.shape[3:]
    # A box has at most 256 rows, and rows start at multiples of 16 bytes.
    fits = TILE_TOKENS <= page_size <= 256 and page_size == _power_of_two(page_size)
    if not fits or head_dim * kv_layer.element_size() % 16:
        return None
    return TensorDescriptor.from_tensor(kv_layer.view(-1, head_dim), [page_size, block_d])


def interprets() -> bool:
    """Whether Triton's kernels run in its interpreter in this process."""
    from triton.runtime.interpreter import InterpretedFunction

    from dagengine_kernels.fused.triton.attend import attend

    return isinstance(attend, InterpretedFunction)


def _to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """int32 arrays by name in one copy, each from a multiple of 16 bytes on; "indices" is all of them."""
    starts, length = {}, 0
    for name, array in arrays.items():
        starts[name] = length
        length += -(-array.size // 4) * 4
    packed = np.zeros(max(length, 4), np.int32)
    for name, array in arrays.items():
        packed[starts[name] : starts[name] + array.size] = array.ravel()
    indices = torch.from_numpy(packed).to(device)
    views = {name: indices[starts[name] : starts[name] + array.size] for name, array in arrays.items()}
    return {"indices": indices, **views}


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _block(head_dim: int) -> int:
    """BLOCK_D: half of it is at least what a dot takes."""
    return max(32, _power_of_two(head_dim))


def _stages(height: int, block_m: int, block_d: int, tile_tokens: int, q: Tensor) -> int:
    """Stages that fit into shared memory beside q and the weights of a tile.

    float32 has none to spare: its operands are split in shared memory.
    """
    wanted = LAUNCHES[height].num_stages
    if not q.is_cuda:
        return wanted
    if q.dtype == torch.float32:
        return 1
    room = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin - 1024
    room -= block_m * (block_d + tile_tokens) * q.element_size()
    return max(1, min(wanted, room // (2 * tile_tokens * block_d * q.element_size())))
