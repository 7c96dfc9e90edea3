"""An explanation says what planning and lowering did, as data and as text."""

import json
import random

from scripted_queries import random_query, scripted_retriever

from dagengine_core_graph import ContextGraph, visible
from dagengine_core_graph.query import (
    Explanation,
    cross,
    dump_query,
    explain,
    g,
    lower,
    note,
    par,
    plan,
    plus,
    repeat,
    retrieve,
    system,
)
from dagengine_core_graph.render import dot, svg

QUERY = g(
    cross(
        system("Answer."),
        retrieve("shelf", "what?"),
        par(repeat(2, g("draft", model="m")), note("two drafts")),
        "Which?",
    ),
    model="m",
    max_tokens=8,
)


def explained() -> Explanation:
    return explain(QUERY, retriever=lambda query: ["one", "two"])


def test_the_text_shows_trees_nodes_graph_layout_and_reuse() -> None:
    text = explained().text()
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "query",
        "after desugar_retrieval",
        "after unroll_repeat",
        "after order_joins",
        "after drop_empties",
        "after flatten_cross",
        "after distribute_plus",
        "note",
        "nodes",
        "graph",
        "layout (linear)",
        "reuse",
    ]
    assert text[text.index("nodes\n") : text.index("graph\n")] == (
        "nodes\n"
        '  n0 user "draft" (g.input.cross[2].plus[0].monad)\n'
        '  n1 system "Answer." (g.input.cross[0])\n'
        '  n2 user "one" (g.input.cross[1].plus[1])\n'
        '  n3 user "two" (g.input.cross[1].plus[2])\n'
        '  n4 user "draft" generate as n0 (g.input.cross[2].plus[1].g)\n'
        '  n5 user "draft" generate as n0 (g.input.cross[2].plus[2].g)\n'
        '  n6 user "Which?" generate (g)\n'
    )
    assert text[text.index("layout") :] == (
        "layout (linear)\n"
        "  n6: 0 n1, +|n1| n2, +|n2| n3, +|n3| n4.turn, +|n4.turn| n5.turn, +|n5.turn| n6\n"
        "reuse\n"
        "  7 nodes, 3 of them calls\n"
        "  2 with an input that another has computed\n"
        "  2 preparations left out: another node computes the same\n"
        "  0 read more than once\n"
    )


def test_the_data_is_json_and_says_the_same() -> None:
    data = json.loads(json.dumps(explained().data()))
    assert data["query"] == dump_query(QUERY)["query"]
    assert [step["rule"] for step in data["steps"]] == [step.rule for step in explained().plan.steps]
    assert data["steps"][-1]["query"] == dump_query(explained().plan.query)["query"]
    assert (data["exact"], data["reductions"], data["notes"]) == (True, [], ["two drafts"])
    assert data["reuse"] == {
        "nodes": 7,
        "calls": 3,
        "equal_inputs": 2,
        "left_out": 2,
        "read_more_than_once": 0,
    }
    (layout,) = data["layouts"]
    assert layout["segments"][3] == {"node": "n4", "span": "turn"}
    assert layout["own_start"] == "|n1| + |n2| + |n3| + |n4.turn| + |n5.turn|"
    assert data["nodes"][6] == {
        "id": "n6",
        "path": "g",
        "messages": [{"role": "user", "content": "Which?"}],
        "context": [
            {"node": "n1", "mode": "inherit"},
            {"node": "n2", "mode": "inherit"},
            {"node": "n3", "mode": "inherit"},
            {"node": "n4", "mode": "artifact", "span": "turn"},
            {"node": "n5", "mode": "artifact", "span": "turn"},
        ],
        "order": [0, {"plus": [[1], [2]]}, {"plus": [[3], [4]]}],
        "generate": {"max_tokens": 8, "temperature": 0.6},
        "model": "m",
        "continues": True,
        "sample": 0,
        "reuses": None,
    }
    assert data["graph"].startswith("flowchart TB\n")


def test_a_node_that_several_see_is_told() -> None:
    explanation = explain(g(cross(system("s"), plus("a"), "b", plus("c"), "d")))
    assert explanation.readers() == {"n0": 2, "n1": 2, "n2": 1, "n3": 1}
    assert explanation.reuse()["read_more_than_once"] == 2


def test_a_reduction_is_told_and_called_another_question() -> None:
    query = g(cross("which?", plus(*"abcd")), closed=True)
    explanation = explain(query, reduce=2)
    assert explanation.data()["reductions"] == [
        {"path": "g", "width": 4, "arity": 2, "calls_added": 2, "rounds": 2}
    ]
    assert "4 candidates, 2 a call: 2 calls more, 2 rounds; not the same question" in explanation.text()


def test_layouts_are_what_the_graph_shows() -> None:
    for seed in range(150):
        explanation = explain(random_query(random.Random(seed)), retriever=scripted_retriever)
        lengths = {node.id: (len(node.parts), 3) for node in explanation.lowered.nodes}
        graph: ContextGraph = explanation.lowered.graph(lengths)
        shown = dict(explanation.layouts)
        for node in explanation.lowered.nodes:
            runs = visible(graph, node.id).ranges
            segments = shown.get(node.id, ())
            assert [segment.node for segment in segments] == [run.node for run in runs]
            assert [segment.span == "turn" for segment in segments] == [
                run.stop - run.start == 3 and graph.node(run.node).spans.turn is not None for run in runs
            ]
        json.dumps(explanation.data())
        assert explanation.text()


def test_wide_queries_are_cut_short_in_text_and_not_in_data() -> None:
    explanation = explain(g(plus(*(f"piece {i}" for i in range(40)))))
    assert "… 28 more" in explanation.text()
    assert "piece 30" in json.dumps(explanation.data()["query"])


def test_a_picture_can_be_drawn_in_every_format() -> None:
    lowered = lower(plan(QUERY, retriever=lambda query: ['<&"]', "x" * 99]))
    assert svg(lowered.picture()).count("<rect") == len(lowered.nodes) == 7
    assert dot(lowered.picture()).count("->") == 5
