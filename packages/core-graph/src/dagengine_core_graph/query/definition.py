"""What a span query means, by brute force: the oracle that planning and lowering are held to.

A query is evaluated behind a *view*, v: what stands before it. It adds to the view what it *shows*; ∅ is the empty
view.

- `S` `U` `A` `F`: shows the message, computed under v; a fragment is a user's. Without text it shows nothing.
- `⋈(q…)`, `seq(q…)`, `par(q…)`: shows what the first shows behind v, then what the second shows behind both, and so
  on.
- `+(q…)`: shows a bag of what each child shows behind ∅. So no child sees v or a sibling, and their order means
  nothing. A bag in a bag is one bag, a bag of one thing is that, a bag of nothing is nothing.
- `G(q)`: calls a model with what q shows behind ∅, and shows its answer as an assistant's message. The answer is read
  as it was computed, under that prompt; the prompt itself is not shown.
- `C(m…)`: as `G(⋈(m…))`.
- `R`: as + of the fragments that are found.
- `repeat(n, g)`: as + of n times g, each a sample of its own; n = 0 stands for 1.
- `map(p, t…)`: as + of `G(U t)`, each with the parameters p.
- `zip(a, b)`: as b, with a before each child of b that shows something; every copy of a is evaluated by itself. The
  children of `repeat`, `map`, `R` and `zip` are those of what they stand for, and what is no join is the only child of
  a ⋈.
- `monad(q)`: evaluates q behind ∅ and shows nothing.
- `print`: shows nothing.

A query has no side effects, so calls that do not read each other may run at once. Two equal calls are two samples.
G¹ (`prepare`) is a G of one token at temperature 0. The result of a query is a query: every call replaced by what
it answered, and what shows nothing left out.

This module shares no code with the rules or the lowering, and costs what an unrolled query is long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

from ..errors import QueryError
from .expressions import (
    NOTHING,
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
    Print,
    Query,
    Repeat,
    Retrieve,
    Role,
    Seq,
    Zip,
)


@dataclass(frozen=True)
class Shown:
    """A message as a reader meets it. `digest` tells apart what was computed under different views."""

    role: Role
    text: str
    digest: str


@dataclass(frozen=True)
class Bag:
    """What the children of a + show: each a view, in an order that is no one's choice (by digest)."""

    members: tuple[View, ...]
    digest: str


View: TypeAlias = tuple[Shown | Bag, ...]
Model: TypeAlias = Callable[[GenerateParams, View, int], str]
"""The answer to a prompt. The int counts earlier calls with equal parameters and an equal prompt."""


@dataclass(frozen=True)
class Call:
    """One call that ran."""

    params: GenerateParams
    prompt: View
    answer: str


@dataclass(frozen=True)
class Evaluation:
    """What a query shows, its result (an empty ⋈ if it shows nothing), and the calls in the order they ran."""

    view: View
    result: Query
    calls: tuple[Call, ...]


def evaluate(query: Query, model: Model, retriever: FindFragments | None = None) -> Evaluation:
    """Execute a query as the table says.

    Raises:
        QueryError: `invalid_request` for a call whose prompt shows nothing, or a retrieval without a retriever.
    """
    run = _Run(model, retriever)
    view, result = run.show(query, ())
    return Evaluation(view, result or NOTHING, tuple(run.calls))


def digest(view: View) -> str:
    """Equal for views that a model cannot tell apart."""
    return _digest("view", *(entry.digest for entry in view))


def shown(role: Role, text: str, before: View) -> Shown:
    """A message computed behind a view."""
    return Shown(role, text, _digest("message", role, text, digest(before)))


def answered(text: str, prompt: View) -> Shown:
    """An answer, computed behind its prompt."""
    return Shown("assistant", text, _digest("answer", text, digest(prompt)))


def bag(views: Sequence[View]) -> View:
    """What a + of subtrees that show these views shows."""
    members: list[View] = []
    for view in views:
        if len(view) == 1 and isinstance(view[0], Bag):
            members += view[0].members
        elif view:
            members.append(view)
    if len(members) < 2:
        return members[0] if members else ()
    members.sort(key=digest)
    return (Bag(tuple(members), _digest("bag", *map(digest, members))),)


@dataclass
class _Run:
    model: Model
    retriever: FindFragments | None
    calls: list[Call] = field(default_factory=list)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def show(self, query: Query, before: View) -> tuple[View, Query | None]:
        """What the query adds to the view before it, and its result."""
        match query:
            case Message(role, text):
                return ((shown(role, text, before),), query) if text else ((), None)
            case Fragment(text):
                return ((shown("user", text, before),), query) if text else ((), None)
            case Print():
                return (), None
            case Monad(hidden):
                self.show(hidden, ())
                return (), None
            case Plus(children):
                shows = [self.show(child, ()) for child in children]
                return bag([view for view, _ in shows]), _joined(Plus, [result for _, result in shows])
            case Cross(children) | Seq(children) | Par(children):
                return self.ordered(type(query), children, before)
            case Generate(params, prompt):
                return self.call(params, prompt)
            case Chat(params, messages):
                return self.call(params, Cross(messages))
            case Repeat() | Map() | Retrieve() | Zip():
                kind, members = self.members(query)
                return self.show(kind(members), before)
            case _:
                raise TypeError(f"{query!r} is no query")

    def ordered(self, kind: type[Join], children: Sequence[Query], before: View) -> tuple[View, Query | None]:
        added: View = ()
        results = []
        for child in children:
            view, result = self.show(child, before + added)
            added += view
            results.append(result)
        return added, _joined(kind, results)

    def call(self, params: GenerateParams, prompt: Query) -> tuple[View, Query | None]:
        view, _ = self.show(prompt, ())
        if not view:
            raise QueryError("invalid_request", "the input of a g shows nothing")
        equal = repr(params), digest(view)
        text = self.model(params, view, self.seen[equal])
        self.seen[equal] += 1
        self.calls.append(Call(params, view, text))
        return (answered(text, view),), Message("assistant", text)

    def members(self, query: Query) -> tuple[type[Join], tuple[Query, ...]]:
        """The join that a query is by definition: which kind, and of what."""
        match query:
            case Plus(children) | Cross(children) | Seq(children) | Par(children):
                return type(query), children
            case Repeat(_, generate):
                return Plus, (generate,) * query.count
            case Map(params, inputs):
                return Plus, tuple(Generate(params, Message("user", text)) for text in inputs)
            case Retrieve():
                if self.retriever is None:
                    raise QueryError("invalid_request", "a retrieval needs a retriever")
                found = self.retriever(query)
                return Plus, tuple(Fragment(piece) if isinstance(piece, str) else piece for piece in found)
            case Zip(first, second):
                kind, members = self.members(second)
                pairs = ((first, member) if self.shows(member) else (member,) for member in members)
                return kind, tuple(part for pair in pairs for part in pair)
        return Cross, (query,)

    def shows(self, query: Query) -> bool:
        return bool(_Run(lambda *_: "", self.retriever).show(query, ())[0])


def _joined(kind: type[Join], results: Sequence[Query | None]) -> Query | None:
    kept = tuple(result for result in results if result is not None)
    return kind(kept) if kept else None


def _digest(*parts: str) -> str:
    whole = sha256()
    for part in parts:
        encoded = part.encode()
        whole.update(b"%d:" % len(encoded))
        whole.update(encoded)
    return whole.hexdigest()
