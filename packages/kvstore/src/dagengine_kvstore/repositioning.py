"""Sealed nodes stored again at other positions. Knows nodes, pages and bases; how rows are moved and turned is the
mover's, in which order the plan's.

    source      own_start s      | page | page | pa |                       evicted, unless it is to be copied
    new node    own_start s + d  | page | page | pa |   the same pages or others; reads shifted by d

K of a page is turned once after it was computed, never again: the error of repeated turns in bfloat16 grows to 10 % at
256. `PagePool.turned` says of which pages that has been.

Turned pages are found by nobody: they have an error that computing has not, and whoever shared them could be stored
nowhere else. So equal new work, and the source once it is evicted, are computed again.

Content is equal up to a common shift of positions, so in a store that reuses across positions a new node has its
source's content, and what reads it is equal to what reads the source. In one that does not, where equal content means
equal bits, what was turned is content of its own; nor does computing it again give its bits, so its pages are never
dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.leases import Lease
from dagengine_kvstore.move_plan import check_width, plan_moves
from dagengine_kvstore.moves import Move, MovePlan, Mover
from dagengine_kvstore.nodes import NodeRecord
from dagengine_kvstore.references import Read, check_held, check_readable
from dagengine_kvstore.residency import not_resident, page_tier
from dagengine_kvstore.reuse import Context, Prefix
from dagengine_kvstore.tiers import Tier
from dagengine_kvstore.writer import Writer

if TYPE_CHECKING:
    from dagengine_kvstore.books import Books


@dataclass(frozen=True, slots=True)
class Reposition:
    """A new node of the tokens [0, stop) of `node` (None: all), the first of them stored at `own_start`."""

    node: NodeRecord
    own_start: int
    stop: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.node.length if self.stop is None else self.stop

    @property
    def shift(self) -> int:
        return self.own_start - self.node.own_start

    @property
    def reads(self) -> tuple[Read, ...]:
        """What the new node reads, where it sees it."""
        return tuple(read._replace(delta=read.delta + self.shift) for read in self.node.reads)


@dataclass(frozen=True, slots=True)
class Repositioned:
    """The new nodes, one per move, each held once; and the plan that was carried out."""

    nodes: tuple[NodeRecord, ...]
    plan: MovePlan


@dataclass(frozen=True, slots=True)
class _Job:
    """One new node: where its rows are, and where they go."""

    asked: Reposition
    sources: tuple[int, ...]
    deltas: tuple[int, ...]
    turned: tuple[bool, ...]  # of the pages it makes
    in_place: bool


class Repositioner:
    """
    Args:
        strict: equal content means equal bits.
    """

    def __init__(self, books: Books, *, strict: bool) -> None:
        self._books = books
        self._strict = strict

    def run(
        self, moves: Sequence[Reposition], mover: Mover, uid: int, *, copy: bool, in_order: bool, width: int
    ) -> Repositioned:
        """As KVStore.reposition; the new nodes' uids count from `uid`."""
        check_width(width)
        jobs = self._jobs(tuple(moves), copy)
        pool = self._books.pool
        num_fresh = sum(len(job.sources) for job in jobs if not job.in_place)
        fresh: list[int] = []
        if num_fresh:
            with self._kept(jobs):
                fresh = self._books.pressure.take_pages(jobs[0].asked.node, num_fresh, None, evict=True)
        given = [page for job in jobs if job.in_place for page in job.sources]
        for job in jobs:
            if job.in_place:
                self._books.evict(job.asked.node, set(job.sources))
        pool.claim(given)
        spare = pool.allocate(min(width, pool.num_free)) if in_order and given else []
        targets = self._targets(jobs, fresh, sorted(given) if in_order else given)
        fence = pool.begin_fence()
        done = False
        try:
            size = self._books.page_size
            plan = plan_moves(_moves(jobs, targets, size), size, spare=spare, width=width)
            mover.run(plan)
            done = True
        finally:
            for page in (*spare, *(() if done else (*fresh, *given))):
                pool.drop(page)
            pool.end_fence(fence)
        nodes = tuple(
            self._seal(job, pages, uid + i) for i, (job, pages) in enumerate(zip(jobs, targets, strict=True))
        )
        return Repositioned(nodes, plan)

    def _jobs(self, moves: tuple[Reposition, ...], copy: bool) -> list[_Job]:
        """What is to be done; raises all refusals that need no page to be seen."""
        jobs: list[_Job] = []
        missing: dict[NodeRecord, set[Tier]] = {}
        given: set[NodeRecord] = set()
        pool, size = self._books.pool, self._books.page_size
        for index, asked in enumerate(moves):
            field, node = f"moves[{index}]", asked.node
            _check(asked, field)
            if node in self._books.writers:
                message = f"the last tokens of node {node.uid} are yet to be computed; seal it first"
                raise KVStoreError("state_in_use", message, field=f"{field}.node")
            count = -(-asked.num_tokens // size)
            pages = tuple(page for page in node.pages[:count] if page is not None)
            if len(pages) < count:
                tiers = {page_tier(node, i) for i in range(count) if node.pages[i] is None}
                missing.setdefault(node, set()).update(tiers)
                continue
            deltas = tuple(asked.own_start + i * size - pool.base[page] for i, page in enumerate(pages))
            for page, delta in zip(pages, deltas, strict=True):
                if delta and pool.turned[page]:
                    message = f"K of node {node.uid} was turned before; take what it was made of, or compute it again"
                    raise KVStoreError("already_repositioned", message, field=f"{field}.node")
            in_place = not copy and node not in given
            if in_place:
                self._check_owned(node, pages, f"{field}.node")
                given.add(node)
            turned = tuple(
                bool(delta) or pool.turned[page] for page, delta in zip(pages, deltas, strict=True)
            )
            jobs.append(_Job(asked, pages, deltas, turned, in_place))
        if missing:
            raise not_resident(missing)
        return jobs

    def _check_owned(self, node: NodeRecord, pages: Sequence[int], field: str) -> None:
        """Whether the pages of a node may be written over. Raises KVStoreError."""
        pool = self._books.pool
        if not node.recomputable:
            message = f"node {node.uid} could not be computed again; ask for a copy"
            raise KVStoreError("not_recomputable", message, field=field)
        if node.leases or node.restoring or node in self._books.pinned():
            message = f"node {node.uid} is leased, pinned or restoring; ask for a copy"
            raise KVStoreError("state_in_use", message, field=field)
        if sum(node.cover.values()) > 1 or node.root.refs > 1 or any(pool.refs[page] > 1 for page in pages):
            message = f"others hold node {node.uid} or share its pages; ask for a copy"
            raise KVStoreError("state_shared", message, field=field)
        if not all(pool.is_quiet(page) and not pool.is_moving(page) for page in pages):
            message = f"an open step or a transfer may touch node {node.uid}; end it first, or ask for a copy"
            raise KVStoreError("state_in_use", message, field=field)

    @contextmanager
    def _kept(self, jobs: Sequence[_Job]) -> Iterator[None]:
        """Keeps the sources from being evicted, without letting anybody read them."""
        reads = tuple(Read(job.asked.node, 0, job.asked.num_tokens) for job in jobs)
        lease = Lease(
            self._books.pool, self._books.page_size, reads, (array("i"),) * len(reads), lambda _: None
        )
        self._books.enter_lease(lease)
        try:
            yield
        finally:
            self._books.remove_lease(lease)

    def _targets(self, jobs: Sequence[_Job], fresh: Sequence[int], given: Sequence[int]) -> list[list[int]]:
        """The pages of each new node, in order."""
        rest = {True: iter(given), False: iter(fresh)}
        return [[next(rest[job.in_place]) for _ in job.sources] for job in jobs]

    def _new_node(self, job: _Job, uid: int) -> NodeRecord:
        asked, source = job.asked, job.asked.node
        if not self._strict:
            content = source.signature
        elif any(job.deltas):
            marks = ("own_start", str(asked.own_start)), ("repositioned", ",".join(map(str, job.deltas)))
            content = (*source.signature, *marks)
        else:
            content = source.context.signature
        context = self._books.contents.context(content, source.salt, asked.reads, asked.own_start)
        below = source.root.below
        for hold in below:
            hold.refs += 1
        root = self._books.holds.root(below)
        node = NodeRecord(
            uid,
            asked.own_start,
            source.parents,
            asked.reads,
            source.signature,
            source.salt,
            context,
            root,
            self._books.page_size,
        )
        node.recomputable = not self._strict or not any(job.turned)
        return node

    def _seal(self, job: _Job, pages: list[int], uid: int) -> NodeRecord:
        books, pool, size = self._books, self._books.pool, self._books.page_size
        node = self._new_node(job, uid)
        tokens = job.asked.node.tokens[: job.asked.num_tokens]
        content: Context | Prefix = node.context
        for index, (page, turned) in enumerate(zip(pages, job.turned, strict=True)):
            pool.base[page] = node.own_start + index * size
            pool.turned[page] = turned
            content = books.contents.extend(content, tokens[index * size : (index + 1) * size])
            if not turned:
                pool.remember(page, content)
        books.add_node(node)
        writer = books.writers[node] = Writer(books, node, ())
        node.tokens = tokens
        writer.pages = pages
        stop = len(tokens)
        spans = {name: (min(a, stop), min(b, stop)) for name, (a, b) in job.asked.node.spans.items()}
        books.seal(writer, spans)
        books.note("reposition", node, tokens=stop, pages=len(pages))
        return node


def _check(asked: Reposition, field: str) -> None:
    """Whether there is such a node to move. Raises KVStoreError."""
    node, stop = asked.node, asked.num_tokens
    check_readable(node, 0, stop, None, f"{field}.node")
    check_held(node, 0, stop, passed=True, field=f"{field}.node")
    if not stop:
        raise KVStoreError("span_out_of_range", "there is no token to reposition", field=f"{field}.stop")
    start = asked.own_start
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        message = f"own_start is a position from 0 on, not {start!r}"
        raise KVStoreError("invalid_position", message, field=f"{field}.own_start")
    least = min((read.view_start for read in asked.reads), default=0)
    if least < 0:
        message = (
            f"what node {node.uid} reads would be seen from {least} on; start at {start - least} or later"
        )
        raise KVStoreError("invalid_position", message, field=f"{field}.own_start")


def _moves(jobs: Sequence[_Job], targets: Sequence[Sequence[int]], page_size: int) -> Iterator[Move]:
    for job, pages in zip(jobs, targets, strict=True):
        left = job.asked.num_tokens
        for source, target, delta in zip(job.sources, pages, job.deltas, strict=True):
            yield Move(source, 0, min(left, page_size), target, 0, delta)
            left -= page_size
