"""Worked cases, laid out: what each node of a graph of lengths sees, passes on, and where. No model."""

from __future__ import annotations

from typing import Any

from dagengine_core_graph import ContextGraph, NodeId, visible
from dagengine_core_graph.cases import Case, dump_case
from dagengine_positions import lay_out

from .errors import DagError, as_dag_error


def explain_case(case: Case) -> dict[str, dict[str, Any]]:
    """Per node: `visible`, `passed`, and its layouts, in the shape of a cases file's `expected`.

    Where no node names a policy the layouts are `linear` and `native`, each with every node under that
    policy; where one does it is `as_given`, and a node that names none is linear.

    Raises:
        DagError: a refusal of the graph, or of a policy; the field begins with `nodes[i]`.
    """
    try:
        graph = case.graph()
    except Exception as error:
        raise as_dag_error(error) from None
    explained: dict[str, dict[str, Any]] = {node: dict(ranges) for node, ranges in dump_case(graph).items()}
    if any(node.policy is not None for node in case.nodes):
        layouts = {"as_given": [node.policy or "linear" for node in case.nodes]}
    else:
        layouts = {name: [name] * len(case.nodes) for name in ("linear", "native")}
    for name, policies in layouts.items():
        for node_id, layout in _lay_out_all(case, graph, policies).items():
            explained[node_id][name] = layout
    return explained


def _lay_out_all(case: Case, graph: ContextGraph, policies: list[str]) -> dict[str, dict[str, Any]]:
    """Layouts of the nodes in order; each is stored where its own layout puts it."""
    stored: dict[NodeId, int] = {}
    result = {}
    for index, (node, policy) in enumerate(zip(case.nodes, policies, strict=True)):
        try:
            layout = lay_out(policy, visible(graph, node.id), stored.__getitem__)
        except Exception as error:
            found = as_dag_error(error)
            field = f"nodes[{index}].{found.field or 'policy'}"
            raise DagError(found.code, found.message, field) from None
        stored[node.id] = layout.own_start
        result[node.id] = {
            "segments": [[str(s.node), s.start, s.stop, s.view_start, s.delta] for s in layout.segments],
            "own_start": layout.own_start,
        }
    return result
