"""The engine's heart: submit, step, abort. Synchronous, single-threaded, no I/O, no clocks but for timing.

    submit ─► PARENTS (wait for requests of the same submission) ─► scheduler's queues ─► sealed or discarded

A step is launched before the one before it is collected, where `overlap` says so; otherwise it is collected at once.
What a request did not want any more by then, a row behind its last token or after its abort, is dropped: its KV was
written to pages that nobody else got meanwhile.

A request that waits only for what the next step completes, such as a judge for its fragments, runs in that step if
there is room for it: what it reads is written before, layer by layer.

How requests end, and that each ends with exactly one FinishedEvent, is `request_table`'s to say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count

import torch
from torch import Tensor

from dagengine_kernels import AttentionBackend
from dagengine_kvstore import KVStore, Mover, NodeRecord
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import ModelAdapter, ModelGeometry

from .attention import choose_backend, make_backend
from .config import EngineConfig
from .errors import DagError, as_dag_error
from .host_tier import HostTier
from .host_time import HostTime
from .pipeline import Flight, Launch, Pipeline
from .prepare import Preparer, ResolvedRef
from .records import engine_facts
from .request import Event, Request, check_parent, check_request
from .request_table import RequestTable
from .runner import Chunk, Runner
from .running import RunningRequest
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
            fail=lambda sequence, error: self._requests.fail(sequence, error),
            forget=self._forget,
            begin_readers=lambda completing: self._requests.begin_readers(completing),
            waiting_tokens=lambda: self._requests.waiting_tokens,
        )
        self._requests = RequestTable(
            store, self.preparer, self._scheduler, self._stats, self.facts, begin=self._begin_waiting
        )
        self._upcoming = upcoming or Upcoming()
        self._upcoming.readers = self._readers
        self._backends: dict[str, AttentionBackend] = {self.default_backend: self.attention.backend}
        self._arrivals = count()
        self._begun = False  # whether a request began since the last batch was chosen
        self._seeds = (
            torch.Generator().manual_seed(config.seed) if config.seed is not None else torch.Generator()
        )
        if config.seed is None:
            self._seeds.seed()
        self._progressed = False
        # Sealed early, and what ended behind them, in the order in which they are to be closed.
        self._to_close: list[Sequence] = []
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
        self.store.expire()
        refs = [self.preparer.find(ref, i, request.salt) for i, ref in enumerate(request.context)]
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
        self.store.expire()
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
                        target = self.preparer.find(ref, index, request.salt)
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
        self._requests.add_group(accepted)
        for running in accepted:
            if not running.parents:
                self._requests.try_begin(running)

    def abort(self, request_id: str, error: DagError | None = None) -> bool:
        """End a request now. Unknown and finished ids are no error; returns whether there was one to end."""
        running = self._requests.by_id.get(request_id)
        if running is None:
            return False
        self._requests.finish(running, error or DagError("cancelled", "the request was cancelled"))
        # There may be no step behind this one, and nothing may keep the nodes of what has ended.
        self._to_close = [work for work in self._to_close if work.phase is Phase.RUNNING]
        return True

    @property
    def arena(self) -> TorchArena:
        """The tensors of the KV pages; to be looked at on the engine's thread."""
        return self._runner.arena

    def check(self, request: Request) -> None:
        """What can be refused by looking at a request alone. Raises: DagError."""
        if request.id in self._requests.by_id:
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
        waiting = len(self._requests.by_id) - len(
            {w.request.id for w in self._scheduler.running if isinstance(w, Sequence)}
        )
        if limit is not None and waiting + count > limit:
            raise DagError("queue_full", f"{waiting} requests wait, at most {limit} may; try again later")

    def _begin_waiting(self, running: RunningRequest) -> None:
        """Begin a request of a group that waits for nobody any more."""
        self._begin(running, [running.targets[i][0] for i in range(len(running.request.context))])

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
                    sequence.holds_back = running.holds_back(may_end_short=sequence.may_end_short)
        except BaseException:
            for sequence in sequences:
                self.preparer.discard(sequence.writer)  # type: ignore[arg-type]
            raise
        running.sequences = sequences
        self._requests.add(running)
        running.release_targets(self.store)
        for sequence in sequences:
            self._scheduler.add(sequence)
        self._begun = True

    def _draw_seed(self) -> int:
        return int(torch.randint(0, 2**62, (1,), generator=self._seeds))

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a step not collected."""
        return bool(self._requests.by_id) or self._pipeline.num_in_flight > 0

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
        return len(self._scheduler.waiting)

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
        return self._requests.take_events()

    def abort_all(self, error: DagError) -> None:
        """End every request, and wait for the steps in flight."""
        for request_id in list(self._requests.by_id):
            self.abort(request_id, error)
        self._settle()

    def step(self) -> list[Event]:
        """Launch one batch, collect the one before it (without `overlap` this one too), and return what happened since
        the last call. Errors of a batch end its requests only.

        With `overlap`, where that leaves the device with nothing to do and let other requests begin, their first batch
        is launched too, before the records of those that ended are made. Where the device is busy, or answers ended
        that were read before, tokens are returned first, and what ended besides is closed by the next call, which
        returns once it has launched; the one behind that collects.
        """
        self.pump()
        self._close_complete()
        was_in_flight = self._pipeline.num_in_flight > 0
        is_ahead = self._pipeline.num_in_flight > 1  # the last call had something to tell, and did not wait
        launched = is_ahead or self._launch_next()
        if self._requests.events and was_in_flight and self.overlap and not is_ahead:
            self._progressed = True
            return self._requests.take_events()
        if self._pipeline.num_in_flight > (1 if launched and self.overlap else 0):
            self._collect()
        if not (self._requests.events and (self._pipeline.num_in_flight or self._to_close)):
            self._close_complete()
            if self.overlap and not self._pipeline.num_in_flight and (self._begun or self._scheduler.running):
                launched = self._launch_next() or launched
        self._progressed = launched or was_in_flight or bool(self._requests.events)
        self._forget_dropped()
        return self._requests.take_events()

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
        for running in self._requests.by_id.values():
            for target, _ in running.targets.values():
                if isinstance(target.node, NodeRecord):
                    passed = self.preparer.graph.node(target.node.uid).passed
                    yield [target.node, *(self.preparer.record(r.node) for r in passed)]

    def _launch_next(self) -> bool:
        """Choose a batch and launch it; the step in flight is collected first if that needs what it holds. Returns
        whether there was one.
        """
        chunks = self._schedule()
        if chunks is None:
            self._collect()
            self._close_complete()
            chunks = self._schedule()
        assert chunks is not None
        if chunks:
            self._launch(chunks)
            self.on_launch()
        return bool(chunks)

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
        """Collect the steps in flight, and close what they completed: later nobody may take its pages."""
        self._close_early()  # what ended already does not fail with a step behind it
        while self._pipeline.num_in_flight:
            self._collect()
        self._close_complete()

    def _page_mover(self) -> Mover:
        return self._runner.page_mover()

    def _collect(self) -> None:
        """Take the results of the oldest step in flight over into its requests.

        If it failed, the one behind it may have read what it did not write: that one is collected too, before anything
        else is launched.
        """
        failures = self._stats.failed_steps
        self._look_ahead(self._pipeline.oldest)
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

    def _look_ahead(self, flight: Flight) -> None:
        """Do what can be done of `_commit` before a step has ended, while the device is busy with it."""
        for launch in flight.launches:
            for chunk in launch.chunks:
                work = chunk.work
                if chunk.count > 1 and work.phase is Phase.RUNNING and isinstance(work, Sequence):
                    work.writer.look_ahead()  # type: ignore[union-attr]

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
            elif isinstance(work, Sequence) and work.sealed_early and work.complete:
                self._to_close.append(work)

    def _take_results(self, launch: Launch) -> None:
        events = self._requests.events
        for row, (sequence, result) in enumerate(zip(launch.sequences, launch.results, strict=True)):
            sequence.pending -= 1
            if sequence.phase is not Phase.RUNNING or sequence.finish_reason is not None:
                continue
            if self._observer is not None and launch.logits is not None:
                offset = len(sequence.tokens) - 1
                self._observer(sequence.request.id, sequence.index, offset, launch.logits[row])
            if isinstance(result, NonFiniteLogits):
                self._stats.non_finite += 1
                self._requests.fail(sequence, DagError("internal", "the model produced no finite logits"))
            else:
                self._append(sequence, result, events)

    def _append(self, sequence: Sequence, result: Sampled, events: list[Event | RunningRequest]) -> None:
        self._stats.generated_tokens += 1
        sequence.accept(result)
        if sequence.writer.num_unknown:
            sequence.writer.fill([result.token_id])
            if sequence.sealed_early:
                self._requests.note_known(sequence)
        event = sequence.take_event()
        if event is not None:
            events.append(event)
        if sequence.finish_reason is not None and not sequence.keep:
            if self._to_close:  # what it reads may be among them, and ends before it does
                self._to_close.append(sequence)
            else:
                self._close(sequence)

    def _close_complete(self) -> None:
        """Close answers that are computed and sample nothing more."""
        self._close_early()
        for work in list(self._scheduler.running):
            if (
                not work.pending
                and isinstance(work, Sequence)
                and work.phase is Phase.RUNNING
                and work.complete
            ):
                self._close_last(work)

    def _close_early(self) -> None:
        """Close answers that were read before they were complete, and what ended behind them: each before those that
        read it.
        """
        early, self._to_close = self._to_close, []
        for work in early:
            if work.phase is Phase.RUNNING:
                self._close_last(work)

    def _close_last(self, work: Sequence) -> None:
        """Close an answer of which nothing is left to do; it may have sampled nothing."""
        if work.finish_reason is None:
            work.finish_reason = "prefill"
            work.first_token = time.perf_counter()
        self._close(work)

    def _close(self, sequence: Sequence) -> None:
        self._requests.close(sequence, self._backend(sequence.backend).implementation)

    def _fail_chunks(self, chunks: list[Chunk], error: Exception) -> None:
        """A launch failed: what still runs of it ends."""
        for chunk in chunks:
            if chunk.work.phase is not Phase.RUNNING:
                continue
            if isinstance(chunk.work, Restore):
                self._scheduler.bringing.fail_restore(chunk.work, as_dag_error(error))
            elif isinstance(chunk.work, Sequence):
                self._requests.fail(chunk.work, as_dag_error(error))
        self.store.check()

    def _forget_dropped(self) -> None:
        """Now and then let go of the graph's nodes that nobody has any more, where they are most of it."""
        if self._stats.steps % 256 == 0 and len(self.preparer.graph) > 2 * len(self._requests.by_id) + 1024:
            self.preparer.forget_dropped()

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
