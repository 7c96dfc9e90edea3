"""How `segmented` cuts a batch into attention calls: numpy on the host, once per step.

Knows integers only. Names, from the outside in:

    piece   an extent, clipped to what its sequence sees; cut where visibility starts to depend on the row
    tile    the query rows of one sequence turned by one delta: what a piece is attended with
    run     the pieces of a tile that every row sees whole ("free"), or those that rows differ on ("masked")
    chunk   consecutive tokens of a run, or one whole page read in place: one batch entry of an attention call
    slab    neighbouring pages that one call reads where they are, as a strided view

    views of a sequence whose rows are at first..last:

            last - window + 1          first           last + 1
      masked       |        free         |    masked      |            one row: everything is free

A chunk is attended by itself; the parts of a row merge by LSE.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dagengine_kernels.segments import SegmentTable

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_CHUNK = 512
"""Tokens per chunk: the key block of torch's flash kernel."""

MAX_CALL = 4096
"""Tokens gathered for one attention call: bounds temporaries whatever the context is."""


@dataclass(frozen=True, eq=False)
class Slab:
    """Pages first..first+count-1; page first + at[i] is chunk chunks[i]; at least 4 of 5 are used."""

    first: int
    count: int
    at: Ints
    chunks: Ints


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a batch by sequence; of a sequence the gathered ones by delta, free before masked.

    Attributes:
        sequence, tile, start, length, masked: [C]; tokens start..start+length-1 of the token arrays.
        in_place: [C], whole pages that `slabs` read; they have no tokens in the token arrays.
        slabs: of sequences with one row only.
        tile_sequence, tile_delta: [tiles].
        token_row: [N], row of each token's K of head 0 in the pages seen as [pages * 2 * Hkv * page_size, D].
        token_view: [N] view positions.
        first_tile: [B+1], tiles of sequence b are first_tile[b]..first_tile[b+1]-1; likewise first_chunk.
    """

    sequence: Ints
    tile: Ints
    start: Ints
    length: Ints
    masked: Bools
    in_place: Bools
    slabs: tuple[Slab, ...]
    tile_sequence: Ints
    tile_delta: Ints
    token_row: Ints
    token_view: Ints
    first_tile: Ints
    first_chunk: Ints


def cut(
    table: SegmentTable,
    num_kv_heads: int,
    window: int | None,
    *,
    turned: bool,
    max_chunk: Ints,
    in_place_pages: int | None,
) -> Chunks:
    """Cut a batch into chunks.

    Args:
        turned: whether deltas matter (False for layers without positions: one tile per sequence).
        max_chunk: [B], tokens per chunk of each sequence.
        in_place_pages: pages that make a slab for sequences with one row; None for no slabs.
    """
    num_rows = np.diff(table.q_indptr).astype(np.int64)
    has_rows = num_rows > 0
    # Where a sequence has no rows the index may point past the end; its pieces are dropped anyway.
    padded = np.append(table.q_positions, 0)
    first = padded[table.q_indptr[:-1]]
    last = first + num_rows - 1

    sequence = np.repeat(np.arange(table.num_sequences), np.diff(table.extent_indptr))
    page, lo, hi, stored, delta = table.extents.T.astype(np.int64)
    begin = stored + delta
    end = begin + hi - lo
    row = page * (2 * num_kv_heads * table.page_size) + lo - begin  # + view = the row of a token
    first_of, last_of = first[sequence], last[sequence]
    end = np.minimum(end, last_of + 1)
    if window is not None:
        begin = np.maximum(begin, first_of - window + 1)
    keep = (begin < end) & has_rows[sequence]
    if not turned:
        delta = np.zeros_like(delta)

    masked = np.zeros(len(begin), bool)
    many = num_rows[sequence] > 1
    if many.any():
        free_end = np.where(many, np.clip(first_of, begin, np.maximum(end, begin)), end)
        free_begin = begin
        if window is not None:
            free_begin = np.where(many, np.clip(last_of - window + 1, begin, free_end), begin)
        bounds = ((begin, free_begin), (free_begin, free_end), (free_end, end))
        parts = [(b, e, keep & (b < e), i != 1) for i, (b, e) in enumerate(bounds)]
        index = np.concatenate([np.flatnonzero(k) for _, _, k, _ in parts])
        begin = np.concatenate([b[k] for b, _, k, _ in parts])
        end = np.concatenate([e[k] for _, e, k, _ in parts])
        masked = np.concatenate([np.full(int(k.sum()), m) for _, _, k, m in parts])
        sequence, delta, row = sequence[index], delta[index], row[index]
        order = np.lexsort((index, masked, delta, sequence))
    else:
        index = np.flatnonzero(keep)
        begin, end, masked = begin[index], end[index], masked[index]
        sequence, delta, row = sequence[index], delta[index], row[index]
        order = np.lexsort((delta, sequence))
    sequence, delta, masked = sequence[order], delta[order], masked[order]
    begin, end, row = begin[order], end[order], row[order]
    page = np.full(len(sequence), -1)
    if in_place_pages is not None:
        whole = (end - begin == table.page_size) & (num_rows[sequence] == 1)
        page[whole] = (row + begin)[whole] // (2 * num_kv_heads * table.page_size)
    return _chunk(
        table.num_sequences, sequence, delta, masked, begin, end, row, page, max_chunk, in_place_pages or 0
    )


def _chunk(
    num_sequences: int,
    sequence: Ints,
    delta: Ints,
    masked: Bools,
    begin: Ints,
    end: Ints,
    row: Ints,
    page: Ints,
    max_chunk: Ints,
    min_slab: int,
) -> Chunks:
    """Chunks of ordered pieces; `page` is that of a piece which may be read in place, -1 for the others."""
    new_tile = np.ones(len(sequence), bool)
    new_tile[1:] = (sequence[1:] != sequence[:-1]) | (delta[1:] != delta[:-1])
    tiles = np.flatnonzero(new_tile)
    tile = np.cumsum(new_tile) - 1
    tile_sequence, tile_delta = sequence[tiles], delta[tiles]

    slabs = _slabs(page, min_slab)
    placed = np.concatenate([np.zeros(0, np.int64), *(slab.chunks for slab in slabs)])
    placed_tile = tile[placed]
    if len(placed):
        kept = np.ones(len(sequence), bool)
        kept[placed] = False
        tile, masked, begin, end, row = tile[kept], masked[kept], begin[kept], end[kept], row[kept]

    length = end - begin
    total = int(length.sum())
    start = np.cumsum(length) - length
    token_view = np.repeat(begin - start, length) + np.arange(total)
    token_row = token_view + np.repeat(row, length)

    new_run = np.ones(len(tile), bool)
    new_run[1:] = (tile[1:] != tile[:-1]) | (masked[1:] != masked[:-1])
    runs = np.flatnonzero(new_run)
    run_tile = tile[runs]
    run_start = start[runs]
    run_length = np.diff(run_start, append=total)

    # Chunks of a run are as equal as they can be, so that calls need little padding.
    count = -(-run_length // max_chunk[tile_sequence[run_tile]])
    size = -(-run_length // np.maximum(count, 1))
    run = np.repeat(np.arange(len(runs)), count)
    ordinal = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    offset = ordinal * size[run]
    chunk_tile = run_tile[run]
    chunk_start = run_start[run] + offset
    chunk_length = np.minimum(size[run], run_length[run] - offset)
    chunk_masked = masked[runs][run]
    in_place = np.zeros(len(run), bool)
    if len(placed):
        chunk_tile = np.concatenate((chunk_tile, placed_tile))
        order = np.argsort(tile_sequence[chunk_tile], kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        taken = len(run)
        for i, slab in enumerate(slabs):
            chunks = place[taken : taken + len(slab.chunks)]
            taken += len(chunks)
            slabs[i] = Slab(slab.first, slab.count, slab.at, chunks)
        nothing = np.zeros(len(placed), np.int64)
        chunk_tile = chunk_tile[order]
        chunk_start = np.concatenate((chunk_start, nothing))[order]
        chunk_length = np.concatenate((chunk_length, nothing))[order]
        chunk_masked = np.concatenate((chunk_masked, nothing.astype(bool)))[order]
        in_place = order >= len(run)
    chunk_sequence = tile_sequence[chunk_tile]
    sequences = np.arange(num_sequences + 1)
    return Chunks(
        sequence=chunk_sequence,
        tile=chunk_tile,
        start=chunk_start,
        length=chunk_length,
        masked=chunk_masked,
        in_place=in_place,
        slabs=tuple(slabs),
        tile_sequence=tile_sequence,
        tile_delta=tile_delta,
        token_row=token_row,
        token_view=token_view,
        first_tile=np.searchsorted(tile_sequence, sequences),
        first_chunk=np.searchsorted(chunk_sequence, sequences),
    )


def _slabs(page: Ints, min_slab: int) -> list[Slab]:
    """Slabs over the pieces whose page is not -1; `chunks` are indices of pieces.

    Several pieces may want the same page: the k-th of them is in the k-th layer of slabs. Pages that are not
    worth a slab are left out, to be gathered.
    """
    wanted = np.flatnonzero(page >= 0)
    if len(wanted) < max(min_slab, 1):
        return []
    wanted = wanted[np.argsort(page[wanted], kind="stable")]
    pages = page[wanted]
    fresh = np.diff(pages, prepend=-1) != 0
    first = np.flatnonzero(fresh)
    layer = np.arange(len(pages)) - np.repeat(first, np.diff(first, append=len(pages)))
    if layer.any():
        order = np.argsort(layer, kind="stable")
        wanted, pages, layer = wanted[order], pages[order], layer[order]
    breaks = np.flatnonzero((np.diff(pages) > 2) | (np.diff(layer) != 0)) + 1
    slabs = []
    for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(pages)], strict=True):
        at = pages[begin:end] - pages[begin]
        if end - begin >= max(min_slab, 0.8 * (at[-1] + 1)):
            slabs.append(Slab(int(pages[begin]), int(at[-1]) + 1, at, wanted[begin:end]))
    return slabs


def buckets(length: Ints, largest_call: int = MAX_CALL) -> list[Ints]:
    """Group chunks of similar length into calls: at most a quarter (or 32 tokens) of padding per chunk.

    Returns: indices into `length`, ascending within a call; at most `largest_call` padded tokens per call
            (a longer chunk is a call of its own).
    """
    if len(length) and length.min() == length.max() and len(length) * length[0] <= largest_call:
        return [np.arange(len(length))]
    order = np.argsort(-length, kind="stable")
    falling = -length[order]
    calls = []
    i = 0
    while i < len(order):
        longest = int(-falling[i])
        shortest = min(longest - 32, longest * 3 // 4)
        j = int(np.searchsorted(falling, -shortest, side="right"))
        j = min(j, i + max(1, largest_call // longest))
        calls.append(np.sort(order[i:j]))
        i = j
    return calls


def gather_rows(chunks: Chunks, picked: Ints, num_kv_heads: int, page_size: int) -> tuple[Ints, Ints]:
    """Which rows to gather for a call over the chunks `picked`, padded to the longest with their last token.

    Returns: rows [2, C, Hkv, L] of the pages seen as [pages * 2 * Hkv * page_size, D], and tokens [C, L].
    Padding repeats a token of the chunk itself, so that nothing outside a slice is ever read.
    """
    length = chunks.length[picked]
    tokens = np.minimum(np.arange(length.max()), length[:, None] - 1) + chunks.start[picked, None]
    kinds = np.arange(2).reshape(2, 1, 1, 1) * (num_kv_heads * page_size)
    heads = np.arange(num_kv_heads).reshape(1, 1, -1, 1) * page_size
    return chunks.token_row[tokens][None, :, None, :] + (kinds + heads), tokens


def visibility(chunks: Chunks, picked: Ints, tokens: Ints, first: Ints, n: int, window: int | None) -> Bools:
    """[C, n, L]: whether row i (at first[c] + i) sees the token; padding is never seen."""
    view = chunks.token_view[tokens][:, None, :]
    position = (first[:, None] + np.arange(n))[:, :, None]
    sees = view <= position
    if window is not None:
        sees &= view > position - window
    sees &= (np.arange(tokens.shape[1]) < chunks.length[picked, None])[:, None, :]
    return sees
