"""Every exact rule keeps what a query means, and a rule that is wrong is found."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from scripted_queries import COLD, WARM, meaning, outcome, random_query, scripted_model, scripted_retriever

from dagengine_core_graph import QueryError
from dagengine_core_graph.query import (
    Chat,
    Cross,
    Fragment,
    Generate,
    Map,
    Message,
    Monad,
    Par,
    Plus,
    Query,
    Repeat,
    Retrieve,
    Seq,
    Zip,
    assistant,
    chat,
    cross,
    evaluate,
    fragment,
    g,
    map_inputs,
    monad,
    note,
    par,
    plan,
    plus,
    prepare,
    repeat,
    retrieve,
    seq,
    shuffled,
    system,
    user,
    zipped,
)
from dagengine_core_graph.query.rules import RULES, Surroundings, apply

QUERIES = 2000
AROUND = Surroundings(scripted_retriever)
RULE = {rule.name: rule for rule in RULES}


def test_each_rule_and_each_plan_keep_the_meaning_of_random_queries() -> None:
    fired: Counter[str] = Counter()
    for seed in range(QUERIES):
        query = random_query(random.Random(seed))
        before = meaning(query)
        for rule in RULES:
            after = apply(rule, query, AROUND)
            if after is not query:
                fired[rule.name] += 1
                assert meaning(after) == before, (seed, rule.name)
        for step in plan(query, retriever=scripted_retriever).steps:
            assert meaning(step.query) == before, (seed, step.rule)
    assert min(fired[rule.name] for rule in RULES) >= 25, fired


def test_a_plan_is_a_fixed_point_of_every_rule_and_holds_six_constructors() -> None:
    kinds = (Message, Fragment, Generate, Plus, Cross, Monad)
    for seed in range(300):
        planned = plan(random_query(random.Random(seed)), retriever=scripted_retriever).query
        for rule in RULES:
            assert apply(rule, planned, AROUND) is planned
        waiting = [planned]
        while waiting:
            found = waiting.pop()
            assert isinstance(found, kinds)
            waiting += found.subqueries
        assert plan(planned).query is planned


A, B, S = user("a"), user("b"), system("s")
SHARED = cross(S, "a")


def ask(*parts: Query | str) -> Generate:
    return Generate(WARM, cross(*parts) if len(parts) > 1 else parts[0])  # type: ignore[arg-type]


def changed(kind: type[Query], change: Callable[..., Query]) -> Callable[[Query, Surroundings], Query]:
    """A rewriting of one constructor."""
    return lambda query, around: change(query) if isinstance(query, kind) else query


def lose_the_scope(query: Query, _: Surroundings) -> Query:
    if not isinstance(query, Cross):
        return query
    return Cross(
        tuple(part for c in query.children for part in (c.children if isinstance(c, Plus) else (c,)))
    )


def show_the_preparation(query: Query, around: Surroundings) -> Query:
    found = RULE["desugar_retrieval"].rewrite(query, around)
    if found is query:
        return query
    return Plus(tuple(c.query if isinstance(c, Monad) else c for c in found.subqueries))


def show_the_input(query: Query, around: Surroundings) -> Query:
    found = RULE["distribute_plus"].rewrite(query, around)
    return (
        Plus(tuple(c.query if isinstance(c, Monad) else c for c in found.subqueries))
        if found is not query
        else query
    )


def drop_the_neighbours(query: Query, around: Surroundings) -> Query:
    found = RULE["drop_empties"].rewrite(query, around)
    return Cross(()) if found is not query and isinstance(query, Plus) else found


WRONG: list[tuple[str, str, Callable[[Query, Surroundings], Query], Query]] = [
    (
        "desugar_chat",
        "+ for ⋈",
        changed(Chat, lambda q: Generate(q.params, Plus(q.messages))),
        Chat(WARM, (S, A)),
    ),
    ("desugar_retrieval", "shows the prepare call", show_the_preparation, ask(S, retrieve("x", "a"))),
    (
        "desugar_retrieval",
        "⋈ for +",
        changed(Retrieve, lambda q: Cross(tuple(map(user, ("1", "2"))))),
        ask(S, retrieve("x", "a")),
    ),
    ("unroll_repeat", "one sample for all", changed(Repeat, lambda q: q.generate), ask(Repeat(2, ask(A)), S)),
    (
        "unroll_repeat",
        "one too many",
        changed(Repeat, lambda q: Plus((q.generate,) * (q.n + 1))),
        Repeat(2, ask(A)),
    ),
    (
        "unroll_repeat",
        "⋈ for +",
        changed(Repeat, lambda q: Cross((q.generate,) * q.n)),
        ask(Repeat(2, ask(A))),
    ),
    (
        "unroll_map",
        "one call over all",
        changed(Map, lambda q: Generate(q.params, Plus(tuple(map(user, q.inputs))))),
        Map(WARM, ("a", "b")),
    ),
    (
        "unroll_zip",
        "first only once",
        changed(Zip, lambda q: Cross((q.first, q.second))),
        ask(zipped("a", cross("b", "a"))),
    ),
    (
        "unroll_zip",
        "behind, not before",
        changed(Zip, lambda q: Cross((q.second, q.first))),
        ask(zipped("a", "b")),
    ),
    ("order_joins", "par is no +", changed(Par, lambda q: Plus(q.children)), ask(par("a", "b"))),
    ("order_joins", "seq is no +", changed(Seq, lambda q: Plus(q.children)), ask(seq("a", "b"))),
    ("drop_empties", "neighbours too", drop_the_neighbours, ask(S, Plus((A, Message("user", ""))))),
    ("flatten_cross", "loses the scope of a +", lose_the_scope, ask(S, plus("a", "b"))),
    (
        "flatten_cross",
        "forgets the tail",
        changed(Cross, lambda q: Cross(q.children[:-1] or q.children)),
        ask(S, cross("a", "b")),
    ),
    (
        "flatten_plus",
        "+(a) is no a",
        changed(Plus, lambda q: q.children[0] if len(q.children) == 1 else q),
        ask(S, plus("a")),
    ),
    (
        "flatten_plus",
        "merges equals",
        changed(Plus, lambda q: Plus(tuple(dict.fromkeys(q.children)))),
        ask(plus("a", plus("b"), "a")),
    ),
    (
        "flatten_plus",
        "flattens a ⋈",
        changed(
            Plus,
            lambda q: Plus(
                tuple(p for c in q.children for p in (c.subqueries if isinstance(c, Cross) else (c,)))
            ),
        ),
        ask(plus(cross("a", "b"), "a")),
    ),
    ("distribute_plus", "shows the input", show_the_input, ask(S, plus(ask(SHARED), ask(SHARED)), "b")),
    (
        "distribute_plus",
        "merges equal calls",
        changed(Plus, lambda q: Plus(tuple(dict.fromkeys(q.children)))),
        ask(S, plus(ask(SHARED), ask(SHARED)), "b"),
    ),
]


@pytest.mark.parametrize(
    ("name", "rewrite", "query"),
    [(n, r, q) for n, _, r, q in WRONG],
    ids=[f"{n}: {w}" for n, w, _, _ in WRONG],
)
def test_a_wrong_rule_changes_the_result_of_its_query(
    name: str, rewrite: Callable[[Query, Surroundings], Query], query: Query
) -> None:
    wrong = apply(replace(RULE[name], kinds=-1, rewrite=rewrite, sugar=True), query, AROUND)
    assert meaning(apply(RULE[name], query, AROUND)) == meaning(query) != meaning(wrong)


def test_every_rule_has_a_wrong_one() -> None:
    assert {name for name, *_ in WRONG} == set(RULE)


def rewritten(name: str, query: Query, around: Surroundings = AROUND) -> Query:
    return apply(RULE[name], query, around)


def test_a_chat_is_a_call_over_ordered_messages() -> None:
    found = rewritten("desugar_chat", chat(S, A, assistant("c"), model="m", max_tokens=8))
    assert found == g(cross(S, A, assistant("c")), model="m", max_tokens=8)


def test_a_retrieval_is_a_plus_of_what_is_found_prepared_where_a_call_reads_it() -> None:
    around = Surroundings(lambda query: ["one", fragment("two", query.corpus), ""])
    found = (fragment("one"), fragment("two", "x"))
    assert rewritten("desugar_retrieval", retrieve("x", "?"), around) == plus(*found)
    assert rewritten("desugar_retrieval", g(retrieve("x", "?"), model="m", temperature=1.0), around) == g(
        plus(monad(prepare(plus(*found), model="m")), *found), model="m", temperature=1.0
    )


def test_a_retrieval_that_finds_nothing_is_an_empty_plus() -> None:
    planned = plan(g(cross("a", retrieve("x", "?"))), retriever=lambda query: [])
    assert planned.query == g("a")
    with pytest.raises(QueryError) as caught:
        plan(cross(g("a"), g(retrieve("x", "?"))), retriever=lambda query: [])
    assert (caught.value.code, caught.value.field) == ("invalid_request", "cross[1].g.input")


def test_a_repeat_is_so_many_equal_calls() -> None:
    call = g("a")
    assert rewritten("unroll_repeat", repeat(3, call)) == plus(call, call, call)
    assert rewritten("unroll_repeat", repeat(0, call)) == plus(call)


def test_a_map_is_a_call_for_each_input() -> None:
    assert rewritten("unroll_map", map_inputs(["a", "b"], model="m")) == plus(
        g("a", model="m"), g("b", model="m")
    )


def test_a_zip_puts_its_first_before_each_child_that_shows_something() -> None:
    first = cross(S, "x")
    assert rewritten("unroll_zip", zipped(first, par("a", note("n"), monad("m"), "b"))) == Par(
        (first, A, note("n"), monad("m"), first, B)
    )
    assert rewritten("unroll_zip", zipped(S, g("a"))) == cross(S, g("a"))
    assert plan(zipped(S, repeat(2, g("a")))).query == plus(S, monad("a"), g("a"), S, g("a"))
    assert plan(zipped(S, zipped(B, plus("a")))).query == plus(S, B, S, A)


def test_flattening_waits_for_the_zip_that_speaks_of_the_children() -> None:
    assert plan(zipped(S, cross(cross("a", "b")))).query == cross(S, "a", "b")
    assert plan(zipped(S, cross("a", "b"))).query == cross(S, "a", S, "b")


def test_ordered_joins_are_one() -> None:
    assert plan(seq("a", par("b", cross(S)), "a")).query == cross("a", "b", S, "a")


def test_what_shows_and_runs_nothing_is_dropped_and_what_runs_stays() -> None:
    query = cross(
        "a", note("n"), plus(user(""), cross(user(""))), monad(note("n")), monad(g("a")), monad("b")
    )
    assert plan(query).query == cross("a", monad(g("a")), monad("b"))
    assert plan(query).notes == ("n", "n")


def test_a_plus_of_pluses_is_one_and_a_plus_of_one_keeps_its_scope() -> None:
    assert plan(plus("a", plus("b", plus("a", cross("a", "b"))))).query == plus(
        "a", "b", "a", cross("a", "b")
    )
    assert plan(cross(S, plus(plus("a")))).query == cross(S, plus("a"))


def test_a_shared_input_is_prepared_once_beside_its_calls() -> None:
    one, other = g(SHARED, max_tokens=4), g(SHARED, max_tokens=5)
    lone = g("b")
    assert rewritten("distribute_plus", plus(lone, one, "a", other, one)) == plus(
        lone, monad(SHARED), one, "a", other, one
    )
    nested = g(cross(S, lone))
    assert rewritten("distribute_plus", plus(nested, nested)) == plus(nested, nested), (
        "a copy would sample again"
    )


def test_a_call_is_neither_merged_nor_copied_by_a_plan() -> None:
    call = Generate(COLD, A)
    query = ask(S, plus(call, call), cross(call, repeat(2, call)), Repeat(2, ask(call)))
    planned = plan(query).query
    calls = [c for c in evaluate(query, scripted_model).calls if c.params == COLD]
    assert [c.params for c in evaluate(planned, scripted_model).calls].count(COLD) == len(calls) == 7


def test_the_order_of_a_plus_means_nothing_and_that_of_a_cross_something() -> None:
    differ = 0
    for seed in range(300):
        rng = random.Random(seed)
        query = plan(random_query(rng), retriever=scripted_retriever).query
        assert meaning(shuffled(query, rng)) == meaning(query)
        differ += meaning(reversed_crosses(query)) != meaning(query)
    assert differ > 50


def test_shuffling_changes_the_order_of_a_plus_and_of_nothing_else() -> None:
    query = plan(g(cross(S, "a", plus(*"abcdefgh"), plus("b"), "c"))).query
    found = shuffled(query, random.Random(1))
    assert found != query
    before, after = query.subqueries[0].subqueries, found.subqueries[0].subqueries
    assert Counter(before[2].subqueries) == Counter(after[2].subqueries)
    assert (before[:2], before[3:]) == (after[:2], after[3:])


def reversed_crosses(query: Query) -> Query:
    children = tuple(map(reversed_crosses, query.subqueries))
    return query.with_subqueries(children[::-1] if isinstance(query, Cross) else children)


def test_a_result_is_a_query_with_no_call_left() -> None:
    for seed in range(200):
        found = evaluate(random_query(random.Random(seed)), scripted_model, scripted_retriever)
        again = evaluate(found.result, scripted_model)
        assert again.calls == ()
        assert outcome(again.result) == outcome(found.result)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (g(Plus(())), "g.input"),
        (cross("a", g(cross("a", g(monad("b"))))), "cross[1].g.input.cross[1].g.input"),
        (plus(repeat(2, g(user("")))), "plus[0].repeat.g.input"),
        (monad(g(note("n"))), "monad.g.input"),
    ],
)
def test_a_call_without_a_prompt_is_refused_where_it_stands(query: Query, field: str) -> None:
    with pytest.raises(QueryError) as caught:
        plan(query)
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
    with pytest.raises(QueryError):
        evaluate(query, scripted_model)


def test_a_retrieval_without_a_retriever_is_refused_where_it_stands() -> None:
    with pytest.raises(QueryError) as caught:
        plan(g(cross("a", plus("b", retrieve("x", "?")))))
    assert (caught.value.code, caught.value.field) == ("invalid_request", "g.input.cross[1].plus[1]")


def test_what_would_be_too_large_is_refused_before_it_is_unrolled() -> None:
    query: Query = g("a")
    for _ in range(8):
        query = repeat(255, g(query))
    for large in (query, zipped(plus(*"abcd"), plus(*"ab" * 2000))):
        with pytest.raises(QueryError) as caught:
            plan(large)
        assert caught.value.code == "capacity"
    assert plan(repeat(20, g("a")), max_nodes=40).query.size == 41
    with pytest.raises(QueryError):
        plan(repeat(20, g("a")), max_nodes=39)
