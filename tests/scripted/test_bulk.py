"""Many queries at once: the same answers in any order, each error its own, and fragments found while they are there."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from scripted_text import text_engine

from dagengine import LLM, BulkItem, DagError
from dagengine.bulk import order_queries
from dagengine_core_graph.query import cross, g, plus

OPTIONS: dict[str, Any] = {"max_tokens": 3, "seed": 1}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with text_engine() as found:
        yield found


def asking(number: int, *pieces: int) -> Any:
    return g(cross(plus(*(f"piece {piece}" for piece in pieces)), f"question {number}"), temperature=0.0)


def corpus(rng: random.Random, count: int) -> list[Any]:
    """Queries over three of eight topics' five pieces, topics shuffled."""
    topics = [rng.randrange(8) for _ in range(count)]
    return [
        asking(i, *(topic * 5 + piece for piece in rng.sample(range(5), 3))) for i, topic in enumerate(topics)
    ]


def misses(order: Sequence[int], wanted: Sequence[Mapping[int, int]], budget: int) -> int:
    """Pages that a pool of least recent use computes, in this order."""
    pool: OrderedDict[int, int] = OrderedDict()
    missed = 0
    for index in order:
        for fragment, pages in wanted[index].items():
            missed += 0 if fragment in pool else pages
            pool[fragment] = pages
            pool.move_to_end(fragment)
        while sum(pool.values()) > budget and len(pool) > 1:
            pool.popitem(last=False)
    return missed


def test_every_order_and_window_gives_the_same_answers(llm: LLM) -> None:
    queries = corpus(random.Random(1), 40)
    alone = [llm.query(query, keep=False, **OPTIONS).text for query in queries]
    for settings in ({}, {"order": "given", "window": 7}, {"window": 1}, {"budget_pages": 8}):
        found = llm.query_bulk(queries, **settings, **OPTIONS)
        assert [result.text for result in found.results if result is not None] == alone
        assert sorted(found.order) == list(range(40)) and not found.errors


def test_fragments_are_computed_once_while_they_fit(llm: LLM) -> None:
    queries = corpus(random.Random(2), 30)
    found = llm.query_bulk(queries, **OPTIONS)
    distinct = {text for query in queries for text in map(str, query.input.children[0].children)}
    assert (found.fragments.input, found.fragments.computed) == (90, len(distinct))
    again = llm.query_bulk(queries, **OPTIONS)
    assert again.fragments.computed == 0 and again.tokens.hit_rate > found.tokens.hit_rate > 0


def test_an_error_is_one_querys_own(llm: LLM) -> None:
    queries = [
        asking(0, 1),
        g("a", options={"top_p": 9}),
        asking(2, 1),
        g("b", max_tokens=9999),
        asking(4, 2),
        7,
    ]
    ended: list[BulkItem] = []
    found = llm.query_bulk(queries, on_item=ended.append, **OPTIONS)
    assert [item.index for item in found.items] == list(range(6))
    assert {index: (error.code, error.field) for index, error in found.errors.items()} == {
        1: ("invalid_request", "g.options.top_p"),
        3: ("position_overflow", "g.max_tokens"),
        5: ("invalid_request", "query"),
    }
    assert sorted(item.index for item in ended) == list(range(6))
    assert [result is None for result in found.results] == [False, True, False, True, False, True]


def test_the_greedy_order_misses_less_than_the_given_one() -> None:
    better = 0
    for seed in range(30):
        rng = random.Random(seed)
        wanted = [
            {topic * 10 + rng.randrange(10): rng.randint(1, 4) for _ in range(4)}
            for topic in (rng.randrange(12) for _ in range(60))
        ]
        order = order_queries(wanted, 60)
        assert sorted(order) == list(range(60))
        given, greedy = (misses(found, wanted, 60) for found in (range(60), order))
        assert greedy <= given
        better += greedy < 0.8 * given
    assert better >= 25


def test_queries_without_fragments_stay_as_given() -> None:
    assert order_queries([{}, {}, {}], 4) == [0, 1, 2]
    assert order_queries([], 4) == []
    assert order_queries([{1: 99}, {2: 1}, {1: 99}], 4)[:2] == [0, 2], "one that is too large runs, too"


def test_results_are_kept_where_that_is_asked_for(llm: LLM) -> None:
    found = llm.query_bulk([asking(0, 1), asking(1, 1)], keep=True, **OPTIONS)
    judge = llm.query(
        g(cross(plus(*(result.held for result in found.results if result)), "which?")), **OPTIONS
    )
    assert judge.text
    judge.close()
    found.close()


@pytest.mark.parametrize("wrong", [{"order": "best"}, {"window": 0}, {"budget_pages": 0}, {"window": True}])
def test_wrong_settings_are_named(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(DagError) as error:
        llm.query_bulk([asking(0, 1)], **wrong)
    assert error.value.field == next(iter(wrong))
