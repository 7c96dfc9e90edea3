"""`dagengine explain`: what every node of a graph would see, where, and at what cost. The model never runs.

With a model, a `dagengine.graph/v1` document is laid out by the engine itself: ranges, layout, reuse, pages,
refusals; of the model only its configuration and tokenizer are read. Without one, lengths stand for inputs: a
list of cases, or a document whose nodes have lengths, is answered in the shape of a cases file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dagengine_core_graph import GraphDocument, load_graph
from dagengine_core_graph.cases import Case, CaseNode, load_cases

from . import options
from .console import CommandError, new_app, print_json, print_table, read_json

app = new_app("Show what the nodes of a graph see, where, and at what cost; no model runs.")


@app.command(context_settings=options.SETTINGS)
def explain(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="a dagengine.graph/v1 document or a list of cases; - reads standard input")
    ],
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = 64,
    kv_pages: options.KvPages = None,
    kv_memory_gib: options.KvMemoryGib = 2.0,
    position_policy: options.PositionPolicy = "linear",
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show what the nodes of a graph see, where, and at what cost; no model runs."""
    document = read_json(file)
    if isinstance(document, list):
        found = explain_cases(load_cases(document))
        print_json(found, indent=None) if as_json else _print_cases(found)
        return
    graph = load_graph(document)
    if model is None and all(node.input is None for node in graph.nodes):
        found = explain_cases((as_case(graph, file.stem),))
        print_json(found, indent=None) if as_json else _print_cases(found)
        return
    if model is None:
        raise CommandError("a document with inputs needs a model, for its tokenizer and its limits", "model")
    rows = explain_document(graph, model, position_policy, options.engine_options(context))
    print_json({"nodes": rows}) if as_json else _print_document(rows)


def explain_cases(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    """`[{"name", "expected"}]` in the shape of a cases file. Raises DagError naming the case and the node."""
    from dagengine import DagError
    from dagengine.cases import explain_case

    result = []
    for index, case in enumerate(cases):
        try:
            result.append({"name": case.name, "expected": explain_case(case)})
        except DagError as error:
            raise DagError(
                error.code, error.message, f"[{index}].{error.field}" if error.field else None
            ) from None
    return result


def as_case(document: GraphDocument, name: str) -> Case:
    """A document of lengths as a case. Raises CommandError for what only an engine can tell."""
    nodes = {node.id: node for node in document.nodes}
    listed = []
    for node_id in document.order:
        node = nodes[node_id]
        position = node.position or document.position
        policy = None if position is None else position.get("policy")
        if policy is not None and not isinstance(policy, str):
            raise CommandError("policy is the name of a position policy", f"{node_id}.position.policy")
        for item in node.context:
            if item.node is None:
                raise CommandError(
                    f"node {node_id!r} reads a state; only a model's engine knows states", "context"
                )
        references = tuple(item.reference(item.node) for item in node.context if item.node is not None)
        listed.append(CaseNode(node_id, node.length or 0, references, node.output_start, policy))
    return Case(name, tuple(listed), {})


def explain_document(
    document: GraphDocument, model: str, policy: str, engine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the engine would do with every node, parents first; a refused one has its refusal.

    Raises:
        DagError: the model, or what concerns the document as a whole.
    """
    from dagengine import EngineConfig
    from dagengine.documents import graph_requests
    from dagengine.explain import explain
    from dagengine.inputs import InputEncoder

    from .planning import planning_core

    core = planning_core(model, EngineConfig(position_policy=policy, **engine))
    requests = graph_requests(document, InputEncoder(core.tokenizer), default_policy=policy)
    names = dict(requests.node_of)

    def renamed(rows: tuple[tuple[Any, ...], ...]) -> list[list[Any]]:
        return [[names.get(node, node), *numbers] for node, *numbers in rows]

    return [
        {
            "id": names[found.request_id],
            "visible": renamed(found.visible),
            "passed": renamed(found.passed),
            "segments": renamed(found.segments),
            "position": {"policy": found.policy, "own_start": found.own_start},
            "tokens": {
                "visible": found.num_visible,
                "input": found.num_input,
                "planned": found.planned_tokens,
                "reused": found.reused,
            },
            "pages": found.num_pages,
            "timing_ms": {"compile": round(found.compile_ms, 4), "layout": round(found.layout_ms, 4)},
            "refusal": None
            if found.error is None
            else {"code": found.error.code, "message": found.error.message, "field": found.error.field},
        }
        for found in explain(core, requests.requests)
    ]


def _print_cases(found: list[dict[str, Any]]) -> None:
    for case in found:
        rows = []
        for node, expected in case["expected"].items():
            layouts = [name for name in ("linear", "native", "as_given") if name in expected]
            rows.append(
                (
                    node,
                    _runs(expected["visible"]),
                    _runs(expected["passed"]),
                    *(_layout(expected[name]) for name in layouts),
                )
            )
        print_table(case["name"], ("node", "visible", "passed", *layouts), rows)


def _print_document(rows: list[dict[str, Any]]) -> None:
    table = []
    for row in rows:
        refusal = row["refusal"]
        if refusal is not None:
            table.append((row["id"], *[""] * 6, f"{refusal['code']}: {refusal['message']}"))
            continue
        tokens = row["tokens"]
        table.append(
            (
                row["id"],
                _runs(row["visible"]),
                _layout({"segments": row["segments"], **row["position"]}),
                f"{tokens['visible']} + {tokens['input']}",
                tokens["planned"],
                tokens["reused"],
                row["pages"],
                "runs",
            )
        )
    columns = ("node", "visible", "layout", "visible + input", "own, planned", "reused", "pages", "answer")
    print_table("graph", columns, table)


def _runs(ranges: list[list[Any]]) -> str:
    return " ".join(f"{node}[{start}:{stop}]" for node, start, stop in ranges) or "-"


def _layout(layout: Mapping[str, Any]) -> str:
    placed = [
        f"{node}[{start}:{stop}]@{view}{delta:+d}" for node, start, stop, view, delta in layout["segments"]
    ]
    return " ".join([*placed, f"own@{layout['own_start']}"])
