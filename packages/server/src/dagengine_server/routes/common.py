"""What the routes share: who asks, under which id, and how a submission becomes one answer or a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from dagengine import DagError, Keep, SamplingParams
from dagengine.documents import parse_position
from dagengine.inputs import Input, build_request, parse_keep
from dagengine.request import ContextRef, FinishedEvent
from dagengine.request import Request as EngineRequest

from ..answers import to_json
from ..errors import renamed
from ..parameters import check_names
from ..protocol import DagOptions
from ..service import Service, Tenant
from ..sse import unless_disconnected
from ..submission import Locate

T = TypeVar("T")
DAG_FIELDS = {
    "context": "dag.context",
    "position": "dag.position",
    "position_options": "dag.position",
    "backend": "dag.backend",
}


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


def id_of(request: Request) -> str:
    """The id of this HTTP request: in its answer, its `X-Request-Id`, and what cancels it."""
    request_id: str = request.state.request_id
    return request_id


def json_response(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


async def off_loop(function: Callable[[], T]) -> T:
    """Run what takes long (templates, tokenizing) on a thread."""
    return await asyncio.to_thread(function)


async def check_parameters(request: Request) -> None:
    """Refuse URL parameters that the route does not have, or has twice. Raises DagError `invalid_request`."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    check_names([name for name, _ in request.query_params.multi_items()], known)


def engine_request(
    service: Service,
    value: Input,
    dag: DagOptions,
    context: tuple[ContextRef, ...],
    *,
    request_id: str,
    sampling: SamplingParams | None,
    salt: str,
    priority: int,
    names: Mapping[str, str],
    keep: Keep | None = None,
    add_special_tokens: bool | None = None,
) -> EngineRequest:
    """An engine request; takes as long as tokenizing does.

    Args:
        names: what the engine's field names are called in the body.
        keep: when `dag.keep` is absent.

    Raises:
        DagError: naming the body's field.
    """
    policy, options = parse_position(dag.position, service.model.default_policy, "dag.position")
    try:
        return build_request(
            service.encoder,
            value,
            sampling=sampling,
            context=context,
            position=policy,
            position_options=options,
            backend=dag.backend,
            keep=keep if dag.keep is None else parse_keep(dag.keep, "dag.keep"),
            salt=salt,
            priority=priority,
            add_special_tokens=add_special_tokens,
            request_id=request_id,
        )
    except DagError as error:
        raise renamed(error, names) from None


async def run_all(
    request: Request, requests: Sequence[EngineRequest], locate: Locate, *, together: bool = False
) -> list[FinishedEvent]:
    """Run requests to their ends, unless the client leaves. The caller ends the submission afterwards.

    Raises:
        DagError: a refusal, or (not together) the first error.
        ClientDisconnect: the client left; everything is cancelled.
    """
    service, http_id, tenant = service_of(request), id_of(request), tenant_of(request)
    with service.submission(http_id, tenant, locate=locate) as submission:

        async def run() -> list[FinishedEvent]:
            await (submission.start_made(lambda core: requests) if together else submission.start(requests))
            return await submission.results()

        events = await unless_disconnected(run(), request.receive)
        submission.delivered()
        return events
