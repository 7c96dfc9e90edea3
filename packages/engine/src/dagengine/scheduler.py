"""Which work gets how many tokens in the next step: admission, chunked prefill, decode, preemption, restores.

Pure Python over the store's bookkeeping; no tensors. The order is (priority, arrival, index): work takes pages only
from work that comes after it, so the first in order always progresses.

    waiting ──lease, match, reserve──► running ──preempted──► waiting
       │                                └─► sealed
       └── evicted context: what the host has is loaded, then the rest is restored one node at a time, for the first in
           the queue only; what it reads stays leased. Others prefetch into unused pages, or run there while it loads

Where pages are short because they are being stored on the host, and those that come suffice, everybody waits for them:
nobody is preempted, and nothing fails while a transfer may still bring pages.

A step may be in flight while the next one is chosen. Then nobody loses pages: whoever would have to is left alone,
and `schedule` asks for that step to be collected first. So a preempted sequence has no token pending and no row in
flight, and its pages are free at once.

Where the batch that decodes changes, or one of it needs a page, each of it gets the page behind the one that it fills,
too, as long as pages are unused and it can sample so many tokens. So a runner that plans then plans for page_size
steps. Whoever needs pages takes these back first, from the last in order, before a state is evicted or work preempted.

Who gets how much of a step's tokens: sequences that decode, one each; then those that compute their input, in order.
One that has more than `LONG_STEPS` whole steps of that to do leaves a quarter of what it found to those behind it, if
there are any, and takes what they leave. So behind m long inputs a request that may run gets 4^-m of what is not
decoded, rounded down, however long they are; and it waits for each of them for no more than `LONG_STEPS` whole steps.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain, count, islice

from dagengine_kvstore import KVStore, Lease, NotResident, OutOfPages, Read, RestoreWriter, Writer
from dagengine_kvstore.recall import Recalls

from .config import EngineConfig
from .errors import DagError
from .loading import LOOK_AHEAD, Loading
from .prepare import context_extents
from .recalling import Recalling
from .restoring import Restoring
from .runner import Chunk
from .sequence import Sequence
from .stats import EngineStats
from .work import Phase, Restore, Work

LONG_STEPS = 4


class _Unsettled(Exception):
    """Somebody has to lose pages, and a step is in flight."""


class Scheduler:
    """Holds the queues.

    Args:
        fail: called with a sequence that can never run and the reason.
        forget: called with work that lost its pages or its lease, so that others drop what they cached of it.
        two_tiers: whether the store has a host tier.
        recalls: brings pages of inputs that outlived an engine; they are looked for once, before an input is computed.
    """

    def __init__(
        self,
        store: KVStore,
        config: EngineConfig,
        work_ids: Iterator[int],
        stats: EngineStats,
        *,
        two_tiers: bool,
        recalls: Recalls | None,
        fail: Callable[[Sequence, DagError], None],
        forget: Callable[[Work], None],
    ) -> None:
        self._store, self._config, self._work_ids = store, config, work_ids
        self._fail, self._forget = fail, forget
        self.waiting: list[Sequence] = []
        self.running: list[Work] = []
        self.num_preemptions = 0
        self.num_restores = 0
        self._restoring: Restoring | None = None
        self._loading = Loading(store, stats)
        self._two_tiers, self._recalling = two_tiers, Recalling(recalls)
        self._chunks: dict[int, tuple[Work, int]] = {}
        self._decoding: list[int] = []
        self._in_flight = False

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues and let go of what it reads. Its writer is the caller's to end."""
        if self._restoring is not None and self._restoring.owner is sequence:
            self._end_restoring()
        if self._loading.owner is sequence:
            self._loading.end()
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
        left = [(work, work.remaining) for work in self.running]
        decoding = [work for work, remaining in left if remaining == 1]
        filling = [work for work, remaining in left if remaining > 1]
        ids = [work.id for work in decoding]
        short = [work for work in decoding if work.writer.pages_needed(1)]
        first = decoding
        if len(ids) <= budget and not short:
            self._chunks = {work.id: (work, 1) for work in decoding}
            budget -= len(ids)
            first = []
        for work in chain(first, filling):
            if work.phase is not Phase.RUNNING or not budget:
                continue
            size = self._share(work, budget)
            if self._reserve(work, size):
                self._chunks[work.id] = (work, size)
                budget -= size
        while self.waiting and budget and self.num_preemptions == preempted:
            admitted = self._admit_first(budget)
            if admitted is None and self.num_preemptions == preempted:
                admitted = self._admit_beside(budget)
            if admitted is None:
                break
            budget -= admitted
        if self._two_tiers and self.waiting:
            self._loading.prefetch(self.waiting, spare=len(self.running))
        self._spend(budget)
        if short or ids != self._decoding:
            self._reserve_ahead(decoding)
        self._decoding = ids

    def _reserve_ahead(self, decoding: list[Work]) -> None:
        """Unused pages for the tokens that chosen work samples in the next page_size steps."""
        for work in decoding:
            if work.id in self._chunks and isinstance(work, Sequence):
                ahead = min(work.writer.page_size, work.most_tokens - work.writer.num_tokens - 1)
                try:
                    work.writer.reserve(1 + ahead, evict=False)
                except OutOfPages:
                    return

    def _take(self, writer: Writer | RestoreWriter, count: int) -> None:
        """Pages for `count` more tokens, those reserved ahead before evicted states'. Raises OutOfPages."""
        short = writer.pages_needed(count) - self._store.num_unused
        if short > 0:
            spare = [(work, work.writer.pages_spare(work.remaining)) for work in self.running]
            total = sum(pages for _, pages in spare)
            if total and self._store.can_fit(writer.pages_needed(count) - total, reads=writer.node.reads):
                for work, _ in reversed(spare):
                    short -= work.writer.give_back(work.remaining, max(0, short))
        writer.reserve(count)

    def _share(self, work: Work, budget: int) -> int:
        """How many of the `budget` tokens that are left this work gets, while others may follow."""
        remaining = work.remaining
        if remaining <= LONG_STEPS * self._config.max_num_batched_tokens:
            return min(remaining, budget)
        followed = self.waiting or any(w.order > work.order and w.remaining > 1 for w in self.running)
        return budget - budget // 4 if followed else budget

    def _spend(self, budget: int) -> None:
        """Give what those behind a long input could not use back to it. Who got one token found, or has, no more."""
        for work, size in [chosen for chosen in self._chunks.values() if chosen[1] > 1]:
            more = min(budget, work.remaining - size)
            if not more:
                continue
            try:
                self._take(work.writer, size + more)
            except OutOfPages:
                continue
            self._chunks[work.id] = (work, size + more)
            budget -= more

    def finish_restore(self, work: Restore) -> None:
        """A restore computed its last token: its node is resident again, and stays so for its owner."""
        assert self._restoring is not None and self._restoring.job is work
        self._restoring.finish_job()
        self._retire(work)
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
        if self._loading.owner not in (None, sequence):
            self._loading.end()
        if sequence.recall:
            return None
        if sequence.lease is None:
            sequence.lease = self._lease(sequence)
            if sequence.lease is None:
                return None
            self._match(sequence)
            if self._restoring is not None and self._restoring.owner is sequence:
                self._end_restoring()
            self._loading.end()
            if self._recalling.start(sequence):
                return None
        if not self._reserve_waiting(sequence):
            return None
        return self._start(sequence, budget)

    def _start(self, sequence: Sequence, budget: int) -> int:
        """A waiting sequence that has its lease and its pages runs. Returns its tokens in this step."""
        assert sequence.lease is not None
        sequence.context = context_extents(sequence.reads, sequence.lease)
        if sequence.matched is None:
            sequence.matched = min(sequence.computed, sequence.num_input)
        self.waiting.remove(sequence)
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=lambda w: w.order)
        if sequence.prepared is None:
            sequence.prepared = time.perf_counter()
        size = self._share(sequence, budget)
        if size:
            self._chunks[sequence.id] = (sequence, size)
        return size

    def _admit_beside(self, budget: int) -> int | None:
        """While the first waits for a load or a recall: admit one behind it that has all it reads, into pages that
        nobody uses and that the first does not need. Returns as `_admit_first`.
        """
        first = self._loading.owner or next((s for s in self.waiting if s.recall), None)
        if first is None or len(self.running) >= self._config.max_num_seqs:
            return None
        if not (first.recall or self._store.num_in_flight or self._store.num_lost):
            return None
        behind = (s for s in self.waiting if s is not first and (s.after is None or s.after.prefilled))
        for sequence in islice(behind, LOOK_AHEAD):
            if sequence.lease is not None or self._store.num_unused <= first.writer.pages_needed(
                first.remaining
            ):
                continue
            try:
                sequence.lease = self._store.lease(sequence.reads)
            except NotResident:
                continue
            self._match(sequence)
            spare = self._store.num_unused - first.writer.pages_needed(first.remaining)
            if sequence.writer.pages_needed(sequence.remaining) <= spare:
                sequence.writer.reserve(sequence.remaining)
                sequence.prepare_began = sequence.prepare_began or time.perf_counter()
                return self._start(sequence, budget)
            sequence.writer.rollback()  # type: ignore[union-attr]
            sequence.restart()
            self._let_go(sequence)
        return None

    def _match(self, sequence: Sequence) -> None:
        """Take over what equal work left of the tokens to be computed."""
        tokens = sequence.tokens
        if sequence.wants_logits:
            sequence.computed = sequence.writer.match(tokens[:-1], whole=False)  # type: ignore[union-attr]
        else:
            sequence.computed = sequence.writer.match(tokens, whole=True)  # type: ignore[union-attr]

    def finish_recalls(self) -> None:
        """Take over what came from a directory since the last call."""
        self._recalling.finish(self.waiting)

    def _end_recalls(self) -> bool:
        """Running work needs the pages of waiting ones that were, or are, recalled: those compute. Returns whether
        there were any.
        """
        ended = [sequence for sequence in self.waiting if sequence.recall or sequence.lease is not None]
        for sequence in ended:
            sequence.recall = False
            sequence.writer.rollback()  # type: ignore[union-attr]
            sequence.restart()
            self._let_go(sequence)
        return bool(ended)

    @property
    def _brings(self) -> bool:
        """Whether copies under way may still make pages available."""
        return self._store.num_in_flight > 0 or self._recalling.is_under_way

    def _lease(self, sequence: Sequence) -> Lease | None:
        """A lease on what a waiting sequence reads; None if that has to be brought back first."""
        try:
            return self._store.lease(sequence.reads)
        except NotResident as missing:
            if not self._bring_back(sequence, missing):
                return None
        try:
            return self._store.lease(sequence.reads)
        except NotResident:
            return None

    def _reserve_waiting(self, sequence: Sequence) -> bool:
        try:
            self._take(sequence.writer, sequence.remaining)
        except OutOfPages as short:
            comes = self._comes_by_itself(short, sequence.writer.node.reads)
            sequence.writer.rollback()  # type: ignore[union-attr]
            sequence.restart()
            self._let_go(sequence)
            if comes or (self._in_flight and self.running and self._restoring is None):
                return False  # what the steps in flight hold comes back by itself
            self._settle()
            if self._restoring is not None:
                self._end_restoring()
            elif not self.running and not self._end_recalls() and not self._brings:
                self._fail(sequence, _never_fits(sequence))
            return False
        return True

    def _reserve(self, work: Work, size: int) -> bool:
        """Pages for `size` more tokens of running work, taken from the last in order if there are none."""
        while True:
            try:
                self._take(work.writer, size)
            except OutOfPages as short:
                if self._loading.end() or self._end_recalls():
                    continue
                if self._comes_by_itself(short, work.writer.node.reads):
                    return False
                self._settle()
                victims = [w for w in self.running if w.order > work.order or w is work]
                victim = victims[-1] if victims else work
                if victim is work and len(self.running) == 1 and self._restoring is None:
                    if self._brings:
                        return False
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

    def _comes_by_itself(self, short: OutOfPages, reads: SequenceOf[Read]) -> bool:
        """Whether stores and recalls under way bring the pages that somebody is short of, who reads `reads`."""
        if not short.moving and not self._recalling.is_under_way:
            return False
        return short.needed <= short.moving + short.waiting + self._store.available(reads=reads)

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
        self.num_preemptions += 1
        self.running.remove(work)
        work.writer.rollback()  # type: ignore[union-attr]
        work.restart()
        work.phase = Phase.WAITING
        self._let_go(work)
        self.add(work)

    def _bring_back(self, owner: Sequence, missing: NotResident) -> bool:
        """Load what the host has of what a waiting sequence reads; once that is there, restore the rest.

        Returns: whether what was to be loaded turned out to be there still.
        """
        if self._restoring is not None and self._restoring.owner is not owner:
            self._end_restoring()
        reads, _ = self._loading.divide(owner, owner.reads, missing)
        if reads and self._restoring is None:
            return self._load(owner, owner.reads, reads)
        self._restore_for(owner)
        return False

    def _load(self, owner: Sequence, kept: SequenceOf[Read], reads: SequenceOf[Read]) -> bool:
        """Start to load `reads`, or go on, beside `kept`: as `_start_restore`, but it waits for work before it.

        Returns: whether all of it is there.
        """
        if self._loading.out_of_reach(owner, reads):
            self._fail(owner, _out_of_reach())
            return False
        while True:
            try:
                return not self._loading.load(owner, reads)
            except OutOfPages as short:
                if self._comes_by_itself(short, kept):
                    return False
                later = [w for w in self.running if w.order > owner.order]
                if self.running and not later:
                    return False
                self._settle()
                if later:
                    self._preempt(later[-1])
                elif self._restoring is None or not self._restoring.spare(None):
                    self._give_up(owner)
                    return False

    def _give_up(self, owner: Sequence) -> None:
        """Nothing runs, and there are no pages to bring back what `owner` reads."""
        if not self._end_recalls() and not self._brings:
            self._end_restoring()
            self._loading.end()
            self._fail(owner, _never_fits(owner))

    def _restore_for(self, owner: Sequence) -> None:
        """Bring evicted context back, as far as it goes now."""
        if self._restoring is None:
            self._restoring = Restoring(self._store, self._loading, owner)
        state = self._restoring
        if state.job is not None:
            return
        while (writer := state.next()) is not None:
            if self._start_restore(state, writer) or self._restoring is not state:
                return
        if state.to_load:
            self._load(owner, state.reads, state.to_load)

    def _start_restore(self, state: Restoring, writer: RestoreWriter) -> bool:
        """Whether it runs now, or waits for transfers. If not it is complete already, or there are no pages and
        restoring has ended.
        """
        job = state.make_job(writer, next(self._work_ids))
        assert job.lease is not None
        while True:
            try:
                self._take(writer, job.remaining)
            except OutOfPages as short:
                if self._comes_by_itself(short, writer.node.reads):
                    job.lease.release()
                    return True
                if self._in_flight:
                    job.lease.release()
                    raise _Unsettled from None
                later = [w for w in self.running if w.order > job.order]
                if later:
                    self._preempt(later[-1])
                    continue
                if not self.running and state.spare(writer.node):
                    continue
                job.lease.release()
                if not self.running:
                    self._give_up(state.owner)
                    return True
                self._end_restoring()
                return False
            break
        state.job = job
        insort(self.running, job, key=lambda w: w.order)
        if not job.remaining:
            self.finish_restore(job)
            return False
        return True

    def _end_restoring(self) -> None:
        state, self._restoring = self._restoring, None
        if state is None:
            return
        if state.job is not None:
            self._chunks.pop(state.job.id, None)
            self._retire(state.job)
        state.end()

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
    begin = work.computed
    known = work.tokens[begin : begin + size]
    unknown = size - len(known)
    assert unknown <= 1, "at most the token that the step in flight samples is unknown"
    slots = tuple(work.writer.append(known, unknown))
    samples = begin + size == len(work.tokens) + work.pending and work.wants_logits
    return Chunk(work, size, slots, samples, work.pending_row if unknown else None)


def _never_fits(sequence: Sequence) -> DagError:
    return DagError(
        "capacity",
        "the request's context and its own tokens do not fit into the KV pool together, even alone",
        "max_tokens" if sequence.max_tokens else "input",
    )


def _out_of_reach() -> DagError:
    return DagError(
        "state_unavailable",
        "loading a state from the host failed or does not end, and it cannot be computed again; try again later",
        "context",
    )


def work_ids() -> Iterator[int]:
    """Numbers for work, never used twice by one engine."""
    return count(1)
