"""Running queries on an engine from a thread that waits, or from an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from .async_engine import EngineThread, MakeRequests
from .calls import release_states
from .core import EngineCore
from .encoded_queries import EncodedQuery
from .errors import DagError
from .fragments import FragmentKey, FragmentStates
from .queries import QueryJob, QueryOptions, fragment_keys, locate_refusal, query_job
from .query_results import QueryResult, outcome_of, query_result
from .request import Event, FinishedEvent, Request, TokenEvent
from .submitted import Submitted

if TYPE_CHECKING:
    from .llm import LLM

OnText = Callable[[int, str], None]
"""on_text(answer, text): new text of answer number so many."""


class QuerySubmission:
    """Makes the requests of queries when the engine takes them, so that no kept fragment goes before it is read.

    Args:
        seeds, first, prepare_only: as of `query_job`.
    """

    def __init__(
        self,
        fragments: FragmentStates,
        queries: Sequence[EncodedQuery],
        options: QueryOptions,
        *,
        seeds: Sequence[Mapping[str, int]] | None = None,
        first: Collection[FragmentKey] = (),
        prepare_only: bool = False,
    ) -> None:
        self._fragments, self._keys = fragments, fragment_keys(queries, options)
        self._make = partial(query_job, queries, options, seeds=seeds, first=first, prepare_only=prepare_only)
        self._made: tuple[QueryJob, Mapping[str, object], float] | None = None

    @property
    def job(self) -> QueryJob:
        """What was submitted. The engine has taken it by now."""
        assert self._made is not None
        return self._made[0]

    @property
    def facts(self) -> Mapping[str, object]:
        """Of the engine, which has taken it by now."""
        assert self._made is not None
        return self._made[1]

    @property
    def handed(self) -> float:
        """When the engine, on its thread, was handed the requests, which it takes or refuses at once; on the clock of
        `time.perf_counter`. That has happened by now.
        """
        assert self._made is not None
        return self._made[2]

    def __call__(self, core: EngineCore) -> Sequence[Request]:
        """On the engine's thread. Raises DagError as `query_job`."""
        job, facts = self._make(self._fragments.find(core, self._keys)), core.facts
        self._made = job, facts, time.perf_counter()
        return job.requests

    def locate(self, core: EngineCore, error: DagError) -> DagError:
        """Why it was refused, located as by `locate_refusal`; what `query_job` raised is. On the engine's thread."""
        return error if self._made is None else locate_refusal(core, self.job, error)


class QueryRun:
    """Queries that run as one submission, from `start` until `finish` or `cancel`.

    An interrupt ends nothing: whoever made the run cancels it then.

    Args:
        seeds, first: as of `query_job`.
    """

    def __init__(
        self,
        llm: LLM,
        queries: Sequence[EncodedQuery],
        options: QueryOptions,
        *,
        seeds: Sequence[Mapping[str, int]] | None = None,
        first: Collection[FragmentKey] = (),
        on_event: Callable[[QueryJob, Event], None] | None = None,
    ) -> None:
        asked = QuerySubmission(llm.fragments, queries, options, seeds=seeds, first=first)
        forward = None if on_event is None else (lambda event: on_event(asked.job, event))
        self._llm, self._asked = llm, asked
        self._submitted = Submitted(llm.engine, asked, forward)
        self._kept: set[str] = set()

    @property
    def submission(self) -> QuerySubmission:
        """What was started, and when."""
        return self._asked

    @property
    def job(self) -> QueryJob:
        """What was started."""
        return self._asked.job

    @property
    def facts(self) -> Mapping[str, object]:
        """Of the engine that it was started on."""
        return self._asked.facts

    def start(self) -> None:
        """Submit the queries. Raises DagError: they were refused as a whole."""
        try:
            self._submitted.start()
        except DagError as error:
            raise self._llm.engine.ask(partial(self._asked.locate, error=error)) from None

    def keep(self, keys: Collection[FragmentKey]) -> None:
        """Wait for those of the fragments that are computed here, and keep them for whoever comes next."""
        names = [name for name, key in self.job.fragments.items() if key in keys and name not in self._kept]
        self._keep(self._submitted.wait(names))

    def finish(self) -> dict[str, FinishedEvent]:
        """Wait for all; the terminal events by request id. What is left of the fragments is kept; states of answers are
        the caller's, until `cancel`.
        """
        for query in self.job.queries:  # what records say of them, while the device is busy with them
            _ = query.document, query.input_digest
        events = self._submitted.wait()
        self._keep([event for event in events if event.request_id not in self._kept])
        return {event.request_id: event for event in events}

    def cancel(self) -> None:
        """End what has not finished, and release all states but those of kept fragments. At any time; does not wait."""
        self._submitted.cancel()

    def _keep(self, events: Sequence[FinishedEvent]) -> None:
        states, fragments = self.job.states(events), self._llm.fragments
        names = [event.request_id for event in events if event.request_id in self.job.fragments]

        def keep(core: EngineCore) -> None:
            fragments.keep(core, states)
            self._submitted.take(names)

        self._llm.engine.post(keep)
        self._kept.update(names)


def run_queries(
    llm: LLM,
    queries: Sequence[EncodedQuery],
    options: QueryOptions,
    *,
    seeds: Sequence[Mapping[str, int]] | None = None,
    on_event: Callable[[QueryJob, Event], None] | None = None,
) -> tuple[QueryJob, dict[str, FinishedEvent], Mapping[str, object]]:
    """Run queries as one submission: the job, its terminal events by request id, and the engine's facts.

    Raises:
        DagError: the submission was refused as a whole.
    """
    run = QueryRun(llm, queries, options, seeds=seeds, on_event=on_event)
    try:
        run.start()
        found = run.finish()
    except BaseException:
        run.cancel()
        raise
    return run.job, found, run.facts


def result_of(
    engine: EngineThread,
    submission: QuerySubmission,
    index: int,
    found: Mapping[str, FinishedEvent],
    came: float,
) -> QueryResult:
    """A query of a submission as a result.

    Args:
        found: terminal events by request id.
        came: when the query was asked for, on the clock of `time.perf_counter`.

    Raises:
        DagError: a node of the query failed; the answers' states are released then.
    """
    job, submit_ms = submission.job, (submission.handed - came) * 1e3
    try:
        return query_result(engine, job, index, outcome_of(job, index, found, submission.facts), submit_ms)
    except DagError:
        for answer in job.queries[index].answers:
            release_states(engine, found[job.places[index][answer]])
        raise


def texts_of(on_text: OnText | None) -> Callable[[QueryJob, Event], None] | None:
    """An event listener for the texts of a single query's answers."""
    if on_text is None:
        return None

    def listen(job: QueryJob, event: Event) -> None:
        answer = job.answer_of(event.request_id)
        if answer is not None and isinstance(event, TokenEvent) and event.text:
            on_text(answer[1], event.text)

    return listen


async def stream_query(
    llm: LLM,
    query: EncodedQuery,
    options: QueryOptions,
    came: float,
    stream_events: Callable[[EngineThread, MakeRequests], AsyncGenerator[Event, None]],
) -> AsyncGenerator[tuple[int, str] | QueryResult, None]:
    """New texts as (answer, text), then the result; leaving early cancels what has not finished.

    Args:
        came: as of `result_of`.
    """
    engine = llm.engine
    asked = QuerySubmission(llm.fragments, [query], options)
    found: dict[str, FinishedEvent] = {}
    ended = False
    try:
        async with aclosing(stream_events(engine, asked)) as events:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    found[event.request_id] = event
                    continue
                answer = asked.job.answer_of(event.request_id)
                if answer is not None and event.text:
                    yield answer[1], event.text
        ended = True
    except DagError as error:
        raise await asyncio.wrap_future(engine.call(partial(asked.locate, error=error))) from None
    finally:
        if not ended:
            for event in found.values():
                release_states(engine, event)
    states = asked.job.states(list(found.values()))
    engine.post(lambda core: llm.fragments.keep(core, states))
    yield result_of(engine, asked, 0, found, came)
