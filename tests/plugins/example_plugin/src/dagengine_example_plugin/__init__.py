"""The position policy `spaced`: linear, with unused positions between references.

    gap 3       reference 0        reference 1      own tokens
    view        0 1 2 3   · · ·    7 8 9            10 …

Knows what the policy protocol of dagengine-positions gives it: the visible ranges per reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dagengine_core_graph import NodeId, VisibleContext
from dagengine_positions import Layout, PositionError, Segment

DEFAULT_GAP = 16


class SpacedPolicy:
    """Visible tokens in context order, `gap` positions left free between references.

    A reference that places no token leaves no gap. Own tokens follow the last visible one.

    Options:
        gap: number of positions left free, 0 or more; 0 is the policy `linear`.
    """

    name = "spaced"

    def lay_out(
        self,
        context: VisibleContext,
        stored_start: Callable[[NodeId], int],
        options: Mapping[str, object],
    ) -> Layout:
        gap = _gap(options)
        _refuse_starts(context)
        segments: list[Segment] = []
        view = 0
        for _, ranges in context.parts:
            if ranges and segments:
                view += gap
            for seen in ranges:
                delta = view - stored_start(seen.node) - seen.start
                last = segments[-1] if segments else None
                if last and (last.node, last.stop, last.delta) == (seen.node, seen.start, delta):
                    segments[-1] = Segment(seen.node, last.start, seen.stop, last.view_start, delta)
                else:
                    segments.append(Segment(seen.node, seen.start, seen.stop, view, delta))
                view += seen.stop - seen.start
        return Layout(self.name, tuple(segments), view, context.num_tokens)


def _gap(options: Mapping[str, object]) -> int:
    for name in options:
        if name != "gap":
            raise PositionError(
                "policy_unsupported", f"policy 'spaced' has only gap; {name!r} is unknown", str(name)
            )
    gap = options.get("gap", DEFAULT_GAP)
    if not isinstance(gap, int) or isinstance(gap, bool) or gap < 0:
        raise PositionError("policy_unsupported", f"must be a whole number, 0 or more, not {gap!r}", "gap")
    return gap


def _refuse_starts(context: VisibleContext) -> None:
    for index, (reference, _) in enumerate(context.parts):
        if reference.start is not None:
            raise PositionError(
                "policy_unsupported", "policy 'spaced' has no use for a start", f"context[{index}].start"
            )
