"""The exact rules: each rewrites one subtree into another that means the same, or leaves it.

A rule looks at one subtree whose own subtrees it has been through already, and knows nothing of what is around
it. `plan` applies them everywhere, in the order of the stages here: what is sugar first, since `zip` speaks of the
children that the client wrote, then what joins look like. Every rule keeps the order of children, and none merges
or copies a call, but for `zip`, whose copies are part of its meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Final, TypeAlias

from ..errors import QueryError, short
from .expressions import (
    CALLS,
    CHAT,
    CROSS,
    EMPTY,
    MAP,
    MONAD,
    NOTHING,
    PAR,
    PLUS,
    PRINT,
    REPEAT,
    RETRIEVE,
    SEQ,
    TEXT,
    ZIP,
    Chat,
    Cross,
    FindFragments,
    Fragment,
    Generate,
    GenerateParams,
    Join,
    Map,
    Message,
    Monad,
    Par,
    Plus,
    Query,
    Repeat,
    Retrieve,
    Seq,
    Zip,
)


@dataclass(frozen=True)
class Surroundings:
    """What a rule may ask for: who retrieves, and the parameters of the call that reads the subtree, if any does."""

    retriever: FindFragments | None = None
    reader: GenerateParams | None = None


Rewrite: TypeAlias = Callable[[Query, Surroundings], Query]


@dataclass(frozen=True)
class Rule:
    """A rewriting of one subtree.

    Attributes:
        kinds: constructors without which a tree is as the rule leaves it.
        rewrite: the subtree in its new form; the same object where the rule does not apply.
        sugar: whether it may look into a `zip` or a `chat`, whose meaning is about the children as they were written.
    """

    name: str
    kinds: int
    rewrite: Rewrite
    sugar: bool = False


def desugar_chat(query: Query, _: Surroundings) -> Query:
    """`C(m…)` → `G(⋈(m…))`: a chat is a call that sees its messages in order."""
    return Generate(query.params, Cross(query.messages)) if isinstance(query, Chat) else query


def desugar_retrieval(query: Query, around: Surroundings) -> Query:
    """`R` → `+(monad(G¹(+(F…))), F…)`: what is found, and a call that prepares it where a call reads it.

    The children of a + are computed alone, so one prepare call covers all of them.
    """
    if not isinstance(query, Retrieve):
        return query
    if around.retriever is None:
        raise QueryError("invalid_request", "a retrieval needs a retriever; give one")
    found = []
    for piece in around.retriever(query):
        if not isinstance(piece, str | Fragment):
            raise TypeError(f"a retriever returns fragments or texts, not {short(piece)}")
        found.append(Fragment(piece) if isinstance(piece, str) else piece)
    fragments = tuple(piece for piece in found if piece.text)
    if around.reader is None or not fragments:
        return Plus(fragments)
    return Plus((Monad(Generate(_preparing(around.reader), Plus(fragments))), *fragments))


def unroll_repeat(query: Query, _: Surroundings) -> Query:
    """`repeat(n, g)` → `+(g, …, g)`: n calls, each a sample of its own."""
    return Plus((query.generate,) * query.count) if isinstance(query, Repeat) else query


def unroll_map(query: Query, _: Surroundings) -> Query:
    """`map(p, t…)` → `+(G(U t), …)`."""
    if not isinstance(query, Map):
        return query
    return Plus(tuple(Generate(query.params, Message("user", text)) for text in query.inputs))


def unroll_zip(query: Query, _: Surroundings) -> Query:
    """`zip(a, ⋈(b, c))` → `⋈(a, b, a, c)`, and so for the other joins; what shows nothing gets no a.

    Waits until it is known which children there are.
    """
    if not isinstance(query, Zip):
        return query
    second = query.second
    if second.kind & (REPEAT | MAP | ZIP) or second.kinds & RETRIEVE:
        return query
    kind, children = (type(second), second.children) if isinstance(second, Join) else (Cross, (second,))
    return kind(
        tuple(part for child in children for part in ((query.first, child) if shows(child) else (child,)))
    )


def order_joins(query: Query, _: Surroundings) -> Query:
    """`seq(q…)` and `par(q…)` → `⋈(q…)`: without side effects only the order of what they show is left."""
    return Cross(query.children) if isinstance(query, Seq | Par) else query


def drop_empties(query: Query, _: Surroundings) -> Query:
    """Leaves out what shows nothing and runs nothing: messages without text, joins of nothing, prints."""
    if isinstance(query, Join):
        kept = tuple(child for child in query.children if child is not NOTHING)
        if not kept:
            return NOTHING
        return query if len(kept) == len(query.children) else type(query)(kept)
    if isinstance(query, Monad):
        return NOTHING if query.query is NOTHING else query
    return NOTHING if query.kind & (TEXT | PRINT) and not query.kinds & TEXT else query


def flatten_cross(query: Query, _: Surroundings) -> Query:
    """`⋈(a, ⋈(b, c), d)` → `⋈(a, b, c, d)`, and `⋈(a)` → `a`: each child sees the same as before."""
    if not isinstance(query, Cross):
        return query
    if any(child.kind == CROSS for child in query.children):
        query = Cross(_spliced(query.children, CROSS))
    return query.children[0] if len(query.children) == 1 else query


def flatten_plus(query: Query, _: Surroundings) -> Query:
    """`+(a, +(b, c))` → `+(a, b, c)`. Not `+(a)` → `a`: alone, a sees nothing of what stands before the +."""
    if isinstance(query, Plus) and any(child.kind == PLUS for child in query.children):
        return Plus(_spliced(query.children, PLUS))
    return query


def distribute_plus(query: Query, _: Surroundings) -> Query:
    """`+(g(i), g(i))` → `+(monad(i), g(i), g(i))`: the input beside the outputs, hidden, and prepared once for all.

    + is distributed into the calls: what they share becomes a span of its own, while a reader still meets their
    outputs alone, each as it was computed. An input that holds calls is left: a copy would sample them again.
    """
    if not isinstance(query, Plus):
        return query
    inputs = [
        child.input
        for child in query.children
        if isinstance(child, Generate) and not child.input.kinds & CALLS
    ]
    samples: Counter[Query] = Counter()
    for same in [list(run) for _, run in groupby(inputs, id)]:  # samples of one call: one object, hashed once
        samples[same[0]] += len(same)
    prepared = {child.query for child in query.children if isinstance(child, Monad)} if samples else set()
    shared = {prompt for prompt, count in samples.items() if count > 1} - prepared
    if not shared:
        return query
    children: list[Query] = []
    for child in query.children:
        if shared and isinstance(child, Generate) and child.input in shared:
            shared.discard(child.input)
            children.append(Monad(child.input))
        children.append(child)
    return Plus(tuple(children))


SUGAR: Final = (
    Rule("desugar_chat", CHAT, desugar_chat, sugar=True),
    Rule("desugar_retrieval", RETRIEVE, desugar_retrieval, sugar=True),
    Rule("unroll_repeat", REPEAT, unroll_repeat, sugar=True),
    Rule("unroll_map", MAP, unroll_map, sugar=True),
    Rule("unroll_zip", ZIP, unroll_zip, sugar=True),
)
JOINS: Final = (
    Rule("order_joins", SEQ | PAR, order_joins),
    Rule("drop_empties", EMPTY, drop_empties),
    Rule("flatten_cross", CROSS, flatten_cross),
    Rule("flatten_plus", PLUS, flatten_plus),
)
REUSE: Final = (Rule("distribute_plus", PLUS, distribute_plus),)
RULES: Final = (*SUGAR, *JOINS, *REUSE)


def apply(rule: Rule, query: Query, around: Surroundings) -> Query:
    """The query after the rule was tried at every subtree, subtrees first; the same object if it changed none."""
    if not query.kinds & rule.kinds or (query.kind & (ZIP | CHAT) and not rule.sugar):
        return query
    if query.kind == RETRIEVE:  # its question is no part of a prompt
        return rule.rewrite(query, around)
    below = Surroundings(around.retriever, query.params) if isinstance(query, Generate) else around
    mask = rule.kinds
    before = query.subqueries
    after: list[Query] | None = None
    last = rewritten = query
    for index, child in enumerate(before):
        if not child.kinds & mask:
            continue
        if child is not last:  # samples of one call are one object
            last, rewritten = child, apply(rule, child, below)
        if rewritten is not child:
            after = after or list(before)
            after[index] = rewritten
    return rule.rewrite(query if after is None else query.with_subqueries(tuple(after)), around)


def shuffled(query: Query, rng: Random) -> Query:
    """A planned query with the children of every + in another order: the same, if their order is declared truly."""
    children = [shuffled(child, rng) for child in query.subqueries]
    if isinstance(query, Plus):
        rng.shuffle(children)
    return query.with_subqueries(tuple(children)) if children else query


def shows(query: Query) -> bool:
    """Whether a reader sees anything of the query, taking for granted that retrievals find something."""
    if not query.kinds & (EMPTY | MONAD | PRINT):
        return True
    if isinstance(query, Join):
        return any(shows(child) for child in query.children)
    if isinstance(query, Zip):
        return shows(query.second)
    if isinstance(query, Map):
        return bool(query.inputs)
    if query.kind == TEXT:
        return bool(query.kinds & TEXT)
    return query.kind not in (MONAD, PRINT)


def _spliced(children: tuple[Query, ...], kind: int) -> tuple[Query, ...]:
    parts: list[Query] = []
    for child in children:
        parts += child.subqueries if child.kind == kind else (child,)
    return tuple(parts)


def _preparing(reader: GenerateParams) -> GenerateParams:
    return GenerateParams(reader.model, max_tokens=1, temperature=0.0)
