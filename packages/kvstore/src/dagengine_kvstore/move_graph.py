"""Which move must read before which other one writes, and where a cycle of them is opened. Knows moves only.

    b before a      b reads rows that a writes; `before[a]` lists such b
    a cycle         a component of the graph in which everybody waits for somebody: one of its moves is *saved*, which
                    means that what it reads is brought to safety first, and nobody waits for it any more

Components are found by Tarjan's algorithm (Depth-first search and linear graph algorithms, SIAM J. Comput. 1(2), 1972),
without recursion. Everything is linear in moves and pairs (b, a).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.moves import Move


class MoveGraph:
    """
    Attributes:
        before: for each move those that must have read before it writes, itself included where it would overwrite what
            it has yet to read.
        after: the other direction.

    Raises KVStoreError `invalid_moves` where two moves write one row.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self.before: list[list[int]] = [[] for _ in moves]
        self.after: list[list[int]] = [[] for _ in moves]
        writers: dict[int, list[int]] = {}
        for index, (_, _, _, target, _, _) in enumerate(moves):
            writers.setdefault(target, []).append(index)
        if len(writers) < len(moves):
            for found in writers.values():
                _check_apart(moves, found)
        for b, (source, lo, hi, _, _, _) in enumerate(moves):
            for a in writers.get(source, ()):
                _, first, last, _, to, _ = moves[a]
                if lo < to + last - first and to < hi and not (a == b and to == lo):
                    self.before[a].append(b)
                    self.after[b].append(a)

    def __len__(self) -> int:
        return len(self.before)

    def order(self) -> tuple[list[int], list[int]]:
        """All moves so that each comes behind those that must read before it, and the moves to be saved for that."""
        order: list[int] = []
        waits = [len(found) for found in self.before]
        ready = [a for a, count in enumerate(waits) if not count]
        for b in ready:
            for a in self.after[b]:
                waits[a] -= 1
                if not waits[a]:
                    ready.append(a)
        order += ready
        saved: list[int] = []
        for component in self.components(a for a, count in enumerate(waits) if count):
            if len(component) == 1 and component[0] not in self.before[component[0]]:
                order += component
            else:
                self._open(component, order, saved)
        return order, saved

    def components(self, among: Iterable[int]) -> list[list[int]]:
        """Strongly connected components of the moves `among`, those that must read first coming first."""
        among = list(among)
        inside = set(among)
        number: dict[int, int] = {}
        low: dict[int, int] = {}
        open_: dict[int, None] = {}  # on Tarjan's stack, in order
        found: list[list[int]] = []
        for root in among:
            if root in number:
                continue
            path = [(root, iter(self.before[root]))]
            number[root] = low[root] = len(number)
            open_[root] = None
            while path:
                a, rest = path[-1]
                for b in rest:
                    if b not in inside:
                        continue
                    if b not in number:
                        number[b] = low[b] = len(number)
                        open_[b] = None
                        path.append((b, iter(self.before[b])))
                        break
                    if b in open_:
                        low[a] = min(low[a], number[b])
                else:
                    path.pop()
                    if path:
                        low[path[-1][0]] = min(low[path[-1][0]], low[a])
                    if low[a] == number[a]:
                        component: list[int] = []
                        while not component or component[-1] != a:
                            component.append(open_.popitem()[0])
                        found.append(sorted(component))
        return found

    def islands(self) -> list[int]:
        """For each move the least move that it is connected with, in any direction."""
        parent = list(range(len(self)))

        def top(a: int) -> int:
            while parent[a] != a:
                parent[a] = parent[parent[a]]
                a = parent[a]
            return a

        for a, found in enumerate(self.before):
            for b in found:
                one, other = top(a), top(b)
                parent[max(one, other)] = min(one, other)
        return [top(a) for a in range(len(self))]

    def levels(self, order: Iterable[int], saved: set[int]) -> list[int]:
        """The step of each move, where everything to be saved is read in step 0 and written from step 1 on."""
        level = [0] * len(self)
        for a in order:
            least = 1 if a in saved else 0
            for b in self.before[a]:
                behind = 1 if b in saved else level[b] + 1
                if behind > least:
                    least = behind
            level[a] = least
        return level

    def _open(self, component: Sequence[int], order: list[int], saved: list[int]) -> None:
        """Add a component to `order`, and to `saved` one move of every cycle met on the way.

        Walks from a move to one that it waits for, until the walk meets itself: its end is on a cycle and is saved.
        """
        if sum(len(self.after[a]) for a in component) == len(component):
            self._open_circle(component[0], order, saved)
            return
        inside, done, safe = set(component), set[int](), set[int]()
        waits = {a: sum(b in inside for b in self.before[a]) for a in component}
        rest = {a: iter(self.before[a]) for a in component}
        ahead: dict[int, int] = {}  # what a move on the walk waits for

        def has_read(b: int) -> None:
            stack = [b]
            while stack:
                for a in self.after[stack.pop()]:
                    if a in inside:
                        waits[a] -= 1
                        if not waits[a]:
                            order.append(a)
                            done.add(a)
                            if a not in safe:
                                stack.append(a)

        for start in component:
            walk, met = [start], {start}
            while walk:
                a = walk[-1]
                if a in done:
                    met.discard(walk.pop())
                    continue
                b = ahead.get(a, -1)
                if b < 0 or b in done or b in safe:
                    b = ahead[a] = next(b for b in rest[a] if b in inside and b not in done and b not in safe)
                if b not in met:
                    walk.append(b)
                    met.add(b)
                    continue
                safe.add(a)
                saved.append(a)
                met.discard(walk.pop())
                has_read(a)

    def _open_circle(self, start: int, order: list[int], saved: list[int]) -> None:
        """The same for a cycle that nothing else is connected with but what reads before it."""
        saved.append(start)
        (a,) = self.after[start]
        while a != start:
            order.append(a)
            (a,) = self.after[a]
        order.append(start)


def _check_apart(moves: Sequence[Move], writers: Sequence[int]) -> None:
    end, last = -1, -1
    for index in sorted(writers, key=lambda i: moves[i].to):
        move = moves[index]
        if move.to < end:
            message = f"writes rows of page {move.target} that moves[{last}] writes too"
            raise KVStoreError("invalid_moves", message, field=f"moves[{index}].to")
        end, last = move.to + move.num_rows, index
