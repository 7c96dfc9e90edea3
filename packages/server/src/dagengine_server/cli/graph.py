"""`dagengine graph`: documents of context graphs, without a model. `check` tells whether one is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dagengine_core_graph import GraphDocument, load_graph
from dagengine_core_graph.cases import load_cases

from .console import error_line, is_refusal, new_app, print_json, read_json, say
from .explain import explain_cases, explain_lengths
from .options import Json

app = new_app("Look at documents of context graphs.")


@app.callback()
def graph() -> None:
    """Look at documents of context graphs."""


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(help="a dagengine.graph/v1 document or a list of cases; - reads standard input")
    ],
    as_json: Json = False,
) -> None:
    """Check a graph document, or a list of cases; the exit status is 1 for an invalid one."""
    document = read_json(file)
    try:
        found = check_document(document)
    except Exception as error:
        if not is_refusal(error):
            raise
        if as_json:
            refusal = {name: getattr(error, name, None) for name in ("code", "message", "field")}
            print_json({"valid": False, "error": refusal})
        else:
            say(f"{file}: {error_line(error)}")
        raise typer.Exit(1) from None
    if as_json:
        print_json({"valid": True, **found})
    else:
        counts = [f"{value} {name}" for name, value in found.items() if name != "order"]
        print(f"{file}: valid: {', '.join(counts)}")


def check_document(document: Any) -> dict[str, Any]:
    """Counts of a valid document, and for a graph the order in which its nodes can run.

    Raises:
        SchemaError: the document's shape or references.
        DagError: sampling options, `keep` or `position` of a node; where all lengths are known, spans and layouts too.
    """
    if isinstance(document, list):
        cases = load_cases(document)
        explain_cases(cases)
        return {"cases": len(cases), "nodes": sum(len(case.nodes) for case in cases)}
    loaded = load_graph(document)
    _check_options(loaded)
    if all(
        node.length is not None and all(item.node is not None for item in node.context)
        for node in loaded.nodes
    ):
        explain_lengths(loaded, "document")
    return {
        "nodes": len(loaded.nodes),
        "references": sum(len(node.context) for node in loaded.nodes),
        "order": list(loaded.order),
    }


def _check_options(document: GraphDocument) -> None:
    from dagengine import SamplingParams
    from dagengine.documents import parse_position
    from dagengine.inputs import parse_keep

    parse_position(document.position, "linear", "position")
    for index, node in enumerate(document.nodes):
        path = f"nodes[{index}]"
        if node.generate is not None:
            SamplingParams.from_mapping(node.generate, f"{path}.generate")
        if node.keep is not None:
            parse_keep(node.keep, f"{path}.keep")
        parse_position(node.position, "linear", f"{path}.position")
