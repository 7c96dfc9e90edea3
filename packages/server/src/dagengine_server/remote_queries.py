"""Span queries as a client sends them, and what it is given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagengine import DagError
from dagengine.errors import as_dag_error
from dagengine.query_results import AnsweredQuery
from dagengine_core_graph.query import FORMAT, Query, dump_query, load_query, user

from .remote import Result, Usage, without_none


@dataclass(frozen=True)
class QueryResult(AnsweredQuery):
    """A finished query.

    Attributes:
        query: the result, a query: every call replaced by the text of its answer.
        answers: of the calls that the result holds, in order; those that were kept hold their states.
        record: what `dagengine replay` needs to run it again.
    """

    query: Query
    answers: tuple[Result, ...]
    usage: Usage
    record: Mapping[str, Any]


def query_document(query: object) -> dict[str, Any]:
    """The `dagengine.query/v1` document of a query or a text. Raises DagError `invalid_request`."""
    try:
        if isinstance(query, str):
            query = user(query)
        if not isinstance(query, Query):
            message = f"a query or a text is needed, not {type(query).__name__}"
            raise DagError("invalid_request", message, "query")
        return dump_query(query)
    except Exception as error:
        raise as_dag_error(error) from None


def query_params(
    cache_salt: str | None,
    position: str | None,
    backend: str | None,
    reduce: int | None,
    keep_ttl_s: float | None,
) -> dict[str, Any]:
    """The options of `/v1/query` that are given."""
    return without_none(
        {
            "cache_salt": cache_salt,
            "position": position,
            "backend": backend,
            "reduce": reduce,
            "keep_ttl_s": keep_ttl_s,
        }
    )


def result_query(answer: Mapping[str, Any]) -> Query:
    """The result that the server told."""
    return load_query({"format": FORMAT, "query": answer["result"]})


def usage_of(answer: Mapping[str, Any]) -> Usage:
    """The counts that the server told."""
    used = answer["usage"]
    return Usage(
        used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"], used["completion_tokens"]
    )
