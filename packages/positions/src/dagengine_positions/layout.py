"""Layouts: the view position of every token that a node sees.

    stored position   the node's own start + the token's offset; a fact about the token
    view position     where this reader wants it; view = stored + delta, delta constant over a segment
    own start         position of the reader's first own token, above every view position

    node u, own start 4    stored   4  5  6  7  8  9
    segment u[2:5] at 10   view          10 11 12         delta = 10 - (4 + 2) = 4

Knows tokens as (node, offset) and nothing of pages or attention. What a node sees is decided before, by its
context; a position policy only numbers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from dagengine_core_graph import NodeId, VisibleContext

from .errors import PositionError
from .registry import Registry
from .rope import POSITION_LIMIT

StoredStart: TypeAlias = Callable[[NodeId], int]
"""The stored position of a node's first token."""

NO_OPTIONS: Mapping[str, object] = {}


class Segment(NamedTuple):
    """Tokens ``[start, stop)`` of `node`, seen at ``[view_start, view_start + stop - start)``.

    `delta` is ``view_start - (stored_start(node) + start)``.
    """

    node: NodeId
    start: int
    stop: int
    view_start: int
    delta: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a node's visible tokens and its first own token stand.

    Attributes:
        policy: name of the policy that made it.
        segments: every visible token once, in context order, in maximal runs that are contiguous in their
            node and have one delta.
        own_start: position of the node's first own token; greater than every view position.
        num_visible: number of tokens in the segments.
    """

    policy: str
    segments: tuple[Segment, ...]
    own_start: int
    num_visible: int


class PositionPolicy(Protocol):
    """A way to lay out what a node sees. Stateless: equal arguments give equal layouts."""

    @property
    def name(self) -> str: ...

    def lay_out(
        self, context: VisibleContext, stored_start: StoredStart, options: Mapping[str, object]
    ) -> Layout:
        """The layout of `context`.

        Raises:
            PositionError: ``policy_unsupported`` for an option it does not know or a context it cannot lay
                out.
        """
        ...


P = TypeVar("P", bound=PositionPolicy)

position_policies: Registry[PositionPolicy] = Registry(
    "dagengine.position_policies", methods=("lay_out",), code="policy_unsupported"
)


_TRUSTED: set[type] = set()


def trusted(policy: type[P]) -> type[P]:
    """Mark a policy of this package: its own tests hold it to what `check_layout` checks, so `lay_out` does not."""
    _TRUSTED.add(policy)
    return policy


def lay_out(
    policy: str | PositionPolicy,
    context: VisibleContext,
    stored_start: StoredStart,
    options: Mapping[str, object] = NO_OPTIONS,
) -> Layout:
    """Lay out `context` under `policy`, a registered name or a policy itself, and check a plug-in's result.

    Args:
        context: what the node sees.
        stored_start: stored position of the first token of any node in `context`.
        options: the policy's own; unknown keys are refused.

    Raises:
        PositionError: ``policy_unsupported`` for an unknown policy or option, or a context that the policy
            refuses; ``position_overflow`` for positions beyond `POSITION_LIMIT`; ``plugin_broken`` for a
            policy that cannot be loaded or whose layout is wrong.
    """
    if isinstance(policy, str):
        policy = position_policies.get(policy)
    layout = policy.lay_out(context, stored_start, options)
    if not isinstance(layout, Layout):
        raise PositionError("plugin_broken", f"policy {policy.name!r} returned no Layout")
    if layout.own_start > POSITION_LIMIT:
        message = f"positions must stay below {POSITION_LIMIT}; this layout needs {layout.own_start}"
        raise PositionError("position_overflow", message)
    if type(policy) not in _TRUSTED:
        check_layout(layout, context, stored_start)
    return layout


def check_layout(layout: Layout, context: VisibleContext, stored_start: StoredStart) -> None:
    """Check that `layout` keeps what `Layout` promises about `context`.

    Raises:
        PositionError: ``plugin_broken``, naming the segment and the promise.
    """

    def broken(message: str, index: int | None = None) -> PositionError:
        field = None if index is None else f"segments[{index}]"
        return PositionError("plugin_broken", f"policy {layout.policy!r}: {message}", field)

    ranges = context.ranges
    segments = layout.segments
    last = -1  # the range of `ranges` that the segment before ended in
    offset = 0  # where it ended; a segment begins there or at the next range
    before: Segment | None = None
    for index, segment in enumerate(segments):
        if before is None or offset == ranges[last].stop:
            last += 1
            offset = ranges[last].start if last < len(ranges) else 0
        elif segment.delta == before.delta:
            raise broken("continues the segment before at the same delta", index)
        if last == len(ranges):
            raise broken("places tokens that are not visible", index)
        seen = ranges[last]
        if segment.node != seen.node or segment.start != offset or not offset < segment.stop <= seen.stop:
            raise broken("visible tokens must be placed once each, in order", index)
        if segment.delta != segment.view_start - stored_start(segment.node) - segment.start:
            raise broken("delta must be the view position minus the stored one", index)
        if segment.view_start < 0:
            raise broken("view positions start at 0", index)
        if segment.view_start + segment.stop - segment.start > layout.own_start:
            raise broken("own_start must be greater than every view position", index)
        offset = segment.stop
        before = segment
    if last + 1 < len(ranges) or (before is not None and offset != ranges[last].stop):
        raise broken("visible tokens are missing")
    if layout.num_visible != context.num_tokens:
        raise broken("num_visible must be the number of visible tokens")
    if layout.own_start < 0:
        raise broken("own_start must not be negative")
