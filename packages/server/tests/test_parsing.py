"""Bodies of queries are read as all others: the same values, and the same refusals."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from conftest import Server
from hypothesis import given, settings
from hypothesis import strategies as st

from dagengine import DagError
from dagengine_core_graph import SchemaError
from dagengine_core_graph.query import load_query
from dagengine_server.parsing import is_small, parse_json, parse_query_json

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
PIECES = (
    *("{", "}", "[", "]", ",", ":", '"', "\\", '"a"', '"a":', "1", "-", "0", ".", "e9", "true", "null", "NaN"),
    *(" ", "\n", "\x00", "\\ud83d", "\\ude00", "\\u0061", "é", "\ufeff", "Infinity", "1e-400", "9" * 30),
)  # fmt: skip


def outcome(parse: Any, body: bytes) -> Any:
    try:
        return repr(parse(body))
    except DagError as error:
        return error.code, error.message, error.field


@settings(max_examples=40)
@given(VALUES, st.booleans())
def test_the_same_values(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert outcome(parse_query_json, body) == outcome(parse_json, body)


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.binary(max_size=2))
def test_the_same_refusals(pieces: list[str], tail: bytes) -> None:
    body = "".join(pieces).encode() + tail
    assert outcome(parse_query_json, body) == outcome(parse_json, body)


@pytest.mark.parametrize("depth", [10, 199, 250, 900, 5000])
def test_the_same_depths(depth: int) -> None:
    body = b"[" * depth + b"]" * depth
    assert outcome(parse_query_json, body) == outcome(parse_json, body)


@pytest.mark.parametrize(
    ("member", "field"),
    [
        ('"temperature": 1e999', "g.temperature"),
        ('"max_tokens": 1e999', "g.max_tokens"),
        ('"options": {"top_p": [-1e999]}', "g.options.top_p[0]"),
        ('"closed": 1e999', "g.closed"),
        ('"model": 1e999', "g.model"),
    ],
)
def test_a_number_beyond_a_double_is_refused_by_its_path(member: str, field: str) -> None:
    body = f'{{"g": {{{member}, "input": {{"user": "a"}}}}}}'.encode()
    with pytest.raises(DagError, match="beyond a double"):
        parse_json(body)
    value = parse_query_json(body)
    assert any(isinstance(number, float) and math.isinf(number) for number in numbers(value))
    with pytest.raises(SchemaError) as refused:
        load_query({"format": "dagengine.query/v1", "query": value})
    assert refused.value.field == f"query.{field}"


def numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [number for member in value.values() for number in numbers(member)]
    if isinstance(value, list):
        return [number for member in value for number in numbers(member)]
    return [value]


@pytest.mark.parametrize("path", ["/v1/query/execute", "/v1/completions"])
@pytest.mark.parametrize(("count", "threads"), [(1, 0), (100_000, 1)])
def test_large_bodies_are_parsed_on_a_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, count: int, threads: int
) -> None:
    found = []

    async def counted(function: Any, *given: Any) -> Any:
        found.append(function)
        return function(*given)

    monkeypatch.setattr("dagengine_server.parsing.asyncio.to_thread", counted)
    body = b'{"prompt": [' + b"1," * count + b'"\\ud800"]}'
    answer = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"prompt[{count}]")
    assert len(found) == threads


def test_the_first_wrong_text_of_a_body_is_named() -> None:
    body = rb"""[1, "a", {"b": [null, ["\ud83d\ude00"]], "c": [[2, "\udc00"], "\ud800"]}, "\ud800"]"""
    assert outcome(parse_json, body) == outcome(parse_query_json, body)
    assert outcome(parse_json, body)[2] == "[2].c[0][1]"


@given(VALUES, st.integers(1, 20))
@settings(max_examples=40)
def test_small_is_what_holds_few_values(value: Any, most: int) -> None:
    assert is_small(value, most) == (count(value) <= most)


def count(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + sum(map(count, value.values() if isinstance(value, dict) else value))
    return 1
