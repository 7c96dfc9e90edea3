"""The definition, by brute force: the oracle that `compile.py` is held to.

Contexts are explicit lists of token instances `(node, offset)`. It shares no code with the compiler, does
not resolve spans through the graph, and costs what the lists are long: for tests and for reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from .context import Artifact, NodeId, Reference
from .graph import ContextGraph, Node
from .ranges import TokenRange

Token: TypeAlias = tuple[Node, int]


def visible(graph: ContextGraph, node: NodeId) -> list[Token]:
    """Every token instance that the node attends besides its own, in order."""
    found = graph.node(node)
    return [token for part in _place(found.context, found.parents, {}) for token in part]


def passed(graph: ContextGraph, node: NodeId) -> list[Token]:
    """Every token instance that the node hands on besides its own, in order."""
    return _passed(graph.node(node), {})


def parts(graph: ContextGraph, references: Sequence[Reference]) -> list[list[Token]]:
    """Per reference, the token instances that it adds to those before it, in order."""
    return _place(references, [graph.node(reference.node) for reference in references], {})


def runs(tokens: Iterable[Token]) -> tuple[TokenRange, ...]:
    """The same tokens as maximal runs."""
    found: list[tuple[Node, int, int]] = []
    for node, offset in tokens:
        if found and found[-1][0] is node and found[-1][2] == offset:
            found[-1] = (node, found[-1][1], offset + 1)
        else:
            found.append((node, offset, offset + 1))
    return tuple(TokenRange(node.id, start, stop) for node, start, stop in found)


def _place(
    references: Iterable[Reference], parents: Iterable[Node], memo: dict[Node, list[Token]]
) -> list[list[Token]]:
    placed: set[Token] = set()
    result = []
    for reference, parent in zip(references, parents, strict=True):
        new = [token for token in _reads(reference, parent, memo) if token not in placed]
        placed.update(new)
        result.append(new)
    return result


def _reads(reference: Reference, parent: Node, memo: dict[Node, list[Token]]) -> list[Token]:
    stop = parent.length if reference.at is None else reference.at
    own = [(parent, offset) for offset in range(stop)]
    if isinstance(reference, Artifact):
        start, end = _bounds(reference, parent)
        return own[start:end]
    return _passed(parent, memo) + own


def _passed(node: Node, memo: dict[Node, list[Token]]) -> list[Token]:
    if node not in memo:
        passing = [
            (reference, parent)
            for reference, parent in zip(node.context, node.parents, strict=True)
            if reference.mode in ("inherit", "artifact")
        ]
        placed = _place([reference for reference, _ in passing], [parent for _, parent in passing], memo)
        memo[node] = [token for part in placed for token in part]
    return memo[node]


def _bounds(reference: Artifact, parent: Node) -> tuple[int, int]:
    sampled = parent.spans.output is not None
    name = reference.span or ("output" if sampled else "all")
    if isinstance(name, tuple):
        return name
    nothing = (parent.length, parent.length)
    before_output = (0, parent.spans.output[0] if parent.spans.output else parent.length)
    named = {
        "all": (0, parent.length),
        "output": parent.spans.output or nothing,
        "prompt": parent.spans.prompt or before_output,
        "turn": parent.spans.turn or nothing,
    }
    return named[name]
