"""Control path B: attention per segment with turned queries, then an LSE merge. K stays as it is stored.

Sequences with few rows (decode, short prompts) of equal row count share their attention calls: a *tile
class*. A sequence with many rows is a *stream*: its chunks are attended one after another and merged as
they come, so temporaries stay bounded. A call reads only tokens of the slices; padding repeats such a token,
so what lies beside a slice is never touched. Decode rows read whole pages in place, if these are large and
neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan
from dagengine_kernels.dense import attend
from dagengine_kernels.lse import LOG2E, apply_sinks
from dagengine_kernels.rotary import RotaryTable, exact_rows, expand_rows, turn
from dagengine_kernels.segments import SegmentTable
from dagengine_kernels.tiling import MAX_CHUNK, Chunks, Ints, Slab, buckets, cut, gather_rows, visibility

STREAM_ROWS = 64
"""From this many rows on a sequence is a stream."""

STREAM_CHUNK = 2048
"""Tokens per chunk of a stream."""

IN_PLACE_GROUP = 16
"""Up to this many query heads per kv head, decode rows read whole pages in place."""


@dataclass(frozen=True, eq=False)
class Turn:
    """Rows of q (None: all of q as it is) and the expanded rows of cos and sin to turn them by, if any."""

    rows: Tensor | None
    cos: Tensor | None
    sin: Tensor | None

    def __call__(self, q: Tensor, rotary: RotaryTable | None) -> Tensor:
        """[rows, Hq, D] in q's dtype."""
        x = q if self.rows is None else q.index_select(0, self.rows)
        if rotary is None or self.cos is None or self.sin is None:
            return x
        return turn(x, self.cos, self.sin, rotary.rotary_dim, rotary.pairing).to(q.dtype)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call over gathered tokens.

    Attributes:
        rows: [2 * C * Hkv * L] rows to gather of the pages seen as [pages * 2 * Hkv * page_size, D].
        size: (C, L).
        tiles: [C] tile of each chunk; None: chunk c has tile c, or all have the only one.
        mask: additive, broadcastable to [C, 1, R, L], or None.
        blind: [C, 1, R] rows that see nothing of their chunk, or None if there are none.
        causal: row i sees tokens 0..i.
    """

    rows: Tensor
    size: tuple[int, int]
    tiles: Tensor | None = None
    mask: Tensor | None = None
    blind: Tensor | None = None
    causal: bool = False

    def keys_values(self, kv_layer: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        """[2, C, Hkv, L, D] in `dtype`, and how many bytes were copied."""
        heads, dim = kv_layer.shape[2], kv_layer.shape[4]
        picked = kv_layer.view(-1, dim).index_select(0, self.rows).to(dtype)
        return picked.view(2, self.size[0], heads, self.size[1], dim), picked.nbytes


@dataclass(frozen=True, eq=False)
class SlabCall:
    """One attention call over the pages first..first+count-1 where they are, each a chunk.

    Attributes:
        size: (count, page_size).
        tiles: as in `Call`; pages that no chunk is have any tile, and their part is never looked at.
    """

    first: int
    size: tuple[int, int]
    tiles: Tensor | None
    mask: None = None
    blind: None = None

    def keys_values(self, kv_layer: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        """[2, count, Hkv, page_size, D] in `dtype`, and how many bytes were copied."""
        slab = kv_layer.narrow(0, self.first, self.size[0])
        cast = slab.to(dtype)
        return cast.transpose(0, 1), 0 if cast is slab else cast.nbytes


@dataclass(frozen=True, eq=False)
class TileClass:
    """All sequences with n rows each.

    Attributes:
        n: rows per sequence.
        num_tiles, num_sequences: of the class; every sequence has at least one chunk.
        turn: the rows of all tiles.
        calls: attention calls; the parts of a row are spread over them.
        parts: K, parts per sequence (the most that any has).
        merge: [num_sequences * K] index into the parts of all calls, None if they already lie in that order.
        padding: [num_sequences, K, 1, 1] entries of `merge` that stand for no part, or None.
        unseen: [num_sequences, 1, R] rows that see nothing at all, or None.
        out_rows: rows of the batch, None if they are all of it in order.
    """

    n: int
    num_tiles: int
    num_sequences: int
    turn: Turn
    calls: tuple[Call | SlabCall, ...]
    parts: int
    merge: Tensor | None
    padding: Tensor | None
    unseen: Tensor | None
    out_rows: Tensor | None


@dataclass(frozen=True, eq=False)
class Stream:
    """One sequence with many rows: per tile its turn and the calls (one chunk each) to merge in order."""

    rows: slice
    tiles: tuple[tuple[Turn, tuple[Call, ...]], ...]


@dataclass(frozen=True, eq=False)
class SegmentedPlan(Plan):
    """`covered`: every row of the batch is written by a class or stream."""

    classes: tuple[TileClass, ...]
    streams: tuple[Stream, ...]
    covered: bool


class SegmentedBackend(AttentionBackend):
    """Attention per segment over torch's CPU flash kernel, merged by LSE."""

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
    ) -> SegmentedPlan:
        device = self._check_plan(table, shape, rotary, device, dtype)
        planner = _Planner(table, shape, rotary, dtype)
        classes, streams = planner.classes(), planner.streams()
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
            rows = tile_class.out_rows if tile_class.out_rows is not None else slice(None)
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
        x = tiles.turn(q, plan.rotary)
        if n == 1:
            x = x.view(tiles.num_tiles, heads, group, shape.head_dim)
        else:
            x = x.view(tiles.num_tiles, n, heads, group, shape.head_dim).transpose(1, 2)
            x = x.reshape(tiles.num_tiles, heads, n * group, shape.head_dim)
        outs, lses = [], []
        temp = x.nbytes
        for call in tiles.calls:
            kv, copied = call.keys_values(kv_layer, q.dtype)
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
                kv, copied = call.keys_values(kv_layer, q.dtype)
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


def _merge_pair(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -math.inf, 0.0)
    share_a, share_b = (lse_a - base).exp_().unsqueeze(-1), (lse_b - base).exp_().unsqueeze(-1)
    return torch.addcmul(out_a * share_a, out_b.to(share_b.dtype), share_b), lse


class _Planner:
    """Turns the chunks of one batch into index tensors."""

    def __init__(
        self, table: SegmentTable, shape: AttentionShape, rotary: RotaryTable | None, dtype: torch.dtype
    ) -> None:
        self.table, self.shape, self.rotary, self.dtype = table, shape, rotary, dtype
        self.num_rows = np.diff(table.q_indptr)
        max_chunk = np.where(self.num_rows < STREAM_ROWS, MAX_CHUNK, STREAM_CHUNK)
        self.chunks: Chunks = cut(
            table,
            shape.num_kv_heads,
            shape.window,
            turned=rotary is not None,
            max_chunk=max_chunk,
            in_place=shape.group <= IN_PLACE_GROUP,
        )
        rows = table.num_pages * 2 * shape.num_kv_heads * table.page_size
        self.row_dtype = np.int32 if rows < 2**31 else np.int64
        self.live = np.diff(self.chunks.first_chunk) > 0

    def classes(self) -> tuple[TileClass, ...]:
        few = np.unique(self.num_rows[self.live & (self.num_rows < STREAM_ROWS)])
        return tuple(self._class(int(n)) for n in few)

    def streams(self) -> tuple[Stream, ...]:
        return tuple(self._stream(int(b)) for b in np.flatnonzero(self.live & (self.num_rows >= STREAM_ROWS)))

    def _class(self, n: int) -> TileClass:
        chunks = self.chunks
        sequences = np.flatnonzero(self.live & (self.num_rows == n))
        in_class = np.zeros(self.table.num_sequences, bool)
        in_class[sequences] = True
        tiles = np.flatnonzero(in_class[chunks.tile_sequence])
        members = np.flatnonzero(in_class[chunks.sequence])
        masked = chunks.masked[members]
        calls: list[Call | SlabCall] = []
        order: list[Ints] = []
        seen = np.zeros((self.table.num_sequences, n), bool)
        for slab in chunks.slabs if n == 1 else ():
            calls.append(self._slab_call(slab, tiles))
            produced = np.full(slab.count, -1)
            produced[slab.at] = slab.chunks
            order.append(produced)
            seen[chunks.sequence[slab.chunks]] = True
        for kind in (False, True):
            of_kind = members[(masked == kind) & ~chunks.in_place[members]]
            for picked in buckets(chunks.length[of_kind]):
                picked = of_kind[picked]
                call, sees = self._call(picked, tiles, n, kind)
                calls.append(call)
                order.append(picked)
                if sees is None:
                    seen[chunks.sequence[picked]] = True
                else:
                    np.logical_or.at(seen, chunks.sequence[picked], sees)
        count = np.diff(chunks.first_chunk)[sequences]
        parts = int(count.max())
        merge, padding = self._merge_index(np.concatenate(order), members, count, parts)
        rows = _rows(self.table, sequences, n)
        unseen = None
        if not seen[sequences].all():
            unseen = torch.from_numpy(~seen[sequences].repeat(self.shape.group, 1))[:, None]
        return TileClass(
            n=n,
            num_tiles=len(tiles),
            num_sequences=len(sequences),
            turn=self._turn(chunks.tile_sequence[tiles], chunks.tile_delta[tiles], n),
            calls=tuple(calls),
            parts=parts,
            merge=merge,
            padding=padding,
            unseen=unseen,
            out_rows=_index(rows, self.table.num_rows),
        )

    def _merge_index(
        self, order: Ints, members: Ints, count: Ints, parts: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """`order` holds the chunk that each part of the calls is, -1 for none."""
        place = np.empty(len(members), np.int64)
        of_chunk = np.flatnonzero(order >= 0)
        place[np.searchsorted(members, order[of_chunk])] = of_chunk
        if (count == parts).all():
            return _index(place, len(order)), None
        slot = np.arange(parts)
        begin = np.cumsum(count) - count
        missing = slot >= count[:, None]
        index = place[np.where(missing, 0, begin[:, None] + slot)]
        padding = torch.from_numpy(missing)[:, :, None, None]
        return torch.from_numpy(index.ravel()), padding

    def _turn(self, sequences: Ints, deltas: Ints, n: int) -> Turn:
        rows = _rows(self.table, sequences, n)
        index = _index(rows, self.table.num_rows)
        if self.rotary is None:
            return Turn(index, None, None)
        # A row that does not see a segment may be turned past the table's ends; any entry will do for it.
        at = np.clip(self.table.q_positions[rows] - deltas.repeat(n), 0, self.rotary.length - 1)
        positions = torch.from_numpy(at)
        if self.dtype == torch.float64:
            cos, sin = exact_rows(self.rotary, positions, scaled=True)
        else:
            cos, sin = self.rotary.rows(positions)
        return Turn(index, *expand_rows(cos, sin, self.rotary.pairing))

    def _call(self, picked: Ints, tiles: Ints, n: int, masked: bool) -> tuple[Call, np.ndarray | None]:
        """A call of a class, and for masked chunks which rows [C, n] see anything."""
        chunks = self.chunks
        rows, tokens = gather_rows(chunks, picked, self.shape.num_kv_heads, self.table.page_size)
        of_tile = np.searchsorted(tiles, chunks.tile[picked])
        count, length = tokens.shape
        mask = blind = sees = None
        if masked:
            first = self.table.q_positions[self.table.q_indptr[chunks.sequence[picked]]]
            visible = visibility(chunks, picked, tokens, first, n, self.shape.window)
            sees = visible.any(2)
            mask = self._mask(visible.repeat(self.shape.group, 1))
            if not sees.all():
                blind = torch.from_numpy(~sees.repeat(self.shape.group, 1))[:, None]
        elif (chunks.length[picked] != length).any():
            mask = self._mask((np.arange(length) < chunks.length[picked, None])[:, None])
        index = None if len(tiles) == 1 else _index(of_tile, len(tiles))
        return Call(self._tensor(rows), (count, length), index, mask, blind), sees

    def _slab_call(self, slab: Slab, tiles: Ints) -> SlabCall:
        index = None
        if len(tiles) > 1:
            of_page = np.zeros(slab.count, np.int64)
            of_page[slab.at] = np.searchsorted(tiles, self.chunks.tile[slab.chunks])
            index = _index(of_page, len(tiles))
        return SlabCall(slab.first, (slab.count, self.table.page_size), index)

    def _stream(self, b: int) -> Stream:
        chunks, n = self.chunks, int(self.num_rows[b])
        rows = slice(int(self.table.q_indptr[b]), int(self.table.q_indptr[b + 1]))
        position = int(self.table.q_positions[rows.start])
        members = np.arange(chunks.first_chunk[b], chunks.first_chunk[b + 1])
        tiles = []
        for tile in range(int(chunks.first_tile[b]), int(chunks.first_tile[b + 1])):
            turned = self._turn(chunks.tile_sequence[tile : tile + 1], chunks.tile_delta[tile : tile + 1], n)
            calls = [self._stream_call(c, position, n) for c in members[chunks.tile[members] == tile]]
            tiles.append((Turn(None, turned.cos, turned.sin), tuple(calls)))
        return Stream(rows, tuple(tiles))

    def _stream_call(self, chunk: int, first: int, n: int) -> Call:
        chunks, picked = self.chunks, np.array([chunk])
        rows, tokens = gather_rows(chunks, picked, self.shape.num_kv_heads, self.table.page_size)
        gathered, size = self._tensor(rows), (1, tokens.shape[1])
        if not chunks.masked[chunk]:
            return Call(gathered, size)
        window = self.shape.window
        view = chunks.token_view[tokens[0]]
        if (
            len(view) == n
            and (window is None or window >= n)
            and np.array_equal(view, np.arange(first, first + n))
        ):
            return Call(gathered, size, causal=True)
        visible = visibility(chunks, picked, tokens, np.array([first]), n, window)
        blind = ~visible.any(2)
        return Call(
            gathered,
            size,
            mask=self._mask(visible),
            blind=torch.from_numpy(blind)[:, None] if blind.any() else None,
        )

    def _mask(self, visible: np.ndarray) -> Tensor:
        """Additive [C, 1, R, L] from [C, R, L]."""
        mask = torch.zeros(visible.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(~visible), -math.inf)[:, None]

    def _tensor(self, rows: Ints) -> Tensor:
        return torch.from_numpy(rows.astype(self.row_dtype).ravel())


def _rows(table: SegmentTable, sequences: Ints, n: int) -> Ints:
    """Rows of the batch of sequences with n rows each, concatenated."""
    return (table.q_indptr[sequences].astype(np.int64)[:, None] + np.arange(n)).ravel()


def _index(index: Ints, length: int) -> Tensor | None:
    """`index` as a tensor, None if it is 0..length-1."""
    if len(index) == length and (index == np.arange(length)).all():
        return None
    return torch.from_numpy(index)
