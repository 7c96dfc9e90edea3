"""Refused span queries over HTTP: `param` is a path in the body as it was sent, and the message says what was sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import MODEL, Server

from dagengine_server.errors import STATUS

FORMAT = "dagengine.query/v1"
G = {"model": MODEL, "input": {"user": "a"}}
RAG = {"cross": [{"system": "S"}, {"plus": [{"user": "A piece"}, {"user": "B piece"}]}, {"user": "Q"}]}
HIGH = {"max_tokens": 10**6}
LONG = {"user": "a long text " * 400}


def g(input: Any, model: str = MODEL, **params: Any) -> dict[str, Any]:
    return {"g": {"model": model, "max_tokens": 6, **params, "input": input}}


Case = tuple[Any, int, str, str | None]
"""A query, and how it is refused where it is the whole body."""

BOTH_FORMS: tuple[Case, ...] = (
    # while it is read
    *(
        (query, 400, "invalid_request", path)
        for query, path in (
            (5, None),
            ([], None),
            ({}, None),
            ({"user": "a", "system": "b"}, None),
            ({"x": 1}, None),
            (g({"cross": []}), "g.input.cross"),
            (g({"plus": []}), "g.input.plus"),
            (g({"cross": [{"user": "a"}, {"plus": []}]}), "g.input.cross[1].plus"),
            (g({"user": 1}), "g.input.user"),
            (g({"ask": "a"}), "g.input"),
            ({"g": {"model": MODEL}}, "g.input"),
            ({"g": {**G, "top": 1}}, "g.top"),
            ({"g": {**G, "max_tokens": -1}}, "g.max_tokens"),
            ({"g": {**G, "temperature": "hot"}}, "g.temperature"),
            (g({"user": "a"}, temperature=1e9), "g.temperature"),
            ({"repeat": {"n": 256, **g({"user": "a"})}}, "repeat.n"),
            ({"repeat": {"n": 1}}, "repeat.g"),
            ({"map": {"metadata": {"model": MODEL}, "inputs": []}}, "map.inputs"),
            ({"map": {"inputs": ["a"]}}, "map.metadata"),
            ({"zip": {"first": {"user": "a"}}}, "zip.second"),
            (g({"user": "\ud800"}), "g.input.user"),
        )
    ),
    # planned
    (g({"monad": {"user": "a"}}), 400, "invalid_request", "g.input"),
    ({"plus": [{"user": "a"}] * 5000}, 400, "capacity", None),
    (g({"plus": [{"user": "a"}] * 5000}), 400, "capacity", None),
    # looked up
    (g({"user": ""}), 400, "invalid_request", "g.input"),
    (g(RAG, "other"), 404, "model_not_found", "g.model"),
    ({"plus": [g(RAG), g(RAG, "other")]}, 400, "unsupported", "plus[1].g.model"),
    (g({"cross": [g(RAG, "other"), {"user": "a"}]}, "other"), 404, "model_not_found", "g.model"),
    ({"repeat": {"n": 2, **g(RAG, "other")}}, 404, "model_not_found", "repeat.g.model"),
    (
        {"map": {"metadata": {"model": "other"}, "inputs": ["a"]}},
        404,
        "model_not_found",
        "map.metadata.model",
    ),
    # submitted, and the second one while it runs
    (g(RAG, **HIGH), 422, "position_overflow", "g.max_tokens"),
    (
        g({"cross": [{"user": "a"}, g(RAG, **HIGH)]}),
        422,
        "position_overflow",
        "g.input.cross[1].g.max_tokens",
    ),
    ({"monad": LONG}, 422, "position_overflow", "monad"),
)
OUR_FORM: tuple[Case, ...] = (
    # while it is read
    ({"g": {**G, "options": {"n": 2}}}, 400, "invalid_request", "g.options.n"),
    ({"chat": {"messages": []}}, 400, "invalid_request", "chat.messages"),
    # planned
    ({"retrieve": {"corpus": "c", "question": {"user": "a"}}}, 400, "invalid_request", "retrieve"),
    # looked up
    ({"chat": {"model": "other", "messages": [{"user": "a"}]}}, 404, "model_not_found", "chat.model"),
    # made
    ({"g": {**G, "options": {"topp": 2}}}, 400, "invalid_request", "g.options.topp"),
    ({"g": {**G, "options": {"top_p": 2}}}, 400, "invalid_request", "g.options.top_p"),
)


def refusal(server: Server, body: Any, route: str = "execute", **params: Any) -> tuple[int, str, str | None]:
    """The status, the code and `param`; of a stream that began with 200, the status that an answer would have."""
    answer = server.http.post(f"/v1/query/{route}", params=params, content=json.dumps(body))
    _, event, sent = answer.text.rpartition("event: error\ndata: ")
    error = json.loads(sent)["error"]
    return STATUS[error["code"]] if event else answer.status_code, error["code"], error["param"]


def in_document(path: str | None) -> str:
    return "query" if path is None else f"query.{path}"


@pytest.mark.parametrize(("query", "status", "code", "path"), BOTH_FORMS, ids=lambda value: repr(value)[:60])
def test_a_bare_query_is_refused_with_the_path_in_it(
    server: Server, query: Any, status: int, code: str, path: str | None
) -> None:
    for stream in ("false", "true"):
        assert refusal(server, query, stream=stream) == (status, code, path)


@pytest.mark.parametrize(
    ("query", "status", "code", "path"), BOTH_FORMS + OUR_FORM, ids=lambda value: repr(value)[:60]
)
def test_a_document_is_refused_with_the_path_in_it_too(
    server: Server, query: Any, status: int, code: str, path: str | None
) -> None:
    document = {"format": FORMAT, "query": query}
    for stream in ("false", "true"):
        assert refusal(server, document, stream=stream) == (status, code, in_document(path))


def test_members_of_the_document_itself_are_named_as_they_are(server: Server) -> None:
    for document, path in (
        ({"format": "dagengine.query/v2", "query": {"user": "a"}}, "format"),
        ({"query": {"user": "a"}}, "format"),
        ({"format": FORMAT, "query": {"user": "a"}, "more": 1}, "more"),
        ({"format": FORMAT}, "query"),
    ):
        assert refusal(server, document) == (400, "invalid_request", path)


def test_url_parameters_are_named_as_they_are(server: Server) -> None:
    for body in (g(RAG), {"format": FORMAT, "query": g(RAG)}):
        for name, value, status in (
            ("position", "sideways", 422),
            ("backend", "none", 400),
            ("reduce", "4", 400),
        ):
            found = refusal(server, body, **{name: value})
            assert (found[0], found[2]) == (status, name)


def test_limits_of_the_server_name_what_is_too_large(start: Callable[..., Server]) -> None:
    many = {"plus": [{"user": name} for name in "abc"]}
    narrow, small = start(max_context=2), start(max_query_nodes=3)
    for server, path in ((narrow, "g"), (small, None)):
        assert refusal(server, g(many)) == (400, "capacity", path)
        assert refusal(server, {"format": FORMAT, "query": g(many)}) == (400, "capacity", in_document(path))


def test_preparing_names_the_same_paths(server: Server) -> None:
    for query, path in (
        (g({"plus": []}), "g.input.plus"),
        (g(RAG, "other"), "g.model"),
        ({"monad": LONG}, "monad"),
    ):
        assert refusal(server, query, "prepare")[2] == path
        assert refusal(server, {"format": FORMAT, "query": query}, "prepare")[2] == in_document(path)


def message(server: Server, body: Any, path: str | None) -> str:
    for route in ("execute", "prepare"):
        answer = server.http.post(f"/v1/query/{route}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", path)
    return str(error["message"])


def test_a_bare_query_without_a_model_is_told_of_our_form(server: Server) -> None:
    bare = {"g": {"max_tokens": 4, "input": {"user": "a"}}}
    found = message(server, bare, "g.model")
    assert "read in spnl's form" in found and f"{{'format': '{FORMAT}', 'query': …}}" in found
    answer = server.http.post("/v1/query/execute", json={"format": FORMAT, "query": bare})
    assert answer.status_code == 200, "what the message says is right"


def test_a_context_graph_is_told_its_route(server: Server) -> None:
    nodes = [{"id": "a", "input": "x", "generate": {"max_tokens": 2}}]
    graph = {"format": "dagengine.graph/v1", "nodes": nodes}
    for body, path in ((graph, "nodes"), ({"nodes": nodes}, None), ({"format": graph["format"]}, "format")):
        found = message(server, body, path)
        assert "a context graph document (dagengine.graph/v1)" in found and "post it to /v1/graphs," in found
    assert server.http.post("/v1/graphs", json=graph).status_code == 200, "what the message says is right"
    assert "context graph" not in message(server, {"node": nodes}, None)
