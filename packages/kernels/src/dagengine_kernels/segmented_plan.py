"""What `segmented` prepares once per step: the chunks of a batch as attention calls over index tensors.

Knows tables, shapes and the rows of the rotary table; never sees q or the pages. Sequences with few rows
(decode, short prompts) of equal row count share their calls: a *tile class*. One with many is a *stream*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape, Plan
from dagengine_kernels.rotary import RotaryTable, exact_rows, expand_rows, turn
from dagengine_kernels.segments import SegmentTable
from dagengine_kernels.tiling import (
    MAX_CALL,
    MAX_CHUNK,
    Bools,
    Chunks,
    Ints,
    Slab,
    buckets,
    cut,
    gather_rows,
    visibility,
)

STREAM_ROWS = 64
"""From this many rows on a sequence is a stream."""

STREAM_CHUNK = 2048
"""Tokens per chunk of a stream."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How the chunks of a batch are cut.

    Attributes:
        chunk: tokens per chunk of a tile class: on the CPU the key block of torch's flash kernel.
        stream_chunk: tokens per chunk of a stream.
        call: tokens gathered for one attention call; bounds temporaries whatever the context is.
    """

    chunk: int
    stream_chunk: int
    call: int


CPU_LIMITS = Limits(MAX_CHUNK, STREAM_CHUNK, MAX_CALL)
CUDA_LIMITS = Limits(chunk=4096, stream_chunk=32768, call=1 << 18)


class Scratch:
    """Memory that every gather of a backend reuses: fresh pages from the system cost more than the gather."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def take(self, rows: int, width: int, like: Tensor) -> Tensor:
        """[rows, width] of `like`'s dtype and device, of unknown content; the next `take` overwrites it."""
        key = (like.device, like.dtype)
        held = self._held.get(key)
        if held is None or held.numel() < rows * width:
            held = self._held[key] = like.new_empty(rows * width)
        return held[: rows * width].view(rows, width)


@dataclass(frozen=True, eq=False)
class Turn:
    """cos and sin from `expand_rows`, shaped to broadcast over what they turn; None without positions."""

    cos: Tensor | None
    sin: Tensor | None

    def __call__(self, x: Tensor, rotary: RotaryTable | None) -> Tensor:
        """x [..., D] turned, broadcast against cos and sin, in x's dtype."""
        if rotary is None or self.cos is None or self.sin is None:
            return x
        return turn(x, self.cos, self.sin, rotary.rotary_dim, rotary.pairing).to(x.dtype)


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

    def keys_values(self, kv_layer: Tensor, dtype: torch.dtype, scratch: Scratch) -> tuple[Tensor, int]:
        """[2, C, Hkv, L, D] in `dtype`, and how many bytes were copied; valid until the next call."""
        heads, dim = kv_layer.shape[2], kv_layer.shape[4]
        picked = scratch.take(len(self.rows), dim, kv_layer)
        torch.index_select(kv_layer.view(-1, dim), 0, self.rows, out=picked)
        return picked.to(dtype).view(2, self.size[0], heads, self.size[1], dim), picked.nbytes


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

    def keys_values(self, kv_layer: Tensor, dtype: torch.dtype, scratch: Scratch) -> tuple[Tensor, int]:
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
        rows: rows of the batch, None if they are all of it in order.
        tile_sequences: [num_tiles] which sequence of the class a tile is of; None if each has one tile, or
            there is one sequence.
        turn: [num_tiles, 1, n, 1, ...], against the rows as [num_sequences or num_tiles, Hkv, n, G, D].
        calls: attention calls; the parts of a row are spread over them.
        parts: K, parts per sequence (the most that any has).
        merge: [num_sequences * K] index into the parts of all calls, None if they already lie in that order.
        padding: [num_sequences, K, 1, 1] entries of `merge` that stand for no part, or None.
        unseen: [num_sequences, 1, R] rows that see nothing at all, or None.
    """

    n: int
    num_tiles: int
    num_sequences: int
    rows: Tensor | None
    tile_sequences: Tensor | None
    turn: Turn
    calls: tuple[Call | SlabCall, ...]
    parts: int
    merge: Tensor | None
    padding: Tensor | None
    unseen: Tensor | None


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


class Planner:
    """Turns the chunks of one batch into index tensors."""

    def __init__(
        self,
        table: SegmentTable,
        shape: AttentionShape,
        rotary: RotaryTable | None,
        dtype: torch.dtype,
        in_place_pages: int | None,
        limits: Limits = CPU_LIMITS,
    ) -> None:
        self.table, self.shape, self.rotary, self.dtype = table, shape, rotary, dtype
        self.num_rows, self.limits = np.diff(table.q_indptr), limits
        max_chunk = np.where(self.num_rows < STREAM_ROWS, limits.chunk, limits.stream_chunk)
        self.chunks: Chunks = cut(
            table,
            shape.num_kv_heads,
            shape.window,
            turned=rotary is not None,
            max_chunk=max_chunk,
            in_place_pages=in_place_pages,
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
            for picked in buckets(chunks.length[of_kind], self.limits.call):
                picked = of_kind[picked]
                call, sees = self._call(picked, tiles, n, kind)
                calls.append(call)
                order.append(picked)
                if sees is None:
                    seen[chunks.sequence[picked]] = True
                else:
                    np.logical_or.at(seen, chunks.sequence[picked], sees)
        tile_sequences = None
        if len(sequences) > 1:
            of_tile = np.searchsorted(sequences, chunks.tile_sequence[tiles])
            tile_sequences = _index(of_tile, len(sequences))
        count = np.diff(chunks.first_chunk)[sequences]
        parts = int(count.max())
        merge, padding = self._merge_index(np.concatenate(order), members, count, parts)
        unseen = None
        if not seen[sequences].all():
            unseen = torch.from_numpy(~seen[sequences].repeat(self.shape.group, 1))[:, None]
        return TileClass(
            n=n,
            num_tiles=len(tiles),
            num_sequences=len(sequences),
            rows=_index(_rows(self.table, sequences, n), self.table.num_rows),
            tile_sequences=tile_sequences,
            turn=self._turn(tiles, n, (len(tiles), 1, n, 1, -1)),
            calls=tuple(calls),
            parts=parts,
            merge=merge,
            padding=padding,
            unseen=unseen,
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

    def _turn(self, tiles: Ints, n: int, shape: tuple[int, ...]) -> Turn:
        """cos and sin of the rows of tiles with n rows each, as `shape`."""
        if self.rotary is None:
            return Turn(None, None)
        rows = _rows(self.table, self.chunks.tile_sequence[tiles], n)
        # A row that does not see a segment may be turned past the table's ends; any entry will do for it.
        at = self.table.q_positions[rows] - self.chunks.tile_delta[tiles].repeat(n)
        positions = torch.from_numpy(at.clip(0, self.rotary.length - 1))
        if self.dtype == torch.float64:
            cos, sin = exact_rows(self.rotary, positions, scaled=True)
        else:
            cos, sin = self.rotary.rows(positions)
        cos, sin = expand_rows(cos, sin, self.rotary.pairing)
        return Turn(cos.view(shape), sin.view(shape))

    def _call(self, picked: Ints, tiles: Ints, n: int, masked: bool) -> tuple[Call, Bools | None]:
        """A call of a class, and for masked chunks which rows [C, n] see anything."""
        chunks = self.chunks
        rows, tokens = gather_rows(chunks, picked, self.shape.num_kv_heads, self.table.page_size)
        of_tile = np.searchsorted(tiles, chunks.tile[picked])
        count, length = tokens.shape
        mask = blind = None
        sees: Bools | None = None
        if masked:
            first = self.table.q_positions[self.table.q_indptr[chunks.sequence[picked]]]
            visible = visibility(chunks, picked, tokens, first, n, self.shape.window)
            any_seen: Bools = np.logical_or.reduce(visible, axis=2)
            mask = self._mask(visible.repeat(self.shape.group, 1))
            if not any_seen.all():
                blind = torch.from_numpy(~any_seen.repeat(self.shape.group, 1))[:, None]
            sees = any_seen
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
            turned = self._turn(np.array([tile]), n, (n, 1, -1))
            calls = [self._stream_call(c, position, n) for c in members[chunks.tile[members] == tile]]
            tiles.append((turned, tuple(calls)))
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
