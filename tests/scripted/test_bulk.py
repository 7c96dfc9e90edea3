"""Many queries at once: the same answers in any order, each error its own, and fragments found while they are there."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from scripted_text import text_engine

from dagengine import LLM, BulkItem, DagError, EngineDead
from dagengine.bulk_order import order_queries
from dagengine.query_run import QueryRun
from dagengine_core_graph.query import Retrieve, cross, g, plus, retrieve, user

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


class Watched(QueryRun):
    """Tells which runs are under way, and how many pages their fragments take together."""

    under_way: ClassVar[list[QueryRun]] = []
    most: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, llm: LLM, queries: Any, *rest: Any, **options: Any) -> None:
        super().__init__(llm, queries, *rest, **options)
        self.ids = {ids for query in queries for ids, _ in query.fragments.values()}
        self.under_way.append(self)
        size = llm.engine.ask(lambda core: core.store.page_size)
        together = set[tuple[int, ...]]().union(*(run.ids for run in self.under_way))
        self.most.append((len(self.under_way), sum(-(-len(ids) // size) for ids in together)))

    def finish(self) -> Any:
        found = super().finish()
        self.under_way.remove(self)
        return found


@pytest.mark.parametrize(
    ("window", "budget", "at_once"), [(5, 200, 3), (5, 18, 3), (1, 200, 1), (40, 200, 1)]
)
def test_three_windows_run_at_once_within_the_budget_and_share_what_they_compute(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, window: int, budget: int, at_once: int
) -> None:
    queries = corpus(random.Random(5), 40)
    monkeypatch.setattr("dagengine.bulk.QueryRun", Watched)
    Watched.most.clear()
    found = llm.query_bulk(queries, window=window, budget_pages=budget, **OPTIONS)
    distinct = {text for query in queries for text in map(str, query.input.children[0].children)}
    assert not found.errors and found.fragments.computed == len(distinct)
    assert max(runs for runs, _ in Watched.most) == at_once and not Watched.under_way
    assert max(pages for _, pages in Watched.most) <= budget


def test_a_refusal_in_one_window_harms_no_other_window(llm: LLM) -> None:
    queries = [asking(number, number % 3) for number in range(12)]
    queries[5] = g(cross(plus("piece 1"), "say"), max_tokens=9999)
    found = llm.query_bulk(queries, order="given", window=3, **OPTIONS)
    assert list(found.errors) == [5] and found.fragments.computed == 3
    assert found.items[5].error is not None and found.items[5].error.code == "position_overflow"


def test_fragments_that_left_the_device_are_computed_again_and_none_is_restored(llm: LLM) -> None:
    query = asking(1, 1, 2, 3)
    first = llm.query(query, keep=False, **OPTIONS)

    def evict(core: Any) -> int:
        found = core.store.states()
        return sum(core.store.evict(core.store.resolve(state.id, "")[0]) for state in found)

    assert llm.engine.ask(evict) >= 3
    again = llm.query_bulk([query, query], **OPTIONS)
    assert [result and result.text for result in again.results] == [first.text] * 2
    assert again.fragments.computed == 3
    assert llm.engine.ask(lambda core: core.stats.restored_tokens) == 0
    assert llm.engine.ask(lambda core: len(core.store.states())) == len(llm.fragments) == 3


def test_fragments_that_a_query_found_leave_the_device_after_others(llm: LLM) -> None:
    llm.query(asking(1, 1, 2, 3), keep=False, **OPTIONS)
    keys = llm.engine.ask(lambda core: list(llm.fragments._kept))

    def order(core: Any) -> list[Any]:
        """Keys as their states are evicted, the middle one found before."""
        llm.fragments.find(core, keys[1:2])
        node_of = {key: core.store.resolve(state, key.salt)[0] for key, state in llm.fragments._kept.items()}
        return sorted(keys, key=lambda key: (node_of[key].last_used, -node_of[key].uid))

    assert llm.engine.ask(order)[-1] == keys[1] and len(keys) == 3


def slowly(query: Retrieve) -> Any:
    time.sleep(0.02)
    return ["one", "two"]


def test_a_query_says_how_long_after_the_bulk_was_given_the_engine_had_it(llm: LLM) -> None:
    queries = [asking(number, number) for number in range(5)]
    queries[4] = g(cross(retrieve("slow", user("which?")), "say"))
    begin = time.perf_counter()
    found = llm.query_bulk(queries, window=1, retriever=slowly, **OPTIONS)
    all_ms = (time.perf_counter() - begin) * 1e3
    results = [found.items[index].result for index in found.order]
    assert len(results) == 5
    before = 0.0
    for result in results:
        assert result is not None
        timing, first_token = result.timing, result.answers[0].dag.timing.first_token
        assert timing.submit > sum(one.timing.plan + one.timing.tokenize for one in results if one)
        assert timing.submit > before >= 0, "it waited for all that ran before it"
        before = timing.submit + first_token
    assert results[0] is not None and results[0].timing.submit >= 20, (
        "all waited for the retriever of the last"
    )
    assert before <= all_ms


def test_queries_of_one_window_were_submitted_at_once_and_those_of_the_fourth_after_the_first(
    llm: LLM,
) -> None:
    queries = [asking(number, number) for number in range(8)]
    found = llm.query_bulk(queries, order="given", window=2, **OPTIONS)
    submits = [result.timing.submit for result in found.results if result is not None]
    assert submits[::2] == submits[1::2] == sorted(submits[::2]) and len(set(submits)) == 4
    first = max(
        result.answers[0].dag.timing.first_token for result in found.results[:2] if result is not None
    )
    assert submits[6] > submits[0] + first


def test_a_query_that_runs_after_a_refusal_was_submitted_when_it_ran(llm: LLM) -> None:
    queries = [asking(0, 1), g("b", options={"stop_token_ids": [10**6]}), asking(2, 1)]
    one, refused, other = llm.query_bulk(queries, order="given", **OPTIONS).results
    assert one is not None and refused is None and other is not None
    assert other.timing.submit > one.timing.submit + one.answers[0].dag.timing.first_token


class Broken:
    """A retriever that finds for every corpus but the one that says how it breaks."""

    def __call__(self, query: Retrieve) -> Any:
        how = query.corpus
        if how == "raises":
            raise ZeroDivisionError("a bug of the plug-in")
        if how == "refuses":
            raise DagError("unsupported", "not here", "retrieve.corpus")
        if how == "yields":
            return (1 / 0 for _ in range(3))
        wrong = {"returns": None, "lists": ["one", 2], "text": "one text", "maps": {"one": "two"}}
        return wrong.get(how, ["one", "two"])


def test_whatever_a_retriever_raises_is_its_querys_own(llm: LLM) -> None:
    hows = ("fine", "raises", "refuses", "yields", "returns", "lists", "text", "maps", "fine too")
    queries = [g(cross(retrieve(how, user("which?")), "say")) for how in hows]
    found = llm.query_bulk(queries, retriever=Broken(), **OPTIONS)
    assert [item.result is not None for item in found.items] == [how.startswith("fine") for how in hows]
    assert {error.code for error in found.errors.values()} == {"internal", "unsupported"}
    assert "ZeroDivisionError: a bug of the plug-in" in found.errors[1].message
    with pytest.raises(DagError) as error:
        llm.query(queries[1], retriever=Broken(), **OPTIONS)
    assert (error.value.code, error.value.field) == ("internal", "g.input.cross[0].retrieve")
    with pytest.raises(KeyboardInterrupt):
        llm.query_bulk(queries, retriever=interrupt, **OPTIONS)


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("window", [1, 2, 64])
@pytest.mark.parametrize("kind", [ValueError, DagError, KeyboardInterrupt])
def test_an_on_item_that_raises_ends_the_call_and_leaves_no_state(
    llm: LLM, window: int, kind: type[BaseException]
) -> None:
    ended: list[BulkItem] = []

    def listen(item: BulkItem) -> None:
        ended.append(item)
        if len(ended) == 2:
            raise DagError("unsupported", "planted") if kind is DagError else kind("planted")

    queries = [asking(number, 1, 2) for number in range(4)]
    with pytest.raises(KeyboardInterrupt if kind is KeyboardInterrupt else DagError) as error:
        llm.query_bulk(queries, on_item=listen, keep=True, window=window, **OPTIONS)
    if isinstance(error.value, DagError):
        assert (error.value.code, error.value.field) == ("invalid_request", "on_item")
        assert "planted" in error.value.message and type(error.value.__cause__) is kind
    assert len(ended) == 2 and all(item.result is not None for item in ended)
    num_kept = llm.engine.ask(lambda core: len(core.store.states()))
    assert num_kept == len(llm.fragments), "only fragments are kept"


def test_an_on_item_that_cannot_be_called_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(DagError) as error:
        llm.query_bulk([asking(0, 1)], on_item="print", **OPTIONS)
    assert (error.value.code, error.value.field) == ("invalid_request", "on_item")
    assert error.value.__cause__ is None, "no query has ended yet"


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


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"position": "sideways"}, "policy_unsupported"),
        ({"position": 5}, "invalid_request"),
        ({"backend": "none"}, "unsupported"),
        ({"max_tokens": 0}, "invalid_request"),
        ({"seed": "x"}, "invalid_request"),
        ({"keep": "yes"}, "invalid_request"),
        ({"cache_salt": ""}, "invalid_request"),
        ({"reduce": 1}, "invalid_request"),
        ({"retriever": "fts5"}, "invalid_request"),
    ],
    ids=str,
)
def test_an_option_that_is_wrong_for_any_query_is_refused_once_before_anything_runs(
    llm: LLM, wrong: dict[str, Any], code: str
) -> None:
    ended: list[BulkItem] = []
    for queries in ([], [asking(0, 1), 7, asking(1, 1)]):
        with pytest.raises(DagError) as error:
            llm.query_bulk(queries, on_item=ended.append, **{**OPTIONS, **wrong})
        assert (error.value.code, error.value.field) == (code, next(iter(wrong)))
    assert not ended and llm.engine.ask(lambda core: core.stats.steps) == 0


def test_the_engine_is_asked_once_what_it_takes_and_what_it_refuses_stays_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    ask = llm.engine.ask

    def counted(function: Any) -> Any:
        asked.append(function)
        return ask(function)

    monkeypatch.setattr(llm.engine, "ask", counted)
    for _ in range(2):
        assert not llm.query_bulk([asking(0, 1)], **OPTIONS).errors
    assert len(asked) == 1
    assert not llm.query_bulk([asking(0, 1)], position="native", **OPTIONS).errors
    assert len(asked) == 2
    for _ in range(2):
        with pytest.raises(DagError) as error:
            llm.query_bulk([asking(0, 1)], position="sideways", **OPTIONS)
        assert error.value.code == "policy_unsupported"
    assert not llm.query_bulk([asking(0, 1)], position="native", **OPTIONS).errors and len(asked) == 4


def test_a_dead_engine_refuses_a_bulk_as_a_whole(llm: LLM) -> None:
    llm.query_bulk([asking(0, 1)], **OPTIONS)
    llm.close()
    ended: list[BulkItem] = []
    with pytest.raises(EngineDead):
        llm.query_bulk([asking(0, 1), asking(1, 2)], on_item=ended.append, **OPTIONS)
    assert not ended


@pytest.mark.parametrize("queries", ["a text", g("a", max_tokens=1), None, 3])
def test_what_is_no_list_of_queries_is_refused(llm: LLM, queries: Any) -> None:
    with pytest.raises(DagError) as error:
        llm.query_bulk(queries)
    assert (error.value.code, error.value.field) == ("invalid_request", "queries")


@pytest.mark.parametrize("wrong", [{"order": "best"}, {"window": 0}, {"budget_pages": 0}, {"window": True}])
def test_wrong_settings_are_named(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(DagError) as error:
        llm.query_bulk([asking(0, 1)], **wrong)
    assert error.value.field == next(iter(wrong))
