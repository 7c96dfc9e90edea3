"""Records: what was done for an answer, as JSON, so that it can be done again (`replay`).

A record holds its own input as token ids and names what it read: a state by its id, another request of its submission
by that one's id. The records of those belong beside it. Without its `inputs` a record says what was done, no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import torch

from .config import EngineConfig
from .request import ContextRef, Request
from .sampling import SamplingParams

FORMAT: Final = "dagengine.record/v1"

_PLAIN_SAMPLING = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
_REFERENCE = tuple(field.name for field in fields(ContextRef))


def engine_facts(
    config: EngineConfig, signature: Mapping[str, str], device: torch.device
) -> Mapping[str, object]:
    """What every record of an engine says: determinism mode, the model's signature, device, versions, page size."""
    from . import __version__

    return {
        "batch_invariant": config.batch_invariant,
        "signature": dict(signature),
        "device": str(device),
        "page_size": config.page_size,
        "versions": {"dagengine": __version__, "torch": torch.__version__},
    }


def answer_record(
    request: Request,
    facts: Mapping[str, object],
    *,
    index: int,
    state: str | None,
    backend: str,
    implementation: str,
    seed: int | None,
    read: int,
    restored: int,
    matched: int,
    sampled: tuple[int, ...],
    finish_reason: str,
) -> dict[str, Any]:
    """The record of one answer.

    Args:
        index: of the answer among those of its request.
        seed: of the request; its answers draw from streams of it. None where nothing is drawn.
        read, restored, matched: tokens that it saw, those of them computed again, and own input tokens whose pages
            were there.
        sampled: every sampled id, the terminating one included.
    """
    return {
        "format": FORMAT,
        "id": request.id,
        "index": index,
        "state": state,
        "backend": backend,
        "implementation": implementation,
        "rewrites": [],
        "order": "as given",
        "policy": request.position,
        "seed": seed,
        "reuse": {
            "visible": read,
            "restored": restored,
            "input": len(request.input_ids),
            "matched": matched,
        },
        **facts,
        "inputs": request_inputs(request),
        "output": {"token_ids": list(sampled), "finish_reason": finish_reason},
    }


def request_inputs(request: Request) -> dict[str, Any]:
    """What was asked: ids, references, layout, sampling; nothing of the tenant."""
    return {
        "input_ids": list(request.input_ids),
        "turn_start": request.turn_start,
        "context": [_reference(ref) for ref in request.context],
        "position_options": dict(request.position_options),
        "sampling": None if request.sampling is None else sampling_options(request.sampling),
        "most_tokens": request.most_tokens,
    }


def sampling_options(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not the default, as `SamplingParams.from_mapping` takes them."""
    named = {
        name: value for name, plain in _PLAIN_SAMPLING.items() if (value := getattr(params, name)) != plain
    }
    if "logit_bias" in named:
        named["logit_bias"] = {str(token): bias for token, bias in named["logit_bias"].items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}


def _reference(ref: ContextRef) -> dict[str, Any]:
    named = {name: value for name in _REFERENCE if (value := getattr(ref, name)) is not None}
    if isinstance(ref.span, tuple):
        named["span"] = list(ref.span)
    return named
