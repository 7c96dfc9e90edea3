"""What a drawing of a graph shows: labelled nodes and edges, in order, without any format or layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .context import Artifact, Reference, Span
from .graph import ContextGraph, Node
from .schema import ContextDocument, GraphDocument


@dataclass(frozen=True)
class PictureNode:
    """A box: name, a line of detail, and whether it is outside the graph (a state, a dropped node)."""

    label: str
    detail: str = ""
    outside: bool = False


@dataclass(frozen=True)
class PictureEdge:
    """An arrow from `source`, which is read, to `target`, which reads; both are indices of nodes."""

    source: int
    target: int
    mode: str
    label: str = ""


@dataclass(frozen=True)
class Picture:
    """Boxes and arrows; arrows end at boxes that come later or earlier, but never form a cycle."""

    nodes: tuple[PictureNode, ...]
    edges: tuple[PictureEdge, ...]


GraphLike: TypeAlias = ContextGraph | GraphDocument | Picture


def picture(graph: GraphLike) -> Picture:
    """The picture of a graph or of a document; a picture is its own."""
    if isinstance(graph, ContextGraph):
        return _of_graph(graph)
    if isinstance(graph, GraphDocument):
        return _of_document(graph)
    return graph


def _of_graph(graph: ContextGraph) -> Picture:
    index_of: dict[Node, int] = {}
    nodes: list[PictureNode] = []
    edges: list[PictureEdge] = []

    def box(node: Node, outside: bool) -> int:
        if node not in index_of:
            index_of[node] = len(nodes)
            state = ", dropped" if outside else "" if node.sealed else ", growing"
            nodes.append(PictureNode(str(node.id), _tokens(node.length) + state, outside))
        return index_of[node]

    named = set(graph.nodes())
    for node in graph.nodes():
        sources = [box(parent, parent not in named) for parent in node.parents]
        target = box(node, False)
        edges += [
            PictureEdge(source, target, reference.mode, _edge_label(reference))
            for source, reference in zip(sources, node.context, strict=True)
        ]
    return Picture(tuple(nodes), tuple(edges))


def _of_document(document: GraphDocument) -> Picture:
    nodes = [
        PictureNode(node.id, "" if node.length is None else _tokens(node.length)) for node in document.nodes
    ]
    index_of = {("node", node.id): index for index, node in enumerate(document.nodes)}
    edges = []
    for target, node in enumerate(document.nodes):
        for item in node.context:
            key = ("node", item.node) if item.node is not None else ("state", str(item.state))
            if key not in index_of:
                index_of[key] = len(nodes)
                nodes.append(PictureNode(str(item.state), "state", outside=True))
            edges.append(PictureEdge(index_of[key], target, item.mode, _edge_label(item)))
    return Picture(tuple(nodes), tuple(edges))


def _tokens(length: int) -> str:
    return f"{length} token{'' if length == 1 else 's'}"


def _edge_label(reference: Reference | ContextDocument) -> str:
    span: Span | None = None
    if isinstance(reference, Artifact | ContextDocument):
        span = reference.span
    words = []
    if reference.mode == "artifact":
        words.append(f"[{span[0]}:{span[1]}]" if isinstance(span, tuple) else span or "output")
    if reference.at is not None:
        words.append(f"cut at {reference.at}")
    if reference.start is not None:
        words.append(f"start {reference.start}")
    return ", ".join(words)
