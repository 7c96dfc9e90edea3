"""From moves that are asked for all at once to steps of independent moves: in place, concurrent, duplicating.

Repositioning cached KV for several readers at once as a graph problem is CIDRA, the Concurrent In-place Duplicating
ReRoPE Algorithm of Span Queries: a source with several targets is copied, cycles are found as strongly connected
components and opened, independent parts run side by side, what is too large for the device goes through the host. Here:

    1. graph      b before a where b reads rows that a writes. A source may have any number of targets: they read it
                  together, before it is overwritten.
    2. cycles     `MoveGraph.order` saves one move of each: its rows go to a spare page first. Where the spare pages do
                  not hold all that one island of the graph saves, these go to the host.
    3. waves      islands that save are packed into as few runs as the spare pages allow; the others go along.
    4. width      a chain in which each waits for the next is as slow as it is long. While spare pages are left, long
                  chains are cut into pieces that run side by side, until about `width` pages move in a step.

Each value is turned once, on its last move. Deterministic; time O(n log n) for n moves of pages of a given size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.move_graph import MoveGraph
from dagengine_kvstore.moves import Move, MovePlan, Step, StepKind

DEFAULT_WIDTH = 32
"""Pages per step from which on steps cost little beside their bytes, where all layers of a model move together."""

SHORT_CHAIN = 4
"""Steps that are taken one after another rather than moving rows twice."""


def plan_moves(
    moves: Iterable[Move], page_size: int, *, spare: Sequence[int] = (), width: int = DEFAULT_WIDTH
) -> MovePlan:
    """Plan `moves` so that each target holds what its source held before any of them.

    Args:
        spare: pages that may be written meanwhile; what they hold afterwards is undefined.
        width: pages that a step should move; more spare pages than that are of no use to one chain.

    Raises:
        KVStoreError `invalid_moves`: rows outside of a page, rows written twice, a spare page that is moved; `field`
            names the move. `invalid_size` for a page size or a width below 1.
    """
    check_width(width)
    if page_size < 1:
        raise KVStoreError(
            "invalid_size", f"page_size must be at least 1, not {page_size}", field="page_size"
        )
    asked = list(moves)
    _check(asked, page_size, spare)
    todo = [move for move in asked if move[5] or not move.in_place]
    return _Planner(todo, page_size, spare, width).plan()


def check_width(width: int) -> None:
    """Raises KVStoreError `invalid_size` for a width below 1."""
    if width < 1:
        raise KVStoreError("invalid_size", f"width must be at least 1, not {width}", field="width")


def _check(moves: Sequence[Move], page_size: int, spare: Sequence[int]) -> None:
    reserved = set(spare)
    if len(reserved) < len(spare) or any(page < 0 for page in spare):
        raise KVStoreError("invalid_moves", "spare pages are distinct and not negative", field="spare")
    for index, (source, lo, hi, target, to, _) in enumerate(moves):
        if not 0 <= lo < hi <= page_size or not 0 <= to <= page_size - hi + lo or source < 0 or target < 0:
            message = f"rows {lo} .. {hi} to {to} are not within pages of {page_size}, or a page is negative"
            raise KVStoreError("invalid_moves", message, field=f"moves[{index}]")
        if reserved and (source in reserved or target in reserved):
            raise KVStoreError("invalid_moves", "a spare page is moved", field=f"moves[{index}]")


class _Planner:
    def __init__(self, moves: Sequence[Move], page_size: int, spare: Sequence[int], width: int) -> None:
        self.moves, self.page_size, self.spare, self.width = moves, page_size, spare, width
        self.graph = MoveGraph(moves)
        self.steps: list[Step] = []
        self.num_spare_pages = self.num_host_pages = 0

    def plan(self) -> MovePlan:
        if not any(self.graph.before):
            self._add(StepKind.MOVE, list(self.moves))
        else:
            order, saved = self.graph.order()
            host: list[int] = []
            waves = [(order, saved)]
            if self._num_pages(saved) > len(self.spare):
                waves, host = self._waves(order, saved)
            for wave, kept in waves:
                self._emit(wave, kept, host)
                host = []
        rows = {(kind, in_place): 0 for kind in StepKind for in_place in (False, True)}
        for kind, moves in self.steps:
            for source, lo, hi, target, to, _ in moves:
                rows[kind, source == target and lo == to] += hi - lo
        copied = rows[StepKind.MOVE, False]
        return MovePlan(
            page_size=self.page_size,
            steps=tuple(self.steps),
            num_rows=sum([hi - lo for _, lo, hi, _, _, _ in self.moves]),
            num_spare_pages=self.num_spare_pages,
            num_host_pages=self.num_host_pages,
            key_rows=copied + rows[StepKind.MOVE, True],
            value_rows=copied,
            host_rows=sum(count for (kind, _), count in rows.items() if kind is not StepKind.MOVE),
        )

    def _waves(
        self, order: Sequence[int], saved: Sequence[int]
    ) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
        """Runs (order, saved) whose saved moves fit into the spare pages, and the moves that the host saves instead.

        The first run has everything that needs no spare page. Islands of one size share a run, so that it ends at once.
        """
        island = self.graph.islands()
        members: defaultdict[int, list[int]] = defaultdict(list)
        saves: defaultdict[int, list[int]] = defaultdict(list)
        for a in order:
            members[island[a]].append(a)
        for a in saved:
            saves[island[a]].append(a)
        needed = {one: self._num_pages(found) for one, found in saves.items()}
        host = [a for a in saved if needed[island[a]] > len(self.spare)]
        packed = [one for one, pages in needed.items() if pages <= len(self.spare)]
        packed.sort(key=lambda one: (-needed[one], -len(members[one]), one))
        in_first = set(members) - set(packed)
        waves: list[tuple[list[int], list[int]]] = [([a for a in order if island[a] in in_first], [])]
        room = len(self.spare)
        for one in packed:
            if needed[one] > room:
                waves.append(([], []))
                room = len(self.spare)
            room -= needed[one]
            waves[-1][0].extend(members[one])
            waves[-1][1].extend(saves[one])
        return [wave for wave in waves if wave[0]], host

    def _emit(self, order: Sequence[int], saved: Sequence[int], host: Sequence[int]) -> None:
        """Add the steps of one run: what is saved is read in its first one; the host's rows come back in its last."""
        safe = {*saved, *host}
        level = self.graph.levels(order, safe)
        cuts = self._cuts(order, level, safe, len(self.spare) - self._num_pages(saved))
        if cuts:
            safe.update(cuts)
            level = self.graph.levels(order, safe)
        by_level: defaultdict[int, list[Move]] = defaultdict(list)
        places = dict(zip([*saved, *cuts], self._places([*saved, *cuts]), strict=True))
        self.num_spare_pages = max(self.num_spare_pages, self._num_pages([*saved, *cuts]))
        for a, (page, row) in places.items():
            source, lo, hi, _, _, _ = self.moves[a]
            by_level[0].append(Move(source, lo, hi, self.spare[page], row))
        outside = set(host)
        for a in order:
            if a in outside:
                continue
            move = self.moves[a]
            if a in places:
                page, row = places[a]
                move = Move(self.spare[page], row, row + move.num_rows, move.target, move.to, move.delta)
            by_level[level[a]].append(move)
        if host:
            self._save(host)
        for number in sorted(by_level):
            self._add(StepKind.MOVE, by_level[number])
        if host:
            self._load(host)

    def _save(self, host: Sequence[int]) -> None:
        places = self._places(host)
        self.num_host_pages = self._num_pages(host)
        self._add(
            StepKind.SAVE,
            [self.moves[a]._replace(target=page, to=row, delta=0) for a, (page, row) in zip(host, places, strict=True)],
        )  # fmt: skip

    def _load(self, host: Sequence[int]) -> None:
        back: list[Move] = []
        turns: list[Move] = []
        for a, (page, row) in zip(host, self._places(host), strict=True):
            _, lo, hi, target, to, delta = self.moves[a]
            back.append(Move(page, row, row + hi - lo, target, to))
            if delta:
                turns.append(Move(target, to, to + hi - lo, target, to, delta))
        self._add(StepKind.LOAD, back)
        self._add(StepKind.MOVE, turns)

    def _cuts(self, order: Sequence[int], level: Sequence[int], safe: set[int], room: int) -> list[int]:
        """Moves to be saved as well, so that chains get about len(order) / width long; `room` in pages."""
        depth = max((level[a] for a in order), default=0)
        most = max(SHORT_CHAIN, -(-len(order) // self.width))
        while room > 0 and depth > most:
            cuts = [
                a for a in order if level[a] and not level[a] % most and a not in safe and self.graph.after[a]
            ]
            if self._num_pages(cuts) <= room:
                return cuts
            most = most + max(1, most // 4)
        return []

    def _places(self, saved: Sequence[int]) -> list[tuple[int, int]]:
        """A page (counted from 0) and a row for the rows of each move, one behind the other in whole pieces."""
        found: list[tuple[int, int]] = []
        page = row = 0
        for a in saved:
            _, lo, hi, _, _, _ = self.moves[a]
            if row + hi - lo > self.page_size:
                page, row = page + 1, 0
            found.append((page, row))
            row += hi - lo
        return found

    def _num_pages(self, saved: Sequence[int]) -> int:
        return self._places(saved)[-1][0] + 1 if saved else 0

    def _add(self, kind: StepKind, moves: list[Move]) -> None:
        if not moves:
            return
        if kind is StepKind.MOVE:
            turns = [move for move in moves if move[0] == move[3] and move[1] == move[4]]
            if turns:
                moves = [move for move in moves if not move.in_place] + turns
        self.steps.append(Step(kind, tuple(moves)))
