"""The graph: nodes that only grow until they are sealed, each reading sealed nodes that came before.

References go to earlier nodes only, so the graph is acyclic by construction. It knows lengths and spans,
never tokens, text or KV. A refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .compile import Reading, VisibleContext, place, place_passing
from .context import Artifact, Digest, Inherit, NodeId, Reference, Span
from .errors import GraphError, short
from .ranges import RangeList


@dataclass(frozen=True)
class NodeSpans:
    """The named spans of a node, `(start, stop)` in its own tokens.

    Attributes:
        output: the returned tokens, possibly none; None if the node sampled no token at all.
        turn: a chat answer from its generation prompt to its end-of-turn; None if it is not one.
        prompt: None for what comes before `output`, or everything where nothing was sampled.
    """

    output: tuple[int, int] | None = None
    turn: tuple[int, int] | None = None
    prompt: tuple[int, int] | None = None


class Node:
    """A chain of tokens. Only its graph changes it, and not after it is sealed.

    Attributes:
        id: its name in the graph.
        serial: its place in arrival order, never used again, unlike the name.
        context: its references, as given.
        parents: the nodes that the references named, one each; they live as long as this node does.
        visible, passed: what it sees, and what it passes on (its own tokens are in neither).
        length, sealed, spans: tokens so far, whether that is final, and which of them have names.
    """

    __slots__ = (
        "__weakref__",
        "context",
        "id",
        "length",
        "parents",
        "passed",
        "sealed",
        "serial",
        "spans",
        "visible",
    )

    def __init__(self, id: NodeId, serial: int, visible: VisibleContext) -> None:
        self.id = id
        self.serial = serial
        self.parents = tuple([reading.node for reading in visible.readings])
        self.visible = visible
        self.passed: RangeList = place_passing(visible)
        self.context: tuple[Reference, ...] = visible.references
        self.length = 0
        self.sealed = False
        self.spans = NodeSpans()

    def span(self, span: Span | None, at: int | None = None) -> tuple[int, int]:
        """The half-open run of own tokens that a span means, cut at the fork `at`.

        Args:
            span: a name, `(start, stop)`, or None: `output`, or `all` where nothing was sampled.
            at: keep only tokens before it; None keeps all.

        Raises:
            GraphError: `span_out_of_range`, or `invalid_request` for what is no span; field `span` or `at`.
        """
        start, stop = self._uncut(span)
        if at is None:
            return start, stop
        if not _is_int(at):
            raise GraphError("invalid_request", f"a fork is cut at an int, not {short(at)}", "at")
        if not 0 <= at <= self.length:
            raise GraphError(
                "span_out_of_range", f"a node of {self.length} tokens cannot be cut at {short(at)}", "at"
            )
        return min(start, at), min(stop, at)

    def _uncut(self, span: Span | None) -> tuple[int, int]:
        output = self.spans.output
        if span == "all" or (span is None and output is None):
            return 0, self.length
        if span is None or span == "output":
            return output or (self.length, self.length)
        if span == "prompt":
            return self.spans.prompt or (0, output[0] if output else self.length)
        if span == "turn":
            if self.spans.turn is None:
                raise GraphError(
                    "span_out_of_range", "the node is no chat answer and has no turn; try all", "span"
                )
            return self.spans.turn
        _check_span(span, self.length, "span")
        start, stop = span
        return start, stop

    def __repr__(self) -> str:
        return f"<Node {self.id!r}, {self.length} tokens{', sealed' if self.sealed else ''}>"


_KINDS = (Inherit, Digest, Artifact)


class ContextGraph:
    """Nodes by id, in arrival order."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, Node] = {}
        self._arrivals = 0

    def add(
        self,
        node: NodeId,
        context: Iterable[Reference] | VisibleContext = (),
        *,
        length: int = 0,
        spans: NodeSpans | None = None,
        sealed: bool = False,
    ) -> Node:
        """Add a node that reads `context`, with `length` tokens to begin with.

        Args:
            context: references, or what `compile_context` made of them on this graph, which then is not done again.

        Raises:
            GraphError: `state_not_found` and `state_not_sealed` (a parent), `span_out_of_range`,
                `edge_mix_forbidden` (inherit and digest in one node), `invalid_request` (a taken id,
                something that is no reference, a negative length); `field` as in `context[2].span`.
        """
        if node in self:
            raise GraphError("invalid_request", f"{node!r} is taken; drop it first or choose another", "node")
        if not _is_count(length):
            raise GraphError("invalid_request", f"a length is an int from 0, not {short(length)}", "length")
        if spans is not None:
            _check_spans(spans, length)
        visible = (
            self._checked(context) if isinstance(context, VisibleContext) else place(self.resolve(context))
        )
        added = Node(node, self._arrivals, visible)
        added.length = length
        added.sealed = sealed
        added.spans = spans or added.spans
        self._arrivals += 1
        self._nodes[node] = added
        return added

    def extend(self, node: NodeId, count: int) -> None:
        """Append `count` tokens.

        Raises:
            GraphError: `state_not_found`, or `invalid_request` if the node is sealed or `count` negative.
        """
        growing = self._unsealed(node)
        if not _is_count(count):
            raise GraphError("invalid_request", f"a count is an int from 0, not {short(count)}", "count")
        growing.length += count

    def seal(self, node: NodeId, spans: NodeSpans | None = None) -> None:
        """Make the node final, so that others may read it; `spans` replace those given before.

        Raises:
            GraphError: `state_not_found`, `span_out_of_range`, or `invalid_request` if it is sealed already.
        """
        sealing = self._unsealed(node)
        if spans is not None:
            _check_spans(spans, sealing.length)
            sealing.spans = spans
        sealing.sealed = True

    def rename_spans(self, node: NodeId, spans: NodeSpans) -> None:
        """Let a sealed node's names stand for other spans from now on; what was compiled before stays as it is.

        Raises:
            GraphError: `state_not_found`, `span_out_of_range`, or `invalid_request` if it is not sealed.
        """
        found = self.node(node)
        if not found.sealed:
            raise GraphError("invalid_request", f"node {short(node)} is not sealed", "node")
        _check_spans(spans, found.length)
        found.spans = spans

    def drop(self, node: NodeId) -> None:
        """Forget the name. What reads the node still sees it; a later node of that name is another one.

        Raises:
            GraphError: `state_not_found`.
        """
        self.node(node)
        del self._nodes[node]

    def node(self, node: NodeId) -> Node:
        """The node of that name; raises GraphError `state_not_found`."""
        found = self._find(node)
        if found is None:
            raise GraphError("state_not_found", f"there is no node {node!r}", "node")
        return found

    def nodes(self) -> tuple[Node, ...]:
        """All nodes that have a name, in arrival order."""
        return tuple(self._nodes.values())

    def resolve(self, references: Iterable[Reference]) -> tuple[Reading, ...]:
        """Check references as those of one new node, and look up what they name. Raises as `add`."""
        readings = []
        whole: str | None = None
        for index, reference in enumerate(references):
            try:
                readings.append(self._read(reference))
            except GraphError as error:
                raise error.under(f"context[{index}]") from None
            mode = reference.mode
            if mode != whole and not isinstance(reference, Artifact):
                whole = whole or mode
                if mode != whole:
                    raise GraphError(
                        "edge_mix_forbidden",
                        f"a node with {whole} references cannot {mode}; artifact mixes with both",
                        f"context[{index}].mode",
                    )
        return tuple(readings)

    def _checked(self, context: VisibleContext) -> VisibleContext:
        for index, reading in enumerate(context.readings):
            if self._nodes.get(reading.node.id) is not reading.node:
                raise GraphError(
                    "state_not_found", f"there is no node {reading.node.id!r}", f"context[{index}].node"
                )
        return context

    def _read(self, reference: Reference) -> Reading:
        if not isinstance(reference, _KINDS):
            raise GraphError(
                "invalid_request", f"a reference is an Inherit, Digest or Artifact, not {reference!r}"
            )
        node = self.node(reference.node)
        if not node.sealed:
            raise GraphError("state_not_sealed", f"{node.id!r} is still growing; seal it first", "node")
        start = reference.start
        if start is not None and not _is_count(start):
            raise GraphError("invalid_request", f"a start is a position from 0, not {short(start)}", "start")
        if isinstance(reference, Artifact):
            return Reading(reference, node, *node.span(reference.span, reference.at))
        if reference.at is None:
            return Reading(reference, node, 0, node.length)
        return Reading(reference, node, *node.span("all", reference.at))

    def _find(self, node: object) -> Node | None:
        try:
            return self._nodes.get(node)
        except TypeError:
            raise GraphError("invalid_request", f"a node id is hashable, unlike {node!r}", "node") from None

    def _unsealed(self, node: NodeId) -> Node:
        found = self.node(node)
        if found.sealed:
            raise GraphError("invalid_request", f"{node!r} is sealed and cannot change", "node")
        return found

    def __contains__(self, node: object) -> bool:
        return self._find(node) is not None

    def __len__(self) -> int:
        return len(self._nodes)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_span(span: object, length: int, *field: str) -> None:
    if not (isinstance(span, tuple) and len(span) == 2 and _is_int(span[0]) and _is_int(span[1])):
        raise GraphError(
            "invalid_request",
            f"a span is prompt, output, turn, all or (start, stop), not {short(span)}",
            ".".join(field),
        )
    if not 0 <= span[0] <= span[1] <= length:
        raise GraphError(
            "span_out_of_range",
            f"{short(list(span))} is not within the node's {length} tokens",
            ".".join(field),
        )


def _check_spans(spans: NodeSpans, length: int) -> None:
    for name, span in (("output", spans.output), ("turn", spans.turn), ("prompt", spans.prompt)):
        if span is not None:
            _check_span(span, length, "spans", name)
