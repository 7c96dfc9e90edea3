"""Control path A: bring K to its view positions, gather it, then one mature attention call per sequence.

Knows the same tables as every backend. K is moved by its delta with the unscaled rotation (it contains YaRN's
factor already) and rounded to the pages' dtype again; queries are rotated at their own positions, once.

`packed` keeps what it gathered, per sequence and layer, and gathers only what was not static before.
`naive` keeps nothing: it gathers and transforms the whole context again in every call.

On a CUDA device one kernel gathers and turns (transform.py), and torch's flash attention follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan
from dagengine_kernels.dense import attend
from dagengine_kernels.lse import LOG2E, apply_sinks
from dagengine_kernels.rotary import RotaryTable, exact_rows, expand_rows, turn
from dagengine_kernels.segments import DELTA, HI, LO, STORED, SegmentTable
from dagengine_kernels.transform import Moves, plan_gather


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """One sequence of a batch.

    Attributes:
        sequence_id: what the cache keys on.
        rows: of the query tensor.
        extents: int32 [E, 5], all extents, in order.
        static: leading extents that stay the same.
        static_tokens: tokens that they list.
        moves: gathers all extents.
        causal: row i sees the tokens up to number i + L - n, which is then all there is to know.
        mask: additive [1, 1, n, L], or None if every row sees every token, or `causal`.
        unseen: [n] rows that see nothing, or None.
    """

    sequence_id: int
    rows: slice
    extents: NDArray[np.int32]
    static: int
    static_tokens: int
    moves: Moves
    causal: bool
    mask: Tensor | None
    unseen: Tensor | None


@dataclass(frozen=True, eq=False)
class PackedPlan(Plan):
    """`cos` and `sin`: expanded rows of the rotary table at the query positions."""

    sequences: tuple[PackedSequence, ...]
    cos: Tensor | None
    sin: Tensor | None


@dataclass(eq=False)
class _Packed:
    """K and V of one sequence in one layer: the first `tokens` of [2, Hkv, capacity, D] are `extents`."""

    buffer: Tensor
    extents: NDArray[np.int32]
    tokens: int

    def leads(self, static: NDArray[np.int32], kv_layer: Tensor) -> bool:
        """Whether what is held is a leading part of the static extents, and of these pages' dtype and device."""
        held = len(self.extents)
        same = self.buffer.dtype == kv_layer.dtype and self.buffer.device == kv_layer.device
        return same and np.array_equal(self.extents, static[:held])

    def grown(self, capacity: int) -> _Packed:
        """The same tokens in a larger buffer."""
        shape = list(self.buffer.shape)
        shape[2] = capacity
        buffer = self.buffer.new_empty(shape)
        buffer[:, :, : self.tokens] = self.buffer[:, :, : self.tokens]
        return _Packed(buffer, self.extents, self.tokens)


class _GatheringBackend(AttentionBackend):
    """What `packed` and `naive` share: everything but where K and V come from."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=("cpu", "cuda"), dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)
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
    ) -> PackedPlan:
        device = self._check_plan(table, shape, rotary, device, dtype)
        sequences = tuple(
            _plan_sequence(table, b, shape, rotary, device, dtype)
            for b in range(table.num_sequences)
            if table.q_indptr[b] < table.q_indptr[b + 1]
        )
        if device.type == "cuda":
            gathers = sequences[0].moves.implementation(dtype) if sequences else "no"
            self.implementation = f"{gathers}-gather+torch-cuda-flash"
        cos = sin = None
        if rotary is not None:
            positions = torch.from_numpy(table.q_positions).to(rotary.cos.device)
            if dtype == torch.float64:
                rows = exact_rows(rotary, positions, scaled=True)
            else:
                rows = rotary.rows(positions)
            cos, sin = (x.to(device) for x in expand_rows(*rows, rotary.pairing))
        return PackedPlan(self.name, table, shape, rotary, device, dtype, sequences, cos, sin)

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
        assert isinstance(plan, PackedPlan)
        shape = plan.shape
        x = q
        if plan.rotary is not None and plan.cos is not None and plan.sin is not None:
            x = turn(q, plan.cos, plan.sin, plan.rotary.rotary_dim, plan.rotary.pairing).to(q.dtype)
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        temp = x.nbytes
        for sequence in plan.sequences:
            if not sequence.moves.num_tokens:
                continue
            kv = self._keys_values(sequence, layer, kv_layer).to(q.dtype)
            part, rows_lse = _attend_sequence(x[sequence.rows], kv, sequence, shape)
            out[sequence.rows] = part
            if sequence.unseen is not None:
                out[sequence.rows] = out[sequence.rows].masked_fill(sequence.unseen[:, None, None], 0.0)
                rows_lse = rows_lse.masked_fill(sequence.unseen[:, None], -math.inf)
            lse[sequence.rows] = rows_lse
            self._note_temp(temp + self._held_bytes(kv))
        lse2 = lse * LOG2E
        if sinks is not None:
            out, lse2 = apply_sinks(out, lse2, sinks)
        return (out, lse2.float()) if return_lse else out

    def _keys_values(self, sequence: PackedSequence, layer: int, kv_layer: Tensor) -> Tensor:
        """[2, Hkv, L, D] of all tokens of a sequence, K at its view positions."""
        kv = _buffer(kv_layer, sequence.moves.num_tokens)
        _gather(sequence, kv_layer, kv, 0)
        return kv

    def _held_bytes(self, kv: Tensor) -> int:
        return int(kv.nbytes)


class NaiveBackend(_GatheringBackend):
    """Gathers and transforms the whole context again in every call."""

    name: ClassVar[str] = "naive"


class PackedBackend(_GatheringBackend):
    """Keeps gathered and transformed K and V per sequence and layer until `forget`."""

    name: ClassVar[str] = "packed"

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[int, dict[int, _Packed]] = {}
        self._cached_bytes = 0

    def forget(self, sequence_id: int) -> None:
        for packed in self._cache.pop(sequence_id, {}).values():
            self._cached_bytes -= packed.buffer.nbytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of all packed buffers."""
        return self._cached_bytes

    def _keys_values(self, sequence: PackedSequence, layer: int, kv_layer: Tensor) -> Tensor:
        layers = self._cache.setdefault(sequence.sequence_id, {})
        static = sequence.extents[: sequence.static]
        packed = layers.get(layer)
        if packed is None or not packed.leads(static, kv_layer):
            packed = _Packed(_buffer(kv_layer, 0), static[:0], 0)
        total = sequence.moves.num_tokens
        if packed.buffer.shape[2] < total:
            packed = packed.grown(max(64, total + total // 4))
        replaced = layers.get(layer)
        self._cached_bytes += packed.buffer.nbytes - (replaced.buffer.nbytes if replaced else 0)
        layers[layer] = packed
        if packed.tokens < total:
            _gather(sequence, kv_layer, packed.buffer, len(packed.extents))
        packed.extents, packed.tokens = static, sequence.static_tokens
        return packed.buffer[:, :, :total]

    def _held_bytes(self, kv: Tensor) -> int:
        return self._cached_bytes


def _plan_sequence(
    table: SegmentTable,
    b: int,
    shape: AttentionShape,
    rotary: RotaryTable | None,
    device: torch.device,
    dtype: torch.dtype,
) -> PackedSequence:
    rows = slice(int(table.q_indptr[b]), int(table.q_indptr[b + 1]))
    extents = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]]
    moves = plan_gather(extents, rotary, device=device)
    first_view = extents[:, STORED].astype(np.int64) + extents[:, DELTA]
    last_view = first_view + extents[:, HI] - extents[:, LO] - 1
    position = table.q_positions[rows]
    mask = unseen = None
    causal = False
    if len(extents) and (
        last_view.max() > position[0]
        or (shape.window is not None and first_view.min() <= position[-1] - shape.window)
    ):
        sees = _visibility(moves, first_view, position, shape.window)
        # On the CPU torch's kernel counts a causal mask from the first token, not from the last.
        last = np.arange(-len(position), 0) + sees.shape[1]
        causal = device.type == "cuda" and np.array_equal(sees, np.arange(sees.shape[1]) <= last[:, None])
        if not causal:
            hidden = torch.from_numpy(~sees)
            mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(hidden, -math.inf)[None, None].to(device)
        if not sees.any(1).all():
            unseen = torch.from_numpy(~sees.any(1)).to(device)
    static = int(table.static_extents[b])
    return PackedSequence(
        sequence_id=table.sequence_ids[b],
        rows=rows,
        extents=extents,
        static=static,
        static_tokens=int(moves.starts[static]),
        moves=moves,
        causal=causal,
        mask=mask,
        unseen=unseen,
    )


def _visibility(
    moves: Moves, first_view: NDArray[np.int64], position: NDArray[np.int64], window: int | None
) -> NDArray[np.bool_]:
    """[n, L], which tokens each row sees."""
    view = np.arange(moves.num_tokens) + np.repeat(first_view - moves.starts[:-1], np.diff(moves.starts))
    sees: NDArray[np.bool_] = view <= position[:, None]
    if window is not None:
        sees &= view > position[:, None] - window
    return sees


def _attend_sequence(
    x: Tensor, kv: Tensor, sequence: PackedSequence, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """out [n, Hq, D] and natural lse [n, Hq] of rotated queries x [n, Hq, D] over kv [2, Hkv, L, D]."""
    heads, group = shape.num_kv_heads, shape.group
    tile = x.unflatten(1, (heads, group))  # [n, Hkv, G, D]
    if x.is_cuda and sequence.mask is None and not sequence.causal:
        # All rows see all tokens: those of a kv head are one block, so that its K and V are read once.
        rows = tile.permute(1, 2, 0, 3).flatten(1, 2)[None]
        part, lse = attend(rows, kv[:1], kv[1:], None, shape.scale, shape.softcap)
        part = part[0].unflatten(1, (group, -1)).permute(2, 0, 1, 3)
        return part.flatten(1, 2), lse[0].unflatten(1, (group, -1)).permute(2, 0, 1).flatten(1, 2)
    # [G, Hkv, n, D] against K and V that every group shares: one mask [n, L] serves all heads.
    k, v = kv.unsqueeze(1).expand(-1, group, -1, -1, -1)
    part, lse = attend(
        tile.permute(2, 1, 0, 3), k, v, sequence.mask, shape.scale, shape.softcap, sequence.causal
    )
    return part.permute(2, 1, 0, 3).flatten(1, 2), lse.permute(2, 1, 0).flatten(1, 2)


def _buffer(kv_layer: Tensor, tokens: int) -> Tensor:
    """[2, Hkv, tokens, D] of unknown content."""
    return kv_layer.new_empty(2, kv_layer.shape[2], tokens, kv_layer.shape[4])


def _gather(sequence: PackedSequence, kv_layer: Tensor, kv: Tensor, first: int) -> None:
    """Bring the extents from `first` on into kv [2, Hkv, L, D], K at its view positions, in the pages' dtype."""
    k_out, v_out = kv.transpose(1, 2)
    sequence.moves.gather(kv_layer, k_out, v_out, first)
