"""Streams of server-sent events to one server, one after the other, and when their lines came. Knows no answers.

What a client does itself is in every time that it measures: so this one blocks, and has the body as bytes before it
begins.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping
from select import select
from urllib.parse import urlsplit

AT_ONCE = 1 << 16


class Refused(Exception):
    """A status other than 200, and the text that came with it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}")
        self.status, self.text = status, text


class EventStreams:
    """A connection that is kept from one stream to the next.

    Args:
        url: with the path that all others are under, if any.
        headers: of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._under, self._headers = parts.path.rstrip("/"), dict(headers)
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)

    def post(self, path: str, body: bytes, take: Callable[[float, bytes], None]) -> tuple[float, float]:
        """Send a body, and hand over every line that came with the second in which it did, until the stream ends.

        Returns:
            When the body was about to be sent, and when the end was there, in seconds of `time.perf_counter`.

        Raises:
            Refused. OSError, http.client.HTTPException: the server does not answer. What `take` raises.
        """
        self._connect()
        try:
            begin = time.perf_counter()
            self._connection.request("POST", self._under + path, body, self._headers)
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise Refused(answer.status, answer.read().decode(errors="replace"))
            rest = b""
            while came := answer.read1(AT_ONCE):
                at = time.perf_counter()
                *lines, rest = (rest + came).split(b"\n")
                for line in lines:
                    take(at, line)
            end = time.perf_counter()
            if answer.length:
                raise http.client.IncompleteRead(rest, answer.length)
            answer.close()  # one of a known length does not know that it was read
            return begin, end
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """A server closes connections that were silent for a while."""
        socket = self._connection.sock
        if socket is not None and select([socket], [], [], 0)[0]:
            self.close()
        if self._connection.sock is None:
            self._connection.connect()

    def close(self) -> None:
        self._connection.close()
