"""What a node sees and what it passes on, as ordered ranges.

    reads(inherit u) = reads(digest u) = passed(u) ∪ tokens(u)
    reads(artifact u[a:b])             = u[a:b]
    visible(v) = ∪ reads(r) over all references r of v
    passed(v)  = ∪ reads(r) over the references that pass

This module knows order and identity of token instances, and neither positions nor pages. A node's parents
are sealed and its references fixed when it is added, so both are final then: they are compiled once, on top
of what the parents hold, and nothing is ever expanded again or walked recursively.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from .context import Artifact, NodeId, Reference
from .ranges import EMPTY, Placement, RangeList, TokenRange

if TYPE_CHECKING:
    from .graph import ContextGraph, Node


class Reading(NamedTuple):
    """A reference that was checked against a graph: the parent, and which of its own tokens are read."""

    reference: Reference
    node: Node
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class VisibleContext:
    """What a node attends besides its own tokens.

    Attributes:
        readings: the references, checked.
        stages: per reference, all that is placed once it is; each list extends the one before.
    """

    readings: tuple[Reading, ...]
    stages: tuple[RangeList, ...]

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        """As given."""
        return tuple([reading.reference for reading in self.readings])

    @property
    def num_tokens(self) -> int:
        """Visible tokens. O(1)."""
        return self.placed.num_tokens

    @property
    def placed(self) -> RangeList:
        """Everything visible, in order."""
        return self.stages[-1] if self.stages else EMPTY

    @cached_property
    def ranges(self) -> tuple[TokenRange, ...]:
        """The maximal runs of everything visible, in order."""
        return self.placed.since()

    @cached_property
    def parts(self) -> tuple[tuple[Reference, tuple[TokenRange, ...]], ...]:
        """Per reference, in order: it and the maximal runs that it places, without those already placed."""
        befores = (EMPTY, *self.stages)
        return tuple(
            (reference, after.since(before))
            for reference, before, after in zip(self.references, befores, self.stages, strict=False)
        )


def place(readings: Iterable[Reading]) -> VisibleContext:
    """The visible context of checked references."""
    placement = Placement()
    placed = tuple(readings)
    stages = []
    for reference, node, start, stop in placed:
        if node.passed.prefix is not None and not isinstance(reference, Artifact):
            placement.place_list(node.passed)
        placement.place(node, start, stop)
        stages.append(placement.placed)
    return VisibleContext(placed, tuple(stages))


def place_passing(context: VisibleContext) -> RangeList:
    """What a node with this visible context passes on."""
    if all(reading.reference.passes for reading in context.readings):
        return context.placed
    return place(reading for reading in context.readings if reading.reference.passes).placed


def compile_context(graph: ContextGraph, references: Iterable[Reference]) -> VisibleContext:
    """What a node with these references would see. Raises as `ContextGraph.add`."""
    return place(graph.resolve(references))


def visible(graph: ContextGraph, node: NodeId) -> VisibleContext:
    """What the node sees. O(1); raises GraphError `state_not_found`."""
    return graph.node(node).visible


def passed(graph: ContextGraph, node: NodeId) -> RangeList:
    """What whoever inherits the node reads before the node's own tokens. O(1); raises `state_not_found`."""
    return graph.node(node).passed
