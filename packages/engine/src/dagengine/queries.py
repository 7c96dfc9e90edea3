"""Encoded queries to requests of one submission, and their events back to answers. Runs nothing.

    EncodedQuery ───────────┐
    kept fragments' states ─┴─ submit together ─► QueryJob ─► events ─► outcomes

- A node is a request; a call's readers read its `turn` (its `output` where the chat template sets no turn apart).
- A fragment, a node that reads and samples nothing, is a request of its own only where no equal one is there: kept from
  an earlier query, or computed for another query or another call of this submission. Two equal fragments that one node
  sees stay two.
- A node whose input equals an earlier one's waits until that one is sealed, and shares its pages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dagengine_core_graph import Artifact
from dagengine_core_graph.query import MAX_TOKENS, QueryNode

from .core import EngineCore
from .encoded_queries import EncodedQuery, held_state
from .errors import DagError
from .fragments import DEFAULT_TTL_S, FragmentKey
from .inputs import new_request_id
from .request import ContextRef, FinishedEvent, Keep, Request, SpanName, check_parent
from .sampling import SamplingParams, seed_after
from .tokenizer import ChatPrompt

CALL_FIELDS = ("max_tokens", "temperature")
WHOLE_FIELDS = ("position", "backend")
"""Options of a query that all its requests have."""


@dataclass(frozen=True)
class QueryOptions:
    """How queries run.

    Attributes:
        position: the position policy of every node.
        backend: the attention backend; None is the engine's.
        salt: the tenant.
        max_tokens: of calls that name none; fewer where no more fit.
        seed: of calls that name none; equal calls differ nevertheless. None draws one for each.
        keep: what becomes of the answers' states; None drops them.
        fragment_ttl_s: how long fragments are kept at first; None keeps only what is read or waited for meanwhile.
    """

    position: str = "linear"
    backend: str | None = None
    salt: str = ""
    priority: int = 0
    max_tokens: int = MAX_TOKENS
    seed: int | None = None
    keep: Keep | None = None
    fragment_ttl_s: float | None = DEFAULT_TTL_S


@dataclass(frozen=True)
class QueryJob:
    """Queries as one submission.

    Attributes:
        requests: parents first.
        fragments: by request id: the fragments that are to be kept once they are states.
        places: per query, node id to request id; what is read as a state of before has none.
        nodes_of: request id to its nodes, as (query, node).
    """

    queries: tuple[EncodedQuery, ...]
    options: QueryOptions
    requests: tuple[Request, ...]
    fragments: Mapping[str, FragmentKey]
    places: tuple[Mapping[str, str], ...]
    nodes_of: Mapping[str, tuple[tuple[int, QueryNode], ...]]

    def locate(self, request_id: str, error: DagError) -> DagError:
        """The error of a request with the path of its subtree as its field."""
        found = self.nodes_of.get(request_id)
        if found is None:
            return error
        index, node = found[0]
        located = at_node(node, error)
        if len(self.queries) > 1:
            return DagError(located.code, located.message, f"queries[{index}].{located.field}")
        return located

    def answer_of(self, request_id: str) -> tuple[int, int] | None:
        """Which query's which answer the request computes; None if it is no answer."""
        for index, node in self.nodes_of.get(request_id, ()):
            if node.id in self.queries[index].answers:
                return index, self.queries[index].answers.index(node.id)
        return None

    def states(self, events: Sequence[FinishedEvent]) -> dict[FragmentKey, str]:
        """Fragments that have become states."""
        return {
            self.fragments[event.request_id]: choice.dag.state
            for event in events
            if event.request_id in self.fragments
            for choice in event.choices
            if choice.dag.state is not None
        }


@dataclass(frozen=True)
class _Target:
    """What a node became: an existing state, or a request; and the span that readers of an answer see."""

    state: str | None = None
    request: str | None = None
    answer: SpanName = "turn"

    def inherited(self) -> ContextRef:
        return ContextRef(state=self.state, request=self.request)

    def answered(self) -> ContextRef:
        return ContextRef(state=self.state, request=self.request, mode="artifact", span=self.answer)


def fragment_keys(queries: Sequence[EncodedQuery], options: QueryOptions) -> list[FragmentKey]:
    """The fragments of which one state serves all readers, each once, in order."""
    keys = (
        FragmentKey(ids, options.backend, options.salt)
        for query in queries
        for ids, slot in query.fragments.values()
        if slot == 0
    )
    return list(dict.fromkeys(keys))


def query_job(
    queries: Sequence[EncodedQuery],
    options: QueryOptions,
    kept: Mapping[FragmentKey, str] | None = None,
    *,
    seeds: Sequence[Mapping[str, int]] | None = None,
    first: Collection[FragmentKey] = (),
    prepare_only: bool = False,
) -> QueryJob:
    """The requests of queries that run together.

    Args:
        kept: states of fragments that are there already.
        seeds: per query, seeds of calls by node id, in place of what else would decide them.
        first: fragments that are computed before all others.
        prepare_only: leave out calls and what reads them; everything else is kept as a fragment's states are.

    Raises:
        DagError: sampling parameters, with the path of the call.
    """
    builder = _Builder(queries, options, kept or {}, seeds or [{}] * len(queries), prepare_only)
    if first:
        builder.begin_with(first)
    for index in range(len(queries)):
        builder.add(index)
    return builder.job()


def locate_refusal(core: EngineCore, job: QueryJob, error: DagError) -> DagError:
    """Why a submission was refused as a whole, located: the refusal of the first request that is refused by itself."""
    if error.code in ("queue_full", "draining", "engine_dead"):
        return error
    if len(job.requests) == 1:
        return job.locate(job.requests[0].id, error)
    earlier: dict[str, Request] = {}
    for request in job.requests:
        try:
            core.check(request)
            for index, ref in enumerate(request.context):
                if ref.request is None:
                    core.preparer.resolve(ref, index, request.salt)
                else:
                    check_parent(ref.request, earlier, f"context[{index}].request")
        except DagError as found:
            return job.locate(request.id, found)
        earlier[request.id] = request
    return error


def at_node(node: QueryNode, error: DagError) -> DagError:
    """The error of a node's request, with its path in the query, and the option that is to blame; just the option if it
    is one of all requests.
    """
    if error.field in WHOLE_FIELDS and error.code != "position_overflow":
        return error
    if node.generate is None or error.field not in SamplingParams.__dataclass_fields__:
        return DagError(error.code, error.message, node.path or "query")
    return _at_option(node, error)


def _at_option(node: QueryNode, error: DagError) -> DagError:
    name = error.field if error.field in CALL_FIELDS else f"options.{error.field}"
    return DagError(error.code, error.message, f"{node.path}.{name}")


@dataclass
class _Builder:
    """
    Attributes:
        params: with the seed of the first sample, by the identity of the parameters that calls share: equal ones may
            hold values of other types.
    """

    queries: Sequence[EncodedQuery]
    options: QueryOptions
    kept: Mapping[FragmentKey, str]
    seeds: Sequence[Mapping[str, int]]
    prepare_only: bool
    requests: list[Request] = field(default_factory=list)
    fragments: dict[str, FragmentKey] = field(default_factory=dict)
    shared: dict[FragmentKey, dict[int, _Target]] = field(default_factory=dict)
    places: list[dict[str, str]] = field(default_factory=list)
    nodes_of: dict[str, list[tuple[int, QueryNode]]] = field(default_factory=dict)
    params: dict[int, SamplingParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.submission = new_request_id()

    def begin_with(self, first: Collection[FragmentKey]) -> None:
        for query in self.queries:
            for node in query.lowered.nodes:
                ids, slot = query.fragments.get(node.id, ((), 0))
                if ids and slot == 0 and FragmentKey(ids, self.options.backend, self.options.salt) in first:
                    self.fragment(query, node)

    def add(self, index: int) -> None:
        query = self.queries[index]
        targets: dict[str, _Target] = {}
        read = {str(ref.node) for node in query.lowered.nodes for ref in node.context}
        waited = {node.reuses for node in query.lowered.nodes}
        self.places.append({})
        for node in query.lowered.nodes:
            if node.id in query.fragments:
                target = targets[node.id] = self.fragment(query, node)
                self.placed(index, node, target)
                continue
            held = held_state(node)
            if held is not None:
                targets[node.id] = _Target(state=held.id, answer="turn" if "turn" in held.spans else "output")
                continue
            if node.id not in query.prompts:
                continue
            if self.prepare_only and (
                node.generate is not None or any(str(ref.node) not in targets for ref in node.context)
            ):
                continue
            unread = node.id not in read and node.id not in waited
            target = self.node(query, node, targets, unread, self.seeds[index].get(node.id))
            targets[node.id] = target
            self.placed(index, node, target)

    def placed(self, index: int, node: QueryNode, target: _Target) -> None:
        if target.request is not None:
            self.places[index][node.id] = target.request
            self.nodes_of.setdefault(target.request, []).append((index, node))

    def fragment(self, query: EncodedQuery, node: QueryNode) -> _Target:
        ids, slot = query.fragments[node.id]
        key = FragmentKey(ids, self.options.backend, self.options.salt)
        shared = self.shared.setdefault(key, {})
        target = shared.get(slot)
        if target is not None:
            return target
        state = None if slot else self.kept.get(key)
        if state is not None:
            target = _Target(state=state)
        else:
            first = shared[0].request if slot else None
            after = () if first is None else (first,)
            ttl = self.options.fragment_ttl_s if slot == 0 else None
            target = self.request(query.prompts[node.id], None, (), after, Keep(ttl_s=ttl) if ttl else None)
            if slot == 0 and ttl:
                assert target.request is not None
                self.fragments[target.request] = key
        shared[slot] = target
        return target

    def node(
        self,
        query: EncodedQuery,
        node: QueryNode,
        targets: Mapping[str, _Target],
        unread: bool,
        seed: int | None,
    ) -> _Target:
        context = [
            targets[str(ref.node)].answered()
            if isinstance(ref, Artifact)
            else targets[str(ref.node)].inherited()
            for ref in node.context
        ]
        after: tuple[str, ...] = ()
        known = None if node.reuses is None else targets.get(node.reuses)
        if known is not None and known.request is not None and self.samples_nothing(known.request):
            after = (known.request,)
        keep = None
        if node.id in query.lowered.answers:
            keep = self.options.keep
        elif node.generate is None and (unread or self.prepare_only) and self.options.fragment_ttl_s:
            keep = Keep(ttl_s=self.options.fragment_ttl_s)
        return self.request(query.prompts[node.id], self.sampling(node, seed), tuple(context), after, keep)

    def samples_nothing(self, request_id: str) -> bool:
        return all(node.generate is None for _, node in self.nodes_of[request_id])

    def sampling(self, node: QueryNode, seed: int | None) -> SamplingParams | None:
        if node.generate is None:
            return None
        try:
            params = self.params.get(id(node.generate))
            if params is None:
                options = node.sampling(None) or {}
                params = SamplingParams.from_mapping({"seed": self.options.seed, **options})
                self.params[id(node.generate)] = params
            if seed is None and params.seed is not None:
                seed = seed_after(params.seed, node.sample)
            return params if seed is None or seed == params.seed else params.with_seed(seed)
        except DagError as error:
            raise _at_option(node, error) from None

    def request(
        self,
        prompt: ChatPrompt,
        sampling: SamplingParams | None,
        context: tuple[ContextRef, ...],
        after: tuple[str, ...],
        keep: Keep | None,
    ) -> _Target:
        options = self.options
        request = Request(
            id=f"{self.submission}:{len(self.requests)}",
            input_ids=prompt.input_ids,
            sampling=sampling,
            context=context,
            position=options.position,
            backend=options.backend,
            keep=keep,
            salt=options.salt,
            priority=options.priority,
            turn_start=prompt.turn_start,
            after=after,
            most_tokens=options.max_tokens if sampling is not None else None,
        )
        self.requests.append(request)
        return _Target(request=request.id, answer="output" if prompt.turn_start is None else "turn")

    def job(self) -> QueryJob:
        return QueryJob(
            tuple(self.queries),
            self.options,
            tuple(self.requests),
            self.fragments,
            tuple(self.places),
            {request: tuple(nodes) for request, nodes in self.nodes_of.items()},
        )
