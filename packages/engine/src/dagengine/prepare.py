"""From a request to pages: resolve, compile, lay out, begin, lease, segment table.

The one place where graph, positions and store meet. Each stage has one name:

    ContextRef → Reference → VisibleContext → Layout → Read → Lease → extents of the segment table
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from dagengine_core_graph import (
    ContextGraph,
    GraphError,
    NodeSpans,
    Reference,
    VisibleContext,
    compile_context,
    make_reference,
)
from dagengine_kvstore import KVStore, Lease, NodeRecord, Parent, Read, Writer
from dagengine_positions import Layout, ModelAdapter, ModelGeometry, Segment, check_room, lay_out

from .errors import DagError, as_dag_error, shown
from .request import ContextRef, Request
from .work import DELTA, EMPTY, HI, LO, PAGE, STORED, Extents

MOST_REFERENCES = 4096
"""References to whole nodes that are kept, since they are equal for all readers."""


@dataclass(frozen=True)
class PlannedNode:
    """A node that is only laid out, by `explain`: it has a place in the graph and none in the store."""

    uid: tuple[str, int]
    own_start: int
    length: int


class ResolvedRef(NamedTuple):
    """A reference whose target is known: a sealed node (or a planned one), and where the handle cuts it."""

    node: NodeRecord | PlannedNode
    at: int | None
    ref: ContextRef


@dataclass(frozen=True)
class Prepared:
    """A request that can run: what it sees, where, what it holds, and how far it may go."""

    context: VisibleContext
    layout: Layout
    reads: tuple[Read, ...]
    parents: tuple[Parent, ...]
    max_tokens: int
    num_pages: int
    compile_ms: float
    layout_ms: float


class Preparer:
    """Knows every live node by its number, in the graph and in the store.

    Args:
        signature: what must be equal for states to meet, by field name.
    """

    def __init__(
        self,
        store: KVStore,
        geometry: ModelGeometry,
        adapter: ModelAdapter,
        signature: Mapping[str, str],
        *,
        max_model_len: int,
    ) -> None:
        self._store, self._geometry, self._adapter = store, geometry, adapter
        self._signature = dict(signature)
        self._max_model_len = max_model_len
        self.graph = ContextGraph()
        self._records: WeakValueDictionary[object, NodeRecord] = WeakValueDictionary()
        self._planned: dict[object, PlannedNode] = {}
        self._plans = count()
        self._whole = lru_cache(MOST_REFERENCES)(make_reference)  # to what each of many readers reads

    def resolve(self, ref: ContextRef, index: int, salt: str) -> ResolvedRef:
        """Look up a reference by state id. Raises as `find`."""
        self._store.expire()
        return self.find(ref, index, salt)

    def find(self, ref: ContextRef, index: int, salt: str) -> ResolvedRef:
        """As `resolve`, of several references: the store's `expire` was called once, before the first.

        Raises:
            DagError: `state_not_found`, `state_released`, `span_out_of_range`, `invalid_request`; the field is
                `context[i].state` or `context[i].at`.
        """
        if not isinstance(ref.state, str):
            raise DagError("invalid_request", "a reference names a state", f"context[{index}].state")
        try:
            node, cut = self._store.find(ref.state, salt)
        except Exception as error:
            found = as_dag_error(error)
            raise DagError(found.code, found.message, f"context[{index}].state") from None
        at = ref.at
        if at is None:
            at = cut
        elif isinstance(at, bool) or not isinstance(at, int):
            message = f"at is a number of tokens, not {shown(at)}"
            raise DagError("invalid_request", message, f"context[{index}].at")
        elif not 0 <= at <= cut:
            message = f"at must be from 0 to {cut}, the state's length, not {shown(at)}"
            raise DagError("span_out_of_range", message, f"context[{index}].at")
        return ResolvedRef(node, at if at < len(node.tokens) else None, ref)

    def prepare(self, request: Request, refs: Sequence[ResolvedRef]) -> Prepared:
        """Compile and lay out; refuse what the model or the pool cannot do. Changes nothing.

        Raises:
            DagError: any refusal of the definition that needs no GPU work to be seen.
        """
        begin = time.perf_counter()
        nodes = {ref.node.uid: ref.node for ref in refs}
        try:
            context = compile_context(self.graph, self._references(refs))
        except GraphError as error:
            raise as_dag_error(error, "context") from None
        compiled = time.perf_counter()
        try:
            layout = lay_out(
                request.position,
                context,
                lambda uid: (nodes.get(uid) or self._node(uid)).own_start,
                request.position_options,
            )
        except Exception as error:
            raise _about_layout(error) from None
        try:
            refusals = self._adapter.check(self._geometry, layout)
            if refusals:
                raise as_dag_error(refusals[0], "position")
            sampling = request.sampling
            limit = check_room(
                layout.own_start,
                len(request.input_ids),
                sampling.max_tokens if sampling else 0,
                self._max_model_len,
            )
        except Exception as error:
            raise as_dag_error(error, "position") from None
        if sampling and sampling.max_tokens is None and request.most_tokens is not None:
            limit = min(limit, request.most_tokens)
        if sampling and limit < 1:
            raise DagError(
                "position_overflow",
                f"the context and the input fill all {self._max_model_len} positions; nothing can be sampled",
                "input",
            )
        laid_out = time.perf_counter()
        max_tokens, num_pages = self._fit(request, layout, limit if sampling else 0)
        if sampling and sampling.min_tokens > max_tokens:
            code = "position_overflow" if sampling.min_tokens > limit else "capacity"
            raise DagError(code, f"at most {max_tokens} tokens can be sampled here", "min_tokens")
        new = tuple.__new__  # takes half the time of the classes' own
        return Prepared(
            context=context,
            layout=layout,
            reads=tuple(
                [
                    new(Read, (node, start, stop, delta))
                    for uid, start, stop, _, delta in layout.segments
                    if isinstance(node := nodes.get(uid) or self._node(uid), NodeRecord)
                ]
            ),
            parents=tuple(
                [
                    new(Parent, (node, reference.mode, start, stop))
                    for (node, _, _), (reference, _, start, stop) in zip(refs, context.readings, strict=True)
                    if isinstance(node, NodeRecord)
                ]
            ),
            max_tokens=max_tokens,
            num_pages=num_pages,
            compile_ms=(compiled - begin) * 1e3,
            layout_ms=(laid_out - compiled) * 1e3,
        )

    def begin(self, request: Request, prepared: Prepared) -> Writer:
        """Start the node: from here on it holds its parents, whoever else lets go of them."""
        try:
            writer = self._store.begin(
                prepared.parents,
                prepared.reads,
                prepared.layout.own_start,
                signature=self._signature,
                salt=request.salt,
            )
        except Exception as error:
            raise as_dag_error(error, "context") from None
        node = writer.node
        self._records[node.uid] = node
        self.graph.add(node.uid, prepared.context)
        return writer

    def seal(
        self,
        writer: Writer,
        length: int,
        spans: Mapping[str, tuple[int, int]],
        *,
        sampled: bool,
        early: bool = False,
    ) -> NodeRecord:
        """Make the node readable, with its named spans; `early`, before its last step has ended, to be followed by
        `finish`.
        """
        node = writer.seal_early(spans) if early else writer.seal(spans)
        self.graph.extend(node.uid, length)
        self.graph.seal(node.uid, _node_spans(spans, sampled=sampled))
        return node

    def finish(self, writer: Writer, spans: Mapping[str, tuple[int, int]], *, sampled: bool) -> NodeRecord:
        """The last step of a node that was sealed early has ended, and with it is known what its named spans are."""
        node = writer.seal(spans)
        self.graph.rename_spans(node.uid, _node_spans(spans, sampled=sampled))
        return node

    def discard(self, writer: Writer) -> None:
        """End a node that nothing will ever read, or that was sealed early and will never be computed."""
        node = writer.node
        was_sealed = node.sealed
        writer.abort()
        if was_sealed:
            self._store.unhold(node)
        self.graph.drop(node.uid)

    def check_start(self, node: NodeRecord, stop: int, start: int) -> None:
        """Whether the first `stop` tokens of a node may be stored from position `start` on. Raises: DagError."""
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise DagError("invalid_request", f"start is a position from 0 on, not {shown(start)}", "start")
        try:
            check_room(start, stop, 0, self._max_model_len)
            segment = Segment(node.uid, 0, stop, start, start - node.own_start)
            layout = Layout("reposition", (segment,), start + stop, stop)
            refusals = self._adapter.check(self._geometry, layout)
            if refusals:
                raise as_dag_error(refusals[0])
        except Exception as error:
            found = as_dag_error(error)
            raise DagError(found.code, found.message, "start") from None

    def adopt(self, node: NodeRecord, source: NodeRecord) -> None:
        """Put a sealed node that the store made of another one into the graph, with its references and spans."""
        of = self.graph.node(source.uid)
        spans = {
            field.name: span and (min(span[0], node.length), min(span[1], node.length))
            for field in fields(of.spans)
            for span in [getattr(of.spans, field.name)]
        }
        self._records[node.uid] = node
        self.graph.add(node.uid, of.context, length=node.length, spans=NodeSpans(**spans), sealed=True)

    def forget_dropped(self) -> None:
        """Drop graph nodes whose records nobody can reach any more."""
        for node in self.graph.nodes():
            if isinstance(node.id, int) and node.id not in self._records:
                self.graph.drop(node.id)

    def plan(self, prepared: Prepared, name: str, length: int, spans: NodeSpans) -> PlannedNode:
        """Put a node into the graph that never runs, so that others can be laid out over it; see `unplan`."""
        node = PlannedNode((name, next(self._plans)), prepared.layout.own_start, length)
        self.graph.add(node.uid, prepared.context, length=length, spans=spans, sealed=True)
        self._planned[node.uid] = node
        return node

    def unplan(self, node: PlannedNode) -> None:
        self.graph.drop(node.uid)
        del self._planned[node.uid]

    def resolve_planned(self, node: PlannedNode, ref: ContextRef) -> ResolvedRef:
        return ResolvedRef(node, ref.at, ref)

    def record(self, uid: object) -> NodeRecord:
        """The store's node of a live number in the graph."""
        return self._records[uid]

    def is_there(self, read: Read) -> bool:
        """Whether all pages of a read are on the device now, or on the host."""
        return self._store.is_there([read])

    def matching(self, request: Request, prepared: Prepared) -> int:
        """Own input tokens whose pages are there already."""
        writer = self.begin(request, prepared)
        try:
            ids = request.input_ids
            return writer.match(ids[:-1], whole=False) if request.sampling else writer.match(ids, whole=True)
        finally:
            self.discard(writer)

    def _node(self, uid: object) -> NodeRecord | PlannedNode:
        return self._planned[uid] if isinstance(uid, tuple) else self._records[uid]

    def _references(self, refs: Sequence[ResolvedRef]) -> list[Reference]:
        made: list[Reference] = []
        try:
            for node, at, ref in refs:
                if at is None and ref.span is None and ref.start is None:
                    made.append(self._whole(node.uid, ref.mode))
                else:
                    made.append(make_reference(node.uid, ref.mode, ref.span, at, ref.start))
        except GraphError as error:
            raise DagError(error.code, error.message, f"context[{len(made)}].{error.field}") from None
        return made

    def _fit(self, request: Request, layout: Layout, max_tokens: int) -> tuple[int, int]:
        """Clamp an unset limit to the pool; refuse what could never be resident at once.

        Counts pages as if nothing were shared below the level of token instances, so that the answer never
        depends on what happens to be cached.
        """
        size = self._store.page_size
        visible = _num_pages(layout, size)
        room = (self._store.num_pages - visible) * size - len(request.input_ids)
        asked = request.sampling.max_tokens if request.sampling else 0
        wanted = max_tokens if asked is not None else min(max_tokens, max(room, 1))
        if wanted > room:
            needed = visible + -(-(len(request.input_ids) + wanted) // size)
            raise DagError(
                "capacity",
                f"the request needs {needed} pages of {size} tokens at once; the pool has {self._store.num_pages}",
                "max_tokens" if request.sampling and len(request.input_ids) < room else "input",
            )
        return wanted, visible + -(-(len(request.input_ids) + wanted) // size)


def _node_spans(spans: Mapping[str, tuple[int, int]], *, sampled: bool) -> NodeSpans:
    return NodeSpans(
        prompt=spans["prompt"], output=spans["output"] if sampled else None, turn=spans.get("turn")
    )


def _num_pages(layout: Layout, size: int) -> int:
    """How many pages of `size` tokens the segments lie in, each node's own counted once."""
    if len({segment[0] for segment in layout.segments}) == len(layout.segments):
        return sum([-(-stop // size) - start // size for _, start, stop, _, _ in layout.segments])
    ranges: dict[object, list[tuple[int, int]]] = {}
    for segment in layout.segments:
        pages = (segment.start // size, -(-segment.stop // size))
        ranges.setdefault(segment.node, []).append(pages)
    found = 0
    for listed in ranges.values():
        end = 0
        for first, behind in sorted(listed):
            found += max(0, behind - max(first, end))
            end = max(end, behind)
    return found


def _about_layout(error: Exception) -> DagError:
    """A policy's refusal in the request's terms: a reference, one of the policy's options, or the policy."""
    found = as_dag_error(error, "position")
    field = found.field or ""
    if found.code == "policy_unsupported" and field != "position" and not field.startswith("context["):
        return DagError(found.code, found.message, f"position_options.{field}")
    return found if field.startswith("context[") else DagError(found.code, found.message, "position")


def context_extents(reads: Sequence[Read], lease: Lease) -> Extents:
    """Rows of the segment table for what is read, [n, 5] int32: page, lo, hi, stored, delta.

    view of a token = its node's own start + its offset + the read's delta
    DELTA of a row  = view - position at which the page's K was rotated
    """
    if not reads:
        return EMPTY
    size = lease.page_size
    # A page of read i in row r of all has its first token at view views[i] + r * size.
    views, counts = array("q"), array("q")
    lows: list[tuple[int, int]] = []
    highs: list[tuple[int, int]] = []
    end = 0
    for (node, start, stop, delta), run in zip(reads, lease.pages, strict=True):
        low, high = start % size, stop % size
        views.append(node.own_start + delta + start - low - end * size)
        counts.append(len(run))
        if run and low:
            lows.append((end, low))
        end += len(run)
        if run and high:
            highs.append((end - 1, high))
    pages = np.frombuffer(b"".join(lease.pages), np.int32)
    stored = np.frombuffer(lease.base_of, np.int64).take(pages)
    rows = np.empty((end, 5), np.int32)
    rows[:, PAGE], rows[:, LO], rows[:, HI], rows[:, STORED] = pages, 0, size, stored
    deltas = np.frombuffer(views, np.int64).repeat(counts)
    deltas += np.arange(0, end * size, size)
    deltas -= stored
    rows[:, DELTA] = deltas
    firsts, lasts, starts = rows[:, LO], rows[:, HI], rows[:, STORED]
    for row, low in lows:
        firsts[row] = low
        starts[row] += low
    for row, high in highs:
        lasts[row] = high
    return rows
