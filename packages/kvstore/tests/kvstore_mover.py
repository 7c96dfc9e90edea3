"""A mover over rows in lists, which refuses steps whose moves are not independent; and the obvious copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dagengine_kvstore import Extent, KVStore, Move, MovePlan, NodeRecord, Read, StepKind

Row = tuple[object, object]  # K, V
SIZE = 4


def turn(key: object, delta: int) -> object:
    """K as the list of deltas it was turned by since it was computed: a number, or (K, delta, delta, ..)."""
    if not delta:
        return key
    return (*key, delta) if isinstance(key, tuple) else (key, delta)


def at_once(rows: Sequence[Row], moves: Sequence[Move], page_size: int) -> list[Row]:
    """What a copy of the whole arena gives."""
    found = list(rows)
    for source, lo, hi, target, to, delta in moves:
        for row in range(hi - lo):
            key, value = rows[source * page_size + lo + row]
            found[target * page_size + to + row] = turn(key, delta), value
    return found


@dataclass
class ListMover:
    """Carries plans out on `rows`, one row at a time.

    Attributes:
        fail_at: the step that raises after half of its moves.
        keys, values, host: K and V rows written by MOVE steps, rows by the others.
    """

    rows: list[Row]
    page_size: int
    fail_at: int | None = None
    keys: int = 0
    values: int = 0
    host: int = 0
    plans: list[MovePlan] = field(default_factory=list)
    _host: dict[tuple[int, int], Row] = field(default_factory=dict)

    def run(self, plan: MovePlan) -> None:
        self.plans.append(plan)
        for number, (kind, moves) in enumerate(plan.steps):
            reads = [{(m.source, m.lo + i) for i in range(m.num_rows)} for m in moves]
            writes = [{(m.target, m.to + i) for i in range(m.num_rows)} for m in moves]
            if kind is StepKind.MOVE:
                for mine, written in enumerate(writes):
                    for other, read in enumerate(reads):
                        same = mine == other and moves[mine].in_place
                        assert same or not written & read, f"{moves[mine]} writes what {moves[other]} reads"
            assert len(set().union(*writes)) == sum(map(len, writes)), "a row is written twice in one step"
            for count, move in enumerate(moves):
                if number == self.fail_at and count >= len(moves) // 2:
                    raise RuntimeError("the device is gone")
                self._move(kind, move)

    def _move(self, kind: StepKind, move: Move) -> None:
        source, lo, hi, target, to, delta = move
        for row in range(hi - lo):
            start, end = source * self.page_size + lo + row, target * self.page_size + to + row
            if kind is StepKind.SAVE:
                self._host[target, to + row] = self.rows[start]
                self.host += 1
            elif kind is StepKind.LOAD:
                self.rows[end] = self._host[source, lo + row]
                self.host += 1
            else:
                key, value = self.rows[start]
                self.keys += 1
                if not move.in_place:
                    self.values += 1
                self.rows[end] = turn(key, delta), value


class Rows(ListMover):
    """An arena in which a row holds its token and the position that its K was computed at, once told."""

    def __init__(self, store: KVStore) -> None:
        super().__init__([(None, None)] * (store.num_pages * SIZE), SIZE)
        self.store = store

    def compute(self, node: NodeRecord, first: int = 0) -> None:
        """Write the rows of a node's pages from number `first` on."""
        for index, (page, lo, hi, stored) in list(enumerate(extents(self.store, node)))[first:]:
            for row in range(lo, hi):
                token = node.tokens[index * SIZE + row]
                self.rows[page * SIZE + row] = (f"{token}@{stored + row - lo}", token)

    def read(self, node: NodeRecord) -> list[tuple[object, object, int]]:
        """K, V and claimed position of a node's tokens."""
        return [
            (*self.rows[page * SIZE + lo + row], stored + row)
            for page, lo, hi, stored in extents(self.store, node)
            for row in range(hi - lo)
        ]


def extents(store: KVStore, node: NodeRecord) -> list[Extent]:
    with store.lease([Read(node, 0, node.length)]) as lease:
        return lease.extents(0)


def moved(tokens: Sequence[int], start: int, delta: int) -> list[tuple[object, object, int]]:
    """What tokens computed from `start` on look like after one turn."""
    return [((f"{token}@{start + i}", delta), token, start + i + delta) for i, token in enumerate(tokens)]
