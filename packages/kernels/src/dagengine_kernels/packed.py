"""Control path A: bring K to its view positions, gather it, then one mature attention call per sequence.

Knows the same tables as every backend. K is moved by its delta with the unscaled rotation (it contains YaRN's
factor already) and rounded to the pages' dtype again; queries are rotated at their own positions, once.

`packed` keeps what it gathered, per sequence and layer, and gathers only what was not static before.
`naive` keeps nothing: it gathers and transforms the whole context again in every call.
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
from dagengine_kernels.segments import DELTA, HI, LO, PAGE, STORED, SegmentTable


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """One sequence of a batch.

    Attributes:
        sequence_id: what the cache keys on.
        rows: of the query tensor.
        extents: int32 [E, 5], all extents, in order.
        static: leading extents that stay the same.
        static_tokens: tokens that they list.
        token_rows: int64 [L, 2, Hkv], rows of the pages seen as [pages * 2 * Hkv * page_size, D].
        turn_rows: int64 [L], row of `cos` and `sin` of each token.
        cos, sin: expanded, unscaled rows for the deltas of the sequence; None if all are 0.
        mask: additive [1, 1, n, L], or None if every row sees every token.
        unseen: [n] rows that see nothing, or None.
    """

    sequence_id: int
    rows: slice
    extents: NDArray[np.int32]
    static: int
    static_tokens: int
    token_rows: Tensor
    turn_rows: Tensor
    cos: Tensor | None
    sin: Tensor | None
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
        """Whether what is held is a leading part of the static extents, and of these pages' dtype."""
        held = len(self.extents)
        return self.buffer.dtype == kv_layer.dtype and np.array_equal(self.extents, static[:held])

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
        devices=("cpu",), dtypes=(torch.float64, torch.float32, torch.bfloat16)
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
            _plan_sequence(table, b, shape, rotary, dtype)
            for b in range(table.num_sequences)
            if table.q_indptr[b] < table.q_indptr[b + 1]
        )
        cos = sin = None
        if rotary is not None:
            positions = torch.from_numpy(table.q_positions)
            if dtype == torch.float64:
                rows = exact_rows(rotary, positions, scaled=True)
            else:
                rows = rotary.rows(positions)
            cos, sin = expand_rows(*rows, rotary.pairing)
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
            if not len(sequence.token_rows):
                continue
            kv = self._keys_values(plan, sequence, layer, kv_layer).to(q.dtype)
            # [G, Hkv, n, D] against K and V that every group shares: one mask [n, L] serves all heads.
            tile = x[sequence.rows].unflatten(1, (shape.num_kv_heads, shape.group)).permute(2, 1, 0, 3)
            k, v = kv.unsqueeze(1).expand(-1, shape.group, -1, -1, -1)
            part, part_lse = attend(tile, k, v, sequence.mask, shape.scale, shape.softcap)
            out[sequence.rows] = part.permute(2, 1, 0, 3).flatten(1, 2)
            rows_lse = part_lse.permute(2, 1, 0).flatten(1, 2)
            if sequence.unseen is not None:
                out[sequence.rows] = out[sequence.rows].masked_fill(sequence.unseen[:, None, None], 0.0)
                rows_lse = rows_lse.masked_fill(sequence.unseen[:, None], -math.inf)
            lse[sequence.rows] = rows_lse
            self._note_temp(temp + self._held_bytes(kv))
        lse2 = lse * LOG2E
        if sinks is not None:
            out, lse2 = apply_sinks(out, lse2, sinks)
        return (out, lse2.float()) if return_lse else out

    def _keys_values(
        self, plan: PackedPlan, sequence: PackedSequence, layer: int, kv_layer: Tensor
    ) -> Tensor:
        """[2, Hkv, L, D] of all tokens of a sequence, K at its view positions."""
        return _gather(plan, sequence, kv_layer, 0)

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

    def _keys_values(
        self, plan: PackedPlan, sequence: PackedSequence, layer: int, kv_layer: Tensor
    ) -> Tensor:
        layers = self._cache.setdefault(sequence.sequence_id, {})
        static = sequence.extents[: sequence.static]
        packed = layers.get(layer)
        if packed is None or not packed.leads(static, kv_layer):
            packed = _Packed(kv_layer.new_empty(2, kv_layer.shape[2], 0, kv_layer.shape[4]), static[:0], 0)
        total = len(sequence.token_rows)
        if packed.buffer.shape[2] < total:
            packed = packed.grown(max(64, total + total // 4))
        replaced = layers.get(layer)
        self._cached_bytes += packed.buffer.nbytes - (replaced.buffer.nbytes if replaced else 0)
        layers[layer] = packed
        if packed.tokens < total:
            packed.buffer[:, :, packed.tokens : total] = _gather(plan, sequence, kv_layer, packed.tokens)
        packed.extents, packed.tokens = static, sequence.static_tokens
        return packed.buffer[:, :, :total]

    def _held_bytes(self, kv: Tensor) -> int:
        return self._cached_bytes


def _plan_sequence(
    table: SegmentTable, b: int, shape: AttentionShape, rotary: RotaryTable | None, dtype: torch.dtype
) -> PackedSequence:
    rows = slice(int(table.q_indptr[b]), int(table.q_indptr[b + 1]))
    extents = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]]
    columns = extents.astype(np.int64)
    length = columns[:, HI] - columns[:, LO]
    within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)

    size, heads = table.page_size, shape.num_kv_heads
    token = np.repeat(columns[:, PAGE] * (2 * heads * size) + columns[:, LO], length) + within
    token_rows = token[:, None, None] + (np.arange(2 * heads) * size).reshape(2, heads)
    deltas, of_extent = np.unique(columns[:, DELTA], return_inverse=True)
    cos = sin = None
    if rotary is not None and deltas.any():
        exact = exact_rows(rotary, torch.from_numpy(deltas), scaled=False)
        turning = torch.promote_types(dtype, torch.float32)
        cos, sin = expand_rows(exact[0].to(turning), exact[1].to(turning), rotary.pairing)

    view = np.repeat(columns[:, STORED] + columns[:, DELTA], length) + within
    position = table.q_positions[rows, None]
    sees = view <= position
    if shape.window is not None:
        sees &= view > position - shape.window
    seen = sees.any(1)
    mask = None
    if not sees.all():
        hidden = torch.from_numpy(~sees)
        mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(hidden, -math.inf)[None, None]
    static = int(table.static_extents[b])
    return PackedSequence(
        sequence_id=table.sequence_ids[b],
        rows=rows,
        extents=extents,
        static=static,
        static_tokens=int(length[:static].sum()),
        token_rows=torch.from_numpy(token_rows),
        turn_rows=torch.from_numpy(np.repeat(of_extent, length)),
        cos=cos,
        sin=sin,
        mask=mask,
        unseen=None if seen.all() else torch.from_numpy(~seen),
    )


def _gather(plan: PackedPlan, sequence: PackedSequence, kv_layer: Tensor, begin: int) -> Tensor:
    """[2, Hkv, L - begin, D] of the tokens from `begin` on, K at its view positions, in the pages' dtype."""
    heads, dim = kv_layer.shape[2], kv_layer.shape[4]
    rows = sequence.token_rows[begin:]
    picked = kv_layer.view(-1, dim).index_select(0, rows.ravel()).view(-1, 2, heads, dim)
    k, v = picked.unbind(1)  # [L, Hkv, D]
    rotary = plan.rotary
    if rotary is not None and sequence.cos is not None and sequence.sin is not None:
        turn_rows = sequence.turn_rows[begin:]
        cos, sin = sequence.cos.index_select(0, turn_rows), sequence.sin.index_select(0, turn_rows)
        k = turn(k, cos, sin, rotary.rotary_dim, rotary.pairing).to(kv_layer.dtype)
    return torch.stack((k.transpose(0, 1), v.transpose(0, 1)))
