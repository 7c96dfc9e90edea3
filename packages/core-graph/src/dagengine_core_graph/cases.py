"""Worked cases: graphs of lengths with the ranges that every node must see and pass on.

A case is `{"name", "nodes", "expected"}`; a node has `id`, `length`, optional `output_start` and `policy`,
and a `context` of `{"node", "mode", "span"?, "at"?, "start"?}`. Policies are kept for whoever lays tokens
out; here they change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import fields
from .compile import passed, visible
from .context import Reference
from .errors import GraphError, SchemaError
from .fields import Json, join
from .graph import ContextGraph, NodeSpans
from .ranges import TokenRange


@dataclass(frozen=True)
class CaseNode:
    """One node; `output_start` is None if it sampled no token."""

    id: str
    length: int
    context: tuple[Reference, ...] = ()
    output_start: int | None = None
    policy: str | None = None


@dataclass(frozen=True)
class Case:
    """A named graph, and what is expected of it, by node id (empty if nothing is)."""

    name: str
    nodes: tuple[CaseNode, ...]
    expected: dict[str, Json]

    def graph(self) -> ContextGraph:
        """The graph, every node sealed.

        Raises:
            SchemaError: as `ContextGraph.add`, with a field such as `nodes[3].context[0].span`.
        """
        graph = ContextGraph()
        for index, node in enumerate(self.nodes):
            output = None if node.output_start is None else (node.output_start, node.length)
            try:
                graph.add(
                    node.id, node.context, length=node.length, spans=NodeSpans(output=output), sealed=True
                )
            except GraphError as error:
                raise SchemaError(error.code, error.message, f"nodes[{index}].{error.field}") from None
        return graph


def load_cases(document: object) -> tuple[Case, ...]:
    """Read a list of cases that `json.loads` gave.

    Raises:
        SchemaError: and nothing else, whatever the value; `field` is a path such as `[2].nodes[0].length`.
    """
    return tuple(_load_case(value, f"[{index}]") for index, value in enumerate(fields.items(document, "")))


def dump_case(graph: ContextGraph) -> dict[str, dict[str, list[Json]]]:
    """Per node, in arrival order, `visible` and `passed` as lists of `[node, start, stop]`."""
    return {
        str(node.id): {
            "visible": [_dump_range(run) for run in visible(graph, node.id).ranges],
            "passed": [_dump_range(run) for run in passed(graph, node.id)],
        }
        for node in graph.nodes()
    }


def _load_case(value: object, path: str) -> Case:
    found = fields.members(value, path, ("name", "nodes", "expected"))
    nodes = enumerate(fields.items(found.get("nodes"), join(path, "nodes")))
    return Case(
        name=fields.name(found.get("name"), join(path, "name")),
        nodes=tuple(_load_node(node, f"{path}.nodes[{index}]") for index, node in nodes),
        expected=fields.mapping(found.get("expected", {}), join(path, "expected")),
    )


def _load_node(value: object, path: str) -> CaseNode:
    found = fields.members(value, path, tuple(CaseNode.__dataclass_fields__))
    length = fields.count(found.get("length"), join(path, "length"))
    output_start = fields.count(found.get("output_start", length), join(path, "output_start"))
    if output_start > length:
        raise SchemaError(
            "span_out_of_range", f"{output_start} is beyond the length", join(path, "output_start")
        )
    context = enumerate(fields.items(found.get("context"), join(path, "context")))
    return CaseNode(
        id=fields.name(found.get("id"), join(path, "id")),
        length=length,
        context=tuple(_load_reference(item, f"{path}.context[{index}]") for index, item in context),
        output_start=output_start if output_start < length else None,
        policy=fields.name(found["policy"], join(path, "policy")) if "policy" in found else None,
    )


def _load_reference(value: object, path: str) -> Reference:
    found = fields.members(value, path, ("node", "mode", "span", "at", "start"))
    return fields.reference(fields.name(found.get("node"), join(path, "node")), found, path)


def _dump_range(run: TokenRange) -> list[Json]:
    return [str(run.node), run.start, run.stop]
