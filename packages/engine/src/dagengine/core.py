"""The engine's heart: submit, step, abort. Synchronous, single-threaded, no I/O, no clocks but for timing.

    submit ─► PARENTS (wait for requests of the same submission) ─► scheduler's queues ─► sealed or discarded

What is submitted alone begins at once, so that it can be refused; of a group those that may begin do so in order, as
far as the next step takes them.

A step is launched before the one before it is collected, where `overlap` says so; otherwise it is collected at once.
What a request did not want any more by then, a row behind its last token or after its abort, is dropped: its KV was
written to pages that nobody else got meanwhile.

Every submitted request ends with exactly one FinishedEvent, whatever happens to it. Every path out of a request goes
through `_finish`, which is where that is held; the event of one that ended well, with the records of its answers, is
made when events are taken.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from heapq import heappop, heappush
from itertools import count

import torch
from torch import Tensor

from dagengine_kernels import AttentionBackend
from dagengine_kvstore import KVStore, KVStoreError, Mover, NodeRecord
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import ModelAdapter, ModelGeometry

from .attention import choose_backend, make_backend
from .config import EngineConfig
from .errors import DagError, as_dag_error
from .host_tier import HostTier
from .host_time import HostTime
from .pipeline import Launch, Pipeline
from .prepare import Preparer, ResolvedRef
from .records import engine_facts
from .request import Event, FinishedEvent, Request, check_parent, check_request
from .runner import Chunk, Runner
from .running import Answer, RunningRequest
from .sampler import NonFiniteLogits, Sampled, Sampler
from .scheduler import Scheduler, work_ids
from .sequence import Sequence
from .state_operations import StateOperations
from .stats import EngineStats
from .tokenizer import Tokenizer
from .upcoming import Upcoming
from .work import Phase, Restore, Work

log = logging.getLogger("dagengine")

# observer(request id, answer index, own offset of the token the logits follow, logits [vocab])
Observer = Callable[[str, int, int, Tensor], None]


class EngineCore(StateOperations):
    """Owns the queues, the store's lifetimes and the step.

    Args:
        tokenizer: None for models without text; then answers have empty text and stop strings are refused.
        observer: sees the logits of every sampled position; for tests and tools.
        host_tier: the store's second tier, to be closed with the core.
        upcoming: what the store's eviction policy asks who will read what.

    Attributes:
        on_launch: called by `step` when a batch is launched, before anything is waited for.
    """

    def __init__(
        self,
        config: EngineConfig,
        store: KVStore,
        runner: Runner,
        geometry: ModelGeometry,
        adapter: ModelAdapter,
        signature: Mapping[str, str],
        *,
        max_model_len: int,
        eos_token_ids: SequenceOf[int],
        tokenizer: Tokenizer | None,
        observer: Observer | None = None,
        host_tier: HostTier | None = None,
        upcoming: Upcoming | None = None,
    ) -> None:
        self.config, self.store, self.geometry = config, store, geometry
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.attention = choose_backend(
            config.attention_backend, runner, batch_invariant=config.batch_invariant
        )
        self.default_backend = self.attention.name
        self._runner, self._observer = runner, observer
        self._eos = frozenset(eos_token_ids)
        vocab_size = min(geometry.vocab_size, tokenizer.vocab_size) if tokenizer else geometry.vocab_size
        self._vocab_size = vocab_size
        self._sampler = Sampler(runner.device, vocab_size)
        self._pipeline = Pipeline(
            store, runner, self._sampler, self._backend, keep_logits=observer is not None
        )
        self.overlap = runner.device.type == "cuda" if config.overlap is None else config.overlap
        self.preparer = Preparer(store, geometry, adapter, signature, max_model_len=max_model_len)
        self.facts = engine_facts(config, signature, runner.device)
        self._work_ids = work_ids()
        self._stats = EngineStats()
        self.host_tier = host_tier
        self._scheduler = Scheduler(
            store,
            config,
            self._work_ids,
            self._stats,
            two_tiers=host_tier is not None,
            recalls=host_tier and host_tier.recalls,
            fail=self._fail_sequence,
            forget=self._forget,
        )
        self._upcoming = upcoming or Upcoming()
        self._upcoming.readers = self._readers
        self._requests: dict[str, RunningRequest] = {}
        self._backends: dict[str, AttentionBackend] = {self.default_backend: self.attention.backend}
        self._arrivals = count()
        self._events: list[Event | RunningRequest] = []  # a request for its terminal event, still to be made
        self._ready: list[tuple[int, int, str]] = []  # of groups, by order: wait for no other request and may begin
        self._begun = False  # whether a request began since the last batch was chosen
        self._seeds = (
            torch.Generator().manual_seed(config.seed) if config.seed is not None else torch.Generator()
        )
        if config.seed is None:
            self._seeds.seed()
        self._progressed = False
        self.on_launch: Callable[[], None] = _nothing

    def submit(self, request: Request) -> None:
        """Accept a request whose references are all states.

        Raises:
            DagError: the refusal; nothing was accepted then, and no event follows.
        """
        self._check_queue(1)
        self.check(request)
        if request.after:
            raise DagError("cycle", f"{request.after[0]!r} is no earlier request", "after[0]")
        refs = [self.preparer.resolve(ref, i, request.salt) for i, ref in enumerate(request.context)]
        running = RunningRequest(request, time.perf_counter(), next(self._arrivals))
        self._begin(running, refs)

    def submit_group(self, requests: SequenceOf[Request]) -> None:
        """Accept requests that may refer to each other, each only to earlier ones of the list.

        A node that is refused once its parents are known ends with that error in its terminal event, its dependents
        with `parent_failed`; independent nodes go on.

        Raises:
            DagError: a refusal that concerns the submission as a whole; nothing was accepted then.
        """
        self._check_queue(len(requests))
        earlier: dict[str, Request] = {}
        now = time.perf_counter()
        accepted: list[RunningRequest] = []
        try:
            for request in requests:
                if request.id in earlier:
                    raise DagError("invalid_request", f"two requests are called {request.id!r}", "id")
                self.check(request)
                accepted.append(RunningRequest(request, now, next(self._arrivals)))
                for index, ref in enumerate(request.context):
                    if ref.request is None:
                        target = self.preparer.resolve(ref, index, request.salt)
                        accepted[-1].hold(self.store, index, target, target.at)
                    else:
                        check_parent(ref.request, earlier, f"context[{index}].request")
                for index, waited in enumerate(request.after):
                    if waited not in earlier:
                        raise DagError("cycle", f"{waited!r} is no earlier request", f"after[{index}]")
                earlier[request.id] = request
        except BaseException:
            for running in accepted:
                running.release_targets(self.store)
            raise
        for running in accepted:
            request = running.request
            read: dict[str, list[int]] = {waited: [] for waited in request.after}
            for index, ref in enumerate(request.context):
                if ref.request is not None:
                    read.setdefault(ref.request, []).append(index)
            running.parents = set(read)
            self._requests[request.id] = running
            for parent, indices in read.items():
                self._requests[parent].children[request.id] = indices
        for running in accepted:
            if not running.parents:
                heappush(self._ready, (running.request.priority, running.arrival, running.request.id))

    def abort(self, request_id: str, error: DagError | None = None) -> bool:
        """End a request now. Unknown and finished ids are no error; returns whether there was one to end."""
        running = self._requests.get(request_id)
        if running is None:
            return False
        self._finish(running, error or DagError("cancelled", "the request was cancelled"))
        return True

    @property
    def arena(self) -> TorchArena:
        """The tensors of the KV pages; to be looked at on the engine's thread."""
        return self._runner.arena

    def check(self, request: Request) -> None:
        """What can be refused by looking at a request alone. Raises: DagError."""
        if request.id in self._requests:
            raise DagError("invalid_request", f"request id {request.id!r} is in use", "id")
        check_request(request, self.geometry.vocab_size, has_text=self.tokenizer is not None)
        params = request.sampling
        if params is not None and params.min_tokens:
            ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
            if sum(token < self._vocab_size for token in ends) == self._vocab_size:
                message = "every token would end the output, so none may come before min_tokens were sampled"
                raise DagError("invalid_request", message, "min_tokens")
        if request.backend is not None:
            self._backend(request.backend)

    def _check_queue(self, count: int) -> None:
        limit = self.config.max_waiting
        waiting = len(self._requests) - len(
            {w.request.id for w in self._scheduler.running if isinstance(w, Sequence)}
        )
        if limit is not None and waiting + count > limit:
            raise DagError("queue_full", f"{waiting} requests wait, at most {limit} may; try again later")

    def _try_begin(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None or running.parents or running.sequences:
            return
        try:
            self._begin(running, [running.targets[i][0] for i in range(len(running.request.context))])
        except DagError as error:
            self._finish(running, error)
        except Exception as error:
            log.exception("a request failed to begin; it ends")
            self._finish(running, as_dag_error(error))

    def _begin_ready(self) -> None:
        """Begin requests in order until a whole step waits in front of the next one: the device need not wait for all
        of a large group.
        """
        waiting, ahead, passed = self._scheduler.waiting, 0, 0
        while self._ready:
            priority, arrival, request_id = self._ready[0]
            while passed < len(waiting) and waiting[passed].order < (priority, arrival):
                ahead += waiting[passed].remaining
                passed += 1
            if ahead >= self.config.max_num_batched_tokens or passed >= self.config.max_num_seqs:
                return
            heappop(self._ready)
            self._try_begin(request_id)

    def _begin(self, running: RunningRequest, refs: SequenceOf[ResolvedRef]) -> None:
        request = running.request
        running.began = time.perf_counter()
        prepared = running.prepared = self.preparer.prepare(request, refs)
        params = request.sampling
        seen = running.seen_tokens()
        sequences: list[Sequence] = []
        try:
            for index in range(params.n if params else 1):
                sequence = Sequence(
                    id=next(self._work_ids),
                    order=(request.priority, running.arrival, index),
                    backend=request.backend or self.default_backend,
                    own_start=prepared.layout.own_start,
                    tokens=list(request.input_ids),
                    writer=self.preparer.begin(request, prepared),
                    request=request,
                    index=index,
                    reads=prepared.reads,
                    num_visible=prepared.layout.num_visible,
                    max_tokens=prepared.max_tokens,
                    keep=request.keep is not None or bool(running.children),
                    after=sequences[0] if sequences else None,
                    seen=seen,
                )
                sequences.append(sequence)
                if params is not None:
                    sequence.begin_sampling(params, self._eos, self._draw_seed, self.tokenizer)
        except BaseException:
            for sequence in sequences:
                self.preparer.discard(sequence.writer)  # type: ignore[arg-type]
            raise
        running.sequences = sequences
        self._requests[request.id] = running
        running.release_targets(self.store)
        for sequence in sequences:
            self._scheduler.add(sequence)
        self._begun = True

    def _draw_seed(self) -> int:
        return int(torch.randint(0, 2**62, (1,), generator=self._seeds))

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step not collected."""
        return bool(self._requests) or self._pipeline.num_in_flight > 0

    @property
    def progressed(self) -> bool:
        """Whether the last step launched, collected or ended something."""
        return self._progressed

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + sum(name in self._requests for _, _, name in self._ready)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def temp_bytes(self, *, reset: bool = False) -> dict[str, int]:
        """Peak temporary bytes of each attention backend in use, since the last reset; `reset` makes this one."""
        peaks = {name: backend.temp_bytes for name, backend in self._backends.items()}
        if reset:
            for backend in self._backends.values():
                backend.reset_stats()
        return peaks

    def watch_host(self) -> HostTime:
        """From now on count how long the device waits for the host between decode steps. Call between requests.

        Raises: DagError `unsupported` where the device is not CUDA: a CPU computes what it is told at once.
        """
        device = self.attention.device
        if device.type != "cuda":
            raise DagError(
                "unsupported", f"on a {device.type} steps are computed by the host itself", "device"
            )
        self._pipeline.host_time = HostTime()
        return self._pipeline.host_time

    def unwatch_host(self) -> None:
        """Stop counting, and count what is done already."""
        times, self._pipeline.host_time = self._pipeline.host_time, None
        if times is not None:
            times.finish()

    def take_events(self) -> list[Event]:
        """What happened outside of a step, such as a cancellation."""
        taken: list[Event] = []
        while self._events:
            events, self._events = self._events, []
            taken += [self._ended_well(one) if isinstance(one, RunningRequest) else one for one in events]
        return taken

    def abort_all(self, error: DagError) -> None:
        """End every request, and wait for the steps in flight."""
        for request_id in list(self._requests):
            self.abort(request_id, error)
        self._settle()

    def step(self) -> list[Event]:
        """Launch one batch, collect the one before it (without `overlap` this one too), and return what happened since
        the last call. Errors of a batch end its requests only.

        With `overlap`, where that leaves the device with nothing to do and let other requests begin, their first batch
        is launched too, before the records of those that ended are made.
        """
        self.pump()
        self._begin_ready()
        in_flight = self._pipeline.num_in_flight
        chunks = self._schedule()
        if chunks is None:
            self._collect()
            self._seal_complete()
            chunks = self._schedule()
        assert chunks is not None
        self._progressed = bool(chunks or in_flight)
        if chunks:
            self._launch(chunks)
            self.on_launch()
        if self._pipeline.num_in_flight > (1 if chunks and self.overlap else 0):
            self._collect()
        self._seal_complete()
        if self.overlap and self._begun and not self._pipeline.num_in_flight:
            chunks = self._schedule()
            if chunks:
                self._launch(chunks)
                self.on_launch()
        self._progressed = self._progressed or bool(self._events)
        if len(self.preparer.graph) > 2 * len(self._requests) + 1024 and self._stats.steps % 256 == 0:
            self.preparer.forget_dropped()
        return self.take_events()

    def pump(self) -> None:
        """Move transfers on. `step` does it; where there is none to do, it is to be called while they are under way."""
        self._upcoming.changed()
        self.store.pump()
        if self.host_tier is not None:
            self._stats.offloads += self.host_tier.watch(self.store.events)
            self._scheduler.finish_recalls()

    def close(self) -> None:
        """Wait for transfers and give the host's memory up. Nothing may be called afterwards but to look."""
        if self.host_tier is not None:
            self.host_tier.close()

    def _readers(self) -> Iterator[Iterable[NodeRecord]]:
        """What each piece of work reads, in the order in which they run."""
        for work in (*self._scheduler.running, *self._scheduler.waiting):
            reads = work.reads if isinstance(work, Sequence) else work.writer.node.reads
            yield [read.node for read in reads]
        for running in self._requests.values():
            for target, _ in running.targets.values():
                if isinstance(target.node, NodeRecord):
                    passed = self.preparer.graph.node(target.node.uid).passed
                    yield [target.node, *(self.preparer.record(r.node) for r in passed)]

    def _schedule(self) -> list[Chunk] | None:
        self._begun = False
        return self._scheduler.schedule(in_flight=self._pipeline.num_in_flight > 0)

    def _launch(self, chunks: list[Chunk]) -> None:
        if self.host_tier is not None:
            self.host_tier.begin_step(chunks)
        self._stats.step(len(chunks), sum(chunk.count for chunk in chunks))
        flight = self._pipeline.launch(chunks)
        self._stats.failed_steps += flight.failed
        for launch in flight.launches:
            if launch.error is not None:
                self._fail_chunks(launch.chunks, launch.error)

    def _settle(self) -> None:
        while self._pipeline.num_in_flight:
            self._collect()

    def _page_mover(self) -> Mover:
        return self._runner.page_mover()

    def _collect(self) -> None:
        """Take the results of the oldest step in flight over into its requests.

        If it failed, the one behind it may have read what it did not write: that one is collected too, before anything
        else is launched.
        """
        failures = self._stats.failed_steps
        flight, failed = self._pipeline.collect()
        if self.host_tier is not None:
            self.host_tier.end_step(failed=flight.failed)
        for launch in failed:
            assert launch.error is not None
            self._fail_chunks(launch.chunks, launch.error)
        done = [launch for launch in flight.launches if launch.error is None]
        for launch in done:
            self._commit(launch.chunks)
        for launch in done:
            self._take_results(launch)
        if failed:
            self._settle()
            self._stats.failed_steps = failures + 1
        elif not flight.failed:
            self._stats.failed_steps = 0

    def _commit(self, chunks: list[Chunk]) -> None:
        """KV of a step is there: of work that still runs, not of what ended while the step was in flight."""
        for chunk in chunks:
            work = chunk.work
            if work.phase is not Phase.RUNNING:
                continue
            work.writer.commit(chunk.count)
            if isinstance(work, Restore):
                self._stats.restored_tokens += chunk.count
                if work.committed:
                    self._scheduler.bringing.finish_restore(work)

    def _take_results(self, launch: Launch) -> None:
        for row, (sequence, result) in enumerate(zip(launch.sequences, launch.results, strict=True)):
            sequence.pending -= 1
            if sequence.phase is not Phase.RUNNING or sequence.finish_reason is not None:
                continue
            if self._observer is not None and launch.logits is not None:
                offset = len(sequence.tokens) - 1
                self._observer(sequence.request.id, sequence.index, offset, launch.logits[row])
            if isinstance(result, NonFiniteLogits):
                self._stats.non_finite += 1
                self._fail_sequence(sequence, DagError("internal", "the model produced no finite logits"))
            else:
                self._append(sequence, result)

    def _seal_complete(self) -> None:
        """Seal, or end, what is computed and samples nothing more."""
        for work in list(self._scheduler.running):
            if (
                not work.pending
                and isinstance(work, Sequence)
                and work.phase is Phase.RUNNING
                and work.complete
            ):
                self._seal(work)

    def _append(self, sequence: Sequence, result: Sampled) -> None:
        self._stats.generated_tokens += 1
        sequence.accept(result)
        if sequence.writer.num_unknown:
            sequence.writer.fill([result.token_id])
        event = sequence.take_event()
        if event is not None:
            self._events.append(event)
        if sequence.finish_reason is not None and not sequence.keep:
            self._close(sequence)

    def _seal(self, sequence: Sequence) -> None:
        """Everything is computed and nothing more is sampled: the node becomes a state, or ends."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "prefill"
            sequence.first_token = time.perf_counter()
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """One answer is complete: keep its node if that is wanted, and finish the request when it was the last."""
        running = self._requests[sequence.request.id]
        self._scheduler.remove(sequence)  # its lease ends before the seal lets go of what it digested
        state: str | None = None
        refusal: DagError | None = None
        if not sequence.keep:
            self.preparer.discard(sequence.writer)  # type: ignore[arg-type]
        else:
            node = self.preparer.seal(
                sequence.writer,  # type: ignore[arg-type]
                len(sequence.tokens),
                sequence.spans(),
                sequence.sampling is not None,
            )
            handed = False
            try:
                state = self._keep(running.request, node)
                handed = self._hand_to_children(running, node)
            except Exception as error:
                log.exception("a sealed node could not be kept; its request ends")
                refusal = as_dag_error(error)
            if not handed:
                self.store.unhold(node)
        implementation = self._backend(sequence.backend).implementation
        running.answers[sequence.index] = Answer(sequence, state, implementation)
        if refusal is not None or len(running.answers) == len(running.sequences):
            self._finish(running, refusal)

    def _keep(self, request: Request, node: NodeRecord) -> str | None:
        """Name the node if the request asked for that. Returns the state id."""
        keep = request.keep
        if keep is None:
            return None
        return self.store.name(node, salt=request.salt, name=keep.name, ttl_s=keep.ttl_s, pin=keep.pin)

    def _hand_to_children(self, running: RunningRequest, node: NodeRecord) -> bool:
        """Hold a sealed node for each reference to it. Returns whether one took over the hold that sealing gave."""
        readers = [
            (child, index, ResolvedRef(node, child.request.context[index].at, child.request.context[index]))
            for child_id, indices in running.children.items()
            if (child := self._requests.get(child_id)) is not None
            for index in indices
        ]
        for child, index, target in readers[1:]:
            child.hold(self.store, index, target, None)
        for child, index, target in readers[:1]:
            child.targets[index] = target, None
        return bool(readers)

    def _finish(self, running: RunningRequest, error: DagError | None) -> None:
        """The one way out: free what the request still holds, tell its dependents, emit its terminal event."""
        ending = deque([(running, error)])
        while ending:
            running, error = ending.popleft()
            request_id = running.request.id
            if self._requests.pop(request_id, None) is None:
                continue
            error = error and _without_frames(error)
            self._free(running, failed=error is not None)
            if error is None:
                self._events.append(running)
            else:
                self._stats.finish(error, ())
                self._events.append(FinishedEvent(request_id, (), error))
            for child_id in running.children:
                child = self._requests.get(child_id)
                if child is None:
                    continue
                if error is not None:
                    ending.append((child, _parent_failed(request_id, error)))
                else:
                    child.parents.discard(request_id)
                    self._try_begin(child_id)

    def _ended_well(self, running: RunningRequest) -> FinishedEvent:
        """The terminal event of a request without an error: with its answers and their records."""
        request_id = running.request.id
        try:
            choices = running.choices(self.facts)
        except Exception as caught:
            log.exception("an answer could not be recorded; its request ends with that error")
            self._free(running, failed=True)
            error = _without_frames(as_dag_error(caught))
            self._stats.finish(error, ())
            for child_id in running.children:
                child = self._requests.get(child_id)
                if child is not None:
                    self._finish(child, _parent_failed(request_id, error))
            return FinishedEvent(request_id, (), error)
        self._stats.finish(None, choices)
        return FinishedEvent(request_id, choices)

    def _free(self, running: RunningRequest, *, failed: bool) -> None:
        """Let go of everything that the request still holds; a failed one leaves no state."""
        for sequence in running.sequences:
            if sequence.index not in running.answers:
                self._scheduler.remove(sequence)
                self.preparer.discard(sequence.writer)  # type: ignore[arg-type]
        running.release_targets(self.store)
        for answer in running.answers.values():
            if failed and answer.state is not None:
                try:
                    self.store.release(answer.state)
                except KVStoreError as error:
                    if error.code != "state_released":
                        raise

    def _fail_sequence(self, sequence: Sequence, error: DagError) -> None:
        running = self._requests.get(sequence.request.id)
        if running is not None:
            self._finish(running, error)

    def _fail_chunks(self, chunks: list[Chunk], error: Exception) -> None:
        for chunk in chunks:
            if chunk.work.phase is not Phase.RUNNING:
                continue
            if isinstance(chunk.work, Restore):
                self._scheduler.bringing.fail_restore(chunk.work, as_dag_error(error))
            elif isinstance(chunk.work, Sequence):
                self._fail_sequence(chunk.work, as_dag_error(error))
        self.store.check()

    def _forget(self, work: Work) -> None:
        for backend in self._backends.values():
            backend.forget(work.id)
        self._sampler.forget(work.id)

    def _backend(self, name: str) -> AttentionBackend:
        if name not in self._backends:
            try:
                self._backends[name] = make_backend(name, batch_invariant=self.config.batch_invariant)
            except Exception as error:
                raise DagError("unsupported", str(error), "backend") from None
        return self._backends[name]


def _nothing() -> None:
    pass


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
