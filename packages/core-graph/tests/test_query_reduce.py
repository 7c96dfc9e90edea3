"""A wide judge becomes a tree of narrow ones, only where that was asked for and declared."""

import pytest
from scripted_queries import scripted_model

from dagengine_core_graph import QueryError
from dagengine_core_graph.query import (
    Generate,
    Plan,
    Plus,
    Query,
    Reduction,
    cross,
    evaluate,
    fragment,
    g,
    lower,
    monad,
    plan,
    plus,
    repeat,
    retrieve,
    system,
    user,
)


def judge(candidates: int, *, closed: bool = True) -> Generate:
    return g(
        cross(system("J"), plus(*(f"c{i}" for i in range(candidates))), "best?"), model="m", closed=closed
    )


def over(*candidates: Query | str) -> Generate:
    return g(cross(system("J"), plus(*candidates), "best?"), model="m", closed=True)


def calls(query: Query) -> int:
    return len(evaluate(query, scripted_model).calls)


def rounds(planned: Plan) -> int:
    """Calls on the longest way through the graph."""
    depth: dict[str, int] = {}
    for node in lower(planned).nodes:
        depth[node.id] = max((depth[str(found.node)] for found in node.context), default=0) + (
            node.generate is not None
        )
    return max(depth.values())


def test_eight_candidates_by_two_are_seven_judges_in_three_rounds() -> None:
    planned = plan(judge(8), reduce=2)
    assert planned.query == over(
        over(over("c0", "c1"), over("c2", "c3")), over(over("c4", "c5"), over("c6", "c7"))
    )
    assert planned.reductions == (Reduction("g", 8, 2, 6, 3),)
    assert not planned.exact
    assert planned.rewrites == ("reduce_judges",)


@pytest.mark.parametrize("arity", [2, 3, 4, 7])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 9, 24, 25])
def test_what_is_reported_is_what_is_done(width: int, arity: int) -> None:
    planned = plan(judge(width), reduce=arity)
    assert max(len(found.children) for found in joins(planned.query)) <= arity
    if width <= arity:
        assert planned.query is planned.source and planned.exact and not planned.reductions
        return
    (found,) = planned.reductions
    assert (found.path, found.width, found.arity) == ("g", width, arity)
    assert found.calls_added == calls(planned.query) - calls(planned.source)
    assert found.rounds == rounds(planned) > 1


def joins(query: Query) -> list[Plus]:
    below = [found for child in query.subqueries for found in joins(child)]
    return [query, *below] if isinstance(query, Plus) else below


def test_one_candidate_left_over_is_passed_on_without_a_call() -> None:
    assert plan(judge(3), reduce=2).query == over(over("c0", "c1"), "c2")


def test_candidates_are_seen_once_and_in_order() -> None:
    seen: list[str] = []
    waiting: list[Query] = [plan(judge(24), reduce=5).query]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Plus):
            seen += [child.text for child in found.children if not isinstance(child, Generate)]  # type: ignore[attr-defined]
        waiting += reversed(found.subqueries)
    assert sorted(seen) == sorted(f"c{i}" for i in range(24))


def test_generated_candidates_are_called_as_often_as_before() -> None:
    query = g(cross(system("J"), repeat(8, g("write", temperature=1.0)), "best?"), closed=True)
    planned = plan(query, reduce=2)
    written = [
        call for call in evaluate(planned.query, scripted_model).calls if call.params.temperature == 1.0
    ]
    assert len(written) == 8
    assert planned.reductions[0].calls_added == 6
    hidden = [
        node for node in lower(planned).nodes if node.generate is None and node.parts[0].text == "write"
    ]
    assert len(hidden) >= 1, "the shared input is still prepared"


def test_a_reduction_is_never_made_unasked() -> None:
    planned = plan(judge(8))
    assert planned.query is planned.source
    assert planned.exact


def test_a_reduction_of_what_is_not_declared_closed_is_refused_where_it_stands() -> None:
    with pytest.raises(QueryError) as caught:
        plan(cross("a", g(judge(8, closed=False))), reduce=2)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "cross[1].g.input.g")
    with pytest.raises(QueryError) as caught:
        plan(g("a"), reduce=2)
    assert caught.value.code == "invalid_request"


def test_only_what_is_declared_closed_is_reduced() -> None:
    inner = judge(4, closed=False)
    planned = plan(g(plus(inner, judge(4), "c"), closed=True, model="m"), reduce=2)
    assert [(found.path, found.width) for found in planned.reductions] == [("g.input.plus[1].g", 4), ("g", 3)]
    assert planned.query == g(
        plus(g(plus(inner, over(over("c0", "c1"), over("c2", "c3"))), closed=True, model="m"), "c"),
        closed=True,
        model="m",
    )


@pytest.mark.parametrize(
    "query",
    [
        g(cross(g("x"), plus("a", "b", "c")), closed=True),
        g(cross(plus("a", "b", "c"), "x", plus("a", "b", "c")), closed=True),
    ],
)
def test_a_judge_with_more_than_messages_beside_its_candidates_is_refused(query: Query) -> None:
    with pytest.raises(QueryError) as caught:
        plan(query, reduce=2)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "g.input")


@pytest.mark.parametrize("arity", [1, 0, -2, True, 2.0, "2"])
def test_an_arity_below_two_is_refused(arity: object) -> None:
    with pytest.raises(QueryError) as caught:
        plan(judge(8), reduce=arity)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.field) == ("invalid_request", "reduce")


def test_preparations_stay_with_the_judge_and_are_no_candidates() -> None:
    query = g(plus(retrieve("c", "?"), monad("warm")), closed=True)
    planned = plan(query, reduce=2, retriever=lambda query: ["a", "b", "c"])
    assert planned.reductions[0].width == 3
    assert [node.parts for node in lower(planned).nodes if node.generate is None] == [
        (part,) for part in (user("warm"), *map(fragment, "abc"))
    ]


def test_what_grows_beyond_the_limit_is_refused() -> None:
    with pytest.raises(QueryError) as caught:
        plan(judge(100), reduce=2, max_nodes=150)
    assert caught.value.code == "capacity"


def test_judges_in_judges_are_reduced_until_it_is_too_deep() -> None:
    query = judge(4)
    while query.depth < 60:
        query = over(query, *"abcdefgh")
    with pytest.raises(QueryError) as caught:
        plan(query, reduce=2)
    assert caught.value.code == "capacity"
    wide = plan(query, reduce=8)
    assert len(wide.reductions) == 19
    assert calls(wide.query) == calls(query) + sum(found.calls_added for found in wide.reductions)
    assert rounds(wide) == sum(found.rounds for found in wide.reductions) + 1
