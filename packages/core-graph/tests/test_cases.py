"""The worked cases, exactly."""

import json
from pathlib import Path

import pytest

from dagengine_core_graph import SchemaError, definition
from dagengine_core_graph.cases import Case, dump_case, load_cases

CASES = load_cases(json.loads((Path(__file__).parent / "data" / "graph_semantics.json").read_text()))


def only(expected: object, *names: str) -> object:
    return {node: {name: wanted[name] for name in names} for node, wanted in expected.items()}


def test_there_are_35_cases() -> None:
    assert len(CASES) == 35


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_visible_and_passed_are_exactly_as_expected(case: Case) -> None:
    assert dump_case(case.graph()) == only(case.expected, "visible", "passed")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_definition_itself_gives_what_the_cases_expect(case: Case) -> None:
    graph = case.graph()
    for node in graph.nodes():
        for name, oracle in (("visible", definition.visible), ("passed", definition.passed)):
            runs = definition.runs(oracle(graph, node.id))
            assert [[run.node, run.start, run.stop] for run in runs] == case.expected[node.id][name]


@pytest.mark.parametrize(
    ("cases", "code", "field"),
    [
        ({}, "invalid_request", ""),
        ([{"name": "x", "nodes": [{"id": "a"}]}], "invalid_request", "[0].nodes[0].length"),
        ([{"name": "x", "nodes": [{"length": 1}]}], "invalid_request", "[0].nodes[0].id"),
        ([{"nodes": []}], "invalid_request", "[0].name"),
        ([{"name": "x", "node": []}], "invalid_request", "[0].node"),
        (
            [{"name": "x", "nodes": [{"id": "a", "length": 1, "output_start": 2}]}],
            "span_out_of_range",
            "[0].nodes[0].output_start",
        ),
    ],
)
def test_a_malformed_case_names_its_field(cases: object, code: str, field: str) -> None:
    with pytest.raises(SchemaError) as refused:
        load_cases(cases)
    assert (refused.value.code, refused.value.field) == (code, field)


def test_a_case_that_no_graph_can_be_names_the_node_and_the_reference() -> None:
    late = {"id": "b", "length": 1, "context": [{"node": "a", "mode": "inherit"}]}
    (case,) = load_cases([{"name": "x", "nodes": [late, {"id": "a", "length": 1}]}])
    with pytest.raises(SchemaError) as refused:
        case.graph()
    assert (refused.value.code, refused.value.field) == ("state_not_found", "nodes[0].context[0].node")
