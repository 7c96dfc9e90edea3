"""The thread that owns an engine core, and how other threads and event loops talk to it.

Everything that touches the core runs on its thread: commands queue up and run between steps, events go out to the
callback of their request. The thread either serves or is dead; when it dies every open request is told.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from .core import EngineCore
from .devices import use_device
from .errors import DagError, EngineDead
from .request import Event, FinishedEvent, Request

log = logging.getLogger("dagengine")

T = TypeVar("T")
OnEvent = Callable[[Event], None]
MakeRequests = Callable[[EngineCore], Sequence[Request]]
"""make(core): the requests of a submission, from what the engine has at that moment. On the engine's thread."""
IDLE_WAIT_S = 0.5
STUCK_WAIT_S = 0.001


def release_all(core: EngineCore, states: Iterable[str]) -> None:
    """Let go of states on the engine's thread; those that are gone already are no error."""
    for state in states:
        try:
            core.release_state(state)
        except DagError as error:
            log.debug("state %s was gone already: %s", state, error)


class EngineThread:
    """Runs a core until `close`.

    Args:
        core: handed over; nobody else may touch it afterwards.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        # no lock of Python's own: an interrupt would leave it taken, and this thread would wait for it for ever
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[str, OnEvent] = {}
        self._told: list[Callable[[], None]] = []
        self._accepted: list[Callable[[], None]] = []
        core.on_launch = self._tell_all_accepted
        self._stopping = False
        self._deadline = 0.0
        self._failures = 0
        self._dead: EngineDead | None = None
        self._beat = time.monotonic()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="dagengine", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> EngineDead | None:
        """Why nothing is served any more, if so."""
        return self._dead

    def seconds_since_beat(self) -> float:
        """Seconds since the thread last came round its loop; it beats at least twice a second unless it hangs."""
        return time.monotonic() - self._beat

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function` on the engine's thread, between steps."""
        return self._call(function, self._tell_now)

    def _call(
        self, function: Callable[[EngineCore], T], tell: Callable[[Callable[[], None]], None]
    ) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(self._core)
            except BaseException as error:
                future.set_exception(error)
            else:
                tell(lambda: future.set_result(result))

        self._post(run, future)
        return future

    def ask(self, function: Callable[[EngineCore], T]) -> T:
        """What `call(function).result()` gives, for a thread that may be interrupted meanwhile: a Future's lock would
        stay taken then, and the engine's thread would wait for it for ever."""
        return self._ask(function, self._tell_now)

    def _ask(self, function: Callable[[EngineCore], T], tell: Callable[[Callable[[], None]], None]) -> T:
        answers: SimpleQueue[Future[T]] = SimpleQueue()

        def run() -> None:
            answer: Future[T] = Future()
            try:
                answer.set_result(function(self._core))
            except BaseException as error:
                answer.set_exception(error)
                answers.put(answer)
            else:
                tell(lambda: answers.put(answer))

        self.check_serving()
        self._commands.put(run)
        if self._dead is not None:
            self._drain()
        return answers.get().result()

    def check_serving(self) -> None:
        """Raises EngineDead where nothing is served any more, as `ask` does."""
        # not Thread.is_alive: an interrupt in it makes it call a running thread ended (bpo-45274)
        if self._dead is not None or os.getpid() != self._process:
            raise self._dead or EngineDead("the engine is closed")

    def submit(self, requests: Sequence[Request], on_event: OnEvent) -> Future[Sequence[Request]]:
        """Accept one request, or a group that may refer to each other.

        `on_event` gets every event of these requests, on the engine's thread. The future gives the requests, before
        their first event; it fails with the refusal if the submission as a whole is refused; then no event follows.
        """
        return self.submit_made(lambda core: requests, on_event)

    def submit_made(self, make: MakeRequests, on_event: OnEvent) -> Future[Sequence[Request]]:
        """`submit` of what `make` gives; what raises there refuses the submission. No command runs in between, and no
        step.
        """
        return self._call(self._accepting(make, on_event), self._tell_accepted)

    def ask_made(self, make: MakeRequests, on_event: OnEvent) -> Sequence[Request]:
        """`submit_made(...).result()`, as `ask`."""
        return self._ask(self._accepting(make, on_event), self._tell_accepted)

    def tells(self, request_id: str, on_event: OnEvent) -> bool:
        """Whether a request of this id runs of which `on_event` hears. To be asked on the engine's thread."""
        return self._listeners.get(request_id) == on_event

    def _accepting(self, make: MakeRequests, on_event: OnEvent) -> Callable[[EngineCore], Sequence[Request]]:
        def accept(core: EngineCore) -> Sequence[Request]:
            if self._dead is not None:  # it came before the end, and is looked at after it
                raise self._dead
            if self._stopping:
                raise DagError("draining", "the engine is shutting down and takes nothing new")
            requests = make(core)
            if not requests:
                return requests
            if any(r.id in self._listeners for r in requests):
                self._dispatch(core.take_events())  # of requests that have ended, whose ids are free then
            fresh = [r.id for r in requests if r.id not in self._listeners]
            self._listeners.update(dict.fromkeys(fresh, on_event))
            try:
                if len(requests) == 1 and all(ref.request is None for ref in requests[0].context):
                    core.submit(requests[0])
                else:
                    core.submit_group(requests)
            except BaseException:
                for request_id in fresh:
                    self._listeners.pop(request_id, None)
                raise
            return requests

        return accept

    def _tell_now(self, tell: Callable[[], None]) -> None:
        tell()

    def _tell_accepted(self, tell: Callable[[], None]) -> None:
        """Tell it when the next step is launched: what the threads that hear it do then delays nothing that the device
        waits for.
        """
        if self._dead is None and self._core.overlap and self._core.has_work:
            self._accepted.append(tell)
        else:
            tell()

    def _tell_all_accepted(self) -> None:
        accepted, self._accepted = self._accepted, []
        for tell in accepted:
            tell()

    def post(self, function: Callable[[EngineCore], object]) -> None:
        """Like `call`, for whoever does not wait; never blocks, and is quietly dropped by a dead engine."""

        def run() -> None:
            try:
                function(self._core)
            except DagError as error:
                log.debug("a posted command was refused: %s", error)

        if self._dead is None:
            self._commands.put(run)

    def once_told(self, function: Callable[[], None]) -> None:
        """Call `function`, which raises nothing, when all events at hand were handed out. For listeners, while one of
        them is called: to wake another thread for many events once, and not while this one still has some.
        """
        self._told.append(function)

    def release(self, states: Iterable[str]) -> None:
        """Let go of states, all in one command; those that are gone already are no error. Never blocks, as `post`."""
        listed = tuple(states)
        if listed:
            self.post(lambda core: release_all(core, listed))

    def close(self, drain_s: float = 0.0, *, wait_s: float | None = None) -> None:
        """Take nothing new, let requests finish for `drain_s` seconds, cancel the rest, stop the thread.

        Waits for the thread to end, at most `wait_s` seconds if given: one that hangs in a step never does.
        """
        self._deadline = time.monotonic() + drain_s
        self._stopping = True
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def _post(self, run: Callable[[], None], future: Future[T]) -> None:
        try:
            self.check_serving()
        except EngineDead as error:
            future.set_exception(error)
            return
        self._commands.put(run)
        if self._dead is not None:
            self._drain()

    def _drain(self) -> None:
        """Run what is still queued; on a dead engine commands fail or answer from a core that stands still."""
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _run(self) -> None:
        try:
            use_device(self._core.attention.device)
            while not self._turn():
                pass
            self._die(EngineDead("the engine is closed"))
        except BaseException as error:
            log.exception("the engine thread dies")
            self._die(EngineDead(f"the engine stopped: {error}"))
        finally:
            self._core.close()

    def _turn(self) -> bool:
        """Once round: commands, a step, events. Returns whether the thread is to stop."""
        self._beat = time.monotonic()
        self._drain()
        if self._stopping and (not self._core.has_work or self._beat >= self._deadline):
            self._core.abort_all(DagError("cancelled", "the engine is shutting down"))
            self._dispatch(self._core.take_events())
            return True
        if not self._core.has_work:
            self._core.pump()
            self._dispatch(self._core.take_events())
            if not self._stopping:
                moving = self._core.store.num_in_flight > 0
                try:
                    command = self._commands.get(timeout=STUCK_WAIT_S if moving else IDLE_WAIT_S)
                except Empty:
                    return False
                command()
            return False
        self._dispatch(self._step())
        if not self._core.progressed:
            time.sleep(STUCK_WAIT_S)
        return False

    def _step(self) -> list[Event]:
        """One step; an error that the core did not pin on a batch ends every request."""
        try:
            events = self._core.step()
            self._failures = self._core.stats.failed_steps
        except Exception as error:
            log.exception("a step failed outside of its batch; all requests end")
            self._failures += 1
            self._core.abort_all(DagError("internal", f"the engine failed: {type(error).__name__}: {error}"))
            self._core.store.check()
            events = self._core.take_events()
        if self._failures >= self._core.config.max_failed_steps:
            self._dispatch(events)
            raise EngineDead(f"{self._failures} steps failed in a row")
        return events

    def _dispatch(self, events: list[Event]) -> None:
        self._tell_all_accepted()
        for event in events:
            finished = isinstance(event, FinishedEvent)
            listener = (
                self._listeners.pop(event.request_id, None)
                if finished
                else self._listeners.get(event.request_id)
            )
            if listener is None:
                continue
            try:
                listener(event)
            except Exception:
                log.exception("a listener of request %s failed", event.request_id)
        self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, []
        for function in told:
            function()

    def _die(self, reason: EngineDead) -> None:
        self._dead = reason
        self._tell_all_accepted()
        listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            try:
                listener(FinishedEvent(request_id, (), reason))
            except Exception:
                log.exception("a listener of request %s failed", request_id)
        self._tell()
        self._drain()
