"""Models by their Hub id: what is told where one cannot be had, of the real client."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagengine import DagError
from dagengine.model_files import find_model

constants = pytest.importorskip("huggingface_hub.constants")
NAME = "somebody/nothing"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that answers everything with the status and the headers that are the parameter."""
    status, headers = request.param

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": "0", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


def refused() -> str:
    with pytest.raises(DagError) as error:
        find_model(NAME)
    assert (error.value.code, error.value.field) == ("model_not_found", "model")
    assert repr(NAME) in error.value.message
    return error.value.message


def test_a_hub_that_cannot_be_reached_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        message = refused()
    assert "the Hub could not be reached: Connect" in message and "has no" not in message


def test_offline_mode_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refused()
    assert "the Hub could not be reached: HF_HUB_OFFLINE is set" in message and "has no" not in message


@pytest.mark.parametrize("endpoint", [(404, {"X-Error-Code": "RepoNotFound"})], indirect=True)
def test_a_model_that_the_hub_has_not_is_told_as_that(endpoint: None) -> None:
    message = refused()
    assert "the Hub has no" in message and "reached" not in message


@pytest.mark.parametrize("endpoint", [(401, {"X-Error-Message": "Invalid credentials"})], indirect=True)
def test_a_hub_that_refuses_to_answer_is_not_said_to_have_no_such_model(endpoint: None) -> None:
    message = refused()
    assert "could not be fetched from the Hub" in message and "has no" not in message
