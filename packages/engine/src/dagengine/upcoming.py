"""Who will read which node next, for eviction policies. Knows the order of readers; evicts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dagengine_kvstore import NodeRecord

Readers = Callable[[], Iterable[Iterable[NodeRecord]]]


class Upcoming:
    """The rank of the first reader of a node among those who run and wait; smaller is sooner.

    Attributes:
        readers: what each reader reads, in the order in which they will run; set by who knows the queues.
    """

    def __init__(self) -> None:
        self.readers: Readers = tuple
        self._ranks: dict[int, int] | None = None

    def changed(self) -> None:
        """The queues may be others from now on."""
        self._ranks = None

    def __call__(self, node: NodeRecord) -> int | None:
        """None: nobody who runs or waits reads the node."""
        if self._ranks is None:
            self._ranks = {}
            for rank, nodes in enumerate(self.readers()):
                for read in nodes:
                    self._ranks.setdefault(read.uid, rank)
        return self._ranks.get(node.uid)
