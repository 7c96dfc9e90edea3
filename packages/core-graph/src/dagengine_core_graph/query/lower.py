"""Lowering: a planned query as nodes of a context graph, parents first, ready to be tokenized and run.

    G(⋈(S, +(F₁, F₂), U))      n0 [S]   n1 [F₁]   n2 [F₂]   n3 [U, generation prompt] reads n0, n1, n2

- Messages that follow each other under ⋈ are one node; it inherits what stands before it.
- A child of a + starts without references: it sees neither its siblings nor what stands before the +.
- A `g` is a node that samples, over the last messages of its input; whoever holds the `g` reads its `turn` as it
  was computed.
- No node stands for two subtrees. Left out is only what nobody reads, samples nothing, and is computed anyway: a
  preparation (under `monad`) that equals a node that is read, or another preparation.

It knows texts and roles: no tokens, no padding, no sentinels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ..context import Artifact, Inherit, Reference
from ..errors import QueryError
from .expressions import (
    CALLS,
    CROSS,
    GENERATE,
    MONAD,
    PLUS,
    TEXT,
    Fragment,
    Generate,
    GenerateParams,
    Leaf,
    Message,
    Query,
    join_path,
)
from .lowered import Commuting, LoweredQuery, Order, QueryNode
from .plan import Plan
from .rules import shows

_Items: TypeAlias = tuple["int | _Group", ...]
"""What a scope shows, in order: `i` inherits draft i, `~i` reads its turn."""


class _Group(NamedTuple):
    """What the children of a + show, each by itself."""

    members: tuple[_Items, ...]


class _Draft(NamedTuple):
    """A node before it is known which are left out. Drafts of one `key` have equal inputs under equal contexts."""

    path: str
    parts: tuple[Leaf, ...]
    items: _Items
    generate: GenerateParams | None
    continues: bool
    key: int


class _Scope(NamedTuple):
    """What a subtree shows behind nothing: what has nodes already, then the messages that have none yet."""

    items: _Items
    parts: tuple[Leaf, ...]
    path: str


def lower(planned: Plan | Query) -> LoweredQuery:
    """The nodes of a planned query.

    Raises:
        QueryError: `invalid_request` for a query that was not planned, or a `g` whose input shows nothing, with the
            path of the subtree.
    """
    query = planned.query if isinstance(planned, Plan) else planned
    lowering = _Lowering()
    lowering.root(query, "")
    return lowering.finish(query)


class _Lowering:
    """Drafts in the order in which calls run. Preparations without calls come last here, and first in the graph."""

    def __init__(self) -> None:
        self.drafts: list[_Draft] = []
        self.keys: dict[object, int] = {}
        self.prepared: set[int] = set()
        self.answers: list[int] = []
        self.waiting: list[tuple[Query, str, bool]] = []
        self.left_out = 0

    def root(self, query: Query, path: str) -> None:
        """What no call reads: calls give answers, and messages are as they are."""
        if query.kind == GENERATE:
            self.answers.append(self.call(query, path))
        elif query.kind & (PLUS | CROSS):
            for index, child in enumerate(query.subqueries):
                if child.kind != TEXT:
                    self.root(child, join_path(path, query.step(index)))
        elif query.kind == MONAD:
            self.hide(query.subqueries[0], join_path(path, "monad"), False)
        elif query.kind != TEXT:
            raise _unplanned(query, path)

    def scope(self, query: Query, path: str, continues: bool) -> _Scope:
        """What the subtree shows where nothing stands before it."""
        kind = query.kind
        if kind == TEXT:
            return _Scope((), (query,), path)  # type: ignore[arg-type]
        if kind == CROSS:
            return self.cross(query, path, continues)
        if kind == PLUS:
            return _Scope(self.plus(query, path), (), path)
        if kind == GENERATE:
            return _Scope((~self.call(query, path),), (), path)
        if kind == MONAD:
            self.hide(query.subqueries[0], join_path(path, "monad"), False)
            return _Scope((), (), path)
        raise _unplanned(query, path)

    def cross(self, query: Query, path: str, continues: bool) -> _Scope:
        prefix = f"{path}.cross[" if path else "cross["
        items: _Items = ()
        parts: list[Leaf] = []
        start = path
        for index, child in enumerate(query.subqueries):
            here = f"{prefix}{index}]"
            if child.kind == TEXT:
                start = start if parts else here
                parts.append(child)  # type: ignore[arg-type]
                continue
            if child.kind == CROSS:
                raise _unplanned(child, here)
            if parts and shows(child):
                items = (self.add(start, tuple(parts), items, None, continues),)
                parts.clear()
            items += self.scope(child, here, True).items
        return _Scope(items, tuple(parts), start)

    def plus(self, query: Query, path: str) -> _Items:
        prefix = f"{path}.plus[" if path else "plus["
        members: list[_Items] = []
        before: Query | None = None
        for index, child in enumerate(query.subqueries):
            here = f"{prefix}{index}]"
            if child.kind == TEXT:
                members.append((self.add(here, (child,), (), None, True),))  # type: ignore[arg-type]
                before = None
                continue
            if child is before:
                members.append((~self.sample(f"{here}.g"),))
                continue
            count = len(self.drafts)
            shown = self.materialize(self.scope(child, here, True), True)
            alone = child.kind == GENERATE and not child.kinds & MONAD and len(self.drafts) == count + 1
            before = child if alone else None
            if len(shown) == 1 and isinstance(shown[0], _Group):
                members += shown[0].members
            elif shown:
                members.append(shown)
        if len(members) < 2:
            return members[0] if members else ()
        return (_Group(tuple(members)),)

    def materialize(self, scope: _Scope, continues: bool) -> _Items:
        """What the scope shows, all of it in nodes."""
        if not scope.parts:
            return scope.items
        return (self.add(scope.path, scope.parts, scope.items, None, continues),)

    def call(self, query: Query, path: str) -> int:
        assert isinstance(query, Generate)
        prompt = self.scope(query.input, join_path(path, "g.input"), False)
        if not prompt.items and not prompt.parts:
            raise QueryError("invalid_request", "the input of a g shows nothing", join_path(path, "g.input"))
        return self.add(join_path(path, "g"), prompt.parts, prompt.items, query.params, False)

    def sample(self, path: str) -> int:
        """One more of the call before it, whose input needed no node of its own."""
        _, parts, items, generate, continues, key = self.drafts[-1]
        self.drafts.append(_Draft(path, parts, items, generate, continues, key))
        return len(self.drafts) - 1

    def add(
        self,
        path: str,
        parts: tuple[Leaf, ...],
        items: _Items,
        generate: GenerateParams | None,
        continues: bool,
    ) -> int:
        equal: tuple[int, ...] = ()
        if items:
            drafts = self.drafts
            equal = tuple([drafts[read].key if read >= 0 else read for read in _flat(items)])
            continues = True
        texts = tuple([(part.role, part.text) for part in parts])
        key = self.keys.setdefault((texts, equal, continues), len(self.keys))
        if generate is None:
            self.prepared.add(key)
        self.drafts.append(_Draft(path, parts, items, generate, continues, key))
        return len(self.drafts) - 1

    def hide(self, query: Query, path: str, continues: bool) -> None:
        """What is executed and shown to nobody: calls in their place, everything else when all calls are known."""
        if query.kind == GENERATE:
            assert isinstance(query, Generate)
            if not query.prepares or query.input.kinds & CALLS:
                self.call(query, path)
            else:
                self.waiting.append((query.input, join_path(path, "g.input"), False))
        elif query.kind == MONAD:
            self.hide(query.subqueries[0], join_path(path, "monad"), continues)
        elif not query.kinds & CALLS:
            self.waiting.append((query, path, continues))
        elif query.kind == PLUS:
            for index, child in enumerate(query.subqueries):
                self.hide(child, join_path(path, query.step(index)), True)
        else:
            self.materialize(self.scope(query, path, continues), continues)

    def prepare(self, query: Query, path: str, continues: bool) -> None:
        """Nodes for what is hidden and holds no call, but for those that another node has computed anyway."""
        if query.kind == PLUS:
            for index, child in enumerate(query.subqueries):
                if isinstance(child, Message | Fragment):
                    if self.keys.get((((child.role, child.text),), (), True)) in self.prepared:
                        self.left_out += 1
                        continue
                self.prepare(child, join_path(path, query.step(index)), True)
            return
        known, first = set(self.prepared), len(self.drafts)
        items = self.materialize(self.scope(query, path, continues), continues)
        if all(self.drafts[item].key in known for item in _flat(items)):
            self.left_out += len(self.drafts) - first
            del self.drafts[first:]
            self.prepared = known

    def finish(self, query: Query) -> LoweredQuery:
        calls = len(self.drafts)
        while self.waiting:
            waiting, self.waiting = self.waiting, []
            for hidden in waiting:
                self.prepare(*hidden)
        ordered = [*range(calls, len(self.drafts)), *range(calls)]
        names = [""] * len(ordered)
        prepared: dict[int, str] = {}
        called: dict[int, str] = {}
        samples: dict[object, int] = {}
        nodes = []
        for number, index in enumerate(ordered):
            path, parts, items, generate, continues, key = self.drafts[index]
            names[index] = name = f"n{number}"
            reuses = prepared.get(key)
            sample = 0
            if generate is None:
                if reuses is None:
                    reuses = called.get(key)
                    prepared[key] = name
            else:
                reuses = reuses or called.get(key)
                called.setdefault(key, name)
                sample = samples.get((key, generate), 0)
                samples[key, generate] = sample + 1
            context: list[Reference] = []
            order = _order(items, names, context) if items else ()
            nodes.append(
                QueryNode(name, path, parts, tuple(context), order, generate, continues, sample, reuses)
            )
        return LoweredQuery(
            query, tuple(nodes), tuple([names[index] for index in self.answers]), self.left_out
        )


def _flat(items: _Items) -> list[int]:
    found: list[int] = []
    for item in items:
        if isinstance(item, int):
            found.append(item)
            continue
        for member in item.members:
            found += member if len(member) == 1 and isinstance(member[0], int) else _flat(member)  # type: ignore[arg-type]
    return found


def _order(items: _Items, names: Sequence[str], context: list[Reference]) -> Order:
    """Append the references that the items stand for; returns which of their order means nothing."""
    order: list[int | Commuting] = []
    for item in items:
        if isinstance(item, int):
            order.append(len(context))
            context.append(Inherit(names[item]) if item >= 0 else Artifact(names[~item], "turn"))
        else:
            order.append(Commuting(tuple([_order(member, names, context) for member in item.members])))
    return tuple(order)


def _unplanned(query: Query, path: str) -> QueryError:
    return QueryError(
        "invalid_request", f"plan the query first; a {query.tag} does not stand here", path or query.tag
    )
