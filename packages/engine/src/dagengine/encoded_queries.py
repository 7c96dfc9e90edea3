"""Span queries as tokens: planned, lowered, and every input looked up or encoded. Runs nothing, and asks no engine.

query ─ plan, lower ─► nodes ─ look up ─► QueryDraft ─ tokenize what is new ─► EncodedQuery
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dagengine_core_graph import Artifact, GraphError
from dagengine_core_graph.query import (
    FindFragments,
    Fragment,
    LoweredQuery,
    Plan,
    Query,
    QueryNode,
    Retrieve,
    dump_query,
    join_path,
    lower,
    plan,
    walk,
)

from .errors import DagError, as_dag_error
from .held import HeldInput, HeldParams
from .prompt_cache import Ids, Lookup, PromptCache
from .retrievers import guarded
from .state import State
from .tokenizer import Chat, ChatPrompt

Finds = Callable[[Retrieve], list[str | Fragment]]


@dataclass(frozen=True)
class QueryTiming:
    """Milliseconds until the engine is asked: to plan (retrieve included) and lower, and to tokenize."""

    plan: float
    tokenize: float


@dataclass(frozen=True)
class EncodedQuery:
    """A lowered query whose inputs are tokens.

    Attributes:
        prompts: by node id; not of what was answered before.
        fragments: nodes that read and sample nothing: their tokens, and how many equal ones stand before them in what
            the same reader sees.
    """

    planned: Plan
    lowered: LoweredQuery
    prompts: Mapping[str, ChatPrompt]
    fragments: Mapping[str, tuple[tuple[int, ...], int]]
    timing: QueryTiming

    @property
    def answers(self) -> tuple[str, ...]:
        """Ids of the calls whose answers the result holds and that are yet to be made, in order."""
        return tuple(answer for answer in self.lowered.answers if answer in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Own input tokens of all nodes."""
        return sum(len(prompt.input_ids) for prompt in self.prompts.values())

    @cached_property
    def document(self) -> object | None:
        """The planned query as it is recorded, not to be changed; None where it reads answers of an earlier query, for
        those are not in it.
        """
        if any(isinstance(node.generate, HeldParams) for node in self.lowered.nodes):
            return None
        return dump_query(self.planned.query)["query"]

    @cached_property
    def input_digest(self) -> str:
        """Tells apart queries whose nodes have other input tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for node, prompt in self.prompts.items():
            ids = prompt.input_ids
            assert isinstance(ids, Ids), "queries are encoded by a PromptCache"
            digest.update(node.encode() + b":" + ids.digest)
        return digest.hexdigest()


@dataclass(frozen=True)
class QueryDraft:
    """A lowered query whose inputs were looked up and are yet to be tokenized.

    Attributes:
        nodes: those that have an input of their own to tokenize; `lookup` is of these.
    """

    planned: Plan
    lowered: LoweredQuery
    nodes: Sequence[QueryNode]
    lookup: Lookup
    prompts: PromptCache
    timing: QueryTiming

    @property
    def characters(self) -> int:
        """Of the messages that are yet to be tokenized."""
        return self.lookup.characters

    @property
    def chats(self) -> int:
        """Different nodes that are yet to be rendered and tokenized."""
        return len(self.lookup.new)

    def encode(self) -> EncodedQuery:
        """Takes as long as tokenizing does. Raises DagError as `encode_query`."""
        begin = time.perf_counter()
        found = self.prompts.encode(self.lookup)
        return self.finish(found, (time.perf_counter() - begin) * 1e3)

    def finish(self, found: Sequence[ChatPrompt | DagError], tokenize_ms: float) -> EncodedQuery:
        """With what `lookup` was encoded to, in so many milliseconds. Raises DagError as `encode_query`."""
        prompts: dict[str, ChatPrompt] = {}
        for node, prompt in zip(self.nodes, found, strict=True):
            if isinstance(prompt, DagError):
                raise DagError(prompt.code, prompt.message, node.path or None)
            if not prompt.input_ids:
                rule = "the chat template makes no token of this"
                raise DagError("invalid_request", rule, node.path or None)
            prompts[node.id] = prompt
        timing = replace(self.timing, tokenize=self.timing.tokenize + tokenize_ms)
        return EncodedQuery(self.planned, self.lowered, prompts, _fragments(self.lowered, prompts), timing)


def encode_query(
    query: Query,
    prompts: PromptCache,
    *,
    salt: str = "",
    retriever: FindFragments | None = None,
    reduce: int | None = None,
    max_nodes: int | None = None,
) -> EncodedQuery:
    """Plan, lower and tokenize a query; takes as long as tokenizing does.

    Args:
        salt: the tenant, whose encoded prompts are remembered.
        max_nodes: refuse queries that stand for more leaves and calls; None is the plan's own limit.

    Raises:
        DagError: the field is the path of the subtree, in the given query or in the planned one. `unsupported` where
            the model has no tokenizer, or calls name different models: an engine has one. `internal` where the
            retriever failed.
    """
    return draft_query(
        query, prompts, salt=salt, retriever=retriever, reduce=reduce, max_nodes=max_nodes
    ).encode()


def encode_drafts(drafts: Sequence[QueryDraft], prompts: PromptCache) -> list[EncodedQuery | DagError]:
    """What `QueryDraft.encode` gives for each, or raises; faster than one after the other.

    Args:
        prompts: the cache that all were looked up in.

    The time that tokenizing takes is parted among the queries by their new chats.
    """
    begin = time.perf_counter()
    found = prompts.encode_together([draft.lookup for draft in drafts])
    each_ms = (time.perf_counter() - begin) * 1e3 / max(1, sum(draft.chats for draft in drafts))
    encoded: list[EncodedQuery | DagError] = []
    for draft, one in zip(drafts, found, strict=True):
        try:
            encoded.append(draft.finish(one, each_ms * draft.chats))
        except DagError as error:
            encoded.append(error)
    return encoded


def draft_query(
    query: Query,
    prompts: PromptCache,
    *,
    salt: str = "",
    retriever: FindFragments | None = None,
    reduce: int | None = None,
    max_nodes: int | None = None,
) -> QueryDraft:
    """What `encode_query` does before it tokenizes; takes as long as the retriever does. Raises as `encode_query`."""
    begin = time.perf_counter()
    try:
        limits = {} if max_nodes is None else {"max_nodes": max_nodes}
        finds = retriever and _placed(guarded(retriever), query)
        planned = plan(query, retriever=finds, reduce=reduce, **limits)
        lowered = lower(planned)
    except GraphError as error:
        raise as_dag_error(error) from None
    return _draft(planned, lowered, prompts, salt, (time.perf_counter() - begin) * 1e3)


def _placed(find: Finds, query: Query) -> Finds:
    """The same, whose refusals name the retrieval by its path in the query."""

    def found(asked: Retrieve) -> list[str | Fragment]:
        try:
            return find(asked)
        except DagError as error:
            path = next((path for path, one in walk(query) if one == asked), "")
            raise DagError(error.code, error.message, join_path(path, error.field or "retrieve")) from error

    return found


def encode_lowered(
    planned: Plan, lowered: LoweredQuery, cache: PromptCache, salt: str = "", *, plan_ms: float = 0.0
) -> EncodedQuery:
    """Tokenize a lowered query that took `plan_ms` to plan and lower. Raises as `encode_query`."""
    return _draft(planned, lowered, cache, salt, plan_ms).encode()


def _draft(planned: Plan, lowered: LoweredQuery, cache: PromptCache, salt: str, plan_ms: float) -> QueryDraft:
    begin = time.perf_counter()
    models = lowered.models
    if len(models) > 1:
        named = ", ".join(models)
        raise DagError("unsupported", f"calls name several models ({named}); an engine has one", "model")
    nodes = [
        node
        for node in lowered.nodes
        if held_state(node) is None and not any(isinstance(part, HeldInput) for part in node.parts)
    ]
    chats = [Chat(node.messages, node.generate is not None, node.continues) for node in nodes]
    try:
        lookup = cache.look_up(chats, salt=salt) if chats else Lookup((), (), {})
    except DagError as error:
        raise DagError(error.code, error.message, nodes[0].path or None) from None
    timing = QueryTiming(plan_ms, (time.perf_counter() - begin) * 1e3)
    return QueryDraft(planned, lowered, nodes, lookup, cache, timing)


def _fragments(
    lowered: LoweredQuery, prompts: Mapping[str, ChatPrompt]
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Nodes that read and sample nothing, numbered among the equal ones that the same reader sees.

    A node is inherited by one other at most, so what a reader sees is a tree under it, and no other reader sees any of
    that.
    """
    inherited: dict[str, list[str]] = {}
    plain: dict[str, tuple[int, ...]] = {}
    for node in lowered.nodes:
        name = node.id
        if not node.context:
            if node.generate is None and name in prompts:
                plain[name] = prompts[name].input_ids
                inherited[name] = [name]
            continue
        below: list[str] = []
        for ref in node.context:
            if not isinstance(ref, Artifact):
                below += inherited.pop(str(ref.node), ())
        if below:
            inherited[name] = below
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for names in inherited.values():
        seen: dict[tuple[int, ...], int] = {}
        for name in names:
            ids = plain[name]
            count = seen.get(ids, 0)
            found[name] = ids, count
            seen[ids] = count + 1
    return found


def held_state(node: QueryNode) -> State | None:
    """The state of a call that was answered before."""
    return node.generate.state if isinstance(node.generate, HeldParams) else None
