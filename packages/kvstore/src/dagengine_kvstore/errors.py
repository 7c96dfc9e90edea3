"""What the store refuses. Every error carries a stable `code`, the `field` at fault (or None) and a message
that says what would be right. Refusals of the graph definition keep its codes; the store's own codes are
listed in the README.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagengine_kvstore.nodes import NodeRecord


class KVStoreError(Exception):
    """Base of all errors of this package."""

    def __init__(self, code: str, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.message = message


class OutOfPages(KVStoreError):
    """Not enough pages now. `waiting` pages come back when open steps end: retry then, before preempting."""

    def __init__(self, needed: int, available: int, waiting: int) -> None:
        super().__init__(
            "capacity",
            f"{needed} pages needed, {available} available now, {waiting} waiting for open steps to end",
            field="count",
        )
        self.needed = needed
        self.available = available
        self.waiting = waiting


class NotResident(KVStoreError):
    """Some of the states to read were evicted: restore `nodes` (in this order), then lease again."""

    def __init__(self, nodes: Sequence[NodeRecord]) -> None:
        names = ", ".join(str(node.uid) for node in nodes)
        super().__init__("not_resident", f"evicted nodes must be restored first: {names}", field="reads")
        self.nodes = tuple(nodes)


class LeakError(KVStoreError):
    """The books do not balance. `problems` names every difference."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("leak", "; ".join(problems))
        self.problems = tuple(problems)
