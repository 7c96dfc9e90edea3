"""Raw HTTP over a socket: what a client library would never do, such as leaving in the middle."""

from __future__ import annotations

import json
import socket
from typing import Any

DEADLINE_S = 30.0


class RawClient:
    """One connection, one request."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self.received = b""

    def send(self, path: str, body: Any, *, part: float = 1.0) -> bytes:
        """Send a request, or the beginning of one: headers, and this share of its body. Returns the rest."""
        data = json.dumps(body).encode()
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        )
        head = "\r\n".join(lines) + "\r\n\r\n"
        sent = int(len(data) * part)
        self.socket.sendall(head.encode() + data[:sent])
        return data[sent:]

    def read_until(self, mark: bytes, times: int = 1) -> bytes:
        """Read until `mark` came so often; everything received so far."""
        while self.received.count(mark) < times:
            data = self.socket.recv(65536)
            assert data, f"the server closed the connection after {self.received[-300:]!r}"
            self.received += data
        return self.received

    def read_to_end(self) -> bytes:
        """Read until the server closes."""
        while data := self.socket.recv(65536):
            self.received += data
        return self.received

    def leave(self) -> None:
        """Close at once, with a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()
