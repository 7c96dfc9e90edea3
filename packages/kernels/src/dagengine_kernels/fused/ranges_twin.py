"""Units, tracks and ranges of a batch in Python, as csrc/ranges.h has them; planner_twin.py says what they are.

Knows spans; not query tiles, walks or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dagengine_kernels.fused.spans import SpanTable

Piece = tuple[int, int, int, int]
"""(track, start, stop, delta)"""


@dataclass(frozen=True)
class Unit:
    """Rows first_row .. first_row + size - 1 of the table, which are one sequence."""

    sequence: int
    first_row: int
    size: int
    pieces: list[Piece]

    @property
    def length(self) -> int:
        return sum(stop - start for _, start, stop, _ in self.pieces)


@dataclass(frozen=True)
class Range:
    """A stretch of a track, and who sees it."""

    track: int
    start: int
    stop: int
    members: list[tuple[int, int]]
    """(unit, delta), in the order of units and of their spans; a unit may be in it more than once."""


class Ranges:
    """Who of a batch sees which stretches of which tracks.

    Args:
        window: as of `PlanParameters`.
        reserve: as of `planner.plan_spans`.
        most: rows of a sequence up to which it shares query tiles with others.

    Attributes:
        tracks: (list, stored position of its token 0) each.
        tail_of: track of a growing tail -> its sequence.
        tail_stop: track of a growing tail -> the end of its tokens.
        units, long: those of at most `most` rows, and those of more.
        ranges: in the order of tracks and starts.
        unit_ranges: those of each unit, span by span.
    """

    def __init__(
        self, table: SpanTable, window: int | None, reserve: Sequence[Sequence[int]] | None, most: int
    ) -> None:
        self.tracks: list[tuple[int, int]] = []
        self.tail_of: dict[int, int] = {}
        self.tail_stop: dict[int, int] = {}
        self.units: list[Unit] = []
        self.long: list[Unit] = []
        self._find_units(table, window, reserve, most)
        self._find_ranges()

    def _find_units(
        self, table: SpanTable, window: int | None, reserve: Sequence[Sequence[int]] | None, most: int
    ) -> None:
        numbers: dict[tuple[int, int], int] = {}
        for b in range(table.num_sequences):
            first_row, size = int(table.q_indptr[b]), int(table.q_indptr[b + 1] - table.q_indptr[b])
            if size == 0:
                continue
            first = int(table.q_positions[first_row])
            spans = table.spans[table.span_indptr[b] : table.span_indptr[b + 1]].tolist()
            grows = reserve is not None and size == 1 and bool(spans)
            pieces = []
            for j, (which, start, stop, stored, delta) in enumerate(spans):
                base = stored - start
                view = base + delta
                tail = stop
                if grows and j == len(spans) - 1:
                    tail = max(start, (stop - 1) // table.page_size * table.page_size)
                end = tail
                if not grows:
                    end = min(end, first + size - view)
                begin = start if window is None else max(start, first - window + 1 - view)
                if begin < end:
                    track = numbers.setdefault((which, base), len(self.tracks))
                    if track == len(self.tracks):
                        self.tracks.append((which, base))
                    pieces.append((track, begin, end, delta))
                if tail < stop:
                    self.tail_of[len(self.tracks)] = b
                    self.tail_stop[len(self.tracks)] = stop
                    pieces.append((len(self.tracks), tail, stop, delta))
                    self.tracks.append((which, base))
            if pieces:
                unit = Unit(b, first_row, size, pieces)
                (self.units if size <= most else self.long).append(unit)

    def _find_ranges(self) -> None:
        """`ranges` in the order of tracks and starts; `unit_ranges`: those of each unit, span by span."""
        of_track: list[list[tuple[int, int, int, int]]] = [[] for _ in self.tracks]
        for u, unit in enumerate(self.units):
            for track, start, stop, delta in unit.pieces:
                of_track[track].append((u, start, stop, delta))
        self.ranges: list[Range] = []
        at: list[dict[int, int]] = []
        for track, seen in enumerate(of_track):
            ends = sorted({end for _, start, stop, _ in seen for end in (start, stop)})
            at.append({})
            for start, stop in pairwise(ends):
                members = [(u, delta) for u, begin, end, delta in seen if begin <= start and stop <= end]
                at[track][start] = len(self.ranges)
                if members:
                    self.ranges.append(Range(track, start, stop, members))
        self.unit_ranges: list[list[int]] = []
        for unit in self.units:
            mine = []
            for track, start, stop, _ in unit.pieces:
                index = at[track][start]
                while (
                    index < len(self.ranges)
                    and self.ranges[index].track == track
                    and self.ranges[index].start < stop
                ):
                    mine.append(index)
                    index += 1
            self.unit_ranges.append(mine)
