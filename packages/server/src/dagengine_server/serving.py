"""`serve`: a process around an application. Signals, sockets and the order of shutting down live here.

SIGTERM, SIGINT ─► ready 503, new requests 503 ─► what runs ends, or is cancelled after the timeout ─► exit 0
the second one  ─► cancelled now
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from dagengine import DagError

from .http_heads import BoundedHttp
from .service import Service

log = logging.getLogger("dagengine.server")
POLL_S = 0.05
LAST_ANSWERS_S = 5.0
FLUSH_S = 0.2
SWITCH_S = 0.0005
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Of an address that this machine does not have, such as `localhost`'s second one where there is no IPv6."""


def check_address(host: str, port: int) -> None:
    """Whether a server could listen there now, on one of the host's addresses at least. Raises OSError, as a server
    would after its model was loaded.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    missing: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
                tried.listen(1)
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
            missing.append(error)
    if len(missing) == len(found):
        raise missing[0]


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    shutdown_timeout_s: float = 30.0,
    log_level: str = "info",
    log_config: dict[str, Any] | None = None,
    access_log: bool = False,
) -> int:
    """Serve until told to stop, then close the engine. Blocks.

    Args:
        port: 0 takes a free one, which uvicorn logs.
        shutdown_timeout_s: how long running requests may take to end once the server was told to stop.
        log_config: a `logging.config.dictConfig`; None leaves uvicorn's.

    Returns:
        The exit status: 0, or 1 if the server could not start.
    """
    options: dict[str, Any] = {} if log_config is None else {"log_config": log_config}
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level.lower(),
        access_log=access_log,
        timeout_graceful_shutdown=int(LAST_ANSWERS_S),
        server_header=False,
        http=BoundedHttp,
        **options,
    )
    server = DrainingServer(config, app.state.service, shutdown_timeout_s)
    with _signals_taken(server), short_turns():
        try:
            server.run()
        except SystemExit:
            return 1
        finally:
            _close(app.state.service)
    return 0 if server.started else 1


@contextmanager
def short_turns() -> Iterator[None]:
    """Threads of Python take turns of SWITCH_S: an event of HTTP waits so long at most for the engine's thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _signals_taken(server: DrainingServer) -> Iterator[None]:
    """Signals that come before uvicorn listens to them stop the server; those that come while the engine closes, when
    uvicorn has put back what it found, do not end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {
        number: signal.signal(number, server.handle_outer_signal)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def _close(service: Service) -> None:
    """Close the engine, unless its thread hangs: then the process ends without it."""
    closing = threading.Thread(target=service.engine.close, daemon=True)
    closing.start()
    closing.join(LAST_ANSWERS_S)
    if closing.is_alive():
        log.error("the engine's thread does not stop; leaving it behind")


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose first signal drains and whose second one cancels."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_timeout_s: float) -> None:
        super().__init__(config)
        self._service, self._timeout_s = service, shutdown_timeout_s
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[Any] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Uvicorn leaves the end of the lifespan out when it is forced, and logs a traceback of that."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in the main thread; what follows runs on the event loop."""
        self._signals += 1
        self._service.draining = True
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._stop_now if self._signals > 1 else self._begin_drain)

    def handle_outer_signal(self, sig: int, frame: FrameType | None) -> None:
        """Called in the main thread before uvicorn listens, or when it does no more."""
        if self._loop is None:
            self.handle_exit(sig, frame)
        else:
            log.info("shutting down already")

    def _begin_drain(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        service, deadline = self._service, time.monotonic() + self._timeout_s
        if service.open_requests:
            told = "shutting down: %d requests may take %g seconds; a second Ctrl-C or SIGTERM cancels them"
            log.info(told, service.open_requests, self._timeout_s)
        else:
            log.info("shutting down")
        while service.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self._cancel_rest()
        self.should_exit = True

    def _stop_now(self) -> None:
        self._cancel_rest()
        asyncio.get_running_loop().call_later(FLUSH_S, self._leave)

    def _leave(self) -> None:
        self.should_exit = self.force_exit = True

    def _cancel_rest(self) -> None:
        if self._service.open_requests:
            log.warning("shutting down: %d requests are cancelled", self._service.open_requests)
            self._service.cancel_all(DagError("draining", "the server is shutting down"))
