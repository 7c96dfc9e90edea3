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
    """Not enough pages now. `waiting` pages come back when open steps end, `moving` ones can be had when the transfers
    under way end: retry then, before preempting.
    """

    def __init__(self, needed: int, available: int, waiting: int, moving: int = 0) -> None:
        message = f"{needed} pages needed, {available} available now, {waiting} waiting for open steps to end"
        if moving:
            message += f", {moving} being stored"
        super().__init__("capacity", message, field="count")
        self.needed = needed
        self.available = available
        self.waiting = waiting
        self.moving = moving


class OutOfHostPages(KVStoreError):
    """The host tier has no room for a node, and nothing there may be dropped for it."""

    def __init__(self, needed: int, available: int) -> None:
        message = f"{needed} host pages needed, {available} can be had"
        super().__init__("capacity", message, field="host")
        self.needed = needed
        self.available = available


class PinBudgetExceeded(KVStoreError):
    """More would be pinned than may be; `used` counts pages, with those that were to be pinned."""

    def __init__(self, field: str, used: int, budget: int) -> None:
        message = f"{used} pages would be pinned, {field} is {budget}; unpin or release something first"
        super().__init__("pin_budget_exceeded", message, field=field)
        self.used = used
        self.budget = budget


class NotResident(KVStoreError):
    """Some of the states to read are not on the device.

    Attributes:
        nodes: all of them, in order.
        on_host: those of which the host has, or is sending, all that is missing: `load` them.
        loading: those of `on_host` of which all that is missing is on its way.
        nowhere: the others: `restore` them, in this order.
    """

    def __init__(
        self,
        nodes: Sequence[NodeRecord],
        on_host: Sequence[NodeRecord] = (),
        loading: Sequence[NodeRecord] = (),
    ) -> None:
        self.nodes = tuple(nodes)
        self.on_host = tuple(on_host)
        self.loading = tuple(loading)
        self.nowhere = tuple(node for node in nodes if node not in self.on_host)
        parts = []
        if self.on_host:
            parts.append(f"offloaded nodes must be loaded first: {_uids(self.on_host)}")
        if self.nowhere:
            parts.append(f"evicted nodes must be restored first: {_uids(self.nowhere)}")
        super().__init__("not_resident", "; ".join(parts), field="reads")


class LeakError(KVStoreError):
    """The books do not balance. `problems` names every difference."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("leak", "; ".join(problems))
        self.problems = tuple(problems)


def _uids(nodes: Sequence[NodeRecord]) -> str:
    return ", ".join(str(node.uid) for node in nodes)
