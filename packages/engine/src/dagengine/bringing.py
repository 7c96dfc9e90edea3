"""Context that left the device is brought back, for the first of the queue that reads it.

    evicted context ──► what the host has is loaded ──► the rest is restored, one node at a time ──► leased
                                │                                       │
                                └── `loading`: whether, and when        └── `restoring`: which node is next

Makes room, and knows who gives way: work behind the owner is preempted, work before it is waited for. What is read
stays leased until the owner runs. Where nothing runs, nothing comes and there is no room, or what cannot be computed
again cannot be loaded either, the owner ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from dagengine_kvstore import KVStore, NotResident, OutOfPages, Read, RestoreWriter

from .errors import DagError
from .loading import Loading
from .queues import Queues, Unsettled, never_fits
from .restoring import Restoring
from .sequence import Sequence
from .work import Restore, Work


class Bringing:
    """
    Args:
        work_ids: numbers of restores.
        fail: called with a sequence that can never run and the reason.
    """

    def __init__(
        self,
        store: KVStore,
        queues: Queues,
        loading: Loading,
        work_ids: Iterator[int],
        fail: Callable[[Sequence, DagError], None],
    ) -> None:
        self._store, self._queues, self._loading = store, queues, loading
        self._work_ids, self._fail = work_ids, fail
        self._restoring: Restoring | None = None

    @property
    def is_restoring(self) -> bool:
        """Whether something is computed again for some owner, and other things stay leased for that."""
        return self._restoring is not None

    def bring(self, owner: Sequence, missing: NotResident) -> bool:
        """Load what the host has of what a waiting sequence reads; once that is there, restore the rest.

        Returns: whether what was to be loaded turned out to be there still.
        """
        if self._restoring is not None and self._restoring.owner is not owner:
            self.end_restoring()
        reads, _ = self._loading.divide(owner, owner.reads, missing)
        if reads and self._restoring is None:
            return self._load(owner, owner.reads, reads)
        self._restore_for(owner)
        return False

    def end(self, owner: Sequence) -> None:
        """Nothing is brought for this sequence any more: it has all, or is gone."""
        if self._restoring is not None and self._restoring.owner is owner:
            self.end_restoring()
        if self._loading.owner is owner:
            self._loading.end()

    def preempt(self, work: Work) -> None:
        """Take the pages of running work: of a sequence, or of a restore, which its owner asks for again."""
        if isinstance(work, Restore):
            self.end_restoring()
        else:
            assert isinstance(work, Sequence)
            self._queues.preempt(work)

    def finish_restore(self, work: Restore) -> None:
        """A restore computed its last token: its node is resident again, and stays so for its owner."""
        assert self._restoring is not None and self._restoring.job is work
        self._restoring.finish_job()
        self._queues.retire(work)

    def fail_restore(self, work: Restore, error: DagError) -> None:
        """A restore failed in its step: its owner ends with that error, since it would fail again."""
        if self._restoring is not None and self._restoring.job is work:
            owner = self._restoring.owner
            self.end_restoring()
            self._fail(owner, error)

    def end_restoring(self) -> None:
        """Give up what is computed again, and all that is kept for it."""
        state, self._restoring = self._restoring, None
        if state is None:
            return
        if state.job is not None:
            self._queues.retire(state.job)
        state.end()

    def _load(self, owner: Sequence, kept: SequenceOf[Read], reads: SequenceOf[Read]) -> bool:
        """Start to load `reads`, or go on, beside `kept`: as `_start_restore`, but it waits for work before it.

        Returns: whether all of it is there.
        """
        if self._loading.out_of_reach(owner, reads):
            self._fail(owner, _out_of_reach())
            return False
        queues = self._queues
        while True:
            try:
                return not self._loading.load(owner, reads)
            except OutOfPages as short:
                if queues.comes_by_itself(short, kept):
                    return False
                later = [w for w in queues.running if w.order > owner.order]
                if queues.running and not later:
                    return False
                queues.settle()
                if later:
                    self.preempt(later[-1])
                elif self._restoring is None or not self._restoring.spare(None):
                    self._give_up(owner)
                    return False

    def _give_up(self, owner: Sequence) -> None:
        """Nothing runs, and there are no pages to bring back what `owner` reads."""
        if not self._queues.end_recalls() and not self._queues.brings:
            self.end_restoring()
            self._loading.end()
            self._fail(owner, never_fits(owner))

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
        queues = self._queues
        job = state.make_job(writer, next(self._work_ids))
        assert job.lease is not None
        while True:
            try:
                queues.take(writer, job.remaining)
            except OutOfPages as short:
                if queues.comes_by_itself(short, writer.node.reads):
                    job.lease.release()
                    return True
                if queues.in_flight:
                    job.lease.release()
                    raise Unsettled from None
                later = [w for w in queues.running if w.order > job.order]
                if later:
                    self.preempt(later[-1])
                    continue
                if not queues.running and state.spare(writer.node):
                    continue
                job.lease.release()
                if not queues.running:
                    self._give_up(state.owner)
                    return True
                self.end_restoring()
                return False
            break
        state.job = job
        queues.run(job)
        if not job.remaining:
            self.finish_restore(job)
            return False
        return True


def _out_of_reach() -> DagError:
    return DagError(
        "state_unavailable",
        "loading a state from the host failed or does not end, and it cannot be computed again; try again later",
        "context",
    )
