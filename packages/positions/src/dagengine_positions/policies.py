"""The built-in position policies: linear, native, explicit.

    linear     visible tokens in order at 0, 1, 2, ...; own start = their number
    native     every token keeps its stored position; own start = the largest view + 1
    explicit   the tokens that a reference places lie consecutively from its ``start``; own start = the
               largest view + 1, or the larger ``own_start`` given as an option

A node that sees nothing starts at 0, unless ``own_start`` says otherwise. What a policy would have to ignore,
it refuses.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagengine_core_graph import Reference, VisibleContext

from .errors import PositionError, shown, suggestion, whole
from .layout import Layout, Segment, StoredStart, trusted
from .rope import POSITION_LIMIT


@trusted
class LinearPolicy:
    """Visible tokens at 0, 1, 2, ... in context order: a chain of inherits is exactly the plain prompt."""

    name = "linear"

    def lay_out(
        self, context: VisibleContext, stored_start: StoredStart, options: Mapping[str, object]
    ) -> Layout:
        _refuse_options(self.name, options, ())
        _refuse_starts(self.name, context)
        segments = []
        view = 0
        for node, start, stop in context.ranges:
            segments.append(Segment(node, start, stop, view, view - stored_start(node) - start))
            view += stop - start
        return Layout(self.name, tuple(segments), view, view)


@trusted
class NativePolicy:
    """Every token where it is stored: parallel branches start together, a merge follows the longest."""

    name = "native"

    def lay_out(
        self, context: VisibleContext, stored_start: StoredStart, options: Mapping[str, object]
    ) -> Layout:
        _refuse_options(self.name, options, ())
        _refuse_starts(self.name, context)
        segments = []
        own_start = 0
        for node, start, stop in context.ranges:
            stored = stored_start(node)
            segments.append(Segment(node, start, stop, stored + start, 0))
            own_start = max(own_start, stored + stop)
        return Layout(self.name, tuple(segments), own_start, context.num_tokens)


@trusted
class ExplicitPolicy:
    """Every reference says where its tokens start; overlaps are allowed.

    Options:
        own_start: position of the node's first own token, at least the largest view position + 1.
    """

    name = "explicit"

    def lay_out(
        self, context: VisibleContext, stored_start: StoredStart, options: Mapping[str, object]
    ) -> Layout:
        _refuse_options(self.name, options, ("own_start",))
        segments: list[Segment] = []
        least = 0
        for index, (reference, ranges) in enumerate(context.parts):
            view = _start(reference, index)
            for node, start, stop in ranges:
                delta = view - stored_start(node) - start
                last = segments[-1] if segments else None
                if last and last.stop == start and last.delta == delta and last.node == node:
                    segments[-1] = Segment(node, last.start, stop, last.view_start, delta)
                else:
                    segments.append(Segment(node, start, stop, view, delta))
                view += stop - start
                if view > least:
                    least = view
        own_start = least
        if options.get("own_start") is not None:
            own_start = _position(options["own_start"], "own_start")
            if own_start < least:
                message = f"must be at least {least}, after every visible token, not {own_start}"
                raise PositionError("policy_unsupported", message, "own_start")
        return Layout(self.name, tuple(segments), own_start, context.num_tokens)


def _start(reference: Reference, index: int) -> int:
    field = f"context[{index}].start"
    if reference.start is None:
        raise PositionError("policy_unsupported", "policy 'explicit' needs a start", field)
    return _position(reference.start, field)


def _position(value: object, field: str) -> int:
    return whole(PositionError, "policy_unsupported", value, field, 0, POSITION_LIMIT - 1)


def _refuse_options(policy: str, options: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            has = f"has only {', '.join(known)}" if known else "has no options"
            message = f"policy {policy!r} {has}; {shown(name)} is unknown{suggestion(name, known)}"
            raise PositionError("policy_unsupported", message, str(name))


def _refuse_starts(policy: str, context: VisibleContext) -> None:
    for index, reference in enumerate(context.references):
        if reference.start is not None:
            message = f"policy {policy!r} has no use for a start; remove it or choose 'explicit'"
            raise PositionError("policy_unsupported", message, f"context[{index}].start")
