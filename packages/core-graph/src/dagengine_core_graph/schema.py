"""`dagengine.graph/v1`: a whole graph in one JSON document.

It knows the shape of a document and how its nodes refer to each other. What `generate`, `keep` and
`position` hold is for the engine to judge; here they only have to be JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, TypeAlias

from . import fields
from .context import Artifact, NodeId, Reference, Span, make_reference
from .errors import SchemaError, short
from .fields import Json, join

FORMAT: Final = "dagengine.graph/v1"

Input: TypeAlias = str | tuple[int, ...] | tuple[dict[str, Json], ...]


@dataclass(frozen=True)
class ContextDocument:
    """One reference: to a node of the same document, or to a state that exists already.

    Attributes:
        node, state: which it names; the other one is None.
        mode, span, at, start: as of a reference.
    """

    node: str | None = None
    state: str | None = None
    mode: str = "inherit"
    span: Span | None = None
    at: int | None = None
    start: int | None = None

    def reference(self, parent: NodeId) -> Reference:
        """The reference, to the node `parent` of some graph."""
        return make_reference(parent, self.mode, self.span, self.at, self.start)


@dataclass(frozen=True)
class NodeDocument:
    """One node.

    Attributes:
        id: its name in the document.
        context: its references, in order.
        input: text, token ids or chat messages; None if only its `length` is given.
        generate, keep, position: objects as given; None if absent.
        backend, add_special_tokens: None leaves them to the engine.
        length, output_start: token counts in place of an input, for looking at graphs without a model.
    """

    id: str
    context: tuple[ContextDocument, ...] = ()
    input: Input | None = None
    generate: dict[str, Json] | None = None
    keep: dict[str, Json] | None = None
    position: dict[str, Json] | None = None
    backend: str | None = None
    add_special_tokens: bool | None = None
    length: int | None = None
    output_start: int | None = None


@dataclass(frozen=True)
class GraphDocument:
    """A graph: `nodes` as given, and `order`: their ids, parents first, otherwise as given."""

    nodes: tuple[NodeDocument, ...]
    order: tuple[str, ...]
    model: str | None = None
    stream: bool = False
    position: dict[str, Json] | None = None
    backend: str | None = None


def load_graph(document: object) -> GraphDocument:
    """Read a document that `json.loads` gave.

    Raises:
        SchemaError: and nothing else, whatever the value; `field` is the JSON path. `invalid_request`,
            `state_not_found` (no such node), `edge_mix_forbidden`, `span_out_of_range` or `cycle`.
    """
    found = fields.members(document, "", ("format", "model", "stream", "position", "backend", "nodes"))
    if found.get("format") != FORMAT:
        raise SchemaError(
            "invalid_request", f"{FORMAT!r} is needed, not {short(found.get('format'))}", "format"
        )
    if "nodes" not in found:
        raise SchemaError("invalid_request", "an array of nodes is needed", "nodes")
    values = fields.items(found["nodes"], "nodes")
    nodes = tuple(_load_node(value, f"nodes[{index}]") for index, value in enumerate(values))
    return GraphDocument(
        nodes=nodes,
        order=_order(nodes),
        model=fields.text(found["model"], "model") if "model" in found else None,
        stream=fields.boolean(found.get("stream", False), "stream"),
        position=fields.mapping(found["position"], "position") if "position" in found else None,
        backend=fields.name(found["backend"], "backend") if "backend" in found else None,
    )


def dump_graph(document: GraphDocument) -> dict[str, Json]:
    """The JSON document that `load_graph` reads as this one; what is absent or default is left out."""
    dumped: dict[str, Json] = {"format": FORMAT}
    _put(dumped, document, ("model", "position", "backend"))
    if document.stream:
        dumped["stream"] = True
    dumped["nodes"] = [_dump_node(node) for node in document.nodes]
    return dumped


def _load_node(value: object, path: str) -> NodeDocument:
    found = fields.members(value, path, tuple(NodeDocument.__dataclass_fields__))
    if "id" not in found:
        raise SchemaError("invalid_request", "a node needs an id", join(path, "id"))
    if ("input" in found) == ("length" in found):
        raise SchemaError("invalid_request", "either input or length is needed", join(path, "input"))
    length = fields.count(found["length"], join(path, "length")) if "length" in found else None
    output_start = None
    if "output_start" in found:
        output_start = fields.count(found["output_start"], join(path, "output_start"))
        if length is None or output_start > length:
            raise SchemaError(
                "span_out_of_range", "a length of at least that is needed", join(path, "output_start")
            )

    def mapping(name: str) -> dict[str, Json] | None:
        return fields.mapping(found[name], join(path, name)) if name in found else None

    special = "add_special_tokens"
    return NodeDocument(
        id=fields.name(found["id"], join(path, "id")),
        context=_load_context(found.get("context"), join(path, "context")),
        input=_load_input(found["input"], join(path, "input")) if "input" in found else None,
        generate=mapping("generate"),
        keep=mapping("keep"),
        position=mapping("position"),
        backend=fields.name(found["backend"], join(path, "backend")) if "backend" in found else None,
        add_special_tokens=fields.boolean(found[special], join(path, special)) if special in found else None,
        length=length,
        output_start=output_start,
    )


def _load_input(value: object, path: str) -> Input:
    if isinstance(value, str):
        return fields.text(value, path)
    if not isinstance(value, list | tuple):
        raise SchemaError(
            "invalid_request", f"text, token ids or messages are needed, not {short(value)}", path
        )
    if any(isinstance(item, Mapping) for item in value):
        return tuple(fields.mapping(item, f"{path}[{index}]") for index, item in enumerate(value))
    return tuple(fields.count(item, f"{path}[{index}]") for index, item in enumerate(value))


def _load_context(value: object, path: str) -> tuple[ContextDocument, ...]:
    context = []
    whole: str | None = None
    for index, item in enumerate(fields.items(value, path)):
        here = f"{path}[{index}]"
        found = fields.members(item, here, ("node", "state", "mode", "span", "at", "start"))
        if ("node" in found) == ("state" in found):
            raise SchemaError("invalid_request", "a reference names either a node or a state", here)
        kind = "node" if "node" in found else "state"
        parent = fields.name(found[kind], join(here, kind))
        reference = fields.reference(parent, found, here)
        if not isinstance(reference, Artifact):
            whole = whole or reference.mode
            if reference.mode != whole:
                raise SchemaError(
                    "edge_mix_forbidden",
                    f"a node with {whole} references cannot {reference.mode}; artifact mixes with both",
                    join(here, "mode"),
                )
        context.append(
            ContextDocument(
                node=parent if kind == "node" else None,
                state=parent if kind == "state" else None,
                mode=reference.mode,
                span=reference.span if isinstance(reference, Artifact) else None,
                at=reference.at,
                start=reference.start,
            )
        )
    return tuple(context)


def _order(nodes: tuple[NodeDocument, ...]) -> tuple[str, ...]:
    """Ids, parents first; among those that are free, the one given first."""
    index_of: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.id in index_of:
            raise SchemaError(
                "invalid_request",
                f"{short(node.id)} is the id of nodes[{index_of[node.id]}] already",
                f"nodes[{index}].id",
            )
        index_of[node.id] = index
    parents: list[list[int]] = []
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        parents.append([])
        for place, item in enumerate(node.context):
            if item.node is None:
                continue
            if item.node not in index_of:
                raise SchemaError(
                    "state_not_found",
                    f"there is no node {short(item.node)}{fields.suggest(item.node, index_of)}",
                    f"nodes[{index}].context[{place}].node",
                )
            parents[index].append(index_of[item.node])
            children[index_of[item.node]].append(index)
    waiting = [len(found) for found in parents]
    free = [index for index, missing in enumerate(waiting) if missing == 0]
    heapify(free)
    order = []
    while free:
        index = heappop(free)
        order.append(nodes[index].id)
        for child in children[index]:
            waiting[child] -= 1
            if waiting[child] == 0:
                heappush(free, child)
    if len(order) < len(nodes):
        raise _cycle(nodes, parents, waiting)
    return tuple(order)


def _cycle(nodes: tuple[NodeDocument, ...], parents: list[list[int]], waiting: list[int]) -> SchemaError:
    index = next(index for index, missing in enumerate(waiting) if missing)
    walk: dict[int, None] = {}
    while index not in walk:
        walk[index] = None
        index = next(parent for parent in parents[index] if waiting[parent])
    back = list(walk)
    cycle = [index, *reversed(back[back.index(index) :])]
    names = [short(nodes[member].id) for member in cycle]
    if len(names) > 12:
        names = [*names[:6], "…", *names[-5:]]
    return SchemaError(
        "cycle", f"a graph has no cycle, unlike {' → '.join(names)}", f"nodes[{index}].context"
    )


def _dump_node(node: NodeDocument) -> dict[str, Json]:
    dumped: dict[str, Json] = {"id": node.id}
    if node.context:
        dumped["context"] = [_dump_reference(item) for item in node.context]
    if node.input is not None:
        dumped["input"] = fields.plain(node.input, "input")
    _put(dumped, node, ("generate", "keep", "position", "backend", "add_special_tokens"))
    _put(dumped, node, ("length", "output_start"))
    return dumped


def _dump_reference(item: ContextDocument) -> dict[str, Json]:
    dumped: dict[str, Json] = {}
    _put(dumped, item, ("node", "state"))
    if item.mode != "inherit":
        dumped["mode"] = item.mode
    _put(dumped, item, ("span", "at", "start"))
    return dumped


def _put(dumped: dict[str, Json], source: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(source, name)
        if value is not None:
            dumped[name] = fields.plain(value, name)
