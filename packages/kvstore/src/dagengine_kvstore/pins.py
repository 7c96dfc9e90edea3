"""How much may be pinned. Knows budgets in pages and which pages pinned handles keep; pins nothing itself.

A pinned page counts once per node, wherever it is, also if nodes share it: it is what the pin promises to keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from dagengine_kvstore.errors import PinBudgetExceeded
from dagengine_kvstore.holds import Hold, HoldTable
from dagengine_kvstore.nodes import NodeRecord


@dataclass(frozen=True, slots=True)
class PinBudget:
    """Pages that pinned handles may keep, of all tenants and of each; None: any number."""

    total: int | None
    per_salt: int | None

    def check(self, pinned: Iterable[NodeRecord], holds: HoldTable, salt: str) -> None:
        """Raises PinBudgetExceeded if these nodes are more than may be pinned, in all or of this tenant."""
        pages: Counter[str] = Counter()
        for node in pinned:
            pages[node.salt] += len(holds.covered_pages(node))
        for field, budget, used in (
            ("pin_budget_per_salt", self.per_salt, pages[salt]),
            ("pin_budget", self.total, pages.total()),
        ):
            if budget is not None and used > budget:
                raise PinBudgetExceeded(field, used, budget)


def pinned_nodes(holds: Iterable[Hold]) -> set[NodeRecord]:
    """Nodes of which these holds keep tokens, and of all that they pass on."""
    stack = list(holds)
    seen = set(stack)
    nodes: set[NodeRecord] = set()
    while stack:
        hold = stack.pop()
        if hold.node is not None and hold.start < hold.stop:
            nodes.add(hold.node)
        below = [other for other in hold.below if other not in seen]
        seen.update(below)
        stack.extend(below)
    return nodes
