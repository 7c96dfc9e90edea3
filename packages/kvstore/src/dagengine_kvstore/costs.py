"""What bringing a node's KV back costs, in microseconds. The store compares; who measures is somebody else."""

from __future__ import annotations

from typing import Protocol

from dagengine_kvstore.nodes import NodeRecord


class CostModel(Protocol):
    def recompute(self, node: NodeRecord) -> int:
        """Microseconds to compute the node's own KV again, with what must be computed for that."""
        ...

    def reload(self, num_pages: int) -> int:
        """Microseconds to bring so many pages back from the host."""
        ...


def reload_is_cheaper(costs: CostModel | None, node: NodeRecord, num_pages: int) -> bool:
    """Whether to load `num_pages` pages of a node rather than to compute it again; without a model, always."""
    return costs is None or costs.reload(num_pages) < costs.recompute(node)
