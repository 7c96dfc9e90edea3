"""`/v1/states`: compute an input and keep it, look at what is kept, cut, hold, move between tiers, release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from dagengine import DagError, Keep
from dagengine.core import EngineCore
from dagengine.errors import as_dag_error
from dagengine.inputs import parse_keep

from ..answers import dag_object, usage
from ..errors import renamed
from ..parsing import check_messages, parse_body, plain_messages, read_json
from ..protocol import ForkBody, MoveBody, RetainBody, StateBody
from ..service import Service
from .common import (
    DAG_FIELDS,
    check_parameters,
    engine_request,
    id_of,
    json_response,
    off_loop,
    run_all,
    service_of,
    tenant_of,
)

router = APIRouter(prefix="/v1/states", tags=["states"], dependencies=[Depends(check_parameters)])
NAMES = {**DAG_FIELDS, "input": "input"}
MOST_LISTED = 1000
CACHE_SALT = Query(None, min_length=1, max_length=256, description="The salt that the state was made with.")


@router.post("", openapi_extra={"x-body": "StateBody"})
async def create_state(request: Request) -> Response:
    """Prefill: compute an input, optionally over a context, and keep it as a state."""
    service, body = service_of(request), parse_body(StateBody, await read_json(request))
    service.check_model(body.model)
    context = service.context(body.dag)
    salt = tenant_of(request).salt(body.cache_salt)
    value = checked_input(body.input, "input", service)
    if body.add_special_tokens is not None and not isinstance(value, str):
        raise DagError("invalid_request", "only text can be given special tokens", "add_special_tokens")

    requests = await off_loop(
        lambda: [
            engine_request(
                service,
                value,
                body.dag,
                context,
                request_id=id_of(request),
                sampling=None,
                salt=salt,
                priority=body.priority,
                names=NAMES,
                keep=Keep(),
                add_special_tokens=body.add_special_tokens,
            )
        ]
    )
    events = await run_all(request, requests, lambda _, error: renamed(error, NAMES))
    try:
        choice = events[0].choices[0]
        state = choice.dag.state
        assert state is not None
        found = await service.call(lambda core: describe(core, state, salt))
        return json_response({**found, "dag": dag_object(choice.dag), "usage": usage([(choice,)])})
    finally:
        service.end(id_of(request))


@router.get("")
async def list_states(
    request: Request,
    cache_salt: str | None = CACHE_SALT,
    limit: int = Query(MOST_LISTED, ge=1, le=MOST_LISTED),
    after: str | None = Query(None, description="List what comes after this state."),
) -> Response:
    """The tenant's states in order of arrival."""
    salt = tenant_of(request).salt(cache_salt)

    def found(core: EngineCore) -> list[Any]:
        return list(core.store.states(salt=salt))

    states = await service_of(request).call(found)
    if after is not None:
        ids = [info.id for info in states]
        if after not in ids:
            raise DagError("state_not_found", f"there is no state {after[:100]!r}", "after")
        states = states[ids.index(after) + 1 :]
    listed = [_described(info) for info in states[:limit]]
    return json_response({"object": "list", "data": listed, "has_more": len(states) > limit})


@router.get("/{state_id}")
async def get_state(request: Request, state_id: str, cache_salt: str | None = CACHE_SALT) -> Response:
    """One state, with the layout that it was computed under."""
    salt = tenant_of(request).salt(cache_salt)
    return json_response(await service_of(request).call(lambda core: describe(core, state_id, salt)))


@router.delete("/{state_id}")
async def delete_state(request: Request, state_id: str, cache_salt: str | None = CACHE_SALT) -> Response:
    """Release a state's name; whatever reads it keeps what it reads."""
    salt = tenant_of(request).salt(cache_salt)
    await service_of(request).call(lambda core: core.release_state(state_id, salt=salt))
    return json_response({"id": state_id, "object": "state", "deleted": True})


@router.post("/{state_id}/fork", openapi_extra={"x-body": "ForkBody"})
async def fork_state(request: Request, state_id: str) -> Response:
    """A new handle on the first tokens of a state."""
    body = parse_body(ForkBody, await read_json(request))
    salt = tenant_of(request).salt(body.cache_salt)
    keep = None if body.keep is None else parse_keep(body.keep, "keep")

    def fork(core: EngineCore) -> dict[str, Any]:
        return describe(core, core.fork(state_id, body.at, salt=salt, keep=keep), salt)

    return json_response(await service_of(request).call(fork))


@router.post("/{state_id}/retain", openapi_extra={"x-body": "RetainBody"})
async def retain_state(request: Request, state_id: str) -> Response:
    """Hold a state for `ttl_s` seconds from now, or until it is released."""
    value = await read_json(request, optional=True)
    body = parse_body(RetainBody, {} if value is None else value)
    salt = tenant_of(request).salt(body.cache_salt)
    if body.ttl_s is not None:
        try:
            parse_keep({"ttl_s": body.ttl_s}, "keep")
        except DagError as error:
            raise renamed(error, {"keep.ttl_s": "ttl_s"}) from None

    def retain(core: EngineCore) -> dict[str, Any]:
        try:
            core.store.retain(state_id, body.ttl_s, salt=salt)
            if body.pin is not None:
                (core.store.pin if body.pin else core.store.unpin)(state_id, salt=salt)
        except Exception as error:
            raise _about_state(error) from None
        return describe(core, state_id, salt)

    return json_response(await service_of(request).call(retain))


@router.post("/{state_id}/offload", status_code=202, openapi_extra={"x-body": "MoveBody"})
async def offload_state(request: Request, state_id: str) -> Response:
    """Move a state's pages to the host: accepted also while it is in use, and done as soon as it is not."""
    return await _move(request, state_id, EngineCore.offload_state)


@router.post("/{state_id}/prefetch", status_code=202, openapi_extra={"x-body": "MoveBody"})
async def prefetch_state(request: Request, state_id: str) -> Response:
    """Begin to bring a state, and what it passes on, back to the device, as far as pages are unused there."""
    return await _move(request, state_id, EngineCore.prefetch_state)


async def _move(request: Request, state_id: str, move: Callable[..., None]) -> Response:
    value = await read_json(request, optional=True)
    body = parse_body(MoveBody, {} if value is None else value)
    salt = tenant_of(request).salt(body.cache_salt)

    def moved(core: EngineCore) -> dict[str, Any]:
        move(core, state_id, salt=salt)
        return describe(core, state_id, salt)

    return json_response(await service_of(request).call(moved), status=202)


def checked_input(value: Any, field: str, service: Service) -> Any:
    """Text or ids as they are; messages checked. What is neither is left to the encoder to refuse."""
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        check_messages(value, field, names=service.uses_message_names)
        return plain_messages(value)
    return value


def describe(core: EngineCore, state_id: str, salt: str) -> dict[str, Any]:
    """A state and the layout it was computed under; runs on the engine's thread. Raises DagError."""
    try:
        info = core.store.describe(state_id, salt=salt)
        node, _ = core.store.resolve(state_id, salt)
        names = {other.node: other.id for other in reversed(core.store.states(salt=salt))}
    except Exception as error:
        raise _about_state(error) from None
    segments = [
        [
            names.get(read.node.uid, f"node:{read.node.uid}"),
            read.start,
            read.stop,
            read.node.own_start + read.start + read.delta,
            read.delta,
        ]
        for read in node.reads
    ]
    return {**_described(info), "layout": {"own_start": info.own_start, "segments": segments}}


def _described(info: Any) -> dict[str, Any]:
    """JSON of the store's description of a handle."""
    return {
        "id": info.id,
        "object": "state",
        "name": info.name,
        "tokens": info.at,
        "context_tokens": info.context_tokens,
        "pages": info.pages,
        "host_pages": info.host_pages,
        "tier": str(getattr(info.tier, "value", info.tier)),
        "readers": info.readers,
        "holders": info.holders,
        "pinned": info.pinned,
        "expires_s": info.expires_s,
        "own_start": info.own_start,
        "spans": {
            name: [min(start, info.at), min(stop, info.at)]
            for name, (start, stop) in info.spans
            if name != "all"
        },
        "signature": dict(info.signature),
    }


def _about_state(error: Exception) -> DagError:
    found = as_dag_error(error)
    return DagError(found.code, found.message, "state")
