"""Bringing the evicted context of one waiting sequence back, one node at a time, deepest first.

Knows nodes, leases and the writers that compute nodes again; the scheduler says when, and finds the pages. What is
resident of what the owner or a node on the way reads stays leased until the owner runs. What the host has of that is
named in `to_load`, and the rest waits until it came: computing may read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from dagengine_kvstore import KVStore, Lease, NodeRecord, NotResident, Read, RestoreWriter

from .loading import Loading
from .prepare import context_extents
from .sequence import Sequence
from .work import Phase, Restore

MOST_RESTORES = 2


class Restoring:
    """
    Attributes:
        owner: on whose behalf.
        job: the restore that runs now.
        to_load: reads to be loaded from the host before anything else, as `next` found.
    """

    def __init__(self, store: KVStore, loading: Loading, owner: Sequence) -> None:
        self.owner = owner
        self.job: Restore | None = None
        self.to_load: list[Read] = []
        self._store, self._loading = store, loading
        # Nodes still to be computed, each needed by the one below it. Their writers hold what they read: of what a
        # sealed node digested nothing else may.
        self._stack: list[RestoreWriter] = []
        self._leases: dict[tuple[int, int, int], Lease] = {}
        self._times: Counter[int] = Counter()

    def next(self) -> RestoreWriter | None:
        """The node to compute now: all that it reads is leased. None once the owner's own reads are, and while there is
        something `to_load`.
        """
        while True:
            writer = self._stack[-1] if self._stack else None
            missing = self._hold(self.reads)
            if not missing or self.to_load:
                return None if self.to_load else writer
            self._stack.append(self._store.restore(missing[0]))

    def make_job(self, writer: RestoreWriter, work_id: int) -> Restore:
        """The work of computing what `next` gave, behind what is found of it."""
        node = writer.node
        lease = self._store.lease(node.reads)
        if not writer.num_tokens:
            writer.match(writer.todo, whole=writer.target == node.length)
        return Restore(
            id=work_id,
            order=self.owner.order,
            backend=self.owner.backend,
            own_start=node.own_start,
            tokens=list(node.tokens[: writer.target]),
            computed=writer.num_tokens,
            found=writer.num_tokens,
            writer=writer,
            lease=lease,
            context=context_extents(node.reads, lease),
            phase=Phase.RUNNING,
        )

    def finish_job(self) -> None:
        """The node of the job is resident again, and stays so for whoever needs it here."""
        assert self.job is not None and self._stack[-1] is self.job.writer
        node = self._stack.pop().finish()
        self._times[node.uid] += 1
        self.owner.restored += len(self.job.tokens) - self.job.found
        self.job = None
        self.owner.awaited.pop(node.uid, None)
        self._release_unneeded()
        self._hold(self.reads)

    @property
    def reads(self) -> SequenceOf[Read]:
        """What must be resident next: what the node on top reads, or the owner."""
        return self._stack[-1].node.reads if self._stack else self.owner.reads

    def spare(self, node: NodeRecord | None) -> bool:
        """Let go of what is only kept for later, since restoring `node`, or loading `reads`, needs the pages; it is
        brought back then.

        Otherwise a request could run or not depending on what happened to be resident. Returns whether there was any;
        what was brought back too often is kept, so that this comes to an end.
        """
        needed = {_key(read) for read in self.reads}
        spared = [k for k in self._leases if k not in needed and self._times[k[0]] < MOST_RESTORES]
        for key in spared:
            self._leases.pop(key).release()
        waiting = [writer for writer in self._stack if writer.node is not node and writer.num_tokens]
        for writer in waiting:
            writer.rollback()
        return bool(spared or waiting)

    def end(self) -> None:
        """Give everything back; the job is the scheduler's to retire."""
        for writer in reversed(self._stack):
            writer.abort()
        for lease in self._leases.values():
            lease.release()

    def _hold(self, reads: SequenceOf[Read]) -> list[NodeRecord]:
        """Lease what is resident of `reads`; return the nodes to be computed again, and find what is `to_load`."""
        missing: list[NodeRecord] = []
        self.to_load = []
        for read in reads:
            if _key(read) in self._leases:
                continue
            try:
                self._leases[_key(read)] = self._store.lease([read])
            except NotResident as error:
                loaded, computed = self._loading.divide(self.owner, [read], error)
                self.to_load += loaded
                missing += computed
        return missing

    def _release_unneeded(self) -> None:
        """Let go of what only nodes already restored had to read; nothing may hold that any more."""
        needed = {_key(read) for read in self.owner.reads}
        for writer in self._stack:
            needed |= {_key(read) for read in writer.node.reads}
        for key in self._leases.keys() - needed:
            self._leases.pop(key).release()


def _key(read: Read) -> tuple[int, int, int]:
    return read.node.uid, read.start, read.stop
