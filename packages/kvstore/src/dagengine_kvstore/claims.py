"""What was brought to the device for a reader who has not come yet. Knows nodes' pages and a count of pumps.

Claimed pages are not evicted. A claim ends with the first lease of the pages, or `patience` pumps after they were last
asked for, so that a reader who never comes keeps nobody out.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass

from dagengine_kvstore.nodes import NodeRecord


@dataclass(slots=True)
class Claim:
    asked: int
    indices: set[int]


class Claims:
    """Page indices by node."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._now = 0
        self._claims: weakref.WeakKeyDictionary[NodeRecord, Claim] = weakref.WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._claims)

    def __getitem__(self, node: NodeRecord) -> Collection[int]:
        """Indices of the node's claimed pages."""
        claim = self._claims.get(node)
        return () if claim is None else claim.indices

    def ask(self, node: NodeRecord, indices: Collection[int]) -> None:
        """Claim pages, or go on claiming them."""
        claim = self._claims.setdefault(node, Claim(self._now, set()))
        claim.asked = self._now
        claim.indices.update(indices)

    def save(self, node: NodeRecord) -> Claim | None:
        """A node's claim as it is now, for `put_back`."""
        claim = self._claims.get(node)
        return None if claim is None else Claim(claim.asked, set(claim.indices))

    def put_back(self, node: NodeRecord, saved: Claim | None) -> None:
        """Undo what was asked for since."""
        if saved is None:
            self._claims.pop(node, None)
        else:
            self._claims[node] = saved

    def end(self, node: NodeRecord, indices: Collection[int]) -> None:
        """Somebody came for these pages."""
        if not self._claims:
            return
        claim = self._claims.get(node)
        if claim is not None:
            claim.indices.difference_update(indices)
            if not claim.indices:
                del self._claims[node]

    def pump(self) -> None:
        self._now += 1
        if self._claims:
            late = [node for node, claim in self._claims.items() if self._now - claim.asked > self._patience]
            for node in late:
                del self._claims[node]
