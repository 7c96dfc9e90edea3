"""A server over the tiny model on a real socket, in a thread of the test process, and its client."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from dagengine import EngineConfig
from dagengine.async_engine import EngineThread
from dagengine.build import build_core
from dagengine_server.app import create_app
from dagengine_server.http_heads import BoundedHttp
from dagengine_server.settings import ServerSettings

sys.path.insert(0, str(Path(__file__).parent))
import tiny_model

DEADLINE_S = 30.0
MODEL = "tiny"
NUM_PAGES, PAGE_SIZE, MAX_LEN = 160, 4, 512


@dataclass
class Server:
    """A running server.

    Attributes:
        http: a client whose base is the server.
    """

    app: FastAPI
    engine: EngineThread
    port: int
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        """A text completion that must work; greedy and short unless `body` says otherwise."""
        answer = self.post("/v1/completions", {"prompt": "the", "max_tokens": 4, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def prefill(self, text: Any, **dag: Any) -> str:
        """A state of this input."""
        answer = self.post("/v1/states", {"input": text, "dag": dag})
        assert answer.status_code == 200, answer.text
        state: str = answer.json()["id"]
        return state

    def release_all(self) -> None:
        """Release every state of every tenant."""

        def release(core: Any) -> None:
            for info in core.store.states():
                core.release_state(info.id)

        self.engine.call(release).result(DEADLINE_S)

    def settle(self) -> None:
        """Wait until nothing runs, then hold that nothing leaked: every page is free or only cached."""
        wait_until(lambda: not self.engine.call(lambda core: core.has_work).result(DEADLINE_S))
        wait_until(lambda: not self.app.state.service.open_requests)

        def audit(core: Any) -> tuple[int, int, int]:
            core.store.check()
            stats = core.store.stats()
            return stats.pages_free + stats.pages_cached, stats.writers, stats.leases

        assert self.engine.call(audit).result(DEADLINE_S) == (NUM_PAGES, 0, 0)
        assert not self.app.state.service._submissions


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.build(tmp_path_factory.mktemp("tiny") / MODEL, max_positions=MAX_LEN)


def make_engine(folder: Path, **config: Any) -> EngineThread:
    options = {
        "device": "cpu",
        "kv_pages": NUM_PAGES,
        "page_size": PAGE_SIZE,
        "max_num_seqs": 16,
        "seed": 1,
        **config,
    }
    return EngineThread(build_core(folder, EngineConfig(**options)))


@contextmanager
def running(engine: EngineThread, settings: ServerSettings) -> Iterator[Server]:
    """Serve on a free port until the block ends."""
    app = create_app(engine, settings)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # sends at once
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, http=BoundedHttp)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http:
        yield Server(app, engine, port, http)
    server.should_exit = True
    thread.join(DEADLINE_S)
    engine.close()


@pytest.fixture(scope="session")
def shared_server(model_folder: Path) -> Iterator[Server]:
    settings = ServerSettings(served_model_name=MODEL, ping_interval_s=0.2, max_body_bytes=2 * 2**20)
    with running(make_engine(model_folder), settings) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server; afterwards everything is released, and nothing may have leaked."""
    yield shared_server
    shared_server.release_all()
    shared_server.settle()


@pytest.fixture
def start(model_folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of a test's own: `start(engine={...}, **settings)`."""
    with pytest.MonkeyPatch.context():
        opened: list[Any] = []

        def begin(engine: dict[str, Any] | None = None, **settings: Any) -> Server:
            context = running(
                make_engine(model_folder, **(engine or {})),
                ServerSettings(served_model_name=MODEL, **settings),
            )
            opened.append(context)
            return context.__enter__()

        yield begin
        for context in reversed(opened):
            context.__exit__(None, None, None)
