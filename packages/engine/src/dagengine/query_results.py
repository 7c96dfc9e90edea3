"""What became of a query: answers, tokens, the record, and the result, which is a query again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from dagengine_core_graph.query import NOTHING, Generate, Join, Monad, Plan, Query

from .async_engine import EngineThread
from .encoded_queries import QueryTiming
from .errors import DagError
from .held import HeldParams, held_answer
from .queries import QueryJob
from .records import FORMAT
from .request import Choice, FinishedEvent
from .state import Result, Usage, make_result


@dataclass(frozen=True)
class QueryTokens:
    """Input tokens of all nodes of a query, and how many of them were computed for it; the others were there."""

    input: int
    computed: int

    @property
    def reused(self) -> int:
        return max(0, self.input - self.computed)

    @property
    def hit_rate(self) -> float:
        """The part that was there already, 0 to 1; 0 without tokens."""
        return self.reused / self.input if self.input else 0.0


@dataclass(frozen=True)
class ResultTiming(QueryTiming):
    """Of a query that ran, in milliseconds.

    Attributes:
        submit: from when it was asked for until the engine, on its thread, was handed its requests, `plan` and
            `tokenize` included. One of many was asked for when `query_bulk` was called: to plan, tokenize and order all
            of them, and the windows that ran before its own, are in it.
    """

    submit: float


@dataclass(frozen=True)
class Outcome:
    """A query that has ended well.

    Attributes:
        calls: by node id, also those that no result shows.
        answers: of the calls whose answers the result holds, in order.
        result: the query with every call replaced by its answer.
        usage: of the calls; `cached_tokens` are those of their prompts that were not computed for this query.
    """

    calls: Mapping[str, Choice]
    answers: tuple[Choice, ...]
    result: Query
    usage: Usage
    tokens: QueryTokens
    record: Mapping[str, Any]


def outcome_of(
    job: QueryJob, index: int, found: Mapping[str, FinishedEvent], facts: Mapping[str, object]
) -> Outcome:
    """What became of a job's query.

    Args:
        found: terminal events by request id.
        facts: of the engine, for the record.

    Raises:
        DagError: what the first node that failed ended with, located.
    """
    query, places = job.queries[index], job.places[index]
    errors = [
        (event.error, request)
        for request in dict.fromkeys(places.values())
        if (event := found[request]).error is not None
    ]
    if errors:
        error, request = min(errors, key=lambda item: item[0].code == "parent_failed")  # type: ignore[union-attr]
        assert error is not None
        raise job.locate(request, error)
    calls = {
        node.id: found[places[node.id]].choices[0]
        for node in query.lowered.nodes
        if node.generate is not None and node.id in places
    }
    own = [
        found[request].choices[0].dag
        for request in dict.fromkeys(places.values())
        if job.nodes_of[request][0][0] == index
    ]
    computed = sum(dag.computed for dag in own)
    prompts = sum(choice.dag.visible + choice.dag.input for choice in calls.values())
    usage = Usage(prompts, max(0, prompts - computed), sum(choice.num_sampled for choice in calls.values()))
    tokens = QueryTokens(query.num_tokens, computed)
    texts = {node: choice.text for node, choice in calls.items()}
    for node in query.lowered.nodes:
        if isinstance(node.generate, HeldParams):
            texts[node.id] = node.generate.text
    return Outcome(
        calls,
        tuple(calls[answer] for answer in query.answers),
        query.lowered.result(texts),
        usage,
        tokens,
        _record(job, index, calls, tokens, facts),
    )


def _record(
    job: QueryJob,
    index: int,
    calls: Mapping[str, Choice],
    tokens: QueryTokens,
    facts: Mapping[str, object],
) -> dict[str, Any]:
    """The record of a query: the planned one, in which retrievals have been made, and every call's seed and output."""
    query, options = job.queries[index], job.options
    first = next(iter(calls.values())).dag.record if calls else {}
    return {
        "format": FORMAT,
        "kind": "query",
        "query": query.document,
        "rewrites": list(query.planned.rewrites),
        "reductions": [
            {"path": item.path, "width": item.width, "arity": item.arity} for item in query.planned.reductions
        ],
        "order": "as given",
        "policy": options.position,
        "backend": first.get("backend", options.backend),
        "implementation": first.get("implementation"),
        "max_tokens": options.max_tokens,
        "reuse": {"input": tokens.input, "computed": tokens.computed, "reused": tokens.reused},
        "input_digest": query.input_digest,
        **facts,
        "calls": [
            {
                "node": node,
                "path": next(found.path for found in query.lowered.nodes if found.id == node),
                "seed": choice.dag.record["seed"],
                "output": choice.dag.record["output"],
            }
            for node, choice in calls.items()
        ],
    }


class AnsweredQuery:
    """What holds the answers of a query until it is closed or left as a context manager: an engine's, or a client's."""

    answers: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The text of the only answer. Raises DagError `invalid_request` where there are none or several."""
        if len(self.answers) != 1:
            message = f"the query has {len(self.answers)} answers; look at `answers`"
            raise DagError("invalid_request", message, "text")
        return self.answers[0].text

    def close(self) -> None:
        """Release the states of the answers."""
        for answer in self.answers:
            answer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class QueryResult(AnsweredQuery):
    """A finished query, which holds the states of its answers until closed or collected.

    Attributes:
        query: the result, a query: every call replaced by the text of its answer.
        answers: of the calls that the result holds, in order.
        plan: the query as it was planned.
        record: what `replay` needs to run it again.
        timing: what it took until the engine had it.
    """

    query: Query
    answers: tuple[Result, ...]
    plan: Plan
    usage: Usage
    tokens: QueryTokens
    record: Mapping[str, Any]
    timing: ResultTiming

    @property
    def held(self) -> Query:
        """The result for a next query of the same `LLM`, which reads the answers where they lie, as they were computed.

        They are held until this result, and every query made of it, is gone. Raises DagError `state_not_found` where
        the answers were not kept.
        """
        answers = iter(self.answers)

        def hold(query: Query) -> Query | None:
            if isinstance(query, Generate):
                if isinstance(query.params, HeldParams):
                    return query
                answer = next(answers)
                if answer.state is None:
                    message = "the answers were not kept; ask for it with keep=True"
                    raise DagError("state_not_found", message, "keep")
                return held_answer(answer.state, answer.text)
            if isinstance(query, Monad):
                return None
            if isinstance(query, Join):
                kept = tuple(part for child in query.children if (part := hold(child)) is not None)
                return type(query)(kept) if kept else None
            return query

        return hold(self.plan.query) or NOTHING


def query_result(
    engine: EngineThread, job: QueryJob, index: int, outcome: Outcome, submit_ms: float
) -> QueryResult:
    """What a Python user is given, of a query that was submitted `submit_ms` after it was asked for."""
    timing = job.queries[index].timing
    return QueryResult(
        outcome.result,
        tuple(make_result(engine, choice) for choice in outcome.answers),
        job.queries[index].planned,
        outcome.usage,
        outcome.tokens,
        outcome.record,
        ResultTiming(timing.plan, timing.tokenize, submit_ms),
    )
