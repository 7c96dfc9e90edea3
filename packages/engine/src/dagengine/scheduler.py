"""Which work gets how many tokens in the next step: admission, chunked prefill, decode, preemption, restores.

Pure Python over the store's bookkeeping; no tensors. The order is (priority, arrival, index): work takes pages only
from work that comes after it, so the first in order always progresses.

    waiting ──lease, match, reserve──► running ──preempted──► waiting
       └── evicted context: restored one node at a time, for the first in the queue only; what it reads stays leased

A step may be in flight while the next one is chosen. Then nobody loses pages: whoever would have to is left alone,
and `schedule` asks for that step to be collected first. So a preempted sequence has no token pending and no row in
flight, and its pages are free at once.

Who gets how much of a step's tokens: sequences that decode, one each; then those that compute their input, in order.
One that needs more than `LONG_STEPS` whole steps for that leaves a quarter of what it found to those behind it, if
there are any: behind m such inputs a request gets at least 4^-m of what they find together, however long they are.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count

from dagengine_kvstore import KVStore, Lease, NodeRecord, NotResident, OutOfPages, Read, RestoreWriter

from .config import EngineConfig
from .errors import DagError
from .prepare import context_extents
from .runner import Chunk
from .sequence import Sequence
from .work import Phase, Restore, Work

MOST_RESTORES = 2
LONG_STEPS = 4


class _Unsettled(Exception):
    """Somebody has to lose pages, and a step is in flight."""


@dataclass
class _Restoring:
    """The evicted context of `owner` being brought back.

    Attributes:
        stack: nodes still to be computed, each needed by the one below it. Their writers hold what they read: of what
            a sealed node digested nothing else may.
        leases: what must stay resident meanwhile, by (node, start, stop).
        job: the restore that runs now.
        times: how often each node was brought back.
    """

    owner: Sequence
    stack: list[RestoreWriter] = field(default_factory=list)
    leases: dict[tuple[int, int, int], Lease] = field(default_factory=dict)
    job: Restore | None = None
    times: Counter[int] = field(default_factory=Counter)


class Scheduler:
    """Holds the queues.

    Args:
        fail: called with a sequence that can never run and the reason.
        forget: called with work that lost its pages or its lease, so that others drop what they cached of it.
    """

    def __init__(
        self,
        store: KVStore,
        config: EngineConfig,
        work_ids: Iterator[int],
        *,
        fail: Callable[[Sequence, DagError], None],
        forget: Callable[[Work], None],
    ) -> None:
        self._store, self._config, self._work_ids = store, config, work_ids
        self._fail, self._forget = fail, forget
        self.waiting: list[Sequence] = []
        self.running: list[Work] = []
        self.num_preemptions = 0
        self.num_restores = 0
        self._restoring: _Restoring | None = None
        self._chunks: dict[int, tuple[Work, int]] = {}
        self._in_flight = False

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues and let go of what it reads. Its writer is the caller's to end."""
        if self._restoring is not None and self._restoring.owner is sequence:
            self._end_restoring()
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._chunks.pop(sequence.id, None)
        self._let_go(sequence)
        sequence.phase = Phase.DONE

    def schedule(self, *, in_flight: bool = False) -> list[Chunk] | None:
        """Choose and reserve the next step's work.

        Args:
            in_flight: whether a launched step was not collected yet.

        Returns: chunks with their slots, none if nothing can run; None if that needs pages which are only to be had
        once the step in flight is collected.
        """
        self._in_flight, self._chunks = in_flight, {}
        try:
            self._choose()
        except _Unsettled:
            self._chunks = {}
            return None
        chosen, self._chunks = self._chunks, {}
        return [_chunk(work, size) for work, size in chosen.values()]

    def _choose(self) -> None:
        budget = self._config.max_num_batched_tokens
        preempted = self.num_preemptions
        for work in sorted(self.running, key=lambda w: (w.remaining > 1, w.order)):
            if work not in self.running or not work.remaining or not budget:
                continue
            size = self._share(work, budget)
            if self._reserve(work, size):
                self._chunks[work.id] = (work, size)
                budget -= size
        while self.waiting and budget and self.num_preemptions == preempted:
            admitted = self._admit_first(budget)
            if admitted is None:
                break
            budget -= admitted
        self._spend(budget)

    def _share(self, work: Work, budget: int) -> int:
        """How many of the `budget` tokens that are left this work gets, while others may follow."""
        remaining = work.remaining
        if remaining <= LONG_STEPS * self._config.max_num_batched_tokens:
            return min(remaining, budget)
        followed = self.waiting or any(w.order > work.order and w.remaining > 1 for w in self.running)
        return budget - budget // 4 if followed else budget

    def _spend(self, budget: int) -> None:
        """Give what those behind a long input could not use back to it."""
        for work, size in list(self._chunks.values()):
            more = min(budget, work.remaining - size)
            if not more:
                continue
            try:
                work.writer.reserve(size + more)
            except OutOfPages:
                continue
            self._chunks[work.id] = (work, size + more)
            budget -= more

    def finish_restore(self, work: Restore) -> None:
        """A restore computed its last token: its node is resident again, and stays so for its owner."""
        assert self._restoring is not None and self._restoring.job is work
        state = self._restoring
        assert state.stack[-1] is work.writer
        state.times[state.stack.pop().finish().uid] += 1
        state.job = None
        self._release_unneeded(state)
        self._hold(state, state.stack[-1].node.reads if state.stack else state.owner.reads)
        self._retire(work)
        state.owner.restored += len(work.tokens) - work.found
        self.num_restores += 1

    def fail_restore(self, work: Restore, error: DagError) -> None:
        """A restore failed in its step: its owner ends with that error, since it would fail again."""
        if self._restoring is not None and self._restoring.job is work:
            owner = self._restoring.owner
            self._end_restoring()
            self._fail(owner, error)

    def _admit_first(self, budget: int) -> int | None:
        """Admit the first waiting sequence that may start. Returns its tokens in this step, or None to wait."""
        if len(self.running) >= self._config.max_num_seqs:
            return None
        sequence = next((s for s in self.waiting if s.after is None or s.after.prefilled), None)
        if sequence is None:
            return None
        if sequence.prepare_began is None:
            sequence.prepare_began = time.perf_counter()
        try:
            lease = self._store.lease(sequence.reads)
        except NotResident:
            self._restore_for(sequence)
            return None
        sequence.lease = lease
        sequence.context = context_extents(sequence.reads, lease)
        tokens = sequence.tokens
        if sequence.wants_logits:
            matched = sequence.writer.match(tokens[:-1], whole=False)  # type: ignore[union-attr]
        else:
            matched = sequence.writer.match(tokens, whole=True)  # type: ignore[union-attr]
        sequence.computed = matched
        if self._restoring is not None and self._restoring.owner is sequence:
            self._end_restoring()
        if not self._reserve_waiting(sequence):
            return None
        if sequence.matched is None:
            sequence.matched = min(matched, sequence.num_input)
        self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=lambda w: w.order)
        if sequence.prepared is None:
            sequence.prepared = time.perf_counter()
        size = self._share(sequence, budget)
        if size:
            self._chunks[sequence.id] = (sequence, size)
        return size

    def _reserve_waiting(self, sequence: Sequence) -> bool:
        try:
            sequence.writer.reserve(sequence.remaining)
        except OutOfPages:
            sequence.writer.rollback()  # type: ignore[union-attr]
            sequence.computed = 0
            self._let_go(sequence)
            self._settle()
            if self._restoring is not None:
                self._end_restoring()
            elif not self.running:
                self._fail(sequence, _never_fits(sequence))
            return False
        return True

    def _reserve(self, work: Work, size: int) -> bool:
        """Pages for `size` more tokens of running work, taken from the last in order if there are none."""
        while True:
            try:
                work.writer.reserve(size)
            except OutOfPages:
                self._settle()
                victims = [w for w in self.running if w.order > work.order or w is work]
                victim = victims[-1] if victims else work
                if victim is work and len(self.running) == 1 and self._restoring is None:
                    assert isinstance(work, Sequence)
                    self._fail(work, _never_fits(work))
                    return False
                if victim is work and len(self.running) == 1 and not isinstance(work, Restore):
                    self._end_restoring()
                    continue
                self._preempt(victim)
                if victim is work:
                    return False
            else:
                return True

    def _settle(self) -> None:
        """From here on pages change hands, which has to wait for a step in flight. Raises _Unsettled."""
        if self._in_flight:
            raise _Unsettled

    def _preempt(self, work: Work) -> None:
        """Take the pages of running work; what it sampled stays, its KV is computed again."""
        self._chunks.pop(work.id, None)
        if isinstance(work, Restore):
            self._end_restoring()
            return
        assert isinstance(work, Sequence)
        assert not work.pending, "a token would be lost"
        self.num_preemptions += 1
        self.running.remove(work)
        work.writer.rollback()  # type: ignore[union-attr]
        work.computed = 0
        work.phase = Phase.WAITING
        self._let_go(work)
        self.add(work)

    def _restore_for(self, owner: Sequence) -> None:
        """Bring evicted context back, one node at a time, deepest first."""
        if self._restoring is not None and self._restoring.owner is not owner:
            self._end_restoring()
        if self._restoring is None:
            self._restoring = _Restoring(owner)
        state = self._restoring
        if state.job is not None:
            return
        while True:
            if not state.stack:
                missing = self._hold(state, owner.reads)
                if not missing:
                    return
                state.stack.append(self._store.restore(missing[0]))
            writer = state.stack[-1]
            missing = self._hold(state, writer.node.reads)
            if missing:
                state.stack.append(self._store.restore(missing[0]))
                continue
            if self._start_restore(state, writer) or self._restoring is not state:
                return

    def _hold(self, state: _Restoring, reads: SequenceOf[Read]) -> list[NodeRecord]:
        """Lease what is resident of `reads` until the owner runs; return the nodes that are not."""
        missing: list[NodeRecord] = []
        for read in reads:
            if _key(read) in state.leases:
                continue
            try:
                state.leases[_key(read)] = self._store.lease([read])
            except NotResident as error:
                missing += error.nodes
        return missing

    def _start_restore(self, state: _Restoring, writer: RestoreWriter) -> bool:
        node = writer.node
        lease = self._store.lease(node.reads)
        if not writer.num_tokens:
            writer.match(writer.todo, whole=writer.target == node.length)
        job = Restore(
            id=next(self._work_ids),
            order=state.owner.order,
            backend=state.owner.backend,
            own_start=node.own_start,
            tokens=list(node.tokens[: writer.target]),
            computed=writer.num_tokens,
            found=writer.num_tokens,
            writer=writer,
            lease=lease,
            context=context_extents(node.reads, lease),
            phase=Phase.RUNNING,
        )
        while True:
            try:
                writer.reserve(job.remaining)
            except OutOfPages:
                if self._in_flight:
                    lease.release()
                self._settle()
                later = [w for w in self.running if w.order > job.order]
                if later:
                    self._preempt(later[-1])
                    continue
                if not self.running and self._spare(state, node):
                    continue
                lease.release()
                owner = state.owner
                self._end_restoring()
                if not self.running:
                    self._fail(owner, _never_fits(owner))
                return False
            break
        state.job = job
        insort(self.running, job, key=lambda w: w.order)
        if not job.remaining:
            self.finish_restore(job)
            return False
        return True

    def _spare(self, state: _Restoring, node: NodeRecord) -> bool:
        """Let go of what is only kept for later, since restoring `node` needs the pages; it is brought back then.

        Otherwise a request could run or not depending on what happened to be resident. Returns whether there was any;
        what was brought back too often is kept, so that this comes to an end.
        """
        needed = {_key(read) for read in node.reads}
        spared = [key for key in state.leases if key not in needed and state.times[key[0]] < MOST_RESTORES]
        for key in spared:
            state.leases.pop(key).release()
        waiting = [writer for writer in state.stack if writer.node is not node and writer.num_tokens]
        for writer in waiting:
            writer.rollback()
        return bool(spared or waiting)

    def _release_unneeded(self, state: _Restoring) -> None:
        """Let go of what only nodes already restored had to read; nothing may hold that any more."""
        needed = {_key(read) for read in state.owner.reads}
        for writer in state.stack:
            needed |= {_key(read) for read in writer.node.reads}
        for key in state.leases.keys() - needed:
            state.leases.pop(key).release()

    def _end_restoring(self) -> None:
        state, self._restoring = self._restoring, None
        if state is None:
            return
        if state.job is not None:
            self._chunks.pop(state.job.id, None)
            self._retire(state.job)
        for writer in reversed(state.stack):
            writer.abort()
        for lease in state.leases.values():
            lease.release()

    def _retire(self, work: Work) -> None:
        self.running.remove(work)
        self._let_go(work)
        work.phase = Phase.DONE

    def _let_go(self, work: Work) -> None:
        if work.lease is not None:
            work.lease.release()
            work.lease = None
        self._forget(work)


def _chunk(work: Work, size: int) -> Chunk:
    """The next `size` tokens with their slots; the last one may be pending."""
    known = work.tokens[work.computed : work.computed + size]
    unknown = size - len(known)
    assert unknown <= 1, "at most the token that the step in flight samples is unknown"
    return Chunk(
        work,
        size,
        tuple(work.writer.append(known, unknown) if unknown else work.writer.append(known)),
        samples=work.wants_logits and work.computed + size == work.num_tokens,
        pending=work.pending_row if unknown else None,
    )


def _key(read: Read) -> tuple[int, int, int]:
    return read.node.uid, read.start, read.stop


def _never_fits(sequence: Sequence) -> DagError:
    return DagError(
        "capacity",
        "the request's context and its own tokens do not fit into the KV pool together, even alone",
        "max_tokens" if sequence.max_tokens else "input",
    )


def work_ids() -> Iterator[int]:
    """Numbers for work, never used twice by one engine."""
    return count(1)
