"""Our own engine under load: so many requests at once, the next as soon as one ends. Times are noted on its thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dagengine.async_engine import EngineThread
from dagengine.request import Event, FinishedEvent, Request, TokenEvent

from .costs import Costs
from .latency import Stream
from .peers import Job
from .probe import Probe


class OwnEngine:
    """A probe's engine as a `Peer`.

    Attributes:
        streams: of the runs it was told to keep.
        host_shares: of these on a GPU, how much of their decode steps it waited for the host, from 0 to 1.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.streams: list[Stream] = []
        self.host_shares: list[float] = []

    @property
    def name(self) -> str:
        return self._probe.core.default_backend

    @property
    def device(self) -> tuple[str, dict[str, str]]:
        return self._probe.device

    @property
    def costs(self) -> Costs:
        return self._probe.costs

    def ids(self, count: int) -> list[int]:
        return self._probe.ids(count)

    def run(self, jobs: Sequence[Job], streams: int, *, keep: bool = False) -> None:
        """Run all jobs. Raises DagError where one fails."""
        requests = [self._probe.request(ids, tokens=tokens) for ids, tokens in jobs]
        loop = ClosedLoop(self._probe.llm.engine, requests, streams)
        if not keep:
            loop.run()
            return
        share = self._probe.watched(lambda: self.streams.extend(loop.run()))
        if share is not None:
            self.host_shares.append(share)


class ClosedLoop:
    """Requests of which `streams` are in the engine at any time while there are so many left.

    Args:
        on_finish: called on the engine's thread with every terminal event.
    """

    def __init__(
        self,
        engine: EngineThread,
        requests: Sequence[Request],
        streams: int,
        on_finish: Callable[[FinishedEvent], None] | None = None,
    ) -> None:
        self._engine, self._on_finish = engine, on_finish
        self._first, self._waiting = list(requests[:streams]), deque(requests[streams:])
        self._streams = {request.id: Stream() for request in requests}
        self._left = len(requests)
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self) -> list[Stream]:
        """Every request's stream, in their order. Raises the first error."""
        self._submit(self._first)
        self._done.wait()
        if self._error is not None:
            raise self._error
        return list(self._streams.values())

    def _submit(self, requests: list[Request]) -> None:
        now = time.perf_counter()
        for request in requests:
            self._streams[request.id].begin = now
        accepted = self._engine.submit(requests, self._receive)
        accepted.add_done_callback(lambda future: self._fail(future.exception()))

    def _fail(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._error = self._error or error
            self._done.set()

    def _receive(self, event: Event) -> None:
        """Runs on the engine's thread."""
        stream, now = self._streams[event.request_id], time.perf_counter()
        if isinstance(event, TokenEvent):
            stream.tell(now, len(event.token_ids))
            return
        assert isinstance(event, FinishedEvent)
        stream.end = now
        if self._on_finish is not None:
            self._on_finish(event)
        self._fail(event.error)
        self._left -= 1
        if self._waiting:
            self._submit([self._waiting.popleft()])
        elif not self._left:
            self._done.set()
