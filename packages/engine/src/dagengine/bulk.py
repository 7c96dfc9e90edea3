"""Many queries at once: in which order, how many together, and what each of them came to.

Order, a greedy heuristic for temporal locality: of a pool of as many pages as the budget says, filled and emptied as by
least recent use, the next query is always the one of which most fragment tokens are in the pool; where none has any
there, the one whose fragments are wanted most by others; of equal ones the first given. The order changes nothing but
what is found in the cache.

Windows: neighbours run together as one submission, in which an equal fragment is one node for all of them. Three
windows run at once, so that steps stay full while the first of them ends and its results are made, and another is
submitted: the engine takes what it is told between steps, which are long here. Together their fragments fit the budget.
Windows of one query run one after the other.

    window 1   fragments ── judges ── results
    window 2            fragments ── judges ── results         begins once the fragments that it shares with those
    window 3                     fragments ── judges ..        before it are there
    window 4                              fragments ── ..      .. and when window 1 has ended

In a window fragments that the next one shares are computed first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dagengine_core_graph.query import Query

from .errors import DagError
from .queries import EncodedQuery, QueryOptions, fragment_keys
from .query_results import QueryResult, QueryTokens
from .query_run import QueryRun, result_of

if TYPE_CHECKING:
    from .llm import LLM

DEFAULT_WINDOW = 64
AT_ONCE = 3
"""Windows."""

ORDERS = ("locality", "given")


@dataclass(frozen=True)
class BulkItem:
    """One query of many: its place in what was given, and its result or its error."""

    index: int
    result: QueryResult | None
    error: DagError | None


@dataclass(frozen=True)
class BulkResult:
    """Attributes:
    items: in the order in which the queries were given.
    order: the order in which they ran; those that could not be planned are not in it.
    tokens: input tokens of all, and how many were computed: `hit_rate` is the measure of reuse.
    fragments: how often a fragment was read, and how many had to be computed for that.
    """

    items: tuple[BulkItem, ...]
    order: tuple[int, ...]
    tokens: QueryTokens
    fragments: QueryTokens

    @property
    def results(self) -> list[QueryResult | None]:
        return [item.result for item in self.items]

    @property
    def errors(self) -> dict[int, DagError]:
        return {item.index: item.error for item in self.items if item.error is not None}

    def close(self) -> None:
        """Release the states of all answers."""
        for item in self.items:
            if item.result is not None:
                item.result.close()


def run_bulk(
    llm: LLM,
    queries: Sequence[Query | str],
    *,
    order: str = "locality",
    budget_pages: int | None = None,
    window: int = DEFAULT_WINDOW,
    on_item: Callable[[BulkItem], None] | None = None,
    **options: Any,
) -> BulkResult:
    """Run many queries. One that fails harms no other.

    Args:
        order: `locality`, or `given`.
        budget_pages: KV pages that fragments may take; None is three quarters of the pool.
        window: most queries of one submission; three run at once, unless it is 1.
        on_item: called with each query once it has ended, in the order in which they end. If it raises, nothing more
            runs.
        options: as of `LLM.query`; `keep` is False unless given.

    Raises:
        DagError: `invalid_request` for a wrong order, budget or window, and for an `on_item` that raises; the states
            of all answers are released then.
    """
    if order not in ORDERS:
        raise DagError("invalid_request", f"order is one of {', '.join(ORDERS)}, not {order!r}", "order")
    size, pool = llm.engine.ask(lambda core: (core.store.page_size, core.store.num_pages))
    budget = max(1, pool * 3 // 4) if budget_pages is None else budget_pages
    for name, value in (("budget_pages", budget), ("window", window)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DagError("invalid_request", f"{name} is an integer from 1, not {value!r}", name)
    if on_item is not None and not callable(on_item):
        raise DagError("invalid_request", f"on_item is called, unlike {on_item!r}", "on_item")
    items: dict[int, BulkItem] = {}

    def end(*ended: BulkItem) -> None:
        items.update((item.index, item) for item in ended)
        for item in ended if on_item is not None else ():
            try:
                on_item(item)
            except Exception as error:
                message = f"it raised at query {item.index}: {type(error).__name__}: {error}"
                raise DagError("invalid_request", message, "on_item") from error

    try:
        return _run_all(llm, queries, order, budget, window, size, options, items, end)
    except BaseException:
        for item in items.values():
            if item.result is not None:
                item.result.close()
        raise


def _run_all(
    llm: LLM,
    queries: Sequence[Query | str],
    order: str,
    budget: int,
    window: int,
    page_size: int,
    options: Mapping[str, Any],
    items: Mapping[int, BulkItem],
    end: Callable[..., None],
) -> BulkResult:
    """Plan, order and run; every query goes through `end`, which puts it into `items`."""
    encoded: dict[int, EncodedQuery] = {}
    settings: QueryOptions | None = None
    for index, query in enumerate(queries):
        try:
            encoded[index], settings = llm.query_call(query, **{"keep": False, **options})
        except DagError as error:
            end(BulkItem(index, None, error))
    if settings is None:
        return BulkResult(_sorted(items), (), QueryTokens(0, 0), QueryTokens(0, 0))
    wanted = {
        index: {key: -(-len(key.input_ids) // page_size) for key in fragment_keys([query], settings)}
        for index, query in encoded.items()
    }
    ordered = list(encoded)
    if order == "locality":
        ordered = [ordered[place] for place in order_queries(list(wanted.values()), budget)]
    reads = sum(len(found) for found in wanted.values())
    room = budget if window == 1 else max(1, budget // AT_ONCE)
    windows = list(_windows(ordered, wanted, room, window))
    computed = _Windows(llm, encoded, wanted, settings, end).run(windows, None if window == 1 else budget)
    results = [item.result for item in items.values() if item.result is not None]
    tokens = QueryTokens(
        sum(result.tokens.input for result in results), sum(result.tokens.computed for result in results)
    )
    return BulkResult(_sorted(items), tuple(ordered), tokens, QueryTokens(reads, computed))


def order_queries(wanted: Sequence[Mapping[Any, int]], budget: int) -> list[int]:
    """The greedy order.

    Args:
        wanted: per query the pages of each of its fragments.
        budget: pages of the pool.

    Returns:
        Indices, in O(w log w) for w wanted fragments in all.
    """
    readers: dict[Any, list[int]] = {}
    for index, fragments in enumerate(wanted):
        for fragment in fragments:
            readers.setdefault(fragment, []).append(index)
    popular = [sum((len(readers[f]) - 1) * pages for f, pages in found.items()) for found in wanted]
    there = [0] * len(wanted)
    waiting = [(0, -popular[index], index) for index in range(len(wanted))]
    heapq.heapify(waiting)
    pool: OrderedDict[Any, int] = OrderedDict()
    used, done, ordered = 0, set[int](), list[int]()

    def shift(fragment: Any, pages: int) -> None:
        for reader in readers[fragment]:
            if reader not in done:
                there[reader] += pages
                heapq.heappush(waiting, (-there[reader], -popular[reader], reader))

    while waiting:
        found, _, index = heapq.heappop(waiting)
        if index in done or -found != there[index]:
            continue
        done.add(index)
        ordered.append(index)
        for fragment, pages in wanted[index].items():
            if fragment in pool:
                pool.move_to_end(fragment)
                continue
            pool[fragment] = pages
            used += pages
            shift(fragment, pages)
        while used > budget and len(pool) > 1:
            fragment, pages = pool.popitem(last=False)
            used -= pages
            shift(fragment, -pages)
    return ordered


def _windows(
    ordered: Sequence[int], wanted: Mapping[int, Mapping[Any, int]], budget: int, most: int
) -> Iterator[list[int]]:
    """Neighbours that run together: at most so many, and while their fragments fit; one always does."""
    chosen: list[int] = []
    pages: dict[Any, int] = {}
    for index in ordered:
        more = {**pages, **wanted[index]}
        if chosen and (len(chosen) == most or sum(more.values()) > budget):
            yield chosen
            chosen, more = [], dict(wanted[index])
        chosen.append(index)
        pages = more
    if chosen:
        yield chosen


@dataclass(frozen=True)
class _Window:
    """Neighbours that run, and the pages of their fragments."""

    chosen: Sequence[int]
    pages: Mapping[Any, int]
    run: QueryRun


@dataclass(frozen=True)
class _Windows:
    """Runs windows of queries, `AT_ONCE` of them.

    Attributes:
        end: called with the queries of a window that has ended.
    """

    llm: LLM
    encoded: Mapping[int, EncodedQuery]
    wanted: Mapping[int, Mapping[Any, int]]
    settings: QueryOptions
    end: Callable[..., None]

    def run(self, windows: Sequence[Sequence[int]], budget: int | None) -> int:
        """Run all in this order, several at once while their fragments fit the budget; one at a time without it.

        Returns: how many fragments had to be computed.
        """
        computed, running = 0, list[_Window]()
        try:
            for chosen, behind in zip_longest(windows, windows[1:], fillvalue=()):
                pages = self._pages(chosen)
                soon = pages.keys() & self._pages(behind).keys()
                while running and not _fits(running, pages, budget):
                    computed += self._end_first(running)
                for window in running:
                    window.run.keep(window.pages.keys() & pages.keys())
                queries = [self.encoded[index] for index in chosen]
                try:
                    run = QueryRun(self.llm, queries, self.settings, first=soon)
                except DagError as error:
                    computed += self._end_all(running) + self._one_by_one(chosen, error)
                    continue
                running.append(_Window(chosen, pages, run))
            return computed + self._end_all(running)
        except BaseException:
            for window in running:
                window.run.cancel()
            raise

    def _pages(self, chosen: Iterable[int]) -> dict[Any, int]:
        return {key: pages for index in chosen for key, pages in self.wanted[index].items()}

    def _end_all(self, running: list[_Window]) -> int:
        return sum(self._end_first(running) for _ in range(len(running)))

    def _end_first(self, running: list[_Window]) -> int:
        """Wait for the first of those that run. Returns how many fragments it computed."""
        run, chosen = running[0].run, running[0].chosen
        found = run.finish()
        del running[0]
        ended: list[BulkItem] = []
        for place, index in enumerate(chosen):
            try:
                result = result_of(self.llm.engine, run.job, place, found, run.facts)
                ended.append(BulkItem(index, result, None))
            except DagError as error:
                ended.append(BulkItem(index, None, _alone(error)))
        self.end(*ended)
        return len(run.job.fragments)

    def _one_by_one(self, chosen: Sequence[int], refusal: DagError) -> int:
        """A query whose requests are refused as they stand refuses the submission: it ends alone, the others run."""
        if len(chosen) == 1:
            self.end(BulkItem(chosen[0], None, refusal))
            return 0
        return sum(self.run([[index]], None) for index in chosen)


def _fits(running: Sequence[_Window], pages: Mapping[Any, int], budget: int | None) -> bool:
    """Whether a window with these pages may run beside those that do."""
    if budget is None or len(running) >= AT_ONCE:
        return False
    together = dict(pages)
    for window in running:
        together.update(window.pages)
    return sum(together.values()) <= budget


def _alone(error: DagError) -> DagError:
    """The error with its path in its own query."""
    field = error.field
    if field is not None and field.startswith("queries["):
        field = field.partition("].")[2]
    return DagError(error.code, error.message, field)


def _sorted(items: Mapping[int, BulkItem]) -> tuple[BulkItem, ...]:
    return tuple(items[index] for index in sorted(items))
