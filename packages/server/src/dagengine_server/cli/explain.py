"""`dagengine explain`: what every node of a graph would see, where, and at what cost. The model never runs.

Of a span query: the tree after each rule of planning, the graph, the layout and what is reused.

With a model, a `dagengine.graph/v1` document is laid out by the engine itself: ranges, layout, reuse, pages,
refusals; of the model only its configuration and tokenizer are read. A server can be asked the same. Without
either, lengths stand for inputs: a list of cases, or a document whose nodes have lengths, is answered in the
shape of a cases file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dagengine_core_graph import GraphDocument, load_graph
from dagengine_core_graph.cases import Case, CaseNode, load_cases

from . import options
from .console import CommandError, new_app, print_json, print_table, read_json
from .queries import Corpus, RetrieverName, corpora_of, is_query

if TYPE_CHECKING:
    from dagengine.retrievers import Corpora
    from dagengine_core_graph.query import Query

QUERY_ONLY = ("reduce", "corpus", "retriever")
SERVER_ONLY = ("url", "api_key")
MODEL_ONLY = ("position_policy", *options.ENGINE_FIELDS)

app = new_app("Show what the nodes of a graph see, where, and at what cost; no model runs.")


@app.command(context_settings=options.SETTINGS)
def explain(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="a dagengine.graph/v1 document, a span query or a list of cases; - reads standard input"
        ),
    ],
    model: options.Model = None,
    url: Annotated[str | None, typer.Option(help="ask this server instead; it knows its states")] = None,
    api_key: Annotated[str | None, typer.Option(help="of that server")] = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = 64,
    kv_pages: options.KvPages = None,
    kv_memory_gib: options.KvMemoryGib = None,
    position_policy: options.PositionPolicy = "linear",
    reduce: Annotated[
        int | None,
        typer.Option(min=2, help="of a query: reduce judges declared closed to so many candidates"),
    ] = None,
    corpus: Corpus = None,
    retriever: RetrieverName = "fts5",
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show what the nodes of a graph see, where, and at what cost; no model runs."""
    document = read_json(file)
    if isinstance(document, list):
        _refuse(
            context, (*QUERY_ONLY, *SERVER_ONLY, *MODEL_ONLY, "model"), "cases are explained by lengths alone"
        )
        cases = explain_cases(load_cases(document))
        print_json(cases, indent=None) if as_json else _print_cases(cases)
        return
    if is_query(document):
        _refuse(context, SERVER_ONLY, "queries are explained here, not by a server")
        if model is None:
            _refuse(
                context,
                MODEL_ONLY,
                "without a model a query is laid out linearly, in no engine; name a model",
            )
        engine = options.engine_options(context)
        with closing(corpora_of(corpus, retriever)) as corpora:
            _explain_query(document, model, position_policy, engine, reduce, corpora, as_json)
        return
    _refuse(context, QUERY_ONLY, "this is said of span queries only")
    if url is not None:
        _refuse(context, (*MODEL_ONLY, "model"), "a server that is asked has its own")
    else:
        _refuse(context, SERVER_ONLY, "no server is asked; name its URL")
    graph = load_graph(document)
    if model is None and url is None and all(node.input is None for node in graph.nodes):
        _refuse(context, MODEL_ONLY, "lengths are explained without an engine; name a model")
        cases = [explain_lengths(graph, file.stem)]
        print_json(cases, indent=None) if as_json else _print_cases(cases)
        return
    if url is not None:
        from ..client import Client

        with Client(url, api_key=api_key) as client:
            found = client.compile(document)
    elif model is not None:
        found = explain_document(graph, model, position_policy, options.engine_options(context))
    else:
        raise CommandError("a document with inputs needs a model, or the URL of a server", "model")
    print_json(found) if as_json else _print_document(found["nodes"])


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Raises CommandError naming the first of the options that the command line gives.

    The environment and a configuration are shared with other documents: what they say beyond need is a default.
    """
    for option in options.resolved(context):
        if option.name in names and option.source == "command line":
            raise CommandError(why, option.name)


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


def explain_lengths(document: GraphDocument, name: str) -> dict[str, Any]:
    """`{"name", "expected"}` for a document of lengths. Raises DagError with the document's path, and as `as_case`."""
    from dagengine import DagError
    from dagengine.cases import explain_case

    place = {node.id: index for index, node in enumerate(document.nodes)}

    def in_document(found: re.Match[str]) -> str:
        return f"nodes[{place[document.order[int(found[1])]]}]"

    try:
        return {"name": name, "expected": explain_case(as_case(document, name))}
    except DagError as error:
        field = error.field and re.sub(r"^nodes\[(\d+)\]", in_document, error.field)
        raise DagError(error.code, error.message, field) from None


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
) -> dict[str, Any]:
    """What the engine would do with every node, as `POST /v1/graphs/compile` answers it.

    Raises:
        DagError: the model, or what concerns the document as a whole.
    """
    from dagengine import EngineConfig
    from dagengine.documents import graph_requests
    from dagengine.explain import explain
    from dagengine.inputs import InputEncoder

    from ..routes.graphs import plan_of
    from .planning import planning_core

    core = planning_core(model, EngineConfig(position_policy=policy, **engine))
    plan = graph_requests(document, InputEncoder(core.tokenizer), default_policy=policy)
    return plan_of(document, plan, explain(core, plan.requests))


def _explain_query(
    document: Any,
    model: str | None,
    policy: str,
    engine: Mapping[str, Any],
    reduce: int | None,
    corpora: Corpora,
    as_json: bool,
) -> None:
    """The tree after each rule, the graph, the layout and what is reused; with a model, lengths in tokens as well."""
    from dagengine.retrievers import guarded
    from dagengine_core_graph.query import explain as explain_query
    from dagengine_core_graph.query import load_query

    query = load_query(document)
    found = explain_query(query, retriever=guarded(corpora), reduce=reduce)
    tokens = None if model is None else query_tokens(found.plan.query, model, policy, engine)
    if as_json:
        print_json({**found.data(), **({} if tokens is None else {"tokens": tokens})})
        return
    print(found.text(), end="")
    if tokens is not None:
        columns = ("node", "sees", "own start", "input", "may sample", "pages", "refused")
        print_table("tokens", columns, [tuple(row.values()) for row in tokens])


def query_tokens(planned: Query, model: str, policy: str, engine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an engine would do with the nodes of a planned query; only a model's configuration and tokenizer are read.

    Raises:
        DagError: the model, or the path of a subtree.
    """
    from dagengine import EngineConfig
    from dagengine.encoded_queries import encode_query
    from dagengine.explain import explain
    from dagengine.prompt_cache import PromptCache
    from dagengine.queries import QueryOptions, query_job

    from .planning import planning_core

    core = planning_core(model, EngineConfig(position_policy=policy, **engine))
    job = query_job([encode_query(planned, PromptCache(core.tokenizer))], QueryOptions(position=policy))
    rows = []
    for row in explain(core, job.requests):
        names = " ".join(node.id for _, node in job.nodes_of[row.request_id])
        rows.append(
            {
                "node": names,
                "visible": row.num_visible,
                "own_start": row.own_start,
                "input": row.num_input,
                "sampled": row.planned_tokens - row.num_input if row.error is None else 0,
                "pages": row.num_pages,
                "error": None if row.error is None else str(row.error),
            }
        )
    return rows


def _print_cases(found: list[dict[str, Any]]) -> None:
    for case in found:
        rows, layouts = [], []
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


def _print_document(nodes: list[dict[str, Any]]) -> None:
    table = []
    for node in nodes:
        if "error" in node:
            error = node["error"]
            table.append((node["node"], *[""] * 6, f"{error['code']}: {error['message']}"))
            continue
        tokens = node["tokens"]
        table.append(
            (
                node["node"],
                _runs(node["visible"]),
                _layout(node["layout"]),
                f"{tokens['visible']} + {tokens['input']}",
                tokens["planned"],
                tokens["reused"],
                node["pages"],
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
