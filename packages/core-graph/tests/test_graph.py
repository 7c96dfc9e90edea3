"""Growing, sealing, dropping, and every refusal with its code and field."""

import gc
import weakref
from collections.abc import Callable

import pytest

from dagengine_core_graph import (
    Artifact,
    ContextGraph,
    Digest,
    GraphError,
    Inherit,
    NodeSpans,
    TokenRange,
    compile_context,
    make_reference,
    passed,
    visible,
)


@pytest.fixture
def graph() -> ContextGraph:
    """`doc` sampled nothing; `answer` is 4 of prompt, 5 of output and an end; `open` still grows."""
    graph = ContextGraph()
    graph.add("doc", length=6, sealed=True)
    graph.add("answer", [Inherit("doc")], length=4)
    graph.extend("answer", 6)
    graph.seal("answer", NodeSpans(output=(4, 9), turn=(2, 10)))
    graph.add("open", length=3)
    return graph


def test_nodes_come_in_arrival_order(graph: ContextGraph) -> None:
    assert [node.id for node in graph.nodes()] == ["doc", "answer", "open"]
    assert len(graph) == 3
    assert "doc" in graph
    assert "nothing" not in graph


@pytest.mark.parametrize(
    ("node", "span", "at", "expected"),
    [
        ("doc", None, None, (0, 6)),
        ("doc", "all", None, (0, 6)),
        ("doc", "prompt", None, (0, 6)),
        ("doc", "output", None, (6, 6)),
        ("answer", None, None, (4, 9)),
        ("answer", "output", None, (4, 9)),
        ("answer", "prompt", None, (0, 4)),
        ("answer", "turn", None, (2, 10)),
        ("answer", "all", None, (0, 10)),
        ("answer", (1, 3), None, (1, 3)),
        ("answer", (10, 10), None, (10, 10)),
        ("answer", None, 6, (4, 6)),
        ("answer", None, 2, (2, 2)),
        ("answer", "all", 0, (0, 0)),
        ("open", "all", None, (0, 3)),
    ],
)
def test_spans_mean_own_tokens(
    graph: ContextGraph, node: str, span: object, at: int | None, expected: tuple[int, int]
) -> None:
    assert graph.node(node).span(span, at) == expected


def test_an_answer_that_returned_nothing_has_an_empty_output_not_all(graph: ContextGraph) -> None:
    graph.seal("open", NodeSpans(output=(2, 2)))
    assert compile_context(graph, [Artifact("open")]).ranges == ()


def test_names_may_stand_for_other_spans_and_what_was_compiled_stays(graph: ContextGraph) -> None:
    compiled = compile_context(graph, [Artifact("answer")])
    graph.rename_spans("answer", NodeSpans(output=(4, 6), turn=(2, 10)))
    assert compiled.ranges == (TokenRange("answer", 4, 9),)
    assert compile_context(graph, [Artifact("answer")]).ranges == (TokenRange("answer", 4, 6),)


REFUSALS: list[tuple[str, str | None, Callable[[ContextGraph], object]]] = [
    ("state_not_found", "context[0].node", lambda g: g.add("x", [Inherit("nothing")])),
    ("state_not_found", "context[1].node", lambda g: compile_context(g, [Inherit("doc"), Artifact("x")])),
    ("state_not_found", "context[0].node", lambda g: g.add("x", [Inherit("x")])),
    ("state_not_sealed", "context[0].node", lambda g: g.add("x", [Digest("open")])),
    ("edge_mix_forbidden", "context[1].mode", lambda g: g.add("x", [Inherit("doc"), Digest("answer")])),
    (
        "edge_mix_forbidden",
        "context[2].mode",
        lambda g: g.add("x", [Digest("doc"), Artifact("doc"), Inherit("doc")]),
    ),
    ("span_out_of_range", "context[0].span", lambda g: g.add("x", [Artifact("doc", (2, 7))])),
    ("span_out_of_range", "context[0].span", lambda g: g.add("x", [Artifact("doc", (3, 2))])),
    ("span_out_of_range", "context[0].span", lambda g: g.add("x", [Artifact("doc", (-1, 2))])),
    ("span_out_of_range", "context[0].span", lambda g: g.add("x", [Artifact("doc", (2, 7), at=3)])),
    ("span_out_of_range", "context[0].span", lambda g: g.add("x", [Artifact("doc", "turn")])),
    ("span_out_of_range", "context[0].at", lambda g: g.add("x", [Inherit("doc", at=7)])),
    ("span_out_of_range", "context[0].at", lambda g: g.add("x", [Artifact("doc", at=-1)])),
    ("span_out_of_range", "spans.output", lambda g: g.seal("open", NodeSpans(output=(2, 4)))),
    ("span_out_of_range", "spans.turn", lambda g: g.add("x", length=1, spans=NodeSpans(turn=(1, 2)))),
    ("invalid_request", "context[0].span", lambda g: g.add("x", [Artifact("doc", "outptu")])),
    ("invalid_request", "context[0].span", lambda g: g.add("x", [Artifact("doc", (0, True))])),
    ("invalid_request", "context[0].span", lambda g: g.add("x", [Artifact("doc", [0, 1])])),
    ("invalid_request", "context[0].at", lambda g: g.add("x", [Inherit("doc", at=True)])),
    ("invalid_request", "context[0].at", lambda g: g.add("x", [Inherit("doc", at=1.0)])),
    ("invalid_request", "context[0].start", lambda g: g.add("x", [Inherit("doc", start=-1)])),
    ("invalid_request", "context[0].node", lambda g: g.add("x", [Inherit(["doc"])])),
    ("invalid_request", "context[0]", lambda g: g.add("x", ["doc"])),
    ("invalid_request", "node", lambda g: g.add("doc")),
    ("invalid_request", "node", lambda g: g.add([])),
    ("invalid_request", "length", lambda g: g.add("x", length=-1)),
    ("invalid_request", "length", lambda g: g.add("x", length=True)),
    ("invalid_request", "node", lambda g: g.extend("doc", 1)),
    ("invalid_request", "count", lambda g: g.extend("open", -1)),
    ("invalid_request", "node", lambda g: g.seal("doc")),
    ("invalid_request", "node", lambda g: g.rename_spans("open", NodeSpans())),
    ("state_not_found", "node", lambda g: g.rename_spans("nothing", NodeSpans())),
    ("span_out_of_range", "spans.output", lambda g: g.rename_spans("doc", NodeSpans(output=(2, 7)))),
    ("state_not_found", "node", lambda g: g.extend("nothing", 1)),
    ("state_not_found", "node", lambda g: g.seal("nothing")),
    ("state_not_found", "node", lambda g: g.drop("nothing")),
    ("state_not_found", "node", lambda g: visible(g, "nothing")),
    ("state_not_found", "node", lambda g: passed(g, "nothing")),
    ("invalid_request", "mode", lambda g: make_reference("doc", "inhreit")),
    ("invalid_request", "span", lambda g: make_reference("doc", "inherit", span="all")),
]


@pytest.mark.parametrize(("code", "field", "call"), REFUSALS)
def test_refusals_are_typed_and_change_nothing(
    graph: ContextGraph, code: str, field: str | None, call: Callable[[ContextGraph], object]
) -> None:
    def state() -> list[object]:
        return [(node.id, node.length, node.sealed, node.spans) for node in graph.nodes()]

    before = state()
    with pytest.raises(GraphError) as refused:
        call(graph)
    assert (refused.value.code, refused.value.field) == (code, field)
    assert refused.value.message in str(refused.value)
    assert state() == before


def test_a_dropped_node_lives_in_what_reads_it_and_dies_with_it(graph: ContextGraph) -> None:
    document = weakref.ref(graph.node("doc"))
    answer = weakref.ref(graph.node("answer"))
    graph.drop("doc")
    assert "doc" not in graph
    assert visible(graph, "answer").ranges == (TokenRange("doc", 0, 6),)
    assert compile_context(graph, [Inherit("answer")]).num_tokens == 16
    gc.disable()
    try:
        graph.drop("answer")
        assert (document(), answer()) == (None, None), "no reference cycles: dropping frees at once"
    finally:
        gc.enable()


def test_a_compiled_context_is_taken_by_the_graph_that_it_was_compiled_on(graph: ContextGraph) -> None:
    references = [Inherit("doc"), Artifact("answer", "turn"), Artifact("doc", (1, 3))]
    compiled = compile_context(graph, references)
    one, other = graph.add("one", references), graph.add("other", compiled)
    assert other.visible is compiled
    assert (one.context, one.parents) == (other.context, other.parents)
    assert (one.visible.ranges, tuple(one.passed)) == (other.visible.ranges, tuple(other.passed))
    graph.drop("answer")
    graph.add("answer", length=10, sealed=True)
    for elsewhere in (graph, ContextGraph()):
        with pytest.raises(GraphError) as refused:
            elsewhere.add("late", compiled)
        assert refused.value.code == "state_not_found"
        assert "late" not in elsewhere


def test_a_name_used_again_is_another_node(graph: ContextGraph) -> None:
    graph.drop("doc")
    graph.add("doc", length=2, sealed=True)
    both = compile_context(graph, [Inherit("answer"), Inherit("doc")])
    assert [ranges for _, ranges in both.parts] == [
        (TokenRange("doc", 0, 6), TokenRange("answer", 0, 10)),
        (TokenRange("doc", 0, 2),),
    ]
    graph.add("reader", [Inherit("answer"), Inherit("doc")], sealed=True)
    assert graph.node("reader").parents[1] is graph.node("doc")
    assert graph.node("answer").parents[0] is not graph.node("doc")


def test_references_keep_the_order_given_and_their_modes(graph: ContextGraph) -> None:
    references = (Artifact("answer"), Inherit("doc", at=2, start=9))
    node = graph.add("x", references)
    assert node.context == references
    assert [(r.mode, r.passes) for r in (*references, Digest("doc"))] == [
        ("artifact", True),
        ("inherit", True),
        ("digest", False),
    ]


@pytest.mark.parametrize("value", [10**5000, -(10**5000), 10**30], ids=["huge", "low", "large"])
def test_a_number_of_any_size_is_refused_by_field(graph: ContextGraph, value: int) -> None:
    for reference, field in (
        (Artifact("answer", (0, value)), "span"),
        (Artifact("answer", (value, value)), "span"),
        (Inherit("answer", at=value), "at"),
    ):
        with pytest.raises(GraphError) as refused:
            graph.add("reader", [reference])
        assert (refused.value.code, refused.value.field) == ("span_out_of_range", f"context[0].{field}")
        assert len(refused.value.message) < 200
    with pytest.raises(GraphError) as refused:
        graph.add("reader", [Inherit("answer", start=-abs(value))])
    assert refused.value.field == "context[0].start"
    with pytest.raises(GraphError) as refused:
        graph.add("reader", length=-abs(value))
    assert refused.value.field == "length"
