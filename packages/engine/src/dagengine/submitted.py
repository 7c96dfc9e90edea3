"""Requests that were submitted as one group, and a thread that waits for them. Knows events by request; not what they
say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

from .async_engine import EngineThread, MakeRequests, release_all
from .core import EngineCore
from .request import Event, FinishedEvent, Request


class Submitted:
    """A group from `start` on, until all of it has ended or `cancel`. One thread starts it and waits.

    An interrupt of that thread, also within `start` and `wait`, ends nothing: whoever made the group cancels it then.

    Args:
        make: gives the group when it is submitted.
        on_event: called with every event, on the engine's thread; what it raises is logged.
    """

    def __init__(
        self,
        engine: EngineThread,
        make: MakeRequests,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._engine, self._make, self._on_event = engine, make, on_event
        self._ids: list[str] = []
        self._finished: dict[str, FinishedEvent] = {}
        self._taken: set[str] = set()
        self._awaited: set[str] = set()
        self._lock = threading.Lock()
        self._come: SimpleQueue[None] = SimpleQueue()

    def start(self) -> None:
        """Submit the group. Raises DagError: it was refused."""

        def made(core: EngineCore) -> Sequence[Request]:
            requests = self._make(core)
            self._ids = [request.id for request in requests]
            return requests

        self._engine.ask_made(made, self._collect)

    def wait(self, request_ids: Sequence[str] | None = None) -> list[FinishedEvent]:
        """The terminal events of these requests, or of all, in order. Their states are the caller's, until `cancel`."""
        wanted = self._ids if request_ids is None else request_ids
        with self._lock:
            self._awaited = {name for name in wanted if name not in self._finished}
            waits = bool(self._awaited)
        if waits:
            self._come.get()
        return [self._finished[name] for name in wanted]

    def take(self, request_ids: Iterable[str]) -> None:
        """Let `cancel` leave the states of these requests alone. On the engine's thread."""
        self._taken.update(request_ids)

    def cancel(self) -> None:
        """Cancel what has not finished, and release the states of what has and was not taken. Does not wait.

        May be called at any time, also before `start` and after a refusal. A state that is released already is no
        error.
        """

        def give_up(core: EngineCore) -> None:
            for name in self._ids:
                if self._engine.tells(
                    name, self._collect
                ):  # else it was refused, and the id may be somebody else's
                    core.abort(name)
            for name, event in self._finished.items():
                if name not in self._taken:
                    states = (choice.dag.state for choice in event.choices)
                    release_all(core, [state for state in states if state is not None])

        self._engine.post(give_up)

    def _collect(self, event: Event) -> None:
        try:
            if self._on_event is not None:
                self._on_event(event)
        finally:  # what raises there is logged, and who waits goes on
            if isinstance(event, FinishedEvent):
                self._end(event)

    def _end(self, event: FinishedEvent) -> None:
        with self._lock:
            self._finished[event.request_id] = event
            if event.request_id in self._awaited:
                self._awaited.remove(event.request_id)
                if not self._awaited:
                    self._come.put(None)
