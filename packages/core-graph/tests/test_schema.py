"""dagengine.graph/v1: what is read, in which order, and that nothing malformed escapes as another error."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagengine_core_graph import Artifact, Inherit, SchemaError
from dagengine_core_graph.cases import load_cases
from dagengine_core_graph.schema import ContextDocument, GraphDocument, dump_graph, load_graph

DOCUMENT: dict[str, Any] = {
    "format": "dagengine.graph/v1",
    "model": "m",
    "stream": True,
    "position": {"policy": "linear"},
    "nodes": [
        {
            "id": "judge",
            "context": [
                {"node": "a", "mode": "artifact"},
                {"node": "b", "mode": "artifact", "span": [1, 4], "at": 3, "start": 7},
                {"state": "st_rules"},
            ],
            "input": "Which is better?",
            "generate": {"max_tokens": 8, "temperature": 0.5},
            "keep": {"ttl_s": 600},
            "add_special_tokens": False,
        },
        {"id": "doc", "input": [1, 2, 3]},
        {"id": "a", "context": [{"node": "doc", "mode": "inherit"}], "input": "A", "backend": "fused"},
        {"id": "b", "context": [{"node": "doc"}], "input": [{"role": "user", "content": "B"}]},
        {"id": "sized", "length": 9, "output_start": 4, "position": {"policy": "native"}},
    ],
}


def test_a_document_is_read_as_it_stands() -> None:
    document = load_graph(DOCUMENT)
    assert (document.model, document.stream, document.position) == ("m", True, {"policy": "linear"})
    judge, doc, a, b, sized = document.nodes
    assert judge.context == (
        ContextDocument(node="a", mode="artifact"),
        ContextDocument(node="b", mode="artifact", span=(1, 4), at=3, start=7),
        ContextDocument(state="st_rules"),
    )
    assert judge.context[1].reference(5) == Artifact(5, (1, 4), 3, 7)
    assert judge.context[2].reference("s") == Inherit("s")
    assert judge.generate == {"max_tokens": 8, "temperature": 0.5}
    assert (judge.keep, judge.add_special_tokens) == ({"ttl_s": 600}, False)
    assert (doc.input, a.input, b.input) == ((1, 2, 3), "A", ({"role": "user", "content": "B"},))
    assert (a.backend, sized.length, sized.output_start, sized.input) == ("fused", 9, 4, None)


def test_order_puts_parents_first_and_is_otherwise_as_given() -> None:
    assert load_graph(DOCUMENT).order == ("doc", "a", "b", "judge", "sized")
    assert [node.id for node in load_graph(DOCUMENT).nodes] == ["judge", "doc", "a", "b", "sized"]


def test_dumping_and_loading_gives_the_same_document() -> None:
    document = load_graph(DOCUMENT)
    dumped = dump_graph(document)
    assert load_graph(json.loads(json.dumps(dumped))) == document
    assert dumped["nodes"][1] == {"id": "doc", "input": [1, 2, 3]}


def test_what_was_read_does_not_change_with_the_value_it_was_read_from() -> None:
    source = copy.deepcopy(DOCUMENT)
    document = load_graph(source)
    source["nodes"][0]["generate"]["max_tokens"] = 9
    assert document == load_graph(DOCUMENT)


def test_null_is_absent() -> None:
    document = load_graph({**DOCUMENT, "model": None, "nodes": [{"id": "a", "input": "x", "context": None}]})
    assert (document.model, document.nodes[0].context) == (None, ())


def nodes(*values: object) -> dict[str, object]:
    return {"format": "dagengine.graph/v1", "nodes": list(values)}


def node(**members: object) -> dict[str, object]:
    return {"id": "a", "input": "x", **members}


def reading(*references: object) -> dict[str, object]:
    return nodes({"id": "d", "input": "x"}, node(context=list(references)))


REFUSALS: list[tuple[str, str, object]] = [
    ("invalid_request", "", []),
    ("invalid_request", "", None),
    ("invalid_request", "format", {"nodes": []}),
    ("invalid_request", "format", {"format": "dagengine.graph/v2", "nodes": []}),
    ("invalid_request", "nodes", {"format": "dagengine.graph/v1"}),
    ("invalid_request", "nodes", {"format": "dagengine.graph/v1", "nodes": {}}),
    ("invalid_request", "node", {"format": "dagengine.graph/v1", "node": []}),
    ("invalid_request", "stream", {**nodes(), "stream": 1}),
    ("invalid_request", "model", {**nodes(), "model": 1}),
    ("invalid_request", "position", {**nodes(), "position": "linear"}),
    ("invalid_request", "nodes[0]", nodes("a")),
    ("invalid_request", "nodes[0]", nodes(10**5000)),
    ("invalid_request", "nodes[0].id", nodes(node(id=[10**5000]))),
    ("invalid_request", "nodes[0].id", nodes({"input": "x"})),
    ("invalid_request", "nodes[0].id", nodes(node(id=""))),
    ("invalid_request", "nodes[0].id", nodes(node(id=3))),
    ("invalid_request", "nodes[0].id", nodes(node(id="\ud800"))),
    ("invalid_request", "nodes[1].id", nodes(node(), node())),
    ("invalid_request", "nodes[0].contxt", nodes(node(contxt=[]))),
    ("invalid_request", "nodes[0].input", nodes({"id": "a"})),
    ("invalid_request", "nodes[0].input", nodes(node(length=3))),
    ("invalid_request", "nodes[0].input", nodes(node(input=3))),
    ("invalid_request", "nodes[0].input", nodes(node(input="\udfff"))),
    ("invalid_request", "nodes[0].input[1]", nodes(node(input=[1, True]))),
    ("invalid_request", "nodes[0].input[0]", nodes(node(input=[-1]))),
    ("invalid_request", "nodes[0].input[0]", nodes(node(input=[1.0]))),
    ("invalid_request", "nodes[0].input[0]", nodes(node(input=[10**5000]))),
    ("invalid_request", "nodes[0].input[1]", nodes(node(input=[{"role": "user"}, 1]))),
    ("invalid_request", "nodes[0].generate", nodes(node(generate=[]))),
    ("invalid_request", "nodes[0].generate.temperature", nodes(node(generate={"temperature": math.nan}))),
    ("invalid_request", "nodes[0].generate.stop[1]", nodes(node(generate={"stop": ["a", b"b"]}))),
    ("invalid_request", "nodes[0].keep", nodes(node(keep=True))),
    ("invalid_request", "nodes[0].keep.ttl_s", nodes(node(keep={"ttl_s": 2**53}))),
    ("invalid_request", "nodes[0].backend", nodes(node(backend=""))),
    ("invalid_request", "nodes[0].add_special_tokens", nodes(node(add_special_tokens=0))),
    ("span_out_of_range", "nodes[0].output_start", nodes({"id": "a", "length": 2, "output_start": 3})),
    ("span_out_of_range", "nodes[0].output_start", nodes(node(output_start=0))),
    ("invalid_request", "nodes[1].context", nodes(node(id="d"), node(context={"node": "d"}))),
    ("invalid_request", "nodes[1].context[0]", reading("d")),
    ("invalid_request", "nodes[1].context[0]", reading({"mode": "inherit"})),
    ("invalid_request", "nodes[1].context[0]", reading({"node": "d", "state": "st_1"})),
    ("invalid_request", "nodes[1].context[0].state", reading({"state": ""})),
    ("invalid_request", "nodes[1].context[0].mode", reading({"node": "d", "mode": "inhreit"})),
    ("invalid_request", "nodes[1].context[0].mode", reading({"node": "d", "mode": ["inherit"]})),
    ("invalid_request", "nodes[1].context[0].span", reading({"node": "d", "span": "all"})),
    ("invalid_request", "nodes[1].context[0].span", reading({"node": "d", "mode": "artifact", "span": "al"})),
    ("invalid_request", "nodes[1].context[0].span", reading({"node": "d", "mode": "artifact", "span": [1]})),
    (
        "invalid_request",
        "nodes[1].context[0].span[1]",
        reading({"node": "d", "mode": "artifact", "span": [1, "2"]}),
    ),
    (
        "span_out_of_range",
        "nodes[1].context[0].span",
        reading({"node": "d", "mode": "artifact", "span": [2, 1]}),
    ),
    ("span_out_of_range", "nodes[1].context[0].at", reading({"node": "d", "at": -1})),
    ("invalid_request", "nodes[1].context[0].at", reading({"node": "d", "at": False})),
    ("invalid_request", "nodes[1].context[0].start", reading({"node": "d", "start": -1})),
    (
        "edge_mix_forbidden",
        "nodes[1].context[1].mode",
        reading({"node": "d"}, {"state": "s", "mode": "digest"}),
    ),
    ("state_not_found", "nodes[1].context[0].node", reading({"node": "e"})),
    ("cycle", "nodes[1].context", reading({"node": "a"})),
]


@pytest.mark.parametrize(("code", "field", "document"), REFUSALS)
def test_what_is_malformed_names_its_field(code: str, field: str, document: object) -> None:
    with pytest.raises(SchemaError) as refused:
        load_graph(document)
    assert (refused.value.code, refused.value.field) == (code, field)


def test_a_misspelt_field_and_a_misspelt_node_are_suggested() -> None:
    with pytest.raises(SchemaError, match="did you mean 'context'"):
        load_graph(nodes(node(contxt=[])))
    with pytest.raises(SchemaError, match="did you mean 'plan-a'"):
        load_graph(nodes(node(id="plan-a"), node(id="b", context=[{"node": "plan_a"}])))


def test_a_cycle_is_named_in_the_order_of_reading() -> None:
    ring = {"a": "c", "b": "a", "c": "b", "d": "a"}
    document = nodes(*({"id": n, "input": "", "context": [{"node": p}]} for n, p in ring.items()))
    with pytest.raises(SchemaError, match="'a' → 'b' → 'c' → 'a'"):
        load_graph(document)


def test_a_long_chain_and_a_long_cycle_need_no_recursion() -> None:
    def ring(first: str) -> dict[str, object]:
        return nodes(
            *(
                {"id": str(n), "input": "", "context": [{"node": str(n - 1) if n else first}]}
                for n in range(5000)
            )
        )

    with pytest.raises(SchemaError) as refused:
        load_graph(ring("4999"))
    assert refused.value.code == "cycle"
    assert len(refused.value.message) < 300
    straight = ring("0")
    del straight["nodes"][0]["context"]
    assert load_graph(straight).order[-1] == "4999"


def test_values_that_contain_themselves_are_refused() -> None:
    loop: list[object] = []
    loop += [loop, loop]
    with pytest.raises(SchemaError, match="nested deeper"):
        load_graph(nodes(node(generate={"stop": loop})))


LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [-1, 0, 2**53, 2**63, 10**400, math.inf, -math.inf, math.nan, -0.0, 1e308, b"", (), set()]
    ),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["a", "d", "node", "state", "artifact", "output", "inherit", "digest", "\ud800", "\x00"]),
)
NAMES = st.one_of(
    st.sampled_from(
        ["id", "context", "input", "node", "state", "mode", "span", "at", "start", "length", "name"]
    ),
    st.text(max_size=3),
    st.integers(),
    st.none(),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


def places(value: object) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a document."""
    members = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [place for key, inner in members for place in [(value, key), *places(inner)]]


def loads_or_refuses(document: object) -> None:
    try:
        loaded = load_graph(document)
    except SchemaError as error:
        assert isinstance(error.field, str)
        str(error).encode()
    else:
        assert isinstance(loaded, GraphDocument)
        assert load_graph(json.loads(json.dumps(dump_graph(loaded)))) == loaded
    try:
        load_cases(document)
    except SchemaError as error:
        str(error).encode()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(VALUES)
def test_arbitrary_values_raise_nothing_but_schema_errors(value: object) -> None:
    loads_or_refuses(value)
    loads_or_refuses(nodes(value))
    loads_or_refuses(reading(value))


@settings(max_examples=800, deadline=None, derandomize=True)
@given(st.integers(min_value=0), VALUES, NAMES)
def test_a_document_with_anything_in_it_replaced_raises_nothing_but_schema_errors(
    which: int, value: object, name: object
) -> None:
    document = copy.deepcopy(DOCUMENT)
    found = places(document)
    container, key = found[which % len(found)]
    if isinstance(container, dict) and which % 3 == 0:
        container[name] = value
    else:
        container[key] = value
    loads_or_refuses(document)
