"""SIGTERM in a process of its own: what runs may end, what is new is refused, the second one means now."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import DEADLINE_S, MODEL, make_engine, wait_until
from sockets import RawClient

from dagengine_server.app import create_app
from dagengine_server.serving import DrainingServer, serve
from dagengine_server.settings import ServerSettings

LONG = {"prompt": "the", "max_tokens": 60, "min_tokens": 60, "temperature": 0, "stream": True}


@dataclass(frozen=True)
class Process:
    """A server in a process of its own."""

    pid: int
    port: int
    ask: Callable[[str], int]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def exit_status(self) -> int:
        """Wait for its end."""
        return self.ask(f"wait {self.pid}")


Start = Callable[[float, float], Process]


@pytest.fixture(scope="module")
def forker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], int]]:
    """Servers whose log must be without a traceback, however they ended."""
    script = str(Path(__file__).parent / "drained_server.py")
    log = tmp_path_factory.mktemp("shutdown") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, script, str(model_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None

        def ask(command: str) -> int:
            print(command, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield ask
        process.stdin.close()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
def start_process(forker: Callable[[str], int]) -> Iterator[Start]:
    started: list[Process] = []

    def begin(timeout_s: float, step_s: float) -> Process:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = Process(forker(f"serve {port} {timeout_s} {step_s}"), port, forker)
        started.append(process)
        wait_until(lambda: _status(port, "/health/ready") == 200)
        return process

    yield begin
    for process in started:
        if _status(process.port, "/health") is not None:
            process.signal(signal.SIGKILL)
            process.exit_status()


def _status(port: int, path: str) -> int | None:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code
    except httpx.TransportError:
        return None


def test_running_requests_end_before_the_server_does(start_process: Start) -> None:
    process = start_process(20.0, 0.02)
    client = RawClient(process.port)
    client.send("/v1/completions", LONG)
    client.read_until(b"data: ", 2)
    process.signal(signal.SIGTERM)
    wait_until(lambda: _status(process.port, "/health/ready") == 503)
    assert _status(process.port, "/health") == 200
    refused = httpx.post(f"http://127.0.0.1:{process.port}/v1/completions", json=LONG, timeout=DEADLINE_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert client.read_to_end().count(b"[DONE]") == 1
    assert process.exit_status() == 0


def test_what_takes_too_long_is_told_and_cancelled(start_process: Start) -> None:
    process = start_process(0.3, 0.1)
    client = RawClient(process.port)
    client.send("/v1/completions", LONG)
    client.read_until(b"data: ", 2)
    process.signal(signal.SIGTERM)
    received = client.read_to_end()
    assert b'"code":"draining"' in received and b"[DONE]" not in received
    assert process.exit_status() == 0


def test_the_second_signal_means_now(start_process: Start) -> None:
    process = start_process(1000.0, 0.1)
    client = RawClient(process.port)
    client.send("/v1/completions", {**LONG, "max_tokens": 400, "min_tokens": 400})
    client.read_until(b"data: ", 2)
    process.signal(signal.SIGTERM)
    wait_until(lambda: _status(process.port, "/health/ready") == 503)
    process.signal(signal.SIGTERM)
    assert b'"code":"draining"' in client.read_to_end()
    assert process.exit_status() == 0


def test_a_signal_before_the_server_listens_is_not_lost(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, startup, stopping = DrainingServer.run, DrainingServer.startup, []

    def signalled(server: DrainingServer, sockets: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        run(server, sockets)

    async def watched(server: DrainingServer, sockets: Any = None) -> None:
        stopping.append(server.should_exit)
        server.should_exit = True
        await startup(server, sockets)

    monkeypatch.setattr(DrainingServer, "run", signalled)
    monkeypatch.setattr(DrainingServer, "startup", watched)
    app = create_app(make_engine(model_folder), ServerSettings(served_model_name=MODEL))
    assert serve(app, port=0, log_level="warning") == 0
    assert stopping == [True]


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.01, 0.1])
def test_signals_in_a_row_leave_no_traceback(start_process: Start, gap_s: float) -> None:
    """The forker holds it."""
    process = start_process(1000.0, 0.05)
    clients = [RawClient(process.port) for _ in range(3)]
    for client in clients:
        client.send("/v1/completions", LONG)
    clients[0].read_until(b"data: ", 2)
    for _ in range(4):
        process.signal(signal.SIGTERM)
        time.sleep(gap_s)
    assert process.exit_status() == 0


def test_an_idle_server_stops_at_once(start_process: Start) -> None:
    process = start_process(1000.0, 0.0)
    process.signal(signal.SIGINT)
    assert process.exit_status() == 0
