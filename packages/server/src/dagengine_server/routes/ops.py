"""What operators and tools ask: models, health, metrics, version, tokens, cancellation."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import dagengine
from dagengine import DagError
from dagengine.tokenizer import Tokenizer

from ..errors import error_response
from ..metrics import Snapshot, take_snapshot
from ..parsing import check_messages, parse_body, plain_messages, read_json
from ..protocol import DetokenizeBody, TokenizeBody
from ..service import Service, registered
from .common import json_response, off_loop, service_of, tenant_of

router = APIRouter(tags=["operations"])
SNAPSHOT_WAIT_S = 5.0


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The model that is served, with its limits and what its graphs may use."""
    return json_response({"object": "list", "data": [_model(service_of(request))]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """One model."""
    service_of(request).check_model(model_id)
    return json_response(_model(service_of(request)))


@router.post("/v1/requests/{request_id}/cancel")
async def cancel_request(request: Request, request_id: str) -> Response:
    """End a running request of the same key; its client gets the error `cancelled`."""
    cancelled = service_of(request).cancel(request_id, tenant_of(request))
    return json_response({"id": request_id, "object": "request", "cancelled": cancelled})


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine comes round, 503 when it hangs or is dead."""
    error = service_of(request).health()
    return json_response({"status": "ok"}) if error is None else error_response(error)


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken, 503 also while the server shuts down."""
    service = service_of(request)
    error = service.health()
    if error is None and service.draining:
        error = DagError("draining", "the server is shutting down")
    return json_response({"status": "ok"}) if error is None else error_response(error)


@router.get("/version")
async def get_version() -> Response:
    """Versions of the server and the engine."""
    return json_response({"version": version("dagengine-server"), "engine": dagengine.__version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics; those of the engine are left out when it does not answer."""
    service = service_of(request)
    snapshot: Snapshot | None = None
    try:
        snapshot = await asyncio.wait_for(service.call(take_snapshot), SNAPSHOT_WAIT_S)
    except (DagError, TimeoutError):
        snapshot = None
    body = service.metrics.exposition(snapshot, service.engine)
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/tokenize", openapi_extra={"x-body": "TokenizeBody"})
async def tokenize(request: Request) -> Response:
    """Text or messages to ids, as generation would."""
    service, body = service_of(request), parse_body(TokenizeBody, await read_json(request))
    service.check_model(body.model)
    tokenizer = _tokenizer(service)
    if (body.prompt is None) == (body.messages is None):
        raise DagError("invalid_request", "send either prompt or messages", "prompt")
    if body.messages is not None:
        check_messages(body.messages, "messages", names=service.uses_message_names)
        if body.add_special_tokens is not None:
            message = "the chat template decides on special tokens"
            raise DagError("invalid_request", message, "add_special_tokens")
    value: Any = body.prompt if body.messages is None else plain_messages(body.messages)
    field = "prompt" if body.messages is None else "messages"

    def encode() -> dict[str, Any]:
        prompt = service.encoder.encode(
            value,
            generate=body.add_generation_prompt,
            has_context=False,
            add_special_tokens=body.add_special_tokens,
            field=field,
        )
        ids = list(prompt.input_ids)
        found = {"count": len(ids), "max_model_len": service.model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [tokenizer.token_text(token) for token in ids]
        return found

    return json_response(await off_loop(encode))


@router.post("/detokenize", openapi_extra={"x-body": "DetokenizeBody"})
async def detokenize(request: Request) -> Response:
    """Ids to text, special tokens shown."""
    service, body = service_of(request), parse_body(DetokenizeBody, await read_json(request))
    service.check_model(body.model)
    tokenizer = _tokenizer(service)
    for index, token in enumerate(body.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            message = f"token ids are integers from 0 to {tokenizer.vocab_size - 1}"
            raise DagError("invalid_request", message, f"tokens[{index}]")
    text = await off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


def _tokenizer(service: Service) -> Tokenizer:
    if service.model.tokenizer is None:
        raise DagError("unsupported", "this model has no tokenizer")
    return service.model.tokenizer


def _model(service: Service) -> dict[str, Any]:
    info = service.model
    return {
        "id": service.settings.served_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "dagengine",
        "root": service.settings.served_model_name,
        "max_model_len": info.max_model_len,
        "dag": {
            "modes": ["inherit", "digest", "artifact"],
            "spans": ["prompt", "output", "turn", "all"],
            "position_policies": registered("dagengine.position_policies"),
            "default_position_policy": info.default_policy,
            "backends": registered("dagengine.attention_backends"),
            "default_backend": info.default_backend,
            "default_implementation": info.default_implementation,
            "default_backend_reason": info.default_backend_reason,
            "page_size": info.page_size,
            "kv_pages": info.num_pages,
            "max_context": service.settings.max_context,
            "max_nodes": service.settings.max_nodes,
        },
    }
