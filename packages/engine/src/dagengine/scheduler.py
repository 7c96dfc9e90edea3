"""Which work gets how many tokens in the next step: admission, chunked prefill, decode.

Pure Python over the store's bookkeeping; no tensors. Who gives pages up for whom is said in `queues`.

What is chosen may complete all that another request waits for. That one joins the same step, if it is the first that
waits, all else that it reads is there, or is completed by a step in flight, and there are pages and tokens for it; so a
chain of such requests may, but for those behind one that reads what is not known yet. An answer's last token need not
be known for that. Where who waits to read it must know it to begin, it is computed once it is, so that both may run in
one step. While requests wait for others, a part of a step's tokens is left to those that join.

    waiting ──lease, match, reserve──► running ──preempted──► waiting
       │                                └─► sealed
       └── evicted context: brought back for the first in the queue only. Others prefetch into unused pages, or run
           there while it loads

Where a step in flight has to be collected before pages change hands, `schedule` asks for that.

Where the batch that decodes changes, or one of it needs a page, each of it gets the page behind the one that it fills,
too, as long as pages are unused and it can sample so many tokens. So a runner that plans then plans for page_size
steps.

Who gets how much of a step's tokens: sequences that decode, one each; then those that compute their input, in order.
One that has more than `LONG_STEPS` whole steps of that to do leaves a quarter of what it found to those behind it, if
there are any, and takes what they leave. So behind m long inputs a request that may run gets 4^-m of what is not
decoded, rounded down, however long they are; and it waits for each of them for no more than `LONG_STEPS` whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import TypeGuard

from dagengine_kvstore import KVStore, Lease, NotResident, OutOfPages
from dagengine_kvstore.recall import Recalls

from .bringing import Bringing
from .config import EngineConfig
from .errors import DagError
from .loading import LOOK_AHEAD, Loading
from .prepare import context_extents
from .queues import Queues, Unsettled, never_fits
from .recalling import Recalling
from .runner import Chunk
from .sequence import Sequence
from .stats import EngineStats
from .work import Phase, Restore, Work

LONG_STEPS = 4

JOINING = 1 / 16
"""The part of a step's tokens that is left to those who may join it, while some wait for others: of those that are
not one for each that runs."""


class Scheduler:
    """Fills the steps from the queues.

    Args:
        fail: called with a sequence that can never run and the reason.
        forget: called with work that lost its pages or its lease, so that others drop what they cached of it.
        begin_readers: called with sequences that the step being chosen completes; seals those whose readers wait for
            nothing else, and returns these readers, which are waiting then.
        waiting_tokens: own tokens of the requests that wait for others.
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
        begin_readers: Callable[[list[Sequence]], list[Sequence]],
        waiting_tokens: Callable[[], int],
    ) -> None:
        self._store, self._config, self._fail = store, config, fail
        self._begin_readers, self._waiting_tokens = begin_readers, waiting_tokens
        self.queues = Queues(store, Recalling(recalls), forget)
        self._loading = Loading(store, stats)
        self.bringing = Bringing(store, self.queues, self._loading, work_ids, fail)
        self._two_tiers = two_tiers
        self._decoding: list[int] = []

    @property
    def waiting(self) -> list[Sequence]:
        return self.queues.waiting

    @property
    def running(self) -> list[Work]:
        return self.queues.running

    @property
    def num_preemptions(self) -> int:
        return self.queues.num_preemptions

    def add(self, sequence: Sequence) -> None:
        self.queues.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues and let go of what it reads. Its writer is the caller's to end."""
        self.bringing.end(sequence)
        self.queues.remove(sequence)

    def schedule(self, *, in_flight: bool = False) -> list[Chunk] | None:
        """Choose and reserve the next step's work.

        Args:
            in_flight: whether a launched step was not collected yet.

        Returns: chunks with their slots, none if nothing can run; None if that needs pages which are only to be had
        once the step in flight is collected.
        """
        self.queues.in_flight, self.queues.chunks = in_flight, {}
        most = self._config.max_num_batched_tokens
        room = min(self._waiting_tokens(), int(most * JOINING), max(0, most - len(self.running)))
        try:
            budget = self._choose(most - room) + room
        except Unsettled:
            self.queues.chunks = {}
            return None
        chosen, self.queues.chunks = self.queues.chunks, {}
        chunks = {id_: _chunk(*found) for id_, found in chosen.items() if _may_be_read(*found)}
        joined, all_joined = self._join(list(chunks.values()), budget)
        self.queues.chunks = {id_: found for id_, found in chosen.items() if id_ not in chunks}
        if room and all_joined:
            self._fill(budget - sum(chunk.count for chunk in joined))
        left = self.queues.chunks  # without a restore that was given up for another
        chosen = {id_: found for id_, found in chosen.items() if id_ in chunks or id_ in left} | left
        self.queues.chunks = {}
        return [chunks.get(id_) or _chunk(*found) for id_, found in chosen.items()] + joined

    def _fill(self, budget: int) -> None:
        """Give what those that could have joined left of a step to others, as far as that changes nobody's pages."""
        budget = self._spend(budget)
        self.queues.in_flight = True  # nobody is preempted: slots of this step are given
        try:
            while self.waiting and budget and (admitted := self._admit_first(budget)) is not None:
                budget -= admitted
        except Unsettled:
            return

    def _join(self, chunks: list[Chunk], budget: int) -> tuple[list[Chunk], bool]:
        """What runs in the same step as these chunks, since it waits only for what they, or others of it, complete; and
        whether that is all of it, so that nobody waits to run who reads what has not ended.
        """
        joined: list[Chunk] = []
        all_joined = True
        completing: list[Sequence] = []
        while budget and chunks:
            more = [chunk.work for chunk in chunks if _may_be_read(chunk.work, chunk.count)]
            completing += more
            chunks = []
            readers = self._begin_readers(completing) if more else []
            for reader in sorted(readers, key=lambda reader: reader.order):
                # Chunks of different backends run one after the other, in no order that matters to readers.
                alike = all(work.backend == reader.backend for work in completing)
                size = self._admit_reader(reader, budget) if budget and alike else 0
                if size:
                    chunks.append(_chunk(reader, size)._replace(joins=True))
                    budget -= size
                all_joined = all_joined and size > 0
            self.queues.chunks = {}
            joined += chunks
        return joined, all_joined

    def _admit_reader(self, sequence: Sequence, budget: int) -> int:
        """Run the first waiting sequence, if all that it reads is there and so are pages. Returns its tokens in this
        step.
        """
        ready = (s for s in self.waiting if s.after is None or s.after.prefilled)
        if next(ready, None) is not sequence or len(self.running) >= self._config.max_num_seqs:
            return 0
        try:
            sequence.lease = self._store.lease(sequence.reads)
        except NotResident:
            return 0
        sequence.prepare_began = time.perf_counter()
        self._match(sequence)
        if not sequence.remaining:  # it would end before what it reads
            self.queues.restart(sequence)
            return 0
        if self.queues.recalling.start(sequence):
            return 0
        try:
            self.queues.take(sequence.writer, sequence.remaining)
        except OutOfPages:
            self.queues.restart(sequence)
            return 0
        return self._start(sequence, budget)

    def _choose(self, budget: int) -> int:
        """Fill `queues.chunks`. Returns the tokens that are left."""
        preempted = self.num_preemptions
        left = [(work, work.remaining) for work in self.running]
        decoding = [work for work, remaining in left if remaining == 1]
        filling = [work for work, remaining in left if remaining > 1]
        ids = [work.id for work in decoding]
        short = [work for work in decoding if work.writer.pages_needed(1)]
        first = decoding
        if len(ids) <= budget and not short:
            self.queues.chunks = {work.id: (work, 1) for work in decoding}
            budget -= len(ids)
            first = []
        for work in chain(first, filling):
            if work.phase is not Phase.RUNNING or not budget:
                continue
            size = self._share(work, budget)
            if self._reserve(work, size):
                self.queues.chunks[work.id] = (work, size)
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
        budget = self._spend(budget)
        if short or ids != self._decoding:
            self._reserve_ahead(decoding)
        self._decoding = ids
        return budget

    def _reserve_ahead(self, decoding: list[Work]) -> None:
        """Unused pages for the tokens that chosen work samples in the next page_size steps."""
        for work in decoding:
            if work.id in self.queues.chunks and isinstance(work, Sequence):
                ahead = min(work.writer.page_size, work.most_tokens - work.writer.num_tokens - 1)
                try:
                    work.writer.reserve(1 + ahead, evict=False)
                except OutOfPages:
                    return

    def _share(self, work: Work, budget: int) -> int:
        """How many of the `budget` tokens that are left this work gets, while others may follow."""
        remaining = work.remaining
        if remaining <= LONG_STEPS * self._config.max_num_batched_tokens:
            return min(remaining, budget)
        followed = self.waiting or any(w.order > work.order and w.remaining > 1 for w in self.running)
        return budget - budget // 4 if followed else budget

    def _spend(self, budget: int) -> int:
        """Give what those behind a long input could not use back to it. Who got one token found, or has, no more.

        Returns: the tokens that are left.
        """
        for work, size in [chosen for chosen in self.queues.chunks.values() if chosen[1] > 1]:
            more = min(budget, work.remaining - size)
            if not more:
                continue
            try:
                self.queues.take(work.writer, size + more)
            except OutOfPages:
                continue
            self.queues.chunks[work.id] = (work, size + more)
            budget -= more
        return budget

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
            self.bringing.end(sequence)
            if self.queues.recalling.start(sequence):
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
        self.queues.run(sequence)
        if sequence.prepared is None:
            sequence.prepared = time.perf_counter()
        size = self._share(sequence, budget)
        if size:
            self.queues.chunks[sequence.id] = (sequence, size)
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
            self.queues.restart(sequence)
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
        self.queues.recalling.finish(self.waiting)

    def _lease(self, sequence: Sequence) -> Lease | None:
        """A lease on what a waiting sequence reads; None if that has to be brought back first."""
        try:
            return self._store.lease(sequence.reads)
        except NotResident as missing:
            if not self.bringing.bring(sequence, missing):
                return None
        try:
            return self._store.lease(sequence.reads)
        except NotResident:
            return None

    def _reserve_waiting(self, sequence: Sequence) -> bool:
        try:
            self.queues.take(sequence.writer, sequence.remaining)
        except OutOfPages as short:
            comes = self.queues.comes_by_itself(short, sequence.writer.node.reads)
            self.queues.restart(sequence)
            if comes or (self.queues.in_flight and self.running and not self.bringing.is_restoring):
                return False  # what the steps in flight hold comes back by itself
            self.queues.settle()
            if self.bringing.is_restoring:
                self.bringing.end_restoring()
            elif not self.running and not self.queues.end_recalls() and not self.queues.brings:
                self._fail(sequence, never_fits(sequence))
            return False
        return True

    def _reserve(self, work: Work, size: int) -> bool:
        """Pages for `size` more tokens of running work, taken from the last in order if there are none."""
        while True:
            try:
                self.queues.take(work.writer, size)
            except OutOfPages as short:
                if self._loading.end() or self.queues.end_recalls():
                    continue
                if self.queues.comes_by_itself(short, work.writer.node.reads):
                    return False
                self.queues.settle()
                victims = [w for w in self.running if w.order > work.order or w is work]
                victim = victims[-1] if victims else work
                if victim is work and len(self.running) == 1 and not self.bringing.is_restoring:
                    if self.queues.brings:
                        return False
                    assert isinstance(work, Sequence)
                    self._fail(work, never_fits(work))
                    return False
                if victim is work and len(self.running) == 1 and not isinstance(work, Restore):
                    self.bringing.end_restoring()
                    continue
                self.bringing.preempt(victim)
                if victim is work:
                    return False
            else:
                return True


def _may_be_read(work: Work, size: int) -> TypeGuard[Sequence]:
    """Whether the next `size` tokens complete a node that others may read in the same step."""
    return (
        isinstance(work, Sequence)
        and work.keep
        and work.completes_with(size)
        and work.writer.node.has_context  # or it cannot be sealed yet; see `Writer.seal_early`
    )


def _chunk(work: Work, size: int) -> Chunk:
    """The next `size` tokens with their slots; the last one may be pending."""
    begin = work.computed
    known = work.tokens[begin : begin + size]
    unknown = size - len(known)
    assert unknown <= 1, "at most the token that the step in flight samples is unknown"
    slots = tuple(work.writer.append(known, unknown))
    samples = begin + size == len(work.tokens) + work.pending and work.wants_logits
    return Chunk(work, size, slots, samples, work.pending_row if unknown else None)


def work_ids() -> Iterator[int]:
    """Numbers for work, never used twice by one engine."""
    return count(1)
