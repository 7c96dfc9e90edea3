"""A lowered query: the nodes that execute it, and its result once their answers are there.

It is a graph of texts: an executor tokenizes the parts of each node, runs it under its references, and hands back
what the calls answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..context import Artifact, Reference
from ..errors import QueryError
from ..fields import Json
from ..graph import ContextGraph, NodeSpans
from ..picture import Picture, PictureEdge, PictureNode
from ..schema import ContextDocument, GraphDocument, NodeDocument
from .expressions import NOTHING, Generate, GenerateParams, Join, Leaf, Message, Monad, Query
from .pretty import quoted

MAX_TOKENS = 2048
"""What a `max_tokens` of 0 stands for, as on spnl's server."""
LONGEST_LABEL = 28


@dataclass(frozen=True, slots=True)
class Commuting:
    """References of which the query declared the order free: groups that may change places as wholes."""

    groups: tuple[Order, ...]


Order: TypeAlias = tuple[int | Commuting, ...]
"""Indices into a node's context, in order but for the groups of a `Commuting`."""


class QueryNode(NamedTuple):
    """One node.

    Attributes:
        id: `n0`, `n1`, … in the order of the nodes.
        path: the subtree that it computes, in the planned query; of several messages the first.
        parts: its own input, messages and fragments in order. Only a call may have none: then its own input is the
            generation prompt alone.
        context: what it reads, in order: `Inherit`, or `Artifact` of a `turn`.
        order: which of that order means nothing.
        generate: None computes the input and samples nothing.
        continues: its input stands in the middle of a prompt, even where it reads nothing: encode it without a BOS
            and without a default system turn.
        sample: how many nodes before it are the same call (equal input, context and parameters).
        reuses: a node before it whose input and context are equal: once it is sealed, its pages serve this one. One
            that samples nothing if there is any, so that waiting for it is worth while.
    """

    id: str
    path: str
    parts: tuple[Leaf, ...]
    context: tuple[Reference, ...]
    order: Order
    generate: GenerateParams | None
    continues: bool
    sample: int
    reuses: str | None

    @property
    def messages(self) -> tuple[dict[str, Json], ...]:
        """The parts as chat messages, `{"role", "content"}`."""
        return tuple({"role": part.role, "content": part.text} for part in self.parts)

    def sampling(self, max_tokens: int | None = MAX_TOKENS) -> dict[str, Json] | None:
        """The parameters by the names of a graph document's `generate`; None if it samples nothing.

        Args:
            max_tokens: for a call that names none; None leaves it out.
        """
        if self.generate is None:
            return None
        most = self.generate.max_tokens or max_tokens
        named: dict[str, Json] = {} if most is None else {"max_tokens": most}
        return {**named, "temperature": self.generate.temperature, **self.generate.options}


@dataclass(frozen=True)
class LoweredQuery:
    """A query as a graph.

    Attributes:
        query: the planned query.
        nodes: parents before children.
        answers: ids of the calls whose answers the result holds, in its order.
        left_out: preparations that have no node because another node computes the same.
    """

    query: Query
    nodes: tuple[QueryNode, ...]
    answers: tuple[str, ...]
    left_out: int

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the calls name, each once, in order."""
        named = (node.generate.model for node in self.nodes if node.generate is not None)
        return tuple(dict.fromkeys(model for model in named if model is not None))

    def result(self, texts: Mapping[str, str]) -> Query:
        """The result, which is a query: every call replaced by its answer, and what shows nothing left out.

        Args:
            texts: what the calls answered, by node id; more than `answers` does no harm.

        Raises:
            QueryError: `invalid_request` for an answer that is missing; the field is the path of its call.
        """
        missing = set(self.answers) - set(texts)
        for node in self.nodes:
            if node.id in missing:
                raise QueryError("invalid_request", f"{node.id} has no answer", node.path)
        return _result(self.query, iter([texts[answer] for answer in self.answers])) or NOTHING

    def graph(self, lengths: Mapping[str, tuple[int, int]] | None = None) -> ContextGraph:
        """The context graph, every node sealed.

        Args:
            lengths: tokens of a node's own input, and of its turn, by id; by default one for each part and each turn.
        """
        graph = ContextGraph()
        for node in self.nodes:
            calls = node.generate is not None
            given = len(node.parts), 1
            own, turn = given if lengths is None else lengths[node.id]
            span = (own, own + turn) if calls else None
            graph.add(
                node.id,
                node.context,
                length=own + turn if calls else own,
                spans=NodeSpans(output=span, turn=span),
                sealed=True,
            )
        return graph

    def document(self, max_tokens: int | None = MAX_TOKENS) -> GraphDocument:
        """The `dagengine.graph/v1` document. It cannot say `continues`, `sample` or `reuses`."""
        nodes = tuple(
            NodeDocument(
                id=node.id,
                context=tuple(
                    ContextDocument(
                        node=str(reference.node),
                        mode=reference.mode,
                        span=reference.span if isinstance(reference, Artifact) else None,
                    )
                    for reference in node.context
                ),
                input=node.messages,
                generate=node.sampling(max_tokens),
            )
            for node in self.nodes
        )
        models = self.models
        return GraphDocument(nodes, tuple(node.id for node in nodes), models[0] if len(models) == 1 else None)

    def picture(self) -> Picture:
        """Boxes with the id and the first text of each node, for `render`."""
        boxes = {node.id: index for index, node in enumerate(self.nodes)}
        nodes = tuple(PictureNode(f"{node.id} {_does(node)}", _says(node)) for node in self.nodes)
        edges = tuple(
            PictureEdge(
                boxes[str(reference.node)],
                boxes[node.id],
                reference.mode,
                "turn" if isinstance(reference, Artifact) else "",
            )
            for node in self.nodes
            for reference in node.context
        )
        return Picture(nodes, edges)


def _result(query: Query, answers: Iterator[str]) -> Query | None:
    if isinstance(query, Generate):
        return Message("assistant", next(answers))
    if isinstance(query, Monad):
        return None
    if isinstance(query, Join):
        results = [_result(child, answers) for child in query.children]
        kept = tuple(result for result in results if result is not None)
        return type(query)(kept) if kept else None
    return query


def _does(node: QueryNode) -> str:
    if node.generate is None:
        return "fragment" if node.parts[0].tag == "fragment" else "messages"
    return "g" if node.generate.model is None else f"g {node.generate.model}"


def _says(node: QueryNode) -> str:
    if not node.parts:
        return ""
    more = f" +{len(node.parts) - 1}" if len(node.parts) > 1 else ""
    return f"{node.parts[-1].role} {quoted(node.parts[-1].text, LONGEST_LABEL)}{more}"
