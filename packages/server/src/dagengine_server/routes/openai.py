"""`/v1/chat/completions` and `/v1/completions`: OpenAI's endpoints, plus the `dag` object."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dagengine import DagError, SamplingParams
from dagengine.request import Choice, Event, TokenEvent
from dagengine.request import Request as EngineRequest

from ..errors import envelope, renamed
from ..parsing import check_messages, parse_body, plain_messages, read_json
from ..protocol import ChatBody, CompletionBody, Generation
from ..service import Service
from ..shapes import ChatShape, Shape, TextShape
from ..sse import DONE, PING, EventStream, data_event, error_event
from ..submission import Submission
from .common import (
    DAG_FIELDS,
    engine_request,
    id_of,
    json_response,
    off_loop,
    run_all,
    service_of,
    tenant_of,
)

router = APIRouter(tags=["openai"])
SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "n",
)
DEFAULT_COMPLETION_TOKENS = 16


@router.post("/v1/chat/completions", openapi_extra={"x-body": "ChatBody"})
async def chat_completions(request: Request) -> Response:
    """Answer a chat, optionally over a context of earlier states."""
    service, body = service_of(request), parse_body(ChatBody, await read_json(request))
    names = {**DAG_FIELDS, "input": "messages", "logprobs": "top_logprobs"}
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        message = "max_tokens and max_completion_tokens differ; give one of them"
        raise DagError("invalid_request", message, "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise DagError("invalid_request", "top_logprobs needs logprobs to be true", "top_logprobs")
    extra: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        extra["max_tokens"] = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        extra["logprobs"] = body.top_logprobs or 0
    sampling = _sampling(body, service, extra, names)
    check_messages(body.messages, "messages", names=service.uses_message_names)
    shape = ChatShape(**_shape(request, body, 1, sampling))
    return await _answer(request, body, [plain_messages(body.messages)], [names], sampling, shape, None)


@router.post("/v1/completions", openapi_extra={"x-body": "CompletionBody"})
async def completions(request: Request) -> Response:
    """Complete text or token ids, or several of them, optionally over a context of earlier states."""
    service, body = service_of(request), parse_body(CompletionBody, await read_json(request))
    prompts, paths = _prompts(body.prompt, service.settings.max_prompts)
    extra: dict[str, Any] = {}
    if body.max_tokens is None:
        extra["max_tokens"] = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    if body.logprobs is not None:
        extra["logprobs"] = body.logprobs
    sampling = _sampling(body, service, extra, {})
    if body.add_special_tokens is not None and not isinstance(prompts[0], str):
        raise DagError("invalid_request", "token ids are taken as they are", "add_special_tokens")
    shape = TextShape(**_shape(request, body, len(prompts), sampling))
    names = [{**DAG_FIELDS, "input": path} for path in paths]
    return await _answer(request, body, prompts, names, sampling, shape, body.add_special_tokens)


def _sampling(
    body: Generation, service: Service, extra: Mapping[str, Any], names: Mapping[str, str]
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise DagError("invalid_request", "stream_options needs stream to be true", "stream_options")
    if body.n is not None and body.n > service.settings.max_n:
        raise DagError("invalid_request", f"n is at most {service.settings.max_n}, not {body.n}", "n")
    options = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams.from_mapping({**options, **extra})
    except DagError as error:
        raise renamed(error, names) from None


def _prompts(prompt: Any, most: int) -> tuple[list[Any], list[str]]:
    """The prompts of a body, and the path of each."""
    if isinstance(prompt, str):
        return [prompt], ["prompt"]
    if not isinstance(prompt, list):
        raise DagError("invalid_request", "prompt is text, token ids, or a list of these", "prompt")
    if not prompt:
        raise DagError("invalid_request", "prompt is empty; send text or at least one token id", "prompt")
    if all(type(item) is int for item in prompt):
        return [prompt], ["prompt"]
    if len(prompt) > most:
        raise DagError(
            "invalid_request", f"a request has at most {most} prompts, not {len(prompt)}", "prompt"
        )
    for index, item in enumerate(prompt):
        ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not (ids if isinstance(prompt[0], list) else isinstance(item, str)):
            message = "prompt is text, token ids, a list of texts, or a list of lists of token ids"
            raise DagError("invalid_request", message, f"prompt[{index}]")
    return prompt, [f"prompt[{index}]" for index in range(len(prompt))]


def _shape(request: Request, body: Generation, num_prompts: int, sampling: SamplingParams) -> dict[str, Any]:
    service = service_of(request)
    return {
        "id": id_of(request),
        "model": service.settings.served_model_name,
        "created": int(time.time()),
        "tokenizer": service.model.tokenizer,
        "num_prompts": num_prompts,
        "n": sampling.n,
        "token_ids": body.return_token_ids,
    }


async def _answer(
    request: Request,
    body: Generation,
    prompts: Sequence[Any],
    names: Sequence[Mapping[str, str]],
    sampling: SamplingParams,
    shape: Shape,
    add_special_tokens: bool | None,
) -> Response:
    service, http_id = service_of(request), id_of(request)
    service.check_model(body.model)
    service.check_effort(body.reasoning_effort)
    context = service.context(body.dag)
    salt = tenant_of(request).salt(body.cache_salt)
    ids = [http_id] if len(prompts) == 1 else [f"{http_id}:{index}" for index in range(len(prompts))]
    names_of = dict(zip(ids, names, strict=True))

    def build() -> list[EngineRequest]:
        return [
            engine_request(
                service,
                prompt,
                body.dag,
                context,
                request_id=request_id,
                sampling=sampling,
                salt=salt,
                priority=body.priority,
                names=names_of[request_id],
                add_special_tokens=add_special_tokens,
            )
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]

    def locate(request_id: str, error: DagError) -> DagError:
        return renamed(error, names_of[request_id])

    requests = await off_loop(build)
    if body.stream:
        usage = body.stream_options is not None and body.stream_options.include_usage
        with service.submission(http_id, tenant_of(request), locate=locate) as submission:
            await submission.start(requests)
            source = _events(submission, shape, usage, service.settings.ping_interval_s)
            return EventStream(source, lambda: service.end(http_id))
    events = await run_all(request, requests, locate)
    try:
        return json_response(shape.answer([event.choices for event in events]))
    finally:
        service.end(http_id)


async def _events(
    submission: Submission, shape: Shape, include_usage: bool, silence_s: float
) -> AsyncGenerator[bytes, None]:
    number = {request.id: index for index, request in enumerate(submission.requests)}
    finished: dict[int, Sequence[Choice]] = {}

    def encoded(chunks: Sequence[dict[str, Any]]) -> bytes:
        extra = {"usage": None} if include_usage else {}
        return b"".join(data_event({**chunk, **extra}) for chunk in chunks)

    def encode(event: Event) -> bytes:
        prompt = number[event.request_id]
        if isinstance(event, TokenEvent):
            chunk = shape.delta(prompt, event)
            return b"" if chunk is None else encoded([chunk])
        if event.error is not None:
            raise event.error
        finished[prompt] = event.choices
        return encoded([shape.finish(prompt, choice) for choice in event.choices])

    yield encoded(shape.first())
    async with aclosing(submission.batches(silence_s)) as batches:
        async for batch in batches:
            sent = b"" if batch else PING
            try:
                for event in batch:
                    sent += encode(event)
            except DagError as error:
                yield sent + error_event(envelope(error))
                return
            if sent:
                yield sent
    last = b""
    if include_usage:
        last = data_event(shape.usage([finished[index] for index in range(len(number))]))
    yield last + DONE
    submission.delivered()
