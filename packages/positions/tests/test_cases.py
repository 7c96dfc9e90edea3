"""Every worked case of the definition, exactly."""

import json
from pathlib import Path

import pytest

from dagengine_core_graph import ContextGraph, NodeSpans, make_reference, visible
from dagengine_positions import lay_out

CASES = json.loads((Path(__file__).parent / "data" / "graph_semantics.json").read_text())
RUNS = [
    (case, key)
    for case in CASES
    for key in ("linear", "native", "as_given")
    if any(key in expected for expected in case["expected"].values())
]


def laid_out(case, policy):
    """Layout of every node by id; `policy` None means each node's own, linear where it has none."""
    graph = ContextGraph()
    layouts = {}
    for node in case["nodes"]:
        references = [
            make_reference(
                ref["node"],
                ref["mode"],
                tuple(ref["span"]) if isinstance(ref.get("span"), list) else ref.get("span"),
                ref.get("at"),
                ref.get("start"),
            )
            for ref in node["context"]
        ]
        length = node["length"]
        output = node.get("output_start", length)
        spans = NodeSpans(output=(output, length)) if output < length else None
        graph.add(node["id"], references, length=length, spans=spans, sealed=True)
        name = policy or node.get("policy", "linear")
        layouts[node["id"]] = lay_out(name, visible(graph, node["id"]), lambda node: layouts[node].own_start)
    return layouts


@pytest.mark.parametrize(("case", "key"), RUNS, ids=[f"{case['name']}-{key}" for case, key in RUNS])
def test_segments_and_own_start(case, key):
    layouts = laid_out(case, None if key == "as_given" else key)
    found = {
        node: {
            "segments": [[s.node, s.start, s.stop, s.view_start, s.delta] for s in layout.segments],
            "own_start": layout.own_start,
        }
        for node, layout in layouts.items()
    }
    assert found == {node: expected[key] for node, expected in case["expected"].items()}


def test_every_case_is_run():
    assert {case["name"] for case, _ in RUNS} == {case["name"] for case in CASES}
    for case in CASES:
        keys = {frozenset(expected) - {"visible", "passed"} for expected in case["expected"].values()}
        assert keys in ({frozenset({"linear", "native"})}, {frozenset({"as_given"})})
