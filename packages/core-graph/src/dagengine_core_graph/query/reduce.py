"""Attention locality: a wide judge as a tree of narrow ones, so that no call reads many candidates at once.

    G(⋈(S, +(c₁, …, c₈), U))   →   J(J(J(c₁, c₂), J(c₃, c₄)), J(J(c₅, c₆), J(c₇, c₈)))
    J(x, y) = G(⋈(S, +(x, y), U))

This is not exact: other calls are made, and their answers, not the candidates, reach the last one. It rests on the
client's declaration that the reducer is closed (`Generate.closed`), and is done only where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import QueryError, short
from .expressions import (
    CALLS,
    GENERATE,
    Cross,
    Generate,
    Monad,
    Plus,
    Query,
    join_path,
    walk,
)


@dataclass(frozen=True)
class Reduction:
    """One judge that was reduced.

    Attributes:
        path: of the judge, in the tree before.
        width: candidates that it read.
        arity: candidates that each call reads now, at most.
        calls_added: calls besides the judge itself.
        rounds: calls on the longest way from a candidate to the answer; it was 1.
    """

    path: str
    width: int
    arity: int
    calls_added: int
    rounds: int


def reduce_judges(query: Query, arity: int) -> tuple[Query, tuple[Reduction, ...]]:
    """Reduce every wide judge of a planned query that is declared closed.

    A judge is a `g` whose input is a + or a ⋈ with one + of more than `arity` candidates; what stands beside the +
    is repeated in every call. Judges inside others are reduced first.

    Raises:
        QueryError: `invalid_request`, with the path of the judge: an arity below 2, no judge that is declared closed,
            or one of which calls or several wide + stand beside the candidates.
    """
    if not isinstance(arity, int) or isinstance(arity, bool) or arity < 2:
        raise QueryError("invalid_request", f"an arity is an integer from 2, not {short(arity)}", "reduce")
    calls = [(path, found) for path, found in walk(query) if isinstance(found, Generate)]
    if not any(call.closed for _, call in calls):
        wide = [path for path, call in calls if any(_width(part) > arity for part in _parts(call))]
        raise QueryError(
            "invalid_request",
            "reducing changes what is asked; declare that the judge's answers keep what the next one needs (closed)",
            join_path(wide[0], "g") if wide else "reduce",
        )
    reductions: list[Reduction] = []
    reduced = _reduce(query, "", arity, reductions)
    return reduced if reductions else query, tuple(reductions)


def _reduce(query: Query, path: str, arity: int, reductions: list[Reduction]) -> Query:
    if not query.kinds & GENERATE:
        return query
    below = (
        _reduce(child, join_path(path, query.step(index)), arity, reductions)
        for index, child in enumerate(query.subqueries)
    )
    found = query.with_subqueries(tuple(below))
    if not isinstance(found, Generate) or not found.closed:
        return found
    parts = _parts(found)
    wide = [index for index, part in enumerate(parts) if _width(part) > arity]
    if not wide:
        return found
    beside = tuple(part for index, part in enumerate(parts) if index != wide[0])
    if len(wide) > 1 or any(part.kinds & CALLS for part in beside):
        raise QueryError(
            "invalid_request",
            "beside the candidates of a judge to be reduced stand messages only; they are repeated in every call",
            join_path(path, "g.input"),
        )
    return _tree(found, parts, wide[0], path, arity, reductions)


def _tree(
    judge: Generate,
    parts: tuple[Query, ...],
    place: int,
    path: str,
    arity: int,
    reductions: list[Reduction],
) -> Query:
    before, after = parts[:place], parts[place + 1 :]
    children = parts[place].subqueries
    hidden = [child for child in children if isinstance(child, Monad)]
    candidates = [child for child in children if not isinstance(child, Monad)]
    width, added, rounds = len(candidates), 0, 1

    def call(group: list[Query]) -> Query:
        plus = Plus(tuple(group))
        return replace(judge, input=Cross((*before, plus, *after)) if before or after else plus)

    while len(candidates) > arity:
        groups = [candidates[start : start + arity] for start in range(0, len(candidates), arity)]
        candidates = [call(group) if len(group) > 1 else group[0] for group in groups]
        added += sum(len(group) > 1 for group in groups)
        rounds += 1
    reductions.append(Reduction(join_path(path, "g"), width, arity, added, rounds))
    return call([*hidden, *candidates])


def _parts(call: Generate) -> tuple[Query, ...]:
    return call.input.subqueries if isinstance(call.input, Cross) else (call.input,)


def _width(part: Query) -> int:
    """Candidates of a +; 0 for anything else."""
    return sum(not isinstance(child, Monad) for child in part.subqueries) if isinstance(part, Plus) else 0
