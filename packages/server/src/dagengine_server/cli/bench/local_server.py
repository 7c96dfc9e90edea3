"""A server in this process, on a free port of this machine: the application that `dagengine serve` runs, no other."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from dagengine import EngineConfig
from dagengine.async_engine import EngineThread
from dagengine.build import build_core
from dagengine.ceilings import release_memory
from dagengine.core import EngineCore
from dagengine.devices import describe

from ...app import create_app
from ...serving import short_turns
from ...settings import ServerSettings
from ..console import CommandError

START_S = 60.0
POLL_S = 0.01


@contextmanager
def local_server(folder: str, options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, dict[str, str]]]]:
    """Its address, and the device in words with the versions that belong to it, until the block ends.

    Args:
        options: fields of `EngineConfig`.
    """
    core: EngineCore = build_core(folder, EngineConfig(**options))
    device = core.attention.device
    # As `dagengine serve` does it: full collections would walk all that was loaded.
    gc.collect()
    gc.freeze()
    engine = EngineThread(core)
    # asyncio sends at once only where a socket says that it is TCP, as those that uvicorn opens do.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, ServerSettings(served_model_name=Path(folder).name)), log_level="warning"
        )
    )
    try:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        _wait(server, thread)
        try:
            with short_turns():
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", describe(device)
        finally:
            server.should_exit = True
            thread.join()
    finally:
        listener.close()
        engine.close()
        del core, engine, server
        gc.unfreeze()
        release_memory(device)


def _wait(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise CommandError("the server does not start", "endpoint", "unavailable")
        time.sleep(POLL_S)
