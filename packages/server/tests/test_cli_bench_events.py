"""Streams to a server that answers oddly: every line once, however it is cut, and no end that is none."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from dagengine_server.cli.bench.events import EventStreams, Refused

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DEADLINE_S = 30.0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def answering(*connections: Sequence[bytes], host: str = "127.0.0.1") -> Iterator[tuple[str, list[bytes]]]:
    """A server of so many connections, each with its answers; it closes a connection behind the last of them.

    Yields its URL, and the requests that came.
    """
    asked: list[bytes] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        listener.settimeout(DEADLINE_S)

        def serve() -> None:
            for answers in connections:
                connection, _ = listener.accept()
                with connection:
                    for answer in answers:
                        request = b""
                        while not request.endswith(b"\r\n\r\nbody"):
                            request += connection.recv(65536)
                        asked.append(request)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        yield f"http://{shown}:{listener.getsockname()[1]}", asked
        thread.join(DEADLINE_S)


def lines_of(streams: EventStreams) -> list[bytes]:
    found: list[bytes] = []
    begin, end = streams.post("/path", b"body", lambda at, line: found.append(line))
    assert begin <= end
    return found


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_lines_are_whole_however_they_are_cut(size: int) -> None:
    events = b"data: one\n\ndata: two\r\n\r\n"
    pieces = [chunk(events[start : start + size]) for start in range(0, len(events), size)]
    with answering([CHUNKED + b"".join(pieces) + END]) as (url, _):
        assert lines_of(EventStreams(url, {}, DEADLINE_S)) == [b"data: one", b"", b"data: two\r", b"\r"]


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"20\r\ndata: one\n\nda",
        CHUNKED + chunk(b"data: one\n\n"),
        HEAD + b"Content-Length: 50\r\n\r\ndata: one\n\n",
        b"",
    ],
    ids=["within a chunk", "without the last chunk", "before its length", "at once"],
)
def test_a_server_that_leaves_in_the_middle_gives_no_end(answer: bytes) -> None:
    with answering([answer], [CHUNKED + chunk(b"data: two\n") + END]) as (url, _):
        streams = EventStreams(url, {}, DEADLINE_S)
        with pytest.raises((http.client.HTTPException, OSError)):
            lines_of(streams)
        assert lines_of(streams) == [b"data: two"]


def test_one_connection_serves_streams_of_every_kind() -> None:
    sized = HEAD + b"Content-Length: 10\r\n\r\ndata: one\n"
    chunked = CHUNKED + chunk(b"data: two\n") + END
    with answering([sized, chunked, sized, sized]) as (url, asked):
        streams = EventStreams(url, {}, DEADLINE_S)
        found = [lines_of(streams) for _ in range(4)]
    assert found == [[b"data: one"], [b"data: two"], [b"data: one"], [b"data: one"]] and len(asked) == 4


def test_a_connection_that_was_closed_meanwhile_is_made_again() -> None:
    answer = CHUNKED + chunk(b"data: one\n") + END
    with answering([answer], [answer]) as (url, _):
        streams = EventStreams(url, {}, DEADLINE_S)
        assert lines_of(streams) == [b"data: one"]
        with suppress(OSError):  # until the server's end is here
            streams._connection.sock.recv(1, socket.MSG_PEEK)
        assert lines_of(streams) == [b"data: one"]


def test_a_refusal_says_why_and_the_next_stream_is_served() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nwhy"
    with answering([refusal], [CHUNKED + chunk(b"data: one\n") + END]) as (url, _):
        streams = EventStreams(url, {}, DEADLINE_S)
        with pytest.raises(Refused) as refused:
            lines_of(streams)
        assert (refused.value.status, refused.value.text) == (400, "why")
        assert lines_of(streams) == [b"data: one"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_paths_are_under_that_of_the_url(host: str) -> None:
    with answering([CHUNKED + END], host=host) as (url, asked):
        assert lines_of(EventStreams(f"{url}/under/", {"X-Key": "k"}, DEADLINE_S)) == []
    head = asked[0].decode()
    assert head.startswith("POST /under/path HTTP/1.1\r\n") and "\r\nX-Key: k\r\n" in head
