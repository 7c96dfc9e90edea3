"""The planner in Python: what a plan is made of, step by step. The C++ planner gives exactly the same arrays.

Knows spans and plan parameters; not tensors, kernels or where a table came from.

    unit        the rows of a sequence of at most M // G rows (the highest M): it shares tiles with others.
                A longer sequence is cut into chunks of M // G rows, which share one walk of its own.
    track       a page list at one place in the stored positions: what units can share. A growing tail (the last
                page of a sequence that `reserve` lets grow) is a track of its own.
    range       a stretch of a track between neighbouring ends of spans; every unit sees all of it or nothing

        unit 0      [--------------------)             spans of one track
        unit 1            [--------)
        ranges      [ 0  )[  1     )[ 2 )              members 0 | 0 1 | 0

    tile        units that read together: the longest one, then again and again the one that has most tokens in
                common with what the tile reads already
    group       the ranges that a tile's slots see at the same deltas: one run of the walk
    pack        short groups of one slot each, its own tokens mostly, that are one run: their entries have owners
    kin         query tiles that walk the same KV tiles, or begin with them: cut alike, they read these at one time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import ne

import numpy as np

from dagengine_kernels.fused.alone_twin import AlonePlanner
from dagengine_kernels.fused.clusters_twin import find_tiles
from dagengine_kernels.fused.plan import (
    ENTRY_OWNER_SHIFT,
    ENTRY_ROWS,
    ENTRY_RUN,
    INVISIBLE,
    NO_TAIL,
    PlanArrays,
    PlanClass,
    PlanParameters,
)
from dagengine_kernels.fused.ranges_twin import Piece, Range, Ranges, Unit
from dagengine_kernels.fused.shares_twin import Item, share
from dagengine_kernels.fused.spans import SpanTable, indptr

PACKED = 4
"""A group of one slot is packed with those of others where its tokens are fewer than those of so many KV tiles."""

Vector = tuple[int, ...]
"""The delta at which each slot of a tile sees a run."""

Part = tuple[int, int, int, int]
"""(layer, track, start, stop)"""


def plan_spans(
    table: SpanTable, parameters: PlanParameters, reserve: Sequence[Sequence[int]] | None = None
) -> PlanArrays:
    """As `planner.plan_spans`, for a valid table and valid parameters."""
    if parameters.invariant_chunk is not None:
        return AlonePlanner(table, parameters, reserve).plan(tokens_unique(table))
    return _Planner(table, parameters, reserve).plan()


def advance(arrays: PlanArrays) -> None:
    """One token more for every sequence with a tail, in place: the definition of what kernels do on the device.

    HI of the tail's entry grows by 1. When the page is full the tail moves to the next reserved entry; when there
    is none it becomes (-1, 0, 1) and the sequence must be planned anew before its next token. The positions of the
    rows advance elsewhere.
    """
    for sequence, (entry, room, stride) in enumerate(arrays.tails.tolist()):
        if entry < 0:
            continue
        arrays.entries[entry, ENTRY_ROWS] += 1 << 16
        if arrays.entries[entry, ENTRY_ROWS] >> 16 == arrays.page_size:
            arrays.tails[sequence] = (entry + stride, room - 1, stride) if room > 1 else NO_TAIL


@dataclass
class _Tile:
    """One query tile and its walk. Run r of `visible` is the first + r of the plan's runs.

    Attributes:
        height: index into rows_per_tile.
        rows: table rows, one per slot.
        begin, end: KV tiles.
        tile_runs: run of each KV tile of the walk, from `walk_begin` on.
        visible: run -> slots that see it; None where all do.
        walks_alone: whether no other tile has its walk.
    """

    height: int
    rows: list[int]
    begin: int
    end: int
    walk_begin: int
    tile_runs: list[int]
    visible: dict[int, list[bool]]
    walks_alone: bool = True


class _Planner:
    def __init__(
        self, table: SpanTable, parameters: PlanParameters, reserve: Sequence[Sequence[int]] | None
    ) -> None:
        self.table = table
        self.parameters = parameters
        self.reserve = reserve
        self.pages = [
            table.list_pages[begin:end].tolist()
            for begin, end in zip(table.list_indptr[:-1], table.list_indptr[1:], strict=True)
        ]
        self.slots = [rows // parameters.group for rows in parameters.rows_per_tile]
        self.found = Ranges(table, parameters.window, reserve, self.slots[-1])
        self.entries: list[list[int]] = []
        self.runs: list[list[int]] = []
        self.deltas: list[int] = []
        self.tiles: list[_Tile] = []
        self.tails = [NO_TAIL] * table.num_sequences

    def plan(self) -> PlanArrays:
        for unit in self.found.long:
            self._walk_long(unit)
        for units, height in find_tiles(self.found, self.slots, self.parameters.wide_cost):
            self._walk_tile(units, height)
        return self._assemble()

    def _walk_tile(self, units: list[int], height: int) -> None:
        slot_of, rows = {}, []
        for u in units:
            unit = self.found.units[u]
            slot_of[u] = range(len(rows), len(rows) + unit.size)
            rows += range(unit.first_row, unit.first_row + unit.size)
        groups: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = {}
        seen = set()
        for u in units:
            for index in self.found.unit_ranges[u]:
                if index in seen:
                    continue
                seen.add(index)
                part = self.found.ranges[index]
                for layer, vector in enumerate(self._vectors(part, slot_of, len(rows))):
                    groups.setdefault(vector, []).append((layer, part.track, part.start, part.stop))

        tails = {
            vector: piece[1]
            for vector, pieces in groups.items()
            for piece in pieces
            if piece[1] in self.found.tail_of
        }
        tile = _Tile(height, rows, 0, 0, len(self.entries) // self.parameters.boxes, [], {})
        packs = self._packs(groups, tails)
        packed = {vector for pack in packs for vector in pack}
        for vector in sorted(groups, key=lambda vector: vector in tails):
            if vector not in packed:
                run = self._begin_run(vector, tile)
                tail = tails.get(vector)
                self._enter_all(groups[vector], tail, run)
                if tail is not None:
                    self._enter_tail(groups[vector], tail, run)
                    self._reserve(tail, run)
                self._pad(run, tile)
        for pack in packs:
            self._walk_pack(pack, groups, tails, tile)
        tile.begin, tile.end = tile.walk_begin, len(self.entries) // self.parameters.boxes
        self.tiles.append(tile)

    def _packs(
        self, groups: Mapping[Vector, Sequence[Part]], tails: Mapping[Vector, int]
    ) -> list[list[Vector]]:
        """Groups of one slot each that are one run together, those that grow in a pack of their own, the last one.

        Of what does not grow the k-th group of each slot is in pack k.
        """
        if not self.parameters.owners:
            return []
        most = PACKED * self.parameters.boxes * self.table.page_size
        packs: dict[int, list[Vector]] = {}
        growing = []
        times: dict[int, int] = {}
        for vector, pieces in groups.items():
            seeing = [slot for slot, delta in enumerate(vector) if delta != INVISIBLE]
            if (
                len(vector) == 1
                or len(seeing) != 1
                or sum(stop - start for _, _, start, stop in pieces) >= most
            ):
                continue
            if vector in tails:
                growing.append(vector)
            else:
                number = times[seeing[0]] = times.get(seeing[0], -1) + 1
                packs.setdefault(number, []).append(vector)
        return [pack for pack in (*packs.values(), growing) if len(pack) > 1]

    def _walk_pack(
        self,
        pack: Sequence[Vector],
        groups: Mapping[Vector, Sequence[Part]],
        tails: Mapping[Vector, int],
        tile: _Tile,
    ) -> None:
        """One run of groups of one slot each; every entry has its owner.

        The pages of tails come behind all others, and behind them, for each further page that they grow into, one
        entry of each: KV tiles that nothing is in yet are then as few as they can be.
        """
        union = tuple(max(deltas) for deltas in zip(*pack, strict=True))  # INVISIBLE is less than any delta
        run = self._begin_run(union, tile)
        owners = [next(slot for slot, delta in enumerate(vector) if delta != INVISIBLE) for vector in pack]
        for vector, owner in zip(pack, owners, strict=True):
            first = len(self.entries)
            self._enter_all(groups[vector], tails.get(vector), run)
            self._own(first, owner)
        if pack[0] in tails:
            assert self.reserve is not None
            first = len(self.entries)
            for vector, owner in zip(pack, owners, strict=True):
                self._enter_tail(groups[vector], tails[vector], run)
                self._own(len(self.entries) - 1, owner)
            reserved = [self._reserved(tails[vector], run) for vector in pack]
            for at in range(max(map(len, reserved))):
                for entries, owner in zip(reserved, owners, strict=True):
                    self.entries.append(entries[at] if at < len(entries) else [-1, 0, 0, run])
                    if at < len(entries):
                        self._own(len(self.entries) - 1, owner)
            for place, vector in enumerate(pack):
                self._grow(tails[vector], first + place, len(reserved[place]), len(pack))
        self._pad(run, tile)

    def _begin_run(self, vector: Vector, tile: _Tile) -> int:
        """A new run, which the slots of a tile see at these deltas."""
        run = len(self.runs)
        uniform = len(set(vector)) == 1
        self.runs.append([vector[0], -1] if uniform else [0, len(self.deltas)])
        if not uniform:
            padding = self.slots[tile.height] - len(vector)
            self.deltas += [*vector, *[INVISIBLE] * padding]
        tile.visible[run] = [delta != INVISIBLE for delta in vector]
        return run

    def _enter_all(self, parts: Sequence[Part], tail: int | None, run: int) -> None:
        """All parts of a group but that of its tail, neighbours as one."""
        merged: list[list[int]] = []
        for layer, track, start, stop in sorted(part for part in parts if part[1] != tail):
            if merged and merged[-1][0] == layer and merged[-1][1] == track and merged[-1][3] == start:
                merged[-1][3] = stop
            else:
                merged.append([layer, track, start, stop])
        for _, track, start, stop in merged:
            self._enter(track, start, stop, run)

    def _enter_tail(self, parts: Sequence[Part], tail: int, run: int) -> None:
        """The last page of a sequence that grows."""
        ((start, stop),) = [(part[2], part[3]) for part in parts if part[1] == tail]
        self._enter(tail, start, stop, run)

    def _own(self, first: int, owner: int) -> None:
        """The entries from `first` on are of one slot alone."""
        for entry in self.entries[first:]:
            entry[ENTRY_ROWS] |= owner + 1 << ENTRY_OWNER_SHIFT

    def _vectors(self, part: Range, slot_of: dict[int, range], slots: int) -> list[tuple[int, ...]]:
        """Deltas of the slots in each layer: the k-th time that a unit sees the range is in layer k."""
        layers: list[list[int]] = []
        times: dict[int, int] = {}
        for u, delta in part.members:
            if u in slot_of:
                layer = times.get(u, 0)
                times[u] = layer + 1
                if layer == len(layers):
                    layers.append([INVISIBLE] * slots)
                for slot in slot_of[u]:
                    layers[layer][slot] = delta
        return [tuple(layer) for layer in layers]

    def _enter(self, track: int, start: int, stop: int, run: int) -> None:
        which, base = self.found.tracks[track]
        size = self.table.page_size
        for index in range(start // size, (stop - 1) // size + 1):
            at = index * size
            lo, hi = max(start - at, 0), min(stop - at, size)
            self.entries.append([self.pages[which][index], lo | hi << 16, base + at, run])

    def _reserved(self, track: int, run: int) -> list[list[int]]:
        """The entries that a tail grows into when its last page, which was just entered, is full."""
        assert self.reserve is not None
        size, base = self.table.page_size, self.found.tracks[track][1]
        stop = self.found.tail_stop[track]
        next_page = (stop - 1) // size + 1
        return [
            [page, 0, base + (next_page + i) * size, run]
            for i, page in enumerate(self.reserve[self.found.tail_of[track]])
        ]

    def _reserve(self, track: int, run: int) -> None:
        """The entries that a tail grows into, behind the one of its last page."""
        last, reserved = len(self.entries) - 1, self._reserved(track, run)
        self.entries += reserved
        self._grow(track, last, len(reserved), 1)

    def _grow(self, track: int, last: int, reserved: int, stride: int) -> None:
        """Note where a tail grows, whose last page is in entry `last`, and the next ones `stride` apart behind it."""
        full = self.found.tail_stop[track] % self.table.page_size == 0
        room = 1 + reserved - full
        if room:
            self.tails[self.found.tail_of[track]] = (last + full * stride, room, stride)

    def _pad(self, run: int, tile: _Tile) -> None:
        boxes = self.parameters.boxes
        while len(self.entries) % boxes:
            self.entries.append([-1, 0, 0, run])
        have = tile.walk_begin + len(tile.tile_runs)
        tile.tile_runs += [run] * (len(self.entries) // boxes - have)

    def _walk_long(self, unit: Unit) -> None:
        """One walk for all chunks of a sequence; each chunk's tile is the part of it that its rows can see.

        What every row sees comes first, grouped by delta, then what depends on the row, by view position; with a
        window everything is by view position.
        """
        first = int(self.table.q_positions[unit.first_row])
        window = self.parameters.window
        order = []
        appeared: dict[int, int] = {}
        for j, (track, start, stop, delta) in enumerate(unit.pieces):
            base = self.found.tracks[track][1]
            free = window is None and base + stop - 1 + delta <= first
            if free:
                order.append((0, appeared.setdefault(delta, len(appeared)), j))
            else:
                order.append((1, base + start + delta, j))
        walk_begin = len(self.entries) // self.parameters.boxes
        shared = _Tile(0, [], 0, 0, walk_begin, [], {})
        previous: Piece | None = None
        for _, _, j in sorted(order):
            track, start, stop, delta = unit.pieces[j]
            if previous is None or previous[3] != delta:
                if previous is not None:
                    self._pad(len(self.runs) - 1, shared)
                self.runs.append([delta, -1])
            elif previous[0] == track and previous[2] == start:
                last = self.entries[-1]
                if start % self.table.page_size:
                    last[ENTRY_ROWS] &= 0xFFFF
                    at = start // self.table.page_size * self.table.page_size
                    last[ENTRY_ROWS] |= min(stop - at, self.table.page_size) << 16
                    start = min(stop, at + self.table.page_size)
            if start < stop:
                self._enter(track, start, stop, len(self.runs) - 1)
            previous = (track, start, stop, delta)
        self._pad(len(self.runs) - 1, shared)

        for at in range(0, unit.size, self.slots[-1]):
            rows = list(range(unit.first_row + at, unit.first_row + min(unit.size, at + self.slots[-1])))
            begin, end = self._trim(walk_begin, first + at, first + at + len(rows) - 1)
            height = 0 if len(rows) <= self.slots[0] else len(self.slots) - 1
            visible = {run: [True] * len(rows) for run in set(shared.tile_runs)}
            if begin < end:
                self.tiles.append(
                    _Tile(height, rows, begin, end, walk_begin, shared.tile_runs, visible, walks_alone=False)
                )

    def _trim(self, begin: int, first: int, last: int) -> tuple[int, int]:
        """KV tiles from `begin` on without those in front and behind that no row at first .. last sees."""
        boxes, window = self.parameters.boxes, self.parameters.window
        end = len(self.entries) // boxes
        seen = []
        for tile in range(begin, end):
            views = []
            for _, packed, pos0, run in self.entries[tile * boxes : (tile + 1) * boxes]:
                lo, hi = packed & 0xFFFF, packed >> 16
                if lo < hi:
                    delta = self.runs[run][0]
                    views += [pos0 + lo + delta, pos0 + hi - 1 + delta]
            if min(views) <= last and (window is None or max(views) > first - window):
                seen.append(tile)
        return (seen[0], seen[-1] + 1) if seen else (begin, begin)

    def _assemble(self) -> PlanArrays:
        parameters, heads = self.parameters, self.parameters.num_kv_heads
        parts: list[list[int] | None] = [[] for _ in range(self.table.num_rows * heads)]
        num_parts = 0
        classes = []
        turns = self._turn_costs()
        for height, rows_per_tile in enumerate(parameters.rows_per_tile):
            tiles = [tile for tile in self.tiles if tile.height == height]
            if not tiles:
                continue
            items = [
                Item(tile.begin, tile.end, tile.walk_begin, kin)
                for tile, kin in zip(tiles, self._kin(tiles), strict=True)
                for _ in range(heads)
            ]
            pieces, work_indptr = share(items, turns, parameters.workers[height], parameters)
            works = []
            for item, begin, end in pieces:
                tile, head = tiles[item // heads], item % heads
                part = -1
                keys = [row * heads + head for row in tile.rows]
                if (begin, end) == (0, items[item].length):
                    for key in keys:
                        parts[key] = None
                else:
                    part = num_parts
                    num_parts += len(tile.rows)
                    offset = tile.begin - tile.walk_begin
                    runs = set(tile.tile_runs[offset + begin : offset + end])
                    for slot, key in enumerate(keys):
                        if any(tile.visible[run][slot] for run in runs):
                            parts[key].append(part + slot)  # type: ignore[union-attr]
                works.append([item // heads, head, tile.begin + begin, tile.begin + end, part])
            padded = [tile.rows + [-1] * (self.slots[height] - len(tile.rows)) for tile in tiles]
            classes.append(
                PlanClass(
                    rows_per_tile=rows_per_tile,
                    tile_rows=_ints(padded, self.slots[height]),
                    works=_ints(works, 5),
                    work_indptr=np.array(work_indptr, np.int32),
                )
            )
        merged = [(key, listed) for key, listed in enumerate(parts) if listed is not None]
        return PlanArrays(
            entries=_ints(self.entries, 4),
            runs=_ints(self.runs, 2),
            deltas=np.array(self.deltas, np.int32),
            classes=tuple(classes),
            merge_rows=np.array([key for key, _ in merged], np.int32),
            merge_indptr=indptr([len(listed) for _, listed in merged]),
            merge_parts=np.array([part for _, listed in merged for part in listed], np.int32),
            num_parts=num_parts,
            tails=_ints(self.tails, 3),
            boxes=parameters.boxes,
            page_size=self.table.page_size,
            tokens_read=self._tokens_read(),
            tokens_unique=tokens_unique(self.table),
        )

    def _kin(self, tiles: Sequence[_Tile]) -> list[int]:
        """Per query tile the first of those, one behind the other, that read what it reads: the chunks of a sequence,
        and tiles that begin their walks as the first of them does, for at least half of the longer one."""
        kin: list[int] = []
        for number, tile in enumerate(tiles):
            first = tiles[kin[-1]] if kin else tile
            alike = tile.walk_begin == first.walk_begin or (
                first.walks_alone and tile.walks_alone and self._begins_as(tile, first)
            )
            kin.append(kin[-1] if kin and alike else number)
        return kin

    def _begins_as(self, tile: _Tile, other: _Tile) -> bool:
        boxes = self.parameters.boxes
        half = (max(tile.end - tile.begin, other.end - other.begin) + 1) // 2
        return half <= min(tile.end - tile.begin, other.end - other.begin) and all(
            self.entries[tile.begin * boxes + i][:ENTRY_RUN]
            == self.entries[other.begin * boxes + i][:ENTRY_RUN]
            for i in range(half * boxes)
        )

    def _turn_costs(self) -> list[int]:
        """What the changes of run up to each KV tile cost."""
        runs = [entry[ENTRY_RUN] for entry in self.entries[:: self.parameters.boxes]]
        return [self.parameters.run_cost * n for n in accumulate(map(ne, runs[1:], runs), initial=0)]

    def _tokens_read(self) -> int:
        boxes = self.parameters.boxes
        read = [rows >> 16 > 0 for _, rows, _, _ in self.entries]
        total = sum(sum(read[tile.begin * boxes : tile.end * boxes]) for tile in self.tiles)
        return total * self.table.page_size


def tokens_unique(table: SpanTable) -> int:
    """Distinct tokens of the lists that the spans name."""
    total, reached = 0, (-1, 0)
    for which, start, stop in sorted(map(tuple, table.spans[:, :3].tolist())):
        begin = max(start, reached[1]) if which == reached[0] else start
        total += max(stop - begin, 0)
        reached = (which, max(begin, stop))
    return total


def _ints(rows: Sequence[Sequence[int]], columns: int) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, columns)
