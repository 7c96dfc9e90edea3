"""The one place where refusals become HTTP: a status, and OpenAI's envelope `{"error": {...}}`.

No traceback and no exception's name leaves the server: what a code of our own does not explain is `internal`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dagengine import DagError

from .answers import to_json

log = logging.getLogger("dagengine.server")

STATUS: Mapping[str, int] = {
    "invalid_request": 400,
    "unsupported": 400,
    "capacity": 400,
    "invalid_ttl": 400,
    "invalid_api_key": 401,
    "not_found": 404,
    "model_not_found": 404,
    "state_not_found": 404,
    "method_not_allowed": 405,
    "state_not_sealed": 409,
    "signature_mismatch": 409,
    "rope_regime_mismatch": 409,
    "kv_kind_unsupported": 409,
    "state_released": 410,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "cycle": 422,
    "span_out_of_range": 422,
    "edge_mix_forbidden": 422,
    "position_overflow": 422,
    "policy_unsupported": 422,
    "chunk_crossing": 422,
    "parent_failed": 422,
    "queue_full": 429,
    "cancelled": 499,
    "internal": 500,
    "plugin_broken": 500,
    "draining": 503,
    "state_unavailable": 503,
    "engine_dead": 503,
    "timeout": 504,
}
TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
HTTP_CODES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
MAX_MESSAGE = 2000
SAFE_INTERNAL = ("the model produced no finite logits",)


def status_of(error: DagError) -> int:
    """The HTTP status of a refusal."""
    return STATUS.get(error.code, 500)


def public(error: DagError) -> DagError:
    """The error as a caller may see it: failures of ours are told apart only in the log."""
    if error.code == "engine_dead":
        return DagError("engine_dead", "the engine has stopped; the server's log says why")
    if error.code not in STATUS or (error.code == "internal" and error.message not in SAFE_INTERNAL):
        log.error("a request failed: %s", error)
        return DagError("internal", "the server failed on this request; its log says why")
    return DagError(
        error.code, error.message[:MAX_MESSAGE], error.field[:MAX_MESSAGE] if error.field else None
    )


def envelope(error: DagError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    shown = public(error)
    status = status_of(shown)
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": shown.message, "type": kind, "param": shown.field, "code": shown.code}}


def error_response(error: DagError, *, retry_after_s: int = 1) -> Response:
    """The whole answer to a refused request."""
    status = status_of(error)
    headers: dict[str, str] = {}
    if status in (429, 503):
        headers["Retry-After"] = str(retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 413:
        headers["Connection"] = "close"
    return Response(to_json(envelope(error)), status, headers, media_type="application/json")


def renamed(error: DagError, names: Mapping[str, str]) -> DagError:
    """The error with its field in the caller's terms: the first part of the path is replaced."""
    if error.field is None:
        return error
    for engine_name, name in names.items():
        rest = error.field.removeprefix(engine_name)
        if rest != error.field and (not rest or rest[0] in ".["):
            return DagError(error.code, error.message, name + rest)
    return error
