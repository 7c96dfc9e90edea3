"""A server in a process of its own, on a free port of this machine: the application that `dagengine serve` runs.

In the process of its client it would share an interpreter with it, and the client's work would count as the server's.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

from dagengine import DagError, EngineConfig
from dagengine.async_engine import EngineThread
from dagengine.build import build_core
from dagengine.devices import describe

from ...app import create_app
from ...garbage import seldom_collected
from ...http_heads import BoundedHttp
from ...serving import short_turns
from ...settings import ServerSettings
from ..console import CommandError

STOP_S = 60.0
Device = tuple[str, dict[str, str]]


@contextmanager
def local_server(folder: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Device]]:
    """Its address, and the device in words with the versions that belong to it, until the block ends.

    Args:
        options: fields of `EngineConfig`.

    Raises:
        DagError: it cannot be built so.
        CommandError: its process ended.
    """
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_serve, args=(folder, dict(options), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            found = ours.recv()
        except EOFError:
            raise CommandError("the server does not start", "endpoint", "unavailable") from None
        if isinstance(found, dict):
            raise DagError(**found)
        yield found
    finally:
        ours.close()
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(folder: str, options: Mapping[str, Any], pipe: Connection) -> None:
    """Until the other end of the pipe is closed. Sends (address, device), or the fields of a DagError."""
    # A terminal's interrupt goes to all of its processes; the client ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        core = build_core(folder, EngineConfig(**options))
    except DagError as error:
        pipe.send({"code": error.code, "message": error.message, "field": error.field})
        return
    device = describe(core.attention.device)
    engine = EngineThread(core)
    # asyncio sends at once only where a socket says that it is TCP, as those that uvicorn opens do.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        app = create_app(engine, ServerSettings(served_model_name=Path(folder).name))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=BoundedHttp))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        with short_turns(), seldom_collected():
            thread.start()
            pipe.send((f"http://127.0.0.1:{listener.getsockname()[1]}", device))
            try:
                pipe.recv()
            except EOFError:
                pass
            server.should_exit = True
            thread.join()
    engine.close()
