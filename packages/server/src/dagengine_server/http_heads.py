"""HTTP as uvicorn reads it with httptools, an end to heads that have none, and when a body was there. Knows no routes,
and not what bodies hold.
"""

from __future__ import annotations

import time

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 2**16
"""Of a request's line and headers, or of what stands between pieces of its body or behind it; what a connection reads
at once comes on top."""


class BoundedHttp(HttpToolsProtocol):
    """A connection that notes in a request's state when the last of its body came, and answers 400 and closes where a
    head goes on for ever: the parser would gather all of it.
    """

    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self.scope["state"]["body_came"] = time.perf_counter()
        super().on_message_complete()
