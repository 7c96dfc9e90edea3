"""tools/serve's plumbing: a server is waited for, and stopped whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import serve

SERVER = """
import http.server, sys, time
not_ready_until = time.monotonic() + float(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/health/ready" and time.monotonic() >= not_ready_until
        self.send_response(200 if ready else 503)
        self.end_headers()
    def log_message(self, *arguments): pass
print("pid", __import__("os").getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def _command(port: int, *, ready_after_s: float = 0.0) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), str(ready_after_s)]


def _stopped(log: Path) -> bool:
    try:
        os.kill(int(log.read_text(encoding="utf-8").split()[1]), 0)
    except ProcessLookupError:
        return True
    return False


def test_the_block_runs_only_when_the_server_is_ready_and_ends_it(log: Path) -> None:
    port = serve.free_port()
    began = time.monotonic()
    with serve.running_server(
        _command(port, ready_after_s=1.0), f"http://127.0.0.1:{port}", log, timeout_s=60
    ):
        assert time.monotonic() - began >= 1.0
        assert not _stopped(log)
    assert _stopped(log)


def test_the_server_is_stopped_when_the_block_fails(log: Path) -> None:
    port = serve.free_port()
    with (
        pytest.raises(RuntimeError, match="the example failed"),
        serve.running_server(_command(port), f"http://127.0.0.1:{port}", log, timeout_s=60),
    ):
        raise RuntimeError("the example failed")
    assert _stopped(log)


def test_a_server_that_exits_is_reported_with_what_it_said(log: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        pytest.raises(serve.ServerFailed, match=r"(?s)status 3.*no such model"),
        serve.running_server(command, "http://127.0.0.1:9", log, timeout_s=60),
    ):
        pytest.fail("the block must not run")


def test_a_server_that_never_gets_ready_is_stopped(log: Path) -> None:
    port = serve.free_port()
    command = _command(port, ready_after_s=3600)
    with (
        pytest.raises(serve.ServerFailed, match="not ready after 2 s"),
        serve.running_server(command, f"http://127.0.0.1:{port}", log, timeout_s=2),
    ):
        pytest.fail("the block must not run")
    assert _stopped(log)


def test_keys_are_not_printed() -> None:
    command = ["dagengine", "serve", "folder", "--api-key", "one", "--port", "1", "--api-key=two"]
    masked = ["dagengine", "serve", "folder", "--api-key", "…", "--port", "1", "--api-key=…"]
    assert serve.shown(command) == masked


def test_an_interrupt_of_the_set_up_says_nothing_and_has_its_status(tmp_path: Path) -> None:
    begins = (
        "import sys; sys.path.insert(0, 'tools'); import environment\nenvironment.ensure = lambda level: "
    )
    ends = "(_ for _ in ()).throw(KeyboardInterrupt)\nimport runpy; sys.argv = ['tools/serve']\n"
    program = f"{begins}{ends}runpy.run_path('tools/serve.py', run_name='__main__')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=serve.ROOT)
    assert (found.returncode, found.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("option", ["--port", "--host", "--api-key"])
@pytest.mark.parametrize("joined", [False, True])
def test_the_example_refuses_what_it_would_not_heed(
    option: str, joined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"{option}=1"] if joined else [option, "1"]
    assert serve.main(["--demo", *given]) == 2
    assert option in capsys.readouterr().err
