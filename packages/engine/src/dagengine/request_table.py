"""The requests that have not ended, and what is to be told of them. Knows no batches and no backends; of steps
no more than which answers the next one completes.

    add ───────────────────────► every answer closed ─┐
    add_group ─► waits ─► begin ─┘                    ├─► finish ─► one FinishedEvent
                   └──────┴───────── failed, aborted ─┘

Who waits begins when all that it waits for has ended well; or with the step that completes the last of it, so that it
may run in that step, and then it fails if the step does.

Every submitted request ends with exactly one FinishedEvent, whatever happens to it. Every path out of the table goes
through `finish`, which is where that is held; the event of one that ended well, with the records of its answers, is
made when events are taken.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from types import MappingProxyType

from dagengine_kvstore import KVStore, KVStoreError, NodeRecord

from .errors import DagError, as_dag_error
from .prepare import Preparer, ResolvedRef
from .request import Event, FinishedEvent, Request
from .running import Answer, RunningRequest
from .scheduler import Scheduler
from .sequence import Sequence
from .stats import EngineStats

log = logging.getLogger("dagengine")

GONE = ("state_released", "state_not_found")
"""What the store says of a state that was let go of: lately, or so long ago that it forgot."""


class RequestTable:
    """
    Args:
        facts: of the engine, for the records of answers.
        begin: called with a request when all that it waits for has ended well, or is sealed early; raises what refuses
            it, and then nothing has begun.

    Attributes:
        by_id: requests that have not ended, in the order in which they came; read-only.
        waiting_tokens: own tokens of those that wait for others.
        events: what nobody has taken yet, always in the same list; a request stands for its terminal event, which is
            still to be made.
    """

    def __init__(
        self,
        store: KVStore,
        preparer: Preparer,
        scheduler: Scheduler,
        stats: EngineStats,
        facts: Mapping[str, object],
        *,
        begin: Callable[[RunningRequest], None],
    ) -> None:
        self._store, self._preparer, self._scheduler, self._stats = store, preparer, scheduler, stats
        self._facts, self._begin = facts, begin
        self._by_id: dict[str, RunningRequest] = {}
        self.by_id: Mapping[str, RunningRequest] = MappingProxyType(self._by_id)
        self._unbegun: dict[str, int] = {}  # own tokens of those that wait for others
        self.waiting_tokens = 0
        self.events: list[Event | RunningRequest] = []

    def add(self, running: RunningRequest) -> None:
        """Enter a request that waits for nobody, or for nobody any more."""
        self._by_id[running.request.id] = running
        self._waits_no_more(running)

    def add_group(self, group: SequenceOf[RunningRequest]) -> None:
        """Enter requests of one submission, each with those before it that it waits for."""
        for running in group:
            request = running.request
            read: dict[str, list[int]] = {waited: [] for waited in request.after}
            for index, ref in enumerate(request.context):
                if ref.request is not None:
                    read.setdefault(ref.request, []).append(index)
            running.parents = set(read)
            self._by_id[request.id] = running
            if read:
                self._unbegun[request.id] = len(request.input_ids)
                self.waiting_tokens += len(request.input_ids)
            for parent, indices in read.items():
                self._by_id[parent].children.append((running, indices))

    def close(self, sequence: Sequence, implementation: str) -> None:
        """One answer is complete: keep its node if that is wanted, and finish the request when it was the last.

        Args:
            implementation: what ran as its attention backend.
        """
        running = self._by_id[sequence.request.id]
        self._scheduler.remove(sequence)  # its lease ends before the seal lets go of what it digested
        state: str | None = None
        refusal: DagError | None = None
        if not sequence.keep:
            self._preparer.discard(sequence.writer)  # type: ignore[arg-type]
        else:
            was_early = sequence.sealed_early
            node = self._finish(sequence) if was_early else self._seal(sequence)
            try:
                state = self._keep(running.request, node)
                if not was_early:
                    self._hand_to_children(running, node)
            except Exception as error:
                log.exception("a sealed node could not be kept; its request ends")
                refusal = as_dag_error(error)
            self._store.unhold(node)
        running.answers[sequence.index] = Answer(sequence, state, implementation)
        if refusal is not None or len(running.answers) == len(running.sequences):
            self.finish(running, refusal)

    def begin_readers(self, completing: SequenceOf[Sequence]) -> list[Sequence]:
        """Begin the requests that wait for nothing but to read what the step to be launched completes, and what a step
        in flight does: these are sealed for them though neither has ended, and the last token may not be known yet.

        Returns: their answers, which wait to run.
        """
        began = time.perf_counter()
        ended = {id(sequence) for sequence in completing}
        children = {
            child.request.id: child
            for sequence in completing
            for child, _ in self._children(self._by_id[sequence.request.id])
        }
        ready = [
            child
            for child in children.values()
            if not child.sequences
            and child.parents.isdisjoint(child.request.after)  # to find what they leave
            and all(self._is_readable(one, ended) for one in child.parents)
        ]
        read = dict.fromkeys(name for child in ready for name in child.parents)
        in_flight = [
            sequence
            for running in [self._by_id[name] for name in read]
            for sequence in running.sequences
            if sequence.ends_in_flight
        ]
        for sequence in (*in_flight, *completing):
            if sequence.request.id in read and not sequence.sealed_early:
                node = self._seal(sequence, early=True)
                self._hand_to_children(self._by_id[sequence.request.id], node)
        for child in ready:
            with suppress(Exception):  # it is refused again, and told so, once those that it reads have ended
                self._begin(child)
                child.began = began  # sealing what it reads was for it
        return [sequence for child in ready for sequence in child.sequences]

    def note_known(self, sequence: Sequence) -> None:
        """The last token of an answer that was sealed early is known: until now its readers waited for it."""
        now = time.perf_counter()
        for child, _ in self._children(self._by_id[sequence.request.id]):
            child.began = now

    def try_begin(self, running: RunningRequest) -> None:
        """Begin a request of a group that waits for nobody any more; it ends with what refuses it."""
        try:
            self._begin(running)
        except DagError as error:
            self.finish(running, error)
        except Exception as error:
            log.exception("a request failed to begin; it ends")
            self.finish(running, as_dag_error(error))

    def fail(self, sequence: Sequence, error: DagError) -> None:
        """End the request of a sequence that cannot go on, unless it has ended."""
        running = self._by_id.get(sequence.request.id)
        if running is not None:
            self.finish(running, error)

    def finish(self, running: RunningRequest, error: DagError | None) -> None:
        """The one way out: free what the request still holds, tell its dependents, emit its terminal event."""
        ending = deque([(running, error)])
        while ending:
            running, error = ending.popleft()
            request_id = running.request.id
            if self._by_id.pop(request_id, None) is None:
                continue
            self._waits_no_more(running)
            error = error and _without_frames(error)
            self._free(running, failed=error is not None)
            if error is None:
                self.events.append(running)
            else:
                self._stats.finish(error, ())
                self.events.append(FinishedEvent(request_id, (), error))
            for child, _ in self._children(running):
                if error is not None:
                    ending.append((child, _parent_failed(request_id, error)))
                    continue
                child.parents.discard(request_id)
                if not child.parents and not child.sequences:
                    self.try_begin(child)

    def _waits_no_more(self, running: RunningRequest) -> None:
        self.waiting_tokens -= self._unbegun.pop(running.request.id, 0)

    def take_events(self) -> list[Event]:
        """What happened since the last call; answers of requests that ended well are recorded now."""
        taken: list[Event] = []
        while self.events:
            events = self.events.copy()
            self.events.clear()
            taken += [self._ended_well(one) if isinstance(one, RunningRequest) else one for one in events]
        return taken

    def _keep(self, request: Request, node: NodeRecord) -> str | None:
        """Name the node if the request asked for that. Returns the state id."""
        keep = request.keep
        if keep is None:
            return None
        return self._store.name(node, salt=request.salt, name=keep.name, ttl_s=keep.ttl_s, pin=keep.pin)

    def _seal(self, sequence: Sequence, *, early: bool = False) -> NodeRecord:
        node = self._preparer.seal(
            sequence.writer,  # type: ignore[arg-type]
            sequence.num_tokens,
            sequence.spans(),
            sampled=sequence.sampling is not None,
            early=early,
        )
        sequence.sealed_early = early
        return node

    def _finish(self, sequence: Sequence) -> NodeRecord:
        return self._preparer.finish(
            sequence.writer,  # type: ignore[arg-type]
            sequence.spans(),
            sampled=sequence.sampling is not None,
        )

    def _is_readable(self, request_id: str, ended: Container[int]) -> bool:
        """Whether the nodes of an unfinished request can be read with, or behind, the step that completes `ended`."""
        running = self._by_id[request_id]
        return bool(running.sequences) and all(
            sequence.sealed_early
            or id(sequence) in ended
            or sequence.index in running.answers
            or sequence.ends_in_flight
            for sequence in running.sequences
        )

    def _hand_to_children(self, running: RunningRequest, node: NodeRecord) -> None:
        """Hold a sealed node for each reference to it."""
        for child, indices in self._children(running):
            for index in indices:
                ref = child.request.context[index]
                child.hold(self._store, index, ResolvedRef(node, ref.at, ref), None)

    def _children(self, running: RunningRequest) -> Iterator[tuple[RunningRequest, list[int]]]:
        """Those of a request's children that have not ended by the time they are come to: others may have their ids."""
        for child, indices in running.children:
            if self._by_id.get(child.request.id) is child:
                yield child, indices

    def _free(self, running: RunningRequest, *, failed: bool) -> None:
        """Let go of everything that the request still holds; a failed one leaves no state."""
        for sequence in running.sequences:
            if sequence.index not in running.answers:
                self._scheduler.remove(sequence)
                self._preparer.discard(sequence.writer)  # type: ignore[arg-type]
        running.release_targets(self._store)
        for answer in running.answers.values():
            if failed and answer.state is not None:
                try:
                    self._store.release(answer.state)
                except KVStoreError as error:
                    if error.code not in GONE:
                        raise

    def _ended_well(self, running: RunningRequest) -> FinishedEvent:
        """The terminal event of a request without an error: with its answers and their records."""
        request_id = running.request.id
        try:
            choices = running.choices(self._facts)
        except Exception as caught:
            log.exception("an answer could not be recorded; its request ends with that error")
            self._free(running, failed=True)
            error = _without_frames(as_dag_error(caught))
            self._stats.finish(error, ())
            for child, _ in self._children(running):
                self.finish(child, _parent_failed(request_id, error))
            return FinishedEvent(request_id, (), error)
        self._stats.finish(None, choices)
        return FinishedEvent(request_id, choices)


def _without_frames(error: DagError) -> DagError:
    """The same error for an event: whoever keeps it must not keep the frames that raised it, and their nodes."""
    if error.__traceback__ is None and error.__context__ is None:
        return error
    return DagError(error.code, error.message, error.field)


def _parent_failed(parent_id: str, error: DagError) -> DagError:
    """What a dependent of a failed request ends with; it names the request that failed first."""
    if error.code == "parent_failed":
        return error
    reason = f"{parent_id!r}, which it reads, ended with {error.code}: {error.message}"
    return DagError("parent_failed", reason)
