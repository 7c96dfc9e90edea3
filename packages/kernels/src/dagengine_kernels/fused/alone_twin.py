"""Batch-invariant plans in Python: every sequence walks by itself and is cut at fixed places.

Knows spans and plan parameters, as planner_twin does; csrc/alone.cpp gives exactly the same arrays.

    walk      all that a sequence lists, in its order and uncut: | stretch 0 |  stretch 1  | own |
    stretch   extents of one delta, one stored position after the other, through whole pages: a run; it begins a KV tile
    part      N = invariant_chunk KV tiles of the walk, counted from its begin

        KV tiles   | 0 1 2 .. N-1 | N .. 2N-1 | 2N ..      a work for each part of which a row of the query tile sees
        tile a     |    ------    |-----------|----        something, without the KV tiles in front and behind that
        tile b     |         -----|--                      none of them sees; works of one part alone write directly

A row's KV tiles, the parts that they are in and the order of both follow from what its sequence lists up to it: not
from other sequences, nor from the rows that are computed with it, nor from the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dagengine_kernels.fused.plan import NO_TAIL, PlanArrays, PlanClass, PlanParameters
from dagengine_kernels.fused.shares_twin import deal
from dagengine_kernels.fused.spans import SpanTable, indptr


@dataclass(frozen=True)
class _Tile:
    """One query tile: the rows first .. first + count - 1 of the table, and what it walks of each part."""

    height: int
    first: int
    count: int
    pieces: list[tuple[int, int]]


class AlonePlanner:
    """One batch, for parameters with an `invariant_chunk`."""

    def __init__(
        self, table: SpanTable, parameters: PlanParameters, reserve: Sequence[Sequence[int]] | None
    ) -> None:
        assert parameters.invariant_chunk is not None
        self.table, self.parameters, self.reserve = table, parameters, reserve
        self.chunk = parameters.invariant_chunk
        self.slots = [rows // parameters.group for rows in parameters.rows_per_tile]
        self.entries: list[list[int]] = []
        self.runs: list[list[int]] = []
        self.tiles: list[_Tile] = []
        self.tails = [NO_TAIL] * table.num_sequences

    def plan(self, tokens_unique: int) -> PlanArrays:
        for b in range(self.table.num_sequences):
            rows = int(self.table.q_indptr[b + 1] - self.table.q_indptr[b])
            if rows and self.table.span_indptr[b] < self.table.span_indptr[b + 1]:
                self._walk(b, rows)
        return self._assemble(tokens_unique)

    def _walk(self, b: int, rows: int) -> None:
        begin = self._end()
        self._enter(b)
        tail = None
        if self.reserve is not None and rows == 1:
            tail = (len(self.entries) - 1) // self.parameters.boxes
            self._grow(b, self.reserve[b])
        self._pad()
        views = [self._views(tile) for tile in range(begin, self._end())]
        first_row = int(self.table.q_indptr[b])
        position, window = int(self.table.q_positions[first_row]), self.parameters.window
        for at in range(0, rows, self.slots[-1]):
            count = min(rows - at, self.slots[-1])
            first, last = position + at, position + at + count - 1

            def sees(tile: int, first: int = first, last: int = last) -> bool:
                if tail is not None and tile >= tail:
                    return True
                low, high = views[tile - begin]
                return (tail is not None or low <= last) and (window is None or high > first - window)

            pieces = []
            for part in range(begin, self._end(), self.chunk):
                low, high = part, min(part + self.chunk, self._end())
                while low < high and not sees(low):
                    low += 1
                while low < high and not sees(high - 1):
                    high -= 1
                if low < high:
                    pieces.append((low, high))
            if pieces:
                height = 0 if count <= self.slots[0] else len(self.slots) - 1
                self.tiles.append(_Tile(height, first_row + at, count, pieces))

    def _enter(self, b: int) -> None:
        """All that the sequence lists."""
        table, size = self.table, self.table.page_size
        page = hi = stored_end = delta_before = None
        for which, start, stop, stored, delta in table.spans[
            table.span_indptr[b] : table.span_indptr[b + 1]
        ].tolist():
            pages = table.list_pages[table.list_indptr[which] :]
            for index in range(start // size, (stop - 1) // size + 1):
                lo, end = max(start - index * size, 0), min(stop - index * size, size)
                pos0 = stored - start + index * size
                follows = delta == delta_before and stored_end == pos0 + lo
                if follows and page == pages[index] and lo == hi:
                    self.entries[-1][1] = self.entries[-1][1] & 0xFFFF | end << 16
                else:
                    if not (follows and lo == 0 and hi == size):
                        self._pad()
                        self.runs.append([delta, -1])
                    self.entries.append([int(pages[index]), lo | end << 16, pos0, len(self.runs) - 1])
                page, hi, stored_end, delta_before = int(pages[index]), end, pos0 + end, delta

    def _grow(self, b: int, pages: Sequence[int]) -> None:
        """The entries that the sequence grows into, behind its last one."""
        last, size = len(self.entries) - 1, self.table.page_size
        _, rows, pos0, run = self.entries[last]
        for i, page in enumerate(pages):
            self.entries.append([page, 0, pos0 + (i + 1) * size, run])
        full = rows >> 16 == size
        room = len(self.entries) - last - full
        if room:
            self.tails[b] = (last + full, room, 1)

    def _pad(self) -> None:
        while len(self.entries) % self.parameters.boxes:
            self.entries.append([-1, 0, 0, len(self.runs) - 1])

    def _end(self) -> int:
        return len(self.entries) // self.parameters.boxes

    def _views(self, tile: int) -> tuple[int, int]:
        """The first and the last view position in a KV tile; of one that is reserved, nothing that is looked at."""
        boxes, found = self.parameters.boxes, []
        for _, packed, pos0, run in self.entries[tile * boxes : (tile + 1) * boxes]:
            lo, hi = packed & 0xFFFF, packed >> 16
            if lo < hi:
                found += [pos0 + lo + self.runs[run][0], pos0 + hi - 1 + self.runs[run][0]]
        return min(found, default=0), max(found, default=0)

    def _assemble(self, tokens_unique: int) -> PlanArrays:
        parameters, heads, boxes = self.parameters, self.parameters.num_kv_heads, self.parameters.boxes
        parts: list[list[int] | None] = [[] for _ in range(self.table.num_rows * heads)]
        num_parts = 0
        classes = []
        for height, rows_per_tile in enumerate(parameters.rows_per_tile):
            tiles = [tile for tile in self.tiles if tile.height == height]
            if not tiles:
                continue
            items = []
            for number, tile in enumerate(tiles):
                for head in range(heads):
                    keys = [row * heads + head for row in range(tile.first, tile.first + tile.count)]
                    for begin, end in tile.pieces:
                        part = -1
                        if len(tile.pieces) > 1:
                            part = num_parts
                            num_parts += tile.count
                        for slot, key in enumerate(keys):
                            if part < 0:
                                parts[key] = None
                            else:
                                parts[key].append(part + slot)  # type: ignore[union-attr]
                        items.append((number, head, begin, end, part))
            order = sorted(range(len(items)), key=lambda i: _place(*items[i]))
            lengths = [end - begin for _, _, begin, end, _ in items]
            costs = [
                end - begin + parameters.work_cost + parameters.run_cost * self._changes(begin, end)
                for _, _, begin, end, _ in items
            ]
            dealt, work_indptr = deal(order, lengths, costs, parameters.workers[height])
            padded = [
                [*range(tile.first, tile.first + tile.count), *[-1] * (self.slots[height] - tile.count)]
                for tile in tiles
            ]
            classes.append(
                PlanClass(
                    rows_per_tile=rows_per_tile,
                    tile_rows=np.array(padded, np.int32).reshape(-1, self.slots[height]),
                    works=np.array([items[i] for i, _, _ in dealt], np.int32).reshape(-1, 5),
                    work_indptr=np.array(work_indptr, np.int32),
                )
            )
        merged = [(key, listed) for key, listed in enumerate(parts) if listed is not None]
        read = [rows >> 16 > rows & 0xFFFF for _, rows, _, _ in self.entries]
        pages = sum(
            sum(read[begin * boxes : end * boxes]) for tile in self.tiles for begin, end in tile.pieces
        )
        return PlanArrays(
            entries=np.array(self.entries, np.int32).reshape(-1, 4),
            runs=np.array(self.runs, np.int32).reshape(-1, 2),
            deltas=np.zeros(0, np.int32),
            classes=tuple(classes),
            merge_rows=np.array([key for key, _ in merged], np.int32),
            merge_indptr=indptr([len(listed) for _, listed in merged]),
            merge_parts=np.array([part for _, listed in merged for part in listed], np.int32),
            num_parts=num_parts,
            tails=np.array(self.tails, np.int32).reshape(-1, 3),
            boxes=boxes,
            page_size=self.table.page_size,
            tokens_read=pages * self.table.page_size,
            tokens_unique=tokens_unique,
        )

    def _changes(self, begin: int, end: int) -> int:
        """How often another run begins within KV tiles begin .. end - 1; those of a walk follow each other."""
        boxes = self.parameters.boxes
        return self.entries[(end - 1) * boxes][3] - self.entries[begin * boxes][3]


def _place(tile: int, head: int, begin: int, end: int, part: int) -> tuple[int, int, int, int]:
    """Long works first; of those the query tiles that read the same KV tiles one after the other."""
    return begin - end, head, begin, tile
