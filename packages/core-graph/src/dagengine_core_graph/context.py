"""References: how a node names what it reads.

A reference knows the parent's id and what of it is read. It knows no graph, so nothing here is checked
against one: `ContextGraph.add` and `compile_context` do that.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from .errors import GraphError

NodeId: TypeAlias = Hashable
SpanName: TypeAlias = Literal["prompt", "output", "turn", "all"]
Span: TypeAlias = SpanName | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Inherit:
    """Read all that `node` passes on and all of its tokens, and pass both on (a solid edge).

    Args:
        node: id of the parent.
        at: read only the parent's first `at` tokens (a fork); None reads all of them.
        start: view position of the first token, for position policies; it never changes what is seen.
    """

    mode: ClassVar[str] = "inherit"
    passes: ClassVar[bool] = True
    node: NodeId
    at: int | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Digest:
    """Read the same as `Inherit`, but pass nothing on: the reader stands in for it (a dashed edge)."""

    mode: ClassVar[str] = "digest"
    passes: ClassVar[bool] = False
    node: NodeId
    at: int | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """Read only `span` of the parent's own tokens, and pass those on.

    Args:
        node, at, start: as for `Inherit`; a span that reaches beyond `at` is cut there, possibly to nothing.
        span: a named span, `(start, stop)` in the parent's tokens, or None: its `output`, or `all` of a
            node that sampled no token.
    """

    mode: ClassVar[str] = "artifact"
    passes: ClassVar[bool] = True
    node: NodeId
    span: Span | None = None
    at: int | None = None
    start: int | None = None


Reference: TypeAlias = Inherit | Digest | Artifact


def make_reference(
    node: NodeId,
    mode: str = "inherit",
    span: Span | None = None,
    at: int | None = None,
    start: int | None = None,
) -> Reference:
    """The reference of that mode.

    Raises:
        GraphError: `invalid_request` for an unknown mode, or for a span that the mode would ignore.
    """
    if mode == "artifact":
        return Artifact(node, span, at, start)
    if mode not in ("inherit", "digest"):
        raise GraphError("invalid_request", f"mode is inherit, digest or artifact, not {mode!r}", "mode")
    if span is not None:
        raise GraphError("invalid_request", f"only an artifact has a span; {mode} reads every token", "span")
    return Inherit(node, at, start) if mode == "inherit" else Digest(node, at, start)
