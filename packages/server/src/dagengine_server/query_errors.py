"""Where a refused span query is wrong, in the terms of who sent it: `param` is a path in the body.

    {"g": {…}}                                              g.input.cross[1].plus
    {"format": "dagengine.query/v1", "query": {"g": {…}}}   query.g.input.cross[1].plus

Below, paths begin at the query, and the query itself is None or, to the engine, `query`. A URL parameter is its name.
"""

from __future__ import annotations

from typing import Any

from dagengine import DagError
from dagengine.errors import as_dag_error
from dagengine_core_graph.query import GenerateParams, Map, Query, join_path, walk
from dagengine_core_graph.schema import FORMAT as GRAPH_FORMAT

from .parameters import ExecuteParameters

ROOT = "query"
URL_PARAMETERS = frozenset(ExecuteParameters.model_fields)


def unread(error: Exception, value: Any) -> DagError:
    """The refusal of a body that `load_query` did not read, whose path is one in the body already."""
    found = as_dag_error(error)
    if not _is_graph(value):
        return found
    message = (
        f"this is a context graph document ({GRAPH_FORMAT}), not a span query; post it to /v1/graphs, "
        "or to /v1/graphs/compile to see what it would do"
    )
    return DagError(found.code, message, found.field)


def unplanned(error: DagError, query: Query, served: str, *, wrapped: bool) -> DagError:
    """The refusal of a query that cannot be planned or tokenized, which is about the query even without a path.

    Args:
        served: the model's name, to find the call that names another one.
        wrapped: whether the body has the query as its member `query`.
    """
    field = error.field or ROOT
    if field == "model":
        field = _other_model(query, served)
    return in_body(DagError(error.code, error.message, field), wrapped=wrapped)


def in_body(error: DagError, *, wrapped: bool) -> DagError:
    """The refusal of a query's requests, or of none of them, with its path in the body."""
    field = error.field
    if field is None or field in URL_PARAMETERS:
        return error
    if field == ROOT:
        return DagError(error.code, error.message, ROOT if wrapped else None)
    return DagError(error.code, error.message, join_path(ROOT, field) if wrapped else field)


def _is_graph(value: Any) -> bool:
    """Whether a body that is no query is meant as a context graph: by its format, or without one by its nodes."""
    return isinstance(value, dict) and (
        value.get("format") == GRAPH_FORMAT
        or ("format" not in value and isinstance(value.get("nodes"), list))
    )


def _other_model(query: Query, served: str) -> str:
    """The path of the first model that is named and not served."""
    for path, found in walk(query):
        params = getattr(found, "params", None)
        if isinstance(params, GenerateParams) and params.model not in (None, served):
            return join_path(
                path, f"{found.tag}.metadata.model" if isinstance(found, Map) else f"{found.tag}.model"
            )
    return ROOT
