"""Planning: the rules, applied everywhere until none changes anything, with the tree after each.

A planned query is made of messages, fragments, `g`, `+`, `⋈` and `monad` only, no ⋈ directly in a ⋈ and no + in a
+. It means what the query meant, unless a reduction was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import QueryError
from .expressions import (
    EMPTY,
    GENERATE,
    MAX_DEPTH,
    MONAD,
    PRINT,
    RETRIEVE,
    FindFragments,
    Print,
    Query,
    Retrieve,
    join_path,
    walk,
)
from .reduce import Reduction, reduce_judges
from .rules import JOINS, REUSE, SUGAR, Rule, Surroundings, apply, shows

MAX_NODES = 10_000
DEEPEST_PLAN = 3 * MAX_DEPTH


@dataclass(frozen=True)
class Step:
    """A rule that changed something, and the whole query after it."""

    rule: str
    query: Query


@dataclass(frozen=True)
class Plan:
    """A query as it was given and as it is to be run.

    Attributes:
        steps: every change, in order.
        reductions: what was reduced, outermost last; none unless asked for.
        notes: the texts of `print`, in order.
    """

    source: Query
    query: Query
    steps: tuple[Step, ...]
    reductions: tuple[Reduction, ...]
    notes: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether the planned query means what the given one meant."""
        return not self.reductions

    @property
    def rewrites(self) -> tuple[str, ...]:
        """Names of the rules that changed something, in order of their first change."""
        return tuple(dict.fromkeys(step.rule for step in self.steps))


def plan(
    query: Query,
    *,
    retriever: FindFragments | None = None,
    reduce: int | None = None,
    max_nodes: int = MAX_NODES,
) -> Plan:
    """Rewrite a query to a fixed point of the rules.

    Args:
        retriever: finds the fragments of retrievals.
        reduce: reduce wide judges that are declared closed to groups of so many candidates, at least 2. This
            changes what is asked, and what comes out.
        max_nodes: refuse queries that stand for more leaves and calls.

    Raises:
        QueryError: `invalid_request` (a `g` whose input shows nothing, a retrieval without a retriever, a reduction
            of what is not declared closed) or `capacity`, with the path of the subtree; what the retriever raises.
    """
    if query.depth > MAX_DEPTH:
        raise QueryError("capacity", f"a query nests at most {MAX_DEPTH} constructors, not {query.depth}")
    _check_size(query, max_nodes)
    _check_inputs(query)
    if retriever is None and query.kinds & RETRIEVE:
        path = next(path for path, found in walk(query) if isinstance(found, Retrieve))
        raise QueryError("invalid_request", "a retrieval needs a retriever; give one", path or "retrieve")
    around = Surroundings(retriever)
    steps: list[Step] = []
    found = _fixed_point(SUGAR, query, around, steps)
    _check_size(found, max_nodes)
    found = _fixed_point(JOINS, found, around, steps)
    _check_inputs(found)
    reductions: tuple[Reduction, ...] = ()
    if reduce is not None:
        reduced, reductions = reduce_judges(found, reduce)
        _check_size(reduced, max_nodes)
        if reduced is not found:
            steps.append(Step("reduce_judges", reduced))
        found = reduced
    if found.depth > DEEPEST_PLAN:
        raise QueryError("capacity", f"the planned query nests more than {DEEPEST_PLAN} constructors")
    found = _fixed_point((*JOINS, *REUSE), found, around, steps)
    notes = (
        tuple(note.text for _, note in walk(query) if isinstance(note, Print)) if query.kinds & PRINT else ()
    )
    return Plan(query, found, tuple(steps), reductions, notes)


def _fixed_point(rules: Sequence[Rule], query: Query, around: Surroundings, steps: list[Step]) -> Query:
    before = None
    while query is not before:
        before = query
        for rule in rules:
            after = apply(rule, query, around)
            if after is not query:
                steps.append(Step(rule.name, after))
                query = after
    return query


def _check_size(query: Query, max_nodes: int) -> None:
    if query.size > max_nodes:
        raise QueryError(
            "capacity", f"a query stands for at most {max_nodes} leaves and calls, not {query.size}"
        )


def _check_inputs(query: Query, path: str = "") -> None:
    """Refuse calls without a prompt. Where nothing is empty or hidden, every prompt shows something."""
    if not (query.kinds & GENERATE and query.kinds & (EMPTY | MONAD)):
        return
    for index, child in enumerate(query.subqueries):
        if query.kind == GENERATE and not shows(child):
            raise QueryError(
                "invalid_request",
                "the input of a g shows nothing; give it a message with text",
                join_path(path, query.step(index)),
            )
        if child.kinds & GENERATE:
            _check_inputs(child, join_path(path, query.step(index)))
