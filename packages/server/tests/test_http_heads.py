"""A head that has no end is refused, whatever it is made of; bodies and heads of a usual size are not."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest
from conftest import MODEL, Server, wait_until
from sockets import RawClient
from starlette.requests import Request

from dagengine_server.http_heads import MOST_HEAD_BYTES
from dagengine_server.parsing import body_came

LINE = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
CHUNKED = LINE + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b"a" * 4096
MOST_SENT = 16 * MOST_HEAD_BYTES


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", PIECE),
        (LINE + b"X-Long: ", PIECE),
        (LINE, b"X-Many: " + PIECE + b"\r\n"),
        (CHUNKED + b"2;", PIECE),
        (CHUNKED + b"2\r\n{}\r\n0\r\nX-Trailer: ", PIECE),
    ],
    ids=["line", "header", "headers", "extension of a chunk", "trailer"],
)
def test_an_endless_head_is_refused(server: Server, begin: bytes, piece: bytes) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as client,
        suppress(ConnectionError),  # it has closed, and not let us wait
    ):
        client.sendall(begin + piece * (MOST_SENT // len(piece)))
        while client.recv(4096):
            pass
    assert server.complete()["model"] == MODEL


def test_a_refused_head_is_told(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(LINE + b"X-Long: ")
        for _ in range(MOST_HEAD_BYTES // len(PIECE) + 1):
            client.sendall(PIECE)
        told = b""
        while not told.endswith(b"too large."):
            told += client.recv(4096)
    assert told.startswith(b"HTTP/1.1 400 ")


def test_bodies_may_be_larger_than_heads(server: Server) -> None:
    text = "a" * (4 * MOST_HEAD_BYTES)
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()

    def pieces() -> object:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    for content in (body, pieces()):
        headers = {"Content-Type": "application/json", "X-Long": "a" * 30000}
        answer = server.http.post("/tokenize", content=content, headers=headers)  # type: ignore[arg-type]
        assert answer.status_code == 200 and answer.json()["count"] == len(text)


def test_a_body_came_when_the_last_of_it_did(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[Request] = []
    told: list[tuple[float, float]] = []

    async def note(request: Request) -> float:
        began.append(request)
        came = await body_came(request)
        told.append((came, time.perf_counter()))
        return came

    monkeypatch.setattr("dagengine_server.routes.queries.body_came", note)
    body = {"g": {"model": MODEL, "max_tokens": 1, "input": {"user": "a"}}}
    client = RawClient(server.port)
    data = client.send("/v1/query/execute", body, part=0.5)
    wait_until(lambda: bool(began))
    half = time.perf_counter()
    client.socket.sendall(data)
    client.read_until(b'"timing_ms"')
    client.socket.close()
    ((came, read),) = told
    assert came == began[0].state.body_came, "as the connection noted it"
    assert half < came < read
