"""A second, naive account of what a store must do: token instances in lists, KV as interned values.

The KV of a token is identified by what it was computed from: salt, the KV it saw at which distance, and the
node's tokens up to itself. The arena is a list of rows that hold (KV, stored position), written late: when
the step that was to write them ends, whoever owns the pages by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dagengine_kvstore import KVStore, Lease, NodeRecord, OutOfPages, Parent, Read

Instance = tuple["ShadowNode", int]


@dataclass(eq=False)
class ShadowNode:
    record: NodeRecord
    salt: str
    passed: list[Instance]  # what descendants get through this node
    parents: list[list[Instance]]  # what it holds while it is written, per parent
    sees: tuple[tuple[int, int], ...]  # (KV, view position - own start) of every visible token
    tokens: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)


class Arena:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows: list[tuple[int, int] | None] = [None] * (num_pages * page_size)
        self._known: dict[object, int] = {}

    def compute(self, node: ShadowNode, tokens: list[int]) -> None:
        """Append tokens to the node and give each its KV."""
        for token in tokens:
            before = node.kv[-1] if node.kv else self._intern((node.salt, node.sees))
            node.tokens.append(token)
            node.kv.append(self._intern((before, token)))

    def _intern(self, made_from: object) -> int:
        return self._known.setdefault(made_from, len(self._known))

    def read(self, extents: list[tuple[int, int, int, int]]) -> list[int]:
        """The KV that the extents show; fails unless each row was written at the position they claim."""
        values = []
        for page, lo, hi, stored in extents:
            for row in range(lo, hi):
                cell = self.rows[page * self.page_size + row]
                assert cell is not None, f"page {page} row {row} was never written"
                assert cell[1] == stored + row - lo, f"page {page} row {row}: {cell} is not at {stored}"
                values.append(cell[0])
        return values


def compute_again(
    store: KVStore,
    arena: Arena,
    node: ShadowNode,
    bring: Callable[[Read], Lease],
    verify: Callable[[Lease, list[Read]], None],
) -> None:
    """Restore a node and, where needed, what it reads; sources stay leased until it is done.

    Args:
        bring: a lease of one read, by whatever has to be done for it.
        verify: whether a lease shows what it should.

    Raises OutOfPages.
    """
    writer = store.restore(node.record)
    leases: list[Lease] = []
    try:
        for read in node.record.reads if writer.todo else ():
            leases.append(bring(read))
            verify(leases[-1], [read])
        todo, first = writer.todo, writer.num_tokens
        writer.reserve(len(todo))
        fence = store.begin_step()
        for offset, slot in enumerate(writer.append(todo), start=first):
            arena.rows[slot] = (node.kv[offset], node.record.own_start + offset)
        store.end_step(fence)
        writer.commit(len(todo))
        writer.finish()
    except OutOfPages:
        writer.abort()
        raise
    finally:
        for lease in leases:
            lease.release()


def context_of(
    modes: list[tuple[ShadowNode, str, int, int]],
) -> tuple[list[Instance], list[Instance], list[list]]:
    """(visible, passed, per parent) of a node with these references, each token instance once, in order."""
    visible: dict[Instance, None] = {}
    passed: dict[Instance, None] = {}
    per_parent = []
    for node, mode, start, stop in modes:
        read = [] if mode == "artifact" else list(node.passed)
        read += [(node, offset) for offset in range(start, stop)]
        per_parent.append(read)
        visible |= dict.fromkeys(read)
        if mode != "digest":
            passed |= dict.fromkeys(read)
    return list(visible), list(passed), per_parent


def lay_out(visible: list[Instance], shift: int) -> list[Read]:
    """Consecutive view positions from `shift` on, as maximal runs."""
    reads: list[Read] = []
    for view, (node, offset) in enumerate(visible, start=shift):
        delta = view - node.record.own_start - offset
        last = reads[-1] if reads else None
        if last and last.node is node.record and last.stop == offset and last.delta == delta:
            reads[-1] = Read(node.record, last.start, offset + 1, delta)
        else:
            reads.append(Read(node.record, offset, offset + 1, delta))
    return reads


def parent_of(node: ShadowNode, mode: str, start: int, stop: int) -> Parent:
    return Parent(node.record, mode, start, stop)  # type: ignore[arg-type]


def covered_pages(store: KVStore, held: list[Instance]) -> dict[NodeRecord, set[int]]:
    pages: dict[NodeRecord, set[int]] = {}
    for node, offset in held:
        pages.setdefault(node.record, set()).add(offset // store.page_size)
    return pages
