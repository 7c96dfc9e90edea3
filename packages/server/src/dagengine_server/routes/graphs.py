"""`/v1/graphs`: a whole graph in one request, run or only explained."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from dagengine import DagError, SamplingParams
from dagengine.core import EngineCore
from dagengine.documents import GraphRequests, graph_requests
from dagengine.errors import as_dag_error
from dagengine.explain import Explanation, explain
from dagengine.request import Choice, FinishedEvent, TokenEvent, check_parent
from dagengine.request import Request as EngineRequest
from dagengine_core_graph import GraphDocument, load_graph

from ..answers import chat_logprobs, dag_object, usage
from ..errors import envelope, renamed
from ..parsing import read_json
from ..service import Service
from ..sse import DONE, PING, EventStream, data_event, error_event
from ..submission import Submission
from .common import check_parameters, id_of, json_response, off_loop, run_all, service_of, tenant_of
from .states import checked_input

router = APIRouter(prefix="/v1/graphs", tags=["graphs"], dependencies=[Depends(check_parameters)])
NODE_FIELDS = {
    "position_options": "position",
    **{field.name: f"generate.{field.name}" for field in fields(SamplingParams)},
}


@dataclass(frozen=True)
class Job:
    """A document that can be submitted.

    Attributes:
        plan: its engine requests, parents first.
        names: node id by engine request id.
    """

    document: GraphDocument
    plan: GraphRequests
    salt: str

    @property
    def names(self) -> Mapping[str, str]:
        return self.plan.node_of

    @property
    def in_order(self) -> list[str]:
        """Engine request ids in the document's order."""
        ids = {node: request for request, node in self.names.items()}
        return [ids[node.id] for node in self.document.nodes]


@router.post("", openapi_extra={"x-body": "GraphDocument"})
async def run_graph(request: Request) -> Response:
    """Run every node; independent ones at once. Whole answers per node, or events as they happen."""
    service, job = service_of(request), await _job(request)
    head = {"id": id_of(request), "created": int(time.time()), "model": service.settings.served_model_name}
    requests = list(job.plan.requests)
    try:
        if job.document.stream:
            with service.submission(id_of(request), tenant_of(request), locate=_unlocated) as submission:
                await submission.start_made(lambda core: requests)
                source = _events(submission, job, head, service)
                return EventStream(source, lambda: service.end(id_of(request)))
        events = await run_all(request, requests, _unlocated, together=True)
    except DagError as error:
        raise await _located(error, job, service) from None
    try:
        found = {event.request_id: event for event in events}
        nodes = [_node(found[request_id], job, found, service) for request_id in job.in_order]
        total = usage([event.choices for event in events if event.choices])
        return json_response({**head, "object": "dagengine.graph", "nodes": nodes, "usage": total})
    finally:
        service.end(id_of(request))


@router.post("/compile", openapi_extra={"x-body": "GraphDocument"})
async def compile_graph(request: Request) -> Response:
    """What every node would see, where, and at what cost; the model does not run."""
    service, job = service_of(request), await _job(request)
    requests = list(job.plan.requests)
    rows = await service.call(lambda core: explain(core, requests, job.salt))
    return json_response(plan_of(job.document, job.plan, rows))


def plan_of(document: GraphDocument, plan: GraphRequests, rows: Sequence[Explanation]) -> dict[str, Any]:
    """The answer for explained requests, in the order of the document's nodes."""
    job = Job(document, plan, "")
    found = {row.request_id: row for row in rows}
    nodes = [_explained(found[request_id], job) for request_id in job.in_order]
    return {"object": "dagengine.graph.plan", "nodes": nodes}


async def _job(request: Request) -> Job:
    """Read the body. Raises DagError, naming the field by its JSON path."""
    service, value = service_of(request), await read_json(request)
    salt = None
    if isinstance(value, dict) and "cache_salt" in value:
        salt = value.pop("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= 256):
            raise DagError("invalid_request", "cache_salt is a text of 1 to 256 characters", "cache_salt")
    return await off_loop(lambda: _built(value, service, tenant_of(request).salt(salt)))


def _built(value: Any, service: Service, salt: str) -> Job:
    try:
        document = load_graph(value)
    except Exception as error:
        raise as_dag_error(error) from None
    service.check_model(document.model)
    settings = service.settings
    nodes = []
    for index, node in enumerate(document.nodes):
        if len(node.context) > settings.max_context:
            message = f"a node has at most {settings.max_context} references"
            raise DagError("invalid_request", message, f"nodes[{index}].context")
        n = (node.generate or {}).get("n")
        if isinstance(n, int) and n > settings.max_n:
            message = f"n is at most {settings.max_n}, not {n}"
            raise DagError("invalid_request", message, f"nodes[{index}].generate.n")
        nodes.append(replace(node, input=checked_input(node.input, f"nodes[{index}].input", service)))
    document = replace(document, nodes=tuple(nodes))
    plan = graph_requests(
        document,
        service.encoder,
        default_policy=service.model.default_policy,
        salt=salt,
        max_nodes=settings.max_nodes,
    )
    return Job(document, plan, salt)


def _unlocated(request_id: str, error: DagError) -> DagError:
    """Errors are located once everything that ended is known."""
    return error


async def _located(error: DagError, job: Job, service: Service) -> DagError:
    """A refusal of the whole submission, with the node it concerns: the first that is refused by itself."""

    def search(core: EngineCore) -> DagError | None:
        earlier: dict[str, EngineRequest] = {}
        for request in job.plan.requests:
            try:
                core.check(request)
                for index, ref in enumerate(request.context):
                    if ref.state is not None:
                        core.preparer.resolve(ref, index, request.salt)
                    elif ref.request is not None:
                        check_parent(ref.request, earlier, f"context[{index}].node")
            except DagError as found:
                return _at_node(found, request.id, job)
            earlier[request.id] = request
        return None

    if error.field is None or error.code in ("queue_full", "draining", "engine_dead"):
        return error
    if len(job.plan.requests) == 1:
        return _at_node(error, job.plan.requests[0].id, job)
    return await service.call(search) or error


def _at_node(error: DagError, request_id: str, job: Job) -> DagError:
    """The error of one node with its field in the document's terms."""
    error = renamed(error, NODE_FIELDS)
    if error.field is not None and error.field.endswith("].request"):
        error = DagError(error.code, error.message, error.field.removesuffix("request") + "node")
    path = f"nodes[{job.in_order.index(request_id)}]"
    return DagError(error.code, error.message, f"{path}.{error.field}" if error.field else path)


async def _events(
    submission: Submission, job: Job, head: Mapping[str, Any], service: Service
) -> AsyncGenerator[bytes, None]:
    """Per-node events: `delta` with new text, `final` with the node's answer or error, and `done`."""
    base = {**head, "object": "dagengine.graph.event"}
    found: dict[str, FinishedEvent] = {}
    async with aclosing(submission.batches(service.settings.ping_interval_s)) as batches:
        async for batch in batches:
            sent, ended = b"" if batch else PING, []
            for event in batch:
                if isinstance(event, TokenEvent):
                    sent += data_event({**base, **_delta(event, job, service)})
                    continue
                found[event.request_id] = event
                sent += data_event({**base, "event": "final", **_node(event, job, found, service)})
                ended.append(event.request_id)
            yield sent
            for request_id in ended:
                submission.delivered(request_id)
    health = service.health()
    if health is not None:
        yield error_event(envelope(health))
        return
    total = usage([event.choices for event in found.values() if event.choices])
    yield data_event({**base, "event": "done", "usage": total}) + DONE


def _delta(event: TokenEvent, job: Job, service: Service) -> dict[str, Any]:
    delta: dict[str, Any] = {
        "event": "delta",
        "node": job.names[event.request_id],
        "index": event.index,
        "text": event.text,
        "token_ids": list(event.token_ids),
    }
    if event.logprobs is not None:
        delta["logprobs"] = chat_logprobs(event.logprobs, service.model.tokenizer)
    return delta


def _node(
    event: FinishedEvent, job: Job, found: Mapping[str, FinishedEvent], service: Service
) -> dict[str, Any]:
    """A node's answer: flat if there is one choice, else with `choices`; or its error."""
    node: dict[str, Any] = {"node": job.names[event.request_id]}
    if event.error is not None:
        return {**node, **envelope(_node_error(event, job, found))}
    answers = [_choice(choice, service) for choice in event.choices]
    shown = answers[0] if len(answers) == 1 else {"choices": answers}
    return {**node, **shown, "usage": usage([event.choices])}


def _choice(choice: Choice, service: Service) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "dag": dag_object(choice.dag),
    }
    if choice.logprobs is not None:
        answer["logprobs"] = chat_logprobs(choice.logprobs, service.model.tokenizer)
    return answer


def _node_error(event: FinishedEvent, job: Job, found: Mapping[str, FinishedEvent]) -> DagError:
    """The node's error in the document's terms."""
    error = event.error
    assert error is not None
    if error.code == "parent_failed":
        request = next(r for r in job.plan.requests if r.id == event.request_id)
        failed: Sequence[str] = [
            ref.request
            for ref in request.context
            if ref.request is not None and ref.request in found and found[ref.request].error is not None
        ]
        names = " and ".join(repr(job.names[request_id]) for request_id in failed) or "a node"
        return DagError(
            "parent_failed",
            f"{names}, which it reads, failed",
            f"nodes[{job.in_order.index(event.request_id)}].context",
        )
    return _at_node(error, event.request_id, job)


def _explained(row: Explanation, job: Job) -> dict[str, Any]:
    node = job.names[row.request_id]
    if row.error is not None:
        error = row.error
        message = "a node that it reads is refused" if error.code == "parent_failed" else error.message
        return {
            "node": node,
            **envelope(_at_node(DagError(error.code, message, error.field), row.request_id, job)),
        }

    def ranges(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        return [[job.names.get(name, name), *rest] for name, *rest in rows]

    return {
        "node": node,
        "visible": ranges(row.visible),
        "passed": ranges(row.passed),
        "layout": {"policy": row.policy, "own_start": row.own_start, "segments": ranges(row.segments)},
        "tokens": {
            "visible": row.num_visible,
            "input": row.num_input,
            "planned": row.planned_tokens,
            "reused": row.reused,
        },
        "pages": row.num_pages,
        "timing_ms": {"compile": round(row.compile_ms, 3), "layout": round(row.layout_ms, 3)},
    }
