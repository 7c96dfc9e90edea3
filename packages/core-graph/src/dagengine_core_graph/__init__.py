"""Context graphs: which token instances a node attends, in which order, and what it passes on."""

from .compile import VisibleContext, compile_context, passed, visible
from .context import Artifact, Digest, Inherit, NodeId, Reference, Span, make_reference
from .errors import GraphError, QueryError, SchemaError
from .graph import ContextGraph, Node, NodeSpans
from .ranges import RangeList, TokenRange
from .schema import ContextDocument, GraphDocument, NodeDocument, dump_graph, load_graph

__all__ = [
    "Artifact",
    "ContextDocument",
    "ContextGraph",
    "Digest",
    "GraphDocument",
    "GraphError",
    "Inherit",
    "Node",
    "NodeDocument",
    "NodeId",
    "NodeSpans",
    "QueryError",
    "RangeList",
    "Reference",
    "SchemaError",
    "Span",
    "TokenRange",
    "VisibleContext",
    "compile_context",
    "dump_graph",
    "load_graph",
    "make_reference",
    "passed",
    "visible",
]
