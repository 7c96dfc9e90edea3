"""One HTTP request's share of the engine: submitted, followed, and ended whatever becomes of its client.

Lives on the event loop. Every engine request of it ends exactly once here: finished, refused, or cancelled.
States that nobody was told of are released, so that a client that leaves leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from dagengine import DagError
from dagengine.async_engine import EngineThread, MakeRequests
from dagengine.core import EngineCore
from dagengine.request import Event, FinishedEvent, Request

Observe = Callable[[Event, Request, float], None]
Locate = Callable[[str, DagError], DagError]


class Submission:
    """Requests that belong to one HTTP request.

    Args:
        observe: sees every event with its request and the seconds since the event before, refusals and
            cancellations included.
        locate: puts the error of a request (by its id) into the caller's terms.
        timeout_s: what has not finished by then ends with `timeout`.

    Attributes:
        requests: what was submitted; none before that.
    """

    def __init__(
        self,
        engine: EngineThread,
        observe: Observe,
        *,
        locate: Locate = lambda request_id, error: error,
        timeout_s: float | None = None,
    ) -> None:
        self._engine, self._observe, self._locate = engine, observe, locate
        self._together = self._starting = False
        self._ending: DagError | None = None
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._add(())
        self._last: dict[tuple[str, int], float] = {}
        self._arrived: list[Event] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._undelivered: dict[str, tuple[str, ...]] = {}
        self._loop = asyncio.get_running_loop()
        if timeout_s is not None:
            self._timer = self._loop.call_later(timeout_s, self.cancel, self._timed_out())

    async def start(self, requests: Sequence[Request]) -> None:
        """Submit requests that each stand alone.

        Raises:
            DagError: the first refusal of the submission; nothing of it runs then.
        """
        self._add(requests)
        await self._accepted([self._engine.submit((request,), self._forward) for request in requests])

    async def start_made(self, make: MakeRequests) -> None:
        """Submit what `make` gives: requests that may refer to each other, earlier ones first. Raises as `start`."""
        self._together = self._starting = True

        def made(core: EngineCore) -> Sequence[Request]:
            """Whoever cancels says so before it looks for requests: it finds these, or is seen here."""
            requests = make(core)
            self._add(requests)
            if self._ending is not None:
                raise self._ending
            return requests

        await self._accepted([self._engine.submit_made(made, self._forward)])
        self._starting = False

    def _add(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._open = {request.id: request for request in requests}

    async def _accepted(self, accepted: Sequence[Future[Sequence[Request]]]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                results = await asyncio.gather(*map(asyncio.wrap_future, accepted), return_exceptions=True)
        except BaseException as error:
            self.close()
            for future in accepted:
                future.add_done_callback(self._give_up)
            if isinstance(error, TimeoutError):
                raise self._timed_out() from None
            raise
        shares = [self.requests] if self._together else [(request,) for request in self.requests]
        failures = [
            (share, result)
            for share, result in zip(shares, results, strict=True)
            if isinstance(result, BaseException)
        ]
        if not failures:
            return
        for share, failure in failures:
            if isinstance(failure, DagError):
                self._refused(share, failure)
        self.close()
        share, failure = failures[0]
        raise self._locate(share[0].id, failure) if share and isinstance(failure, DagError) else failure

    def _refused(self, requests: Sequence[Request], error: DagError) -> None:
        """Tell `observe` of requests that are refused; no event of theirs follows."""
        for request in requests:
            if self._open.pop(request.id, None) is not None:
                self._observe(FinishedEvent(request.id, (), error), request, 0.0)

    def _give_up(self, accepted: Future[Sequence[Request]]) -> None:
        """What is accepted only after everybody has left."""
        if not accepted.cancelled() and accepted.exception() is None:
            for request in accepted.result():
                self._abort(request.id, DagError("cancelled", "the client has left"))

    async def batches(self, silence_s: float) -> AsyncGenerator[list[Event], None]:
        """All events there are, once there is one; an empty list after `silence_s` seconds of silence."""
        ended = 0
        while ended < len(self.requests):
            try:
                async with asyncio.timeout(silence_s):
                    batch = [await self._events.get()]
            except TimeoutError:
                yield []
                continue
            while not self._events.empty():
                batch.append(self._events.get_nowait())
            ended += sum(isinstance(event, FinishedEvent) for event in batch)
            yield batch

    async def results(self) -> list[FinishedEvent]:
        """Terminal events in the order of the requests, errors included."""
        found: dict[str, FinishedEvent] = {}
        while len(found) < len(self.requests):
            event = await self._events.get()
            if isinstance(event, FinishedEvent):
                found[event.request_id] = event
                if event.error is not None and not self._together:
                    raise event.error
        return [found[request.id] for request in self.requests]

    def cancel(self, error: DagError) -> bool:
        """End what has not finished with `error`. Returns whether there was anything."""
        self._ending = error
        ending = list(self._open.values())
        for request in ending:
            self._abort(request.id, error)
            self._take(FinishedEvent(request.id, (), error))
        return bool(ending) or self._starting

    def delivered(self, request_id: str | None = None) -> None:
        """The client was told of the states of one request, or of all."""
        if request_id is None:
            self._undelivered.clear()
        else:
            self._undelivered.pop(request_id, None)

    def close(self) -> None:
        """Nobody listens any more: cancel what runs, release what nobody was told of."""
        self.cancel(DagError("cancelled", "the client has left"))
        if self._timer is not None:
            self._timer.cancel()
        undelivered, self._undelivered = self._undelivered, {}
        self._engine.release(state for states in undelivered.values() for state in states)

    def _forward(self, event: Event) -> None:
        """On the engine's thread."""
        if not self._arrived:
            self._engine.once_told(self._wake)
        self._arrived.append(event)

    def _wake(self) -> None:
        """On the engine's thread: hand what has arrived to the event loop."""
        arrived, self._arrived = self._arrived, []
        try:
            self._loop.call_soon_threadsafe(self._receive_all, arrived)
        except RuntimeError:
            for event in arrived:
                self._abort(event.request_id, DagError("cancelled", "the server has stopped"))

    def _receive_all(self, events: Sequence[Event]) -> None:
        """On the event loop."""
        for event in events:
            self._receive(event)

    def _receive(self, event: Event) -> None:
        if event.request_id in self._open:
            self._take(event)
        elif isinstance(event, FinishedEvent):
            self._engine.release(_states(event))

    def _take(self, event: Event) -> None:
        request = self._open[event.request_id]
        if isinstance(event, FinishedEvent):
            del self._open[event.request_id]
            if states := _states(event):
                self._undelivered[event.request_id] = states
            if event.error is not None:
                event = replace(event, error=self._locate(event.request_id, event.error))
            gap = 0.0
        else:
            now, key = time.perf_counter(), (event.request_id, event.index)
            gap, self._last[key] = now - self._last.get(key, now), now
        self._observe(event, request, gap)
        self._events.put_nowait(event)

    def _timed_out(self) -> DagError:
        return DagError("timeout", f"the request took longer than {self._timeout_s:g} seconds")

    def _abort(self, request_id: str, error: DagError) -> None:
        self._engine.post(lambda core: core.abort(request_id, error))


def _states(event: FinishedEvent) -> tuple[str, ...]:
    return tuple(choice.dag.state for choice in event.choices if choice.dag.state is not None)
