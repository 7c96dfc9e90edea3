"""Server-sent events over ASGI: sends what a source yields, and notices when the client leaves.

Knows nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import to_json

T = TypeVar("T")
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data_event(value: Any) -> bytes:
    """One event with a JSON value."""
    return b"data: " + to_json(value) + b"\n\n"


def error_event(value: Any) -> bytes:
    """The event that ends a stream whose status was sent already."""
    return b"event: error\ndata: " + to_json(value) + b"\n\n"


class EventStream(Response):
    """Sends a source of encoded events; leaves it early when the client does.

    Args:
        source: encoded events; silence is its business (it yields `PING`).
        on_close: called once, however the stream ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._source, self._on_close = source, on_close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(self._send_all(send), receive)
        except ClientDisconnect:
            pass
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._source) as source:
            async for chunk in source:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: the client left first.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnect()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
