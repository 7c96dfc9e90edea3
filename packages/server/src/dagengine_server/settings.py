"""What the HTTP side is told when it is built. Resolved once; nothing reads the environment later."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dagengine import DagError


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one HTTP application. How many requests may wait is `EngineConfig.max_waiting`.

    Attributes:
        served_model_name: the id under which the model is listed and asked for.
        api_keys: whoever sends one of them is that tenant; empty serves everybody as one tenant.
        allowed_origins: origins for CORS; empty leaves CORS off.
        max_body_bytes: larger request bodies are refused before they are parsed.
        max_open_requests: requests that may be in work at once before 429; None is unbounded.
        max_n: most answers to one prompt.
        max_prompts: most prompts in one completions request.
        max_context: most references of one request or node.
        max_nodes: most nodes of one graph.
        max_query_nodes: most leaves and calls that one span query may stand for.
        max_fragments: most fragments of span queries that are kept to be read again; 0 keeps none.
        fragment_ttl_s: seconds after its last use until a fragment is let go of.
        ping_interval_s: a stream that is silent for so long gets a comment, so that proxies keep it open.
        request_timeout_s: requests that run longer end with `timeout`; None is unbounded.
        heartbeat_timeout_s: `/health` fails when the engine's thread has not come round for so long.
        retry_after_s: what `Retry-After` says when the server is too busy.
    """

    served_model_name: str = "model"
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_open_requests: int | None = 1024
    max_n: int = 16
    max_prompts: int = 256
    max_context: int = 1024
    max_nodes: int = 1024
    max_query_nodes: int = 4096
    max_fragments: int = 4096
    fragment_ttl_s: float = 600.0
    ping_interval_s: float = 15.0
    request_timeout_s: float | None = None
    heartbeat_timeout_s: float = 60.0
    retry_after_s: int = 1

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise _bad("served_model_name", "must not be empty")
        if any(not key for key in self.api_keys):
            raise _bad("api_keys", "must not hold an empty key")
        for name in (
            "max_body_bytes",
            "max_n",
            "max_prompts",
            "max_context",
            "max_nodes",
            "max_query_nodes",
            "retry_after_s",
        ):
            _at_least_one(name, getattr(self, name))
        if self.max_fragments:
            _at_least_one("max_fragments", self.max_fragments)
        if self.max_open_requests is not None:
            _at_least_one("max_open_requests", self.max_open_requests)
        for name in ("ping_interval_s", "heartbeat_timeout_s", "fragment_ttl_s"):
            _positive(name, getattr(self, name))
        if self.request_timeout_s is not None:
            _positive("request_timeout_s", self.request_timeout_s)


def _bad(name: str, rule: str) -> DagError:
    return DagError("invalid_request", f"{name} {rule}", name)


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(name, f"must be an integer of at least 1, not {value!r}")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise _bad(name, f"must be a positive number of seconds, not {value!r}")
