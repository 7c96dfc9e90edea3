"""`/v1/query`: span queries in spnl's wire form or as `dagengine.query/v1`, executed as one graph each."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from dagengine import DagError, Keep
from dagengine.encoded_queries import EncodedQuery, QueryDraft, draft_query
from dagengine.queries import QueryJob, QueryOptions
from dagengine.query_results import Outcome, outcome_of
from dagengine.query_run import QuerySubmission
from dagengine.request import Choice, Event, FinishedEvent, TokenEvent
from dagengine_core_graph.query import GenerateParams, Map, Message, dump_query, load_query
from dagengine_core_graph.query import Query as SpanQuery

from ..answers import dag_object
from ..errors import envelope
from ..limits import MAX_CLIENT_ID
from ..parameters import ExecuteParameters, PrepareParameters, described, read_parameters
from ..parsing import body_came, is_small, read_query_json
from ..query_errors import in_body, unplanned, unread
from ..service import Service
from ..sse import DONE, PING, EventStream, data_event, error_event, unless_disconnected
from ..submission import Submission
from .common import id_of, json_response, off_loop, service_of, tenant_of

router = APIRouter(prefix="/v1/query", tags=["queries"])
T = TypeVar("T")
SPNL_PREFIX = "spnl/"
MOST_QUICK = 256
"""JSON values of a body, and leaves and calls of a query, that are read and planned in about a millisecond."""
MOST_QUICK_CHARACTERS = 4096
"""Of texts that are tokenized in about a millisecond."""
MOST_QUICK_CHATS = 16
"""Nodes that the chat template renders in about a millisecond, however short their texts."""


@dataclass(frozen=True)
class Job:
    """A query that is submitted.

    Attributes:
        came: when the last of its body came, on the clock of `time.perf_counter`.
        texts: whether it is a `map`, whose answer is a text completion.
        wrapped: whether its body has it as the member `query`.
    """

    head: Mapping[str, Any]
    came: float
    asked: QuerySubmission
    texts: bool
    wrapped: bool

    @property
    def query(self) -> QueryJob:
        """What was submitted, once it is."""
        return self.asked.job

    def outcome(self, found: Mapping[str, FinishedEvent]) -> Outcome:
        """The whole answer, of all terminal events. Raises DagError: what the first call that failed ended with."""
        try:
            return outcome_of(self.query, 0, found, self.asked.facts)
        except DagError as error:
            raise in_body(error, wrapped=self.wrapped) from None

    def locate(self, request_id: str, error: DagError) -> DagError:
        """The error of a request with its path in the body."""
        return in_body(self.query.locate(request_id, error), wrapped=self.wrapped)


@router.post("/execute", openapi_extra={"x-body": "SpanQuery", "parameters": described(ExecuteParameters)})
async def execute(request: Request) -> Response:
    """Run a span query; nested calls are one graph. Answers of the calls that its result holds are the choices.

    `dag.timing_ms` of the whole query: `plan` and `tokenize`, and `submit`, from when the last of the body came
    until the engine was handed the requests, both of these included. `waited` of an answer counts from there.
    """
    service, asked = service_of(request), read_parameters(request, ExecuteParameters)
    keep = None if asked.keep_ttl_s is None else Keep(ttl_s=asked.keep_ttl_s)
    job = await _job(request, asked, reduce=asked.reduce, keep=keep)
    headers = _echo(request)
    with service.submission(id_of(request), tenant_of(request), locate=_unlocated) as submission:
        await _start(service, job, submission)
        if asked.stream:
            source = _events(service, job, submission)
            return EventStream(source, lambda: service.end(id_of(request)), headers)
        outcome = await unless_disconnected(_outcome(service, job, submission), request.receive)
        answer = json_response(_answer(job, outcome))
        submission.delivered()
    service.end(id_of(request))
    answer.headers.update(headers)
    return answer


@router.post("/prepare", openapi_extra={"x-body": "SpanQuery", "parameters": described(PrepareParameters)})
async def prepare(request: Request) -> Response:
    """Compute what of a query needs no call, and keep it, so that executing it finds that: `{"success": true}`."""
    service, asked = service_of(request), read_parameters(request, PrepareParameters)
    if not service.settings.max_fragments:
        raise DagError("unsupported", "this server keeps no fragments; start it with --max-fragments above 0")
    job = await _job(request, asked, prepare_only=True)
    with service.submission(id_of(request), tenant_of(request), locate=_unlocated) as submission:
        await _start(service, job, submission)
        found = await unless_disconnected(_finished(service, job, submission), request.receive)
        for event in found.values():
            if event.error is not None:
                raise job.locate(event.request_id, event.error)
        submission.delivered()
    service.end(id_of(request))
    answer = json_response({"success": True})
    answer.headers.update(_echo(request))
    return answer


async def _job(
    request: Request,
    asked: PrepareParameters,
    *,
    reduce: int | None = None,
    keep: Keep | None = None,
    prepare_only: bool = False,
) -> Job:
    """What is to be submitted. Raises as `_encoded`."""
    service, came = service_of(request), await body_came(request)
    encoded, options, texts, wrapped = await _encoded(request, asked, reduce, keep)
    submission = QuerySubmission(service.fragments, [encoded], options, prepare_only=prepare_only)
    head = {"id": id_of(request), "created": int(time.time()), "model": service.settings.served_model_name}
    return Job(head, came, submission, texts, wrapped)


async def _encoded(
    request: Request, asked: PrepareParameters, reduce: int | None, keep: Keep | None
) -> tuple[EncodedQuery, QueryOptions, bool, bool]:
    """Read, plan, lower and tokenize the body; also gives `texts` and `wrapped` of the job. Raises DagError naming the
    subtree.
    """
    service, value = service_of(request), await read_query_json(request)
    tenant, wrapped = tenant_of(request), isinstance(value, dict) and "format" in value
    options = QueryOptions(
        position=service.model.default_policy if asked.position is None else asked.position,
        backend=asked.backend,
        salt=tenant.salt(asked.cache_salt),
        keep=keep,
        fragment_ttl_s=service.fragments.ttl_s if service.fragments.most else None,
    )

    def load() -> SpanQuery:
        try:
            return _renamed(load_query(value))
        except Exception as error:
            raise unread(error, value) from None

    small = is_small(value, MOST_QUICK)
    query = await _quickly(small, load)

    def draft() -> QueryDraft:
        found = draft_query(
            query,
            service.prompts,
            salt=options.salt,
            retriever=service.retriever,
            reduce=reduce,
            max_nodes=service.settings.max_query_nodes,
        )
        for name in found.lowered.models:
            service.check_model(name)
        for node in found.lowered.nodes:
            if len(node.context) > service.settings.max_context:
                message = f"a call sees at most {service.settings.max_context} parts"
                raise DagError("capacity", message, node.path)
        return found

    try:
        drafted = await _quickly(small and query.size <= MOST_QUICK and not query.retrieves, draft)
        brief = drafted.characters <= MOST_QUICK_CHARACTERS and drafted.chats <= MOST_QUICK_CHATS
        encoded = await _quickly(brief, drafted.encode)
    except DagError as error:
        raise unplanned(error, query, service.settings.served_model_name, wrapped=wrapped) from None
    return encoded, options, isinstance(query, Map), wrapped


async def _quickly(quick: bool, function: Callable[[], T]) -> T:
    """Run it here, where a thread of its own would take longer to wake than it does."""
    return function() if quick else await off_loop(function)


async def _start(service: Service, job: Job, submission: Submission) -> None:
    """Submit. Raises DagError, the first refusal, located."""
    try:
        await submission.start_made(job.asked)
    except DagError as error:
        if error.code in ("timeout", "cancelled", "draining"):  # the engine may not answer at all
            raise
        located = await service.call(partial(job.asked.locate, error=error))
        raise in_body(located, wrapped=job.wrapped) from None


async def _finished(service: Service, job: Job, submission: Submission) -> dict[str, FinishedEvent]:
    """Terminal events by request id; fragments among them are kept."""
    found = {event.request_id: event for event in await submission.results()}
    _keep(service, job, submission, list(found.values()))
    return found


async def _outcome(service: Service, job: Job, submission: Submission) -> Outcome:
    return job.outcome(await _finished(service, job, submission))


def _keep(service: Service, job: Job, submission: Submission, events: list[FinishedEvent]) -> None:
    """Hand states of fragments over to those that keep them. Waits for nothing: it cannot be cancelled half done."""
    states = job.query.states(events)
    if not states:
        return
    service.engine.post(lambda core: service.fragments.keep(core, states))
    for event in events:
        if event.request_id in job.query.fragments:
            submission.delivered(event.request_id)


def _answer(job: Job, outcome: Outcome) -> dict[str, Any]:
    """spnl's two shapes: a chat completion, or a text completion for a `map`; and what else there is to say."""
    kind = "text_completion" if job.texts else "chat.completion"
    return {
        **job.head,
        "object": kind,
        "choices": [_choice(job, index, choice) for index, choice in enumerate(outcome.answers)],
        "usage": _usage(outcome),
        "result": dump_query(outcome.result)["query"],
        "dag": _about(job, outcome),
    }


def _about(job: Job, outcome: Outcome) -> dict[str, Any]:
    """The `dag` of the whole query. `submit` are the milliseconds from when the last of its body came until the engine
    was handed its requests: to read, plan and tokenize it, to wait for the engine's thread and to make them there.
    """
    timing, submit = job.query.queries[0].timing, (job.asked.handed - job.came) * 1e3
    spent = {"submit": submit, "plan": timing.plan, "tokenize": timing.tokenize}
    return {
        "record": dict(outcome.record),
        "timing_ms": {name: round(value, 3) for name, value in spent.items()},
    }


def _choice(job: Job, index: int, choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"text": choice.text}
        if job.texts
        else {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
    )
    return {
        "index": index,
        **said,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": None,
        "dag": _dag(choice),
    }


def _dag(choice: Choice) -> dict[str, Any]:
    """The `dag` of one answer; the record is the query's."""
    return {name: value for name, value in dag_object(choice.dag).items() if name != "record"}


def _usage(outcome: Outcome) -> dict[str, Any]:
    used = outcome.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }


async def _events(service: Service, job: Job, submission: Submission) -> AsyncGenerator[bytes, None]:
    """Chunks of text completions, as spnl's client reads them for every query; the last says how each answer ended."""
    found: dict[str, FinishedEvent] = {}
    async with aclosing(submission.batches(service.settings.ping_interval_s)) as batches:
        async for batch in batches:
            sent = b"" if batch else PING
            ended = [event for event in batch if isinstance(event, FinishedEvent)]
            failed = next((event for event in ended if event.error is not None), None)
            if failed is not None:
                assert failed.error is not None
                yield error_event(envelope(job.locate(failed.request_id, failed.error)))
                return
            _keep(service, job, submission, ended)
            for event in batch:
                sent += _chunk(job, event)
            found.update((event.request_id, event) for event in ended)
            if sent:
                yield sent
    if len(found) < len(job.query.requests):
        error = service.health() or DagError("internal", "the answer ended before every part of it had")
        yield error_event(envelope(error))
        return
    outcome = job.outcome(found)
    chunks: list[dict[str, Any]] = [
        {
            "choices": [
                {
                    "index": index,
                    "text": "",
                    "finish_reason": choice.finish_reason,
                    "logprobs": None,
                    "dag": _dag(choice),
                }
            ]
        }
        for index, choice in enumerate(outcome.answers)
    ] or [{"choices": []}]
    chunks[-1] |= {"usage": _usage(outcome), "dag": _about(job, outcome)}
    last = b"".join(data_event({**job.head, "object": "text_completion", **chunk}) for chunk in chunks)
    yield last + DONE
    submission.delivered()


def _chunk(job: Job, event: Event) -> bytes:
    answer = job.query.answer_of(event.request_id)
    if answer is None or not isinstance(event, TokenEvent) or not event.text:
        return b""
    choice = {"index": answer[1], "text": event.text, "finish_reason": None, "logprobs": None}
    return data_event({**job.head, "object": "text_completion", "choices": [choice]})


def _unlocated(request_id: str, error: DagError) -> DagError:
    """Errors are located where they are told."""
    return error


def _renamed(query: SpanQuery) -> SpanQuery:
    """The query with spnl's prefix taken off the models' names."""
    if isinstance(query, Message):
        return query
    below = query.subqueries
    renamed = tuple(_renamed(part) for part in below)
    if any(before is not after for before, after in zip(below, renamed, strict=True)):
        query = query.with_subqueries(renamed)
    params = getattr(query, "params", None)
    if isinstance(params, GenerateParams) and params.model and params.model.startswith(SPNL_PREFIX):
        query = replace(query, params=replace(params, model=params.model.removeprefix(SPNL_PREFIX)))  # type: ignore[call-arg]
    return query


def _echo(request: Request) -> dict[str, str]:
    """A client's own id, given back; it means nothing here."""
    given = request.headers.get("x-request-id")
    return {"X-Client-Request-Id": given} if given and len(given) <= MAX_CLIENT_ID else {}
