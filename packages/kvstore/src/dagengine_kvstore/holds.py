"""Who keeps which pages. Knows holds and coverage; does not know handles, requests or page contents.

    a handle on v at n:   Hold(v, 0, n) ──► root(v) ──► Hold(p, 0, m) ──► root(p) ──► …   inherit(p) at m
                                                   └──► Hold(q, a, b)                     artifact(q, a, b)

`root(v)` stands for what v passes on; it is shared by everybody who holds v, so a node costs its descendants
one reference however long the chain behind it is. A page of a sealed node is kept exactly while some hold
covers one of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.nodes import NodeRecord


class Hold:
    """Keeps tokens [start, stop) of `node` (None: nothing of its own) and whatever is `below`."""

    __slots__ = ("below", "node", "refs", "start", "stop")

    def __init__(self, node: NodeRecord | None, start: int, stop: int, below: tuple[Hold, ...]) -> None:
        self.refs = 1
        self.node = node
        self.start = start
        self.stop = stop
        self.below = below


class HoldTable:
    """Makes and releases holds; calls `drop_page(node, index)` for pages that nothing covers any more."""

    def __init__(self, page_size: int, drop_page: Callable[[NodeRecord, int], None]) -> None:
        self._page_size = page_size
        self._drop_page = drop_page

    def hold(self, node: NodeRecord, start: int, stop: int, *, passed: bool) -> Hold:
        """A hold on [start, stop) of a node and, with `passed`, on everything that the node passes on."""
        if start < stop:
            span = start, stop
            node.cover[span] = node.cover.get(span, 0) + 1
        if passed:
            assert node.root.refs > 0
            node.root.refs += 1
        return Hold(node, start, stop, (node.root,) if passed else ())

    def root(self, below: Iterable[Hold]) -> Hold:
        """What a new node passes on; takes over the references on `below`."""
        return Hold(None, 0, 0, tuple(below))

    def release(self, *holds: Hold) -> None:
        """Give back one reference each. Iterative: chains may be longer than the recursion limit."""
        stack = list(holds)
        while stack:
            hold = stack.pop()
            if hold.refs < 1:
                raise KVStoreError("double_release", "a hold is released more often than it was taken")
            hold.refs -= 1
            if hold.refs == 0:
                if hold.node is not None and hold.start < hold.stop:
                    self._uncover(hold.node, hold.start, hold.stop)
                stack.extend(hold.below)
                hold.below = ()

    def covered_pages(self, node: NodeRecord) -> set[int]:
        """Indices of the node's pages that some hold keeps."""
        return {index for span in node.cover for index in self.page_range(*span)}

    def page_range(self, start: int, stop: int) -> range:
        """Indices of the pages that tokens [start, stop) lie in; empty for an empty span."""
        if start >= stop:
            return range(0)
        return range(start // self._page_size, -(-stop // self._page_size))

    def _uncover(self, node: NodeRecord, start: int, stop: int) -> None:
        span = start, stop
        left = node.cover[span] - 1
        if left:
            node.cover[span] = left
            return
        del node.cover[span]
        kept = self.covered_pages(node)
        # Last page first: the cache then reclaims tails before the prefixes that make them reachable.
        for index in reversed(self.page_range(start, stop)):
            if index < len(node.pages) and index not in kept:
                self._drop_page(node, index)
