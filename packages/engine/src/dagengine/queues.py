"""Who waits, who runs, and whose pages go to whom. Knows the order of work and the store's pages; chooses no step.

The order is (priority, arrival, index): work takes pages only from work that comes after it, so the first in order
always progresses. Whoever needs pages takes those reserved ahead back first, from the last in order, before a state is
evicted or work preempted.

Where pages are short because they are being stored on the host, and those that come suffice, everybody waits for them:
nobody is preempted, and nothing fails while a transfer may still bring pages.

A step may be in flight while the next one is chosen. Then nobody loses pages: whoever would have to raises `Unsettled`.
So a preempted sequence has no token pending and no row in flight, and its pages are free at once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from dagengine_kvstore import KVStore, OutOfPages, Read, RestoreWriter, Writer

from .errors import DagError
from .recalling import Recalling
from .sequence import Sequence
from .work import Phase, Work


class Unsettled(Exception):
    """Somebody has to lose pages, and a step is in flight."""


class Queues:
    """
    Args:
        recalling: of inputs whose pages come from a directory.
        forget: called with work that lost its pages or its lease, so that others drop what they cached of it.

    Attributes:
        waiting, running: in order.
        chunks: by id, work that was chosen for the next step, and for how many tokens.
        in_flight: whether a launched step was not collected yet.
    """

    def __init__(self, store: KVStore, recalling: Recalling, forget: Callable[[Work], None]) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Work] = []
        self.chunks: dict[int, tuple[Work, int]] = {}
        self.in_flight = False
        self.num_preemptions = 0
        self.recalling = recalling
        self._store, self._forget = store, forget

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def run(self, work: Work) -> None:
        insort(self.running, work, key=lambda w: w.order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and let go of what it reads. Its writer is the caller's to end."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self.chunks.pop(sequence.id, None)
        self.let_go(sequence)
        sequence.phase = Phase.DONE

    def retire(self, work: Work) -> None:
        """Running work that is no request is done, or given up."""
        self.running.remove(work)
        self.chunks.pop(work.id, None)
        self.let_go(work)
        work.phase = Phase.DONE

    def let_go(self, work: Work) -> None:
        """Release its lease."""
        if work.lease is not None:
            work.lease.release()
            work.lease = None
        self._forget(work)

    def take(self, writer: Writer | RestoreWriter, count: int) -> None:
        """Pages for `count` more tokens, those reserved ahead before evicted states'. Raises OutOfPages."""
        short = writer.pages_needed(count) - self._store.num_unused
        if short > 0:
            spare = [(work, work.writer.pages_spare(work.remaining)) for work in self.running]
            total = sum(pages for _, pages in spare)
            if total and self._store.can_fit(writer.pages_needed(count) - total, reads=writer.node.reads):
                for work, _ in reversed(spare):
                    short -= work.writer.give_back(work.remaining, max(0, short))
        writer.reserve(count)

    def settle(self) -> None:
        """From here on pages change hands, which has to wait for a step in flight. Raises Unsettled."""
        if self.in_flight:
            raise Unsettled

    def preempt(self, sequence: Sequence) -> None:
        """Take the pages of a running sequence; what it sampled stays, its KV is computed again."""
        self.chunks.pop(sequence.id, None)
        self.num_preemptions += 1
        self.running.remove(sequence)
        self.restart(sequence)
        sequence.phase = Phase.WAITING
        self.add(sequence)

    def restart(self, sequence: Sequence) -> None:
        """A sequence gives its pages and its lease back, and is computed from its first token on."""
        sequence.writer.rollback()  # type: ignore[union-attr]
        sequence.restart()
        self.let_go(sequence)

    def end_recalls(self) -> bool:
        """Running work needs the pages of waiting ones that were, or are, recalled: those compute. Returns whether
        there were any.
        """
        ended = [sequence for sequence in self.waiting if sequence.recall or sequence.lease is not None]
        for sequence in ended:
            sequence.recall = False
            self.restart(sequence)
        return bool(ended)

    @property
    def brings(self) -> bool:
        """Whether copies under way may still make pages available."""
        return self._store.num_in_flight > 0 or self.recalling.is_under_way

    def comes_by_itself(self, short: OutOfPages, reads: SequenceOf[Read]) -> bool:
        """Whether stores and recalls under way bring the pages that somebody is short of, who reads `reads`."""
        if not short.moving and not self.recalling.is_under_way:
            return False
        return short.needed <= short.moving + short.waiting + self._store.available(reads=reads)


def never_fits(sequence: Sequence) -> DagError:
    """What a sequence ends with for which there are not enough pages, even alone."""
    return DagError(
        "capacity",
        "the request's context and its own tokens do not fit into the KV pool together, even alone",
        "max_tokens" if sequence.max_tokens else "input",
    )
