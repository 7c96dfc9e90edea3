"""Many queries at once: how many together, and what each of them came to; in which order, `bulk_order` says.

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

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dagengine_core_graph.query import FindFragments, Query

from .bulk_order import ORDERS, order_queries, windows_of
from .encoded_queries import EncodedQuery, QueryDraft, encode_drafts
from .errors import DagError, shown
from .queries import QueryOptions, fragment_keys
from .query_results import QueryResult, QueryTokens
from .query_run import QueryRun, result_of
from .request import FinishedEvent, Keep

if TYPE_CHECKING:
    from .llm import LLM

DEFAULT_WINDOW = 64
AT_ONCE = 3
"""Windows."""


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
    retriever: FindFragments | None = None,
    reduce: int | None = None,
    keep: bool | Keep = False,
    **options: Any,
) -> BulkResult:
    """Run many queries. One that fails harms no other.

    Args:
        order: `locality`, or `given`.
        budget_pages: KV pages that fragments may take; None is three quarters of the pool.
        window: most queries of one submission; three run at once, unless it is 1.
        on_item: called with each query once it has ended, in the order in which they end. If it raises, nothing more
            runs.
        retriever, reduce, keep, options: as of `LLM.query`.

    Raises:
        DagError: an argument that is wrong whatever the queries are, before anything runs; `invalid_request` for an
            `on_item` that raises; the states of all answers are released then.
    """
    came = time.perf_counter()
    if isinstance(queries, str | Query) or not isinstance(queries, Iterable):
        raise DagError("invalid_request", f"a list of queries is needed, not {shown(queries)}", "queries")
    if order not in ORDERS:
        raise DagError("invalid_request", f"order is one of {', '.join(ORDERS)}, not {order!r}", "order")
    least_of = {
        "window": (window, 1),
        "budget_pages": (1 if budget_pages is None else budget_pages, 1),
        "reduce": (2 if reduce is None else reduce, 2),
    }
    for name, (value, least) in least_of.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise DagError("invalid_request", f"{name} is an integer from {least}, not {value!r}", name)
    for name, function in (("on_item", on_item), ("retriever", retriever)):
        if function is not None and not callable(function):
            raise DagError("invalid_request", f"{name} is called, unlike {function!r}", name)
    settings = llm.query_options(keep=keep, **options)
    page_size, num_pages = llm.pool_of(settings)
    ended = _Ended(on_item)
    bulk = _Bulk(
        llm=llm,
        settings=settings,
        retriever=retriever,
        reduce=reduce,
        order=order,
        budget=max(1, num_pages * 3 // 4) if budget_pages is None else budget_pages,
        window=window,
        page_size=page_size,
        ended=ended,
        came=came,
    )
    try:
        return bulk.run(queries)
    except BaseException:
        ended.close()
        raise


class _Ended:
    """The queries that have ended, by their place; each is told to `on_item` as it ends."""

    def __init__(self, on_item: Callable[[BulkItem], None] | None) -> None:
        self._items: dict[int, BulkItem] = {}
        self._on_item = on_item

    def add(self, item: BulkItem) -> None:
        """Raises DagError `invalid_request` where `on_item` raises."""
        self._items[item.index] = item
        if self._on_item is None:
            return
        try:
            self._on_item(item)
        except Exception as error:
            message = f"it raised at query {item.index}: {type(error).__name__}: {error}"
            raise DagError("invalid_request", message, "on_item") from error

    def items(self) -> tuple[BulkItem, ...]:
        """In the order in which the queries were given."""
        return tuple(self._items[index] for index in sorted(self._items))

    def close(self) -> None:
        """Release the states of all answers."""
        for item in self._items.values():
            if item.result is not None:
                item.result.close()


@dataclass(frozen=True)
class _Bulk:
    """Plans, orders and runs queries.

    Attributes:
        budget: KV pages that fragments may take.
        window: most queries of one submission.
        page_size: tokens.
        came: when the queries were given, on the clock of `time.perf_counter`.
    """

    llm: LLM
    settings: QueryOptions
    retriever: FindFragments | None
    reduce: int | None
    order: str
    budget: int
    window: int
    page_size: int
    ended: _Ended
    came: float

    def run(self, queries: Sequence[Query | str]) -> BulkResult:
        """Every query goes through `ended`."""
        encoded = self._encode(queries)
        wanted = {
            index: {
                key: -(-len(key.input_ids) // self.page_size) for key in fragment_keys([query], self.settings)
            }
            for index, query in encoded.items()
        }
        ordered = list(encoded)
        if self.order == "locality" and len(ordered) > 1:
            ordered = [ordered[place] for place in order_queries(list(wanted.values()), self.budget)]
        together = None if self.window == 1 else self.budget
        room = self.budget if together is None else max(1, self.budget // AT_ONCE)
        windows = list(windows_of(ordered, wanted, room, self.window))
        running = _Windows(self.llm, encoded, wanted, self.settings, self.ended, self.came)
        computed = running.run(windows, together)
        items = self.ended.items()
        results = [item.result for item in items if item.result is not None]
        tokens = QueryTokens(
            sum(result.tokens.input for result in results), sum(result.tokens.computed for result in results)
        )
        reads = sum(len(found) for found in wanted.values())
        return BulkResult(items, tuple(ordered), tokens, QueryTokens(reads, computed))

    def _encode(self, queries: Sequence[Query | str]) -> dict[int, EncodedQuery]:
        """By index; a query that cannot be planned or tokenized ends here."""
        drafts: dict[int, QueryDraft] = {}
        errors: dict[int, DagError] = {}
        for index, query in enumerate(queries):
            try:
                drafts[index] = self.llm.draft_query(
                    query, self.settings, retriever=self.retriever, reduce=self.reduce
                )
            except DagError as error:
                errors[index] = error
        encoded: dict[int, EncodedQuery] = {}
        for index, found in zip(drafts, encode_drafts(list(drafts.values()), self.llm.prompts), strict=True):
            if isinstance(found, DagError):
                errors[index] = found
            else:
                encoded[index] = found
        for index, error in sorted(errors.items()):
            self.ended.add(BulkItem(index, None, error))
        return encoded


@dataclass(frozen=True)
class _Window:
    """Neighbours that run, and the pages of their fragments."""

    chosen: Sequence[int]
    pages: Mapping[Any, int]
    run: QueryRun


@dataclass(frozen=True)
class _Windows:
    """Runs windows of queries, `AT_ONCE` of them."""

    llm: LLM
    encoded: Mapping[int, EncodedQuery]
    wanted: Mapping[int, Mapping[Any, int]]
    settings: QueryOptions
    ended: _Ended
    came: float

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
                run = QueryRun(self.llm, queries, self.settings, first=soon)
                running.append(_Window(chosen, pages, run))  # before it starts: it may be interrupted
                try:
                    run.start()
                except DagError as error:
                    del running[-1]
                    computed += self._end_all(running) + self._one_by_one(chosen, error)
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
        for place, index in enumerate(chosen):
            self.ended.add(self._item(run, place, index, found))
        del running[0]  # not before all are told: if that is interrupted, it is cancelled
        return len(run.job.fragments)

    def _item(self, run: QueryRun, place: int, index: int, found: Mapping[str, FinishedEvent]) -> BulkItem:
        try:
            return BulkItem(index, result_of(self.llm.engine, run.submission, place, found, self.came), None)
        except DagError as error:
            return BulkItem(index, None, _alone(error))

    def _one_by_one(self, chosen: Sequence[int], refusal: DagError) -> int:
        """A query whose requests are refused as they stand refuses the submission: it ends alone, the others run."""
        if len(chosen) == 1:
            self.ended.add(BulkItem(chosen[0], None, refusal))
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
