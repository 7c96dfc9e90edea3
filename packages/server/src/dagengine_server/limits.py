"""What is turned away before anybody reads it: too many, too large, too late.

Gate ── 503 while draining, 429 when too much is in work, request ids, counters
  BodyLimit ── 413, by the declared length or while the body arrives
"""

from __future__ import annotations

import asyncio
import logging
import time
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dagengine import DagError

from .auth import is_health
from .errors import error_response
from .service import Service

log = logging.getLogger("dagengine.server")
MAX_CLIENT_ID = 128
DISCARDED_BODIES = 4
DISCARD_S = 2.0
WORK = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/states",
    "/v1/graphs",
    "/v1/query",
    "/tokenize",
    "/detokenize",
)


class Gate:
    """The outermost ASGI middleware.

    Every answer has our `X-Request-Id`; a client's `X-Client-Request-Id` is given back and means nothing.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, began = self._service, time.perf_counter()
        request_id = f"req-{uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        client_id = Headers(scope=scope).get("x-client-request-id")
        echoed = client_id if client_id and len(client_id) <= MAX_CLIENT_ID else None
        status, started = 499, False

        async def send_with_ids(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if echoed is not None:
                    headers["X-Client-Request-Id"] = echoed
            await send(message)

        is_work = scope["method"] == "POST" and scope["path"].startswith(WORK)
        refusal = self._refusal(scope, is_work)
        service.open_requests += is_work
        try:
            if refusal is not None:
                answer = error_response(refusal, retry_after_s=service.settings.retry_after_s)
                await answer(scope, receive, send_with_ids)
            else:
                await self._app(scope, receive, send_with_ids)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await error_response(DagError("internal", "unexpected"))(scope, receive, send_with_ids)
        finally:
            service.open_requests -= is_work
            route = getattr(scope.get("route"), "path", "unmatched")
            service.metrics.answered(route, scope["method"], status, time.perf_counter() - began)

    def _refusal(self, scope: Scope, is_work: bool) -> DagError | None:
        service, path = self._service, scope["path"]
        if service.draining and not (is_health(path) or path == "/metrics" or path.endswith("/cancel")):
            return DagError("draining", "the server is shutting down and takes nothing new")
        limit = service.settings.max_open_requests
        if is_work and limit is not None and service.open_requests >= limit:
            return DagError("queue_full", f"{limit} requests are in work; try again later")
        return None


class BodyLimit:
    """ASGI middleware: a request's body may hold so many bytes.

    What is too large is thrown away as it arrives, within bounds, before it is refused: a client that is cut off while
    it sends sees a broken connection in place of the answer.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = DagError("body_too_large", f"a body holds at most {self._max_bytes} bytes")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            if "expect" not in Headers(scope=scope):
                await self._discard(receive)
            await error_response(error)(scope, receive, send)
            return
        seen = 0

        async def receive_within() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                if message.get("more_body"):
                    await self._discard(receive)
                raise error
            return message

        await self._app(scope, receive_within, send)

    async def _discard(self, receive: Receive) -> None:
        seen = 0
        try:
            async with asyncio.timeout(DISCARD_S):
                while seen <= DISCARDED_BODIES * self._max_bytes:
                    message = await receive()
                    seen += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            return
