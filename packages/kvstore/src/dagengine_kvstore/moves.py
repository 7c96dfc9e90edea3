"""Moves of KV rows between pages, and the protocol of what carries them out. Knows pages and rows; no tensors.

a move      page `source` | . . lo ~ ~ ~ hi . |  ──►  page `target` | . to ~ ~ ~ . . . . |     K turned by `delta`
a plan      steps one after another; inside a step no move writes what another one reads, so its moves may run in
            any order or all at once. A move onto its own rows (`in_place`) turns K where it is and leaves V alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class Move(NamedTuple):
    """Rows `lo..hi-1` of page `source` to the rows from `to` on of page `target`, K turned by `delta` positions."""

    source: int
    lo: int
    hi: int
    target: int
    to: int
    delta: int = 0

    @property
    def num_rows(self) -> int:
        return self.hi - self.lo

    @property
    def in_place(self) -> bool:
        return self.source == self.target and self.lo == self.to


class StepKind(StrEnum):
    """MOVE: between device pages. SAVE: to host pages, LOAD: from host pages; neither turns anything."""

    MOVE = "move"
    SAVE = "save"
    LOAD = "load"


class Step(NamedTuple):
    """Independent moves. `target` of a SAVE and `source` of a LOAD count host pages from 0.

    Moves in place come last.
    """

    kind: StepKind
    moves: tuple[Move, ...]

    @property
    def num_copies(self) -> int:
        """Moves that are not in place."""
        if self.kind is not StepKind.MOVE:
            return len(self.moves)
        return next((i for i, move in enumerate(self.moves) if move.in_place), len(self.moves))


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Steps that together do what was asked, as if all at once.

    Attributes:
        page_size: rows per page.
        num_rows: rows asked for, less those that stay as they are.
        num_spare_pages, num_host_pages: pages used on the way.
        key_rows, value_rows: K and V rows that the MOVE steps write, detours included.
        host_rows: rows, K and V, that the SAVE and LOAD steps write.
    """

    page_size: int
    steps: tuple[Step, ...]
    num_rows: int
    num_spare_pages: int
    num_host_pages: int
    key_rows: int
    value_rows: int
    host_rows: int

    def bytes_written(self, bytes_per_token: int) -> int:
        """Bytes that carrying out the plan writes; as many are read. `bytes_per_token`: K and V, in all layers."""
        return (self.key_rows + self.value_rows) * bytes_per_token // 2 + self.host_rows * bytes_per_token


class Mover(Protocol):
    """What carries out plans over the layers of an arena.

    K contains its rotation at its stored position; a move with a delta turns it once, by the unscaled rotation of the
    delta, from the stored value. V, and K of moves without a delta, keep their bits.
    """

    def run(self, plan: MovePlan) -> None:
        """Carry out the steps in order. Returns when everything is written, for every stream and tier.

        Where it raises, nothing is known of the rows that the plan writes.
        """
        ...
