"""The graph executes what the query means, and shows every node what it should see and nothing else."""

import json
import random
from collections.abc import Callable

import pytest
from scripted_queries import (
    WARM,
    Execution,
    executed,
    meaning,
    random_query,
    scripted_retriever,
)

from dagengine_core_graph import Artifact, Inherit, QueryError, dump_graph, load_graph
from dagengine_core_graph.query import (
    Commuting,
    Generate,
    LoweredQuery,
    Message,
    Query,
    QueryNode,
    assistant,
    cross,
    fragment,
    g,
    lower,
    monad,
    par,
    plan,
    plus,
    prepare,
    repeat,
    retrieve,
    system,
    user,
)

QUERIES = 1500
S, U, A, B, C, D = system("s"), user("u"), fragment("a"), fragment("b"), fragment("c"), fragment("d")


def test_executing_the_graph_gives_what_the_query_means() -> None:
    calls = 0
    for seed in range(QUERIES):
        query = random_query(random.Random(seed))
        lowered = lower(plan(query, retriever=scripted_retriever))
        assert executed(lowered) == meaning(query)[1:], seed  # type: ignore[index]
        calls += sum(node.generate is not None for node in lowered.nodes)
    assert calls > 2 * QUERIES


def shape(query: Query) -> list[tuple[str, list[str]]]:
    """Per node its texts, with `!` if it samples, and what it reads, with `*` for a turn."""
    return [
        (
            "".join(part.text for part in node.parts) + "!" * (node.generate is not None),
            [f"{found.node}{'*' * isinstance(found, Artifact)}" for found in node.context],
        )
        for node in lower(plan(query)).nodes
    ]


def test_children_of_a_plus_have_no_references_and_the_reader_has_them_in_order() -> None:
    assert shape(g(cross(S, plus(A, B), U))) == [("s", []), ("a", []), ("b", []), ("u!", ["n0", "n1", "n2"])]


def test_messages_between_joins_are_one_node_that_inherits_what_stands_before() -> None:
    assert shape(g(cross(S, A, plus(B, C), U, "v", plus(D), "w"))) == [
        ("sa", []),
        ("b", []),
        ("c", []),
        ("uv", ["n0", "n1", "n2"]),
        ("d", []),
        ("w!", ["n3", "n4"]),
    ]


def test_messages_alone_are_the_calls_own_input() -> None:
    assert shape(g(cross(S, U, A))) == [("sua!", [])]


def test_a_plus_child_of_several_parts_has_a_scope_of_its_own() -> None:
    assert shape(g(cross(S, plus(cross(A, plus(B, C), "v"), D), U))) == [
        ("s", []),
        ("a", []),
        ("b", []),
        ("c", []),
        ("v", ["n1", "n2", "n3"]),
        ("d", []),
        ("u!", ["n0", "n4", "n5"]),
    ]


def test_a_nested_call_sees_its_own_input_and_its_reader_only_its_turn() -> None:
    assert shape(g(cross(S, plus(g(cross("x", A)), g("y")), U))) == [
        ("s", []),
        ("xa!", []),
        ("y!", []),
        ("u!", ["n0", "n1*", "n2*"]),
    ]
    assert shape(g(cross(S, g(U)))) == [("s", []), ("u!", []), ("!", ["n0", "n1*"])]


def test_equal_subtrees_are_nodes_of_their_own_that_reuse_pages() -> None:
    lowered = lower(plan(g(cross(S, plus(A, A, g(cross(S, plus(A), U))), U))))
    assert [(node.id, node.reuses) for node in lowered.nodes] == [
        ("n0", None),
        ("n1", None),
        ("n2", "n1"),
        ("n3", "n0"),
        ("n4", "n1"),
        ("n5", None),
        ("n6", None),
    ]


def test_equal_calls_are_samples_that_wait_for_one_input() -> None:
    lowered = lower(plan(g(cross(S, repeat(3, g(cross(S, U))), "which"))))
    assert [(n.id, n.generate is not None, n.sample, n.reuses) for n in lowered.nodes] == [
        ("n0", False, 0, None),
        ("n1", False, 0, None),
        ("n2", True, 0, "n0"),
        ("n3", True, 1, "n0"),
        ("n4", True, 2, "n0"),
        ("n5", True, 0, None),
    ]
    sourced = lower(plan(g(plus(fragment("a", "x"), fragment("a", "y"), user("a"), assistant("a")))))
    assert [node.reuses for node in sourced.nodes] == [None, "n0", "n0", None, None]
    in_order = lower(plan(cross(g(U), g(U), g(U, temperature=0.1))))
    assert [(n.sample, n.reuses) for n in in_order.nodes] == [(0, None), (1, "n0"), (0, "n0")]


def apart(query: Query) -> Query:
    """The same query, in which no two calls are one object."""
    return query.with_subqueries(tuple(apart(child) for child in query.subqueries))


def test_samples_of_one_call_are_lowered_as_equal_calls_are() -> None:
    once, twice, deep = g(cross(S, U)), g(cross(S, A)), g(cross(S, plus(A, g(U)), B))
    hides = g(cross(monad(B), U))
    for query in (
        g(cross(S, repeat(3, once), U)),
        g(cross(plus(once, once, user("v"), once, twice, once, once), U)),
        g(cross(plus(deep, deep, once, once, deep), U)),
        g(cross(plus(hides, hides, monad(once), hides), U)),
    ):
        planned = plan(query).query
        assert plan(apart(query)).query == planned and lower(planned) == lower(apart(planned))
    again = 0
    for seed in range(QUERIES // 3):
        planned = plan(random_query(random.Random(seed)), retriever=scripted_retriever).query
        found = lower(planned)
        assert found == lower(apart(planned)), seed
        again += sum(node.sample > 0 for node in found.nodes)
    assert again > QUERIES // 30


def test_what_is_prepared_is_left_out_where_it_is_computed_anyway() -> None:
    lowered = lower(plan(g(cross(S, retrieve("c", "?"), U)), retriever=lambda query: ["a", "b", "a"]))
    assert [node.messages[0]["content"] for node in lowered.nodes] == ["s", "a", "b", "a", "u"]
    assert lowered.left_out == 3
    alone = lower(plan(monad(plus(prepare(plus(A, B)), cross(S, U), A))))
    assert [(node.parts, node.generate) for node in alone.nodes] == [
        ((A,), None),
        ((B,), None),
        ((S, U), None),
    ]
    assert (alone.left_out, alone.answers) == (1, ())
    whole = lower(plan(cross(monad(cross(S, plus(A, B))), g(cross(S, plus(B, A), U)))))
    assert (len(whole.nodes), whole.left_out) == (4, 3)
    part = lower(plan(cross(monad(cross(S, plus(A, C))), g(cross(S, plus(B, A), U)))))
    assert (len(part.nodes), part.left_out) == (7, 0)


def test_a_hidden_call_runs_and_nobody_reads_it() -> None:
    lowered = lower(plan(g(cross(monad(g(A)), U))))
    assert [(node.parts, node.generate is not None, node.context) for node in lowered.nodes] == [
        ((A,), True, ()),
        ((U,), True, ()),
    ]
    assert lowered.answers == ("n1",)


def test_order_is_free_exactly_where_it_was_declared() -> None:
    node = lower(plan(g(cross(S, plus(A, cross(B, plus(C, D)), g(U)), U)))).nodes[-1]
    assert [found.node for found in node.context] == ["n0", "n1", "n2", "n3", "n4", "n5"]
    assert node.order == (0, Commuting(((1,), (2, Commuting(((3,), (4,)))), (5,))))
    assert lower(plan(g(cross(par(A, plus(B)), U)))).nodes[-1].order == (0, 1)


def test_only_what_begins_a_prompt_does_not_continue_one() -> None:
    lowered = lower(plan(g(cross(S, plus(A, g(cross(S, plus(B), U))), U))))
    assert [(node.parts, node.continues) for node in lowered.nodes] == [
        ((S,), False),
        ((A,), True),
        ((S,), False),
        ((B,), True),
        ((U,), True),
        ((U,), True),
    ]


def test_a_path_names_the_subtree_of_each_node() -> None:
    lowered = lower(plan(cross("v", g(cross(S, A, plus(B, cross(C, D)), U)))))
    assert [node.path for node in lowered.nodes] == [
        "cross[1].g.input.cross[0]",
        "cross[1].g.input.cross[2].plus[0]",
        "cross[1].g.input.cross[2].plus[1].cross[0]",
        "cross[1].g",
    ]


def test_the_result_has_the_shape_of_the_query() -> None:
    lowered = lower(plan(cross("v", repeat(2, g(U)), monad(g(A)), g(g(B)))))
    answers = {name: f"answer {index}" for index, name in enumerate(lowered.answers)}
    texts = {node.id: "hidden" for node in lowered.nodes} | answers
    expected = cross("v", plus(assistant("answer 0"), assistant("answer 1")), assistant("answer 2"))
    assert lowered.result(texts) == expected
    assert lower(plan(monad(g(A)))).result({}) == plan(monad(user(""))).query
    with pytest.raises(QueryError) as caught:
        lowered.result({name: text for name, text in texts.items() if name != lowered.answers[2]})
    assert (caught.value.code, caught.value.field) == ("invalid_request", "cross[3].g")


def test_a_query_that_was_not_planned_is_refused_where_it_has_to_be() -> None:
    for query, field in ((g(cross(S, cross(A, B))), "g.input.cross[1]"), (plus(repeat(2, g(A))), "plus[0]")):
        with pytest.raises(QueryError) as caught:
            lower(query)
        assert (caught.value.code, caught.value.field) == ("invalid_request", field)


def test_parameters_have_the_names_of_a_graph_document() -> None:
    call = g(U, model="m", temperature=0.0, options={"seed": 3, "stop": ["."]})
    (node,) = lower(plan(call)).nodes
    assert node.sampling() == {"max_tokens": 2048, "temperature": 0.0, "seed": 3, "stop": ["."]}
    assert node.sampling(None) == {"temperature": 0.0, "seed": 3, "stop": ["."]}
    assert lower(plan(g(U, max_tokens=7))).nodes[0].sampling() == {"max_tokens": 7, "temperature": 0.6}
    assert lower(plan(plus(call, g(U), g(A, model="n"), call))).models == ("m", "n")


def test_the_document_is_a_graph_that_can_be_loaded() -> None:
    lowered = lower(plan(g(cross(S, plus(A, g(B, model="m")), U), model="m")))
    document = load_graph(json.loads(json.dumps(dump_graph(lowered.document()))))
    assert (document, document.model) == (lowered.document(), "m")
    assert [document.nodes[-1].context[i].span for i in range(3)] == [None, None, "turn"]
    assert document.nodes[1].input == ({"role": "user", "content": "a"},)


def test_lengths_of_a_graph_may_be_given() -> None:
    lowered = lower(plan(g(cross(S, g(A), U))))
    graph = lowered.graph({"n0": (3, 0), "n1": (5, 7), "n2": (2, 4)})
    assert [(node.length, node.visible.num_tokens) for node in graph.nodes()] == [(3, 0), (12, 0), (6, 10)]


def test_depth_needs_no_more_stack_than_python_has() -> None:
    query: Query = g(A)
    while query.depth < 63:
        query = g(cross(plus(query), U)) if query.depth < 61 else plus(query)
    assert len(lower(plan(query)).answers) == 1
    assert executed(lower(plan(query)))[0] == meaning(query)[1]  # type: ignore[index]


def with_node(lowered: LoweredQuery, index: int, **changes: object) -> LoweredQuery:
    nodes = list(lowered.nodes)
    nodes[index] = nodes[index]._replace(**changes)
    return LoweredQuery(lowered.query, tuple(nodes), lowered.answers, lowered.left_out)


QUERY = Generate(WARM, cross(S, plus(A, B), plus(Generate(WARM, U), Generate(WARM, U)), "v", plus(C), "w"))
# n0 [u] · n1 [s] · n2 [a] · n3 [b] · n4 [u]! · n5 [u]! · n6 [v] · n7 [c] · n8 [w]!
FAULTS: dict[str, Callable[[LoweredQuery], LoweredQuery]] = {
    "a fragment sees the system": lambda q: with_node(q, 2, context=(Inherit("n1"),), order=(0,)),
    "a fragment sees its sibling": lambda q: with_node(q, 3, context=(Inherit("n2"),), order=(0,)),
    "two samples are one": lambda q: with_node(
        q,
        6,
        context=(*q.nodes[6].context[:4], Artifact("n4", "turn")),
        order=(0, Commuting(((1,), (2,))), Commuting(((3,), (4,)))),
    ),
    "the prompt of a call is shown": lambda q: with_node(
        q, 6, context=(*q.nodes[6].context[:3], Inherit("n4"), Artifact("n5", "turn"))
    ),
    "ordered parts change places": lambda q: with_node(
        q, 8, context=tuple(reversed(q.nodes[8].context)), order=(0, 1)
    ),
    "what stands before is forgotten": lambda q: with_node(q, 6, context=(), order=()),
    "a message is lost": lambda q: with_node(q, 6, parts=()),
    "a role is another": lambda q: with_node(q, 1, parts=(Message("user", "s"),)),
    "ordered parts are free": lambda q: with_node(q, 8, order=(Commuting(((1,), (0,))),)),
    "free parts are ordered": lambda q: with_node(q, 6, order=(0, 1, 2, 3, 4)),
    "an inner call sees the outer prompt": lambda q: with_node(q, 4, context=(Inherit("n1"),), order=(0,)),
    "other parameters": lambda q: with_node(q, 4, generate=g(U, max_tokens=9).params),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_lowering_is_found(fault: Callable[[LoweredQuery], LoweredQuery]) -> None:
    lowered = lower(plan(QUERY))
    right = meaning(QUERY)[1:]  # type: ignore[index]
    assert executed(lowered) == right
    try:
        found = executed(fault(lowered))
    except AssertionError:
        return
    assert found != right


def test_the_executor_checks_what_the_graph_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower(plan(QUERY))
    graph = with_node(lowered, 2, context=(Inherit("n1"),), order=(0,)).graph()
    monkeypatch.setattr(LoweredQuery, "graph", lambda self: graph)
    with pytest.raises(AssertionError):
        Execution(lowered)


def test_a_node_is_a_value() -> None:
    one, other = (lower(plan(QUERY)) for _ in range(2))
    assert one == other and one is not other
    assert isinstance(one.nodes[0], QueryNode)
