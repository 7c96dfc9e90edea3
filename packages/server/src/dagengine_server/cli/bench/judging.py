"""Judges over haystacks as span queries: what is asked, many at once, and what became of every call.

fragments    G(⋈(+(F₁, … Fₙ), U)): a fragment sees no other
plain        G(⋈(+(F₁), F₂, … Fₙ, U)): each sees those before it; the tokens are the same, since here too F₁ is a
             child of a +, which takes no default system turn
k            the judge reduced to calls of at most k candidates each (`reduce`), which may change what it answers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagengine_core_graph.query import (
    Cross,
    Fragment,
    Generate,
    Message,
    Plus,
    Query,
    cross,
    g,
    join_path,
    plan,
    plus,
)

from ..console import CommandError, say
from .arguments import Common
from .haystack import QUESTION, Haystack, is_right, names_in

if TYPE_CHECKING:
    from dagengine import LLM
    from dagengine.query_results import QueryResult

ANSWER = 16
"""Tokens of an answer, at most."""
TOKENS_PER_SENTENCE, TOKENS_PER_MESSAGE = 20, 12
"""More than an English sentence of the hay takes, and than a chat template adds; the pool is made for it."""


@dataclass(frozen=True)
class Way:
    """How haystacks are judged.

    Attributes:
        arity: most candidates of a call; None: all of them, by one.
        plain: whether fragments see those before them.
        position: the position policy.
    """

    name: str
    arity: int | None = None
    plain: bool = False
    position: str = "linear"

    def query(self, fragments: Sequence[str]) -> tuple[Query, int]:
        """The planned query, and the calls on the longest way from a fragment to the answer."""
        judge = g(
            cross(plus(*fragments), QUESTION),
            max_tokens=ANSWER,
            temperature=0.0,
            closed=self.arity is not None,
        )
        planned = plan(judge, reduce=self.arity)
        rounds = max((found.rounds for found in planned.reductions), default=1)
        return (one_prompt_each(planned.query) if self.plain else planned.query), rounds


@dataclass(frozen=True)
class Judged:
    """A haystack and what a judge made of it.

    Attributes:
        rounds: calls on the longest way to the answer.
        seen: input tokens of all calls, context included. own: those that are computed, where nothing is cached.
        sampled: tokens of all calls.
        kept: per call that saw the needle, whether its answer names it and nobody else.
        strays: per call that did not, whether its answer names somebody.
    """

    name: str
    answer: str
    rounds: int
    seen: int
    own: int
    sampled: int
    kept: tuple[bool, ...]
    strays: tuple[bool, ...]

    @property
    def calls(self) -> int:
        return len(self.kept) + len(self.strays)

    @property
    def right(self) -> bool:
        return is_right(self.answer, self.name)


def one_prompt_each(query: Query) -> Query:
    """The same calls over plain prompts: of every +, which must come first in its prompt, only the first child
    stands by itself."""
    below = tuple(one_prompt_each(found) for found in query.subqueries)
    if isinstance(query, Plus):
        return Cross((Plus(below[:1]), *below[1:]))
    return query.with_subqueries(below) if below else query


def judge_all(
    llm: LLM, way: Way, stacks: Sequence[Haystack], at_once: int, report: Callable[[int], None] | None = None
) -> list[Judged]:
    """Judge haystacks one way, so many fragments at once; nothing is kept for a later run.

    Args:
        report: called with the number of haystacks judged so far.

    Raises:
        DagError: what the first query that failed ended with.
    """
    queries = [way.query(stack.fragments) for stack in stacks]
    done = 0

    def count(_: object) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done)

    widest = max(len(stack.fragments) for stack in stacks)
    found = llm.query_bulk(
        [query for query, _ in queries],
        order="given",
        window=max(1, at_once // widest),
        position=way.position,
        on_item=count,
    )
    for error in found.errors.values():
        raise error
    results = [result for result in found.results if result is not None]
    return [
        _judged(llm, stack.name, result, rounds)
        for stack, result, (_, rounds) in zip(stacks, results, queries, strict=True)
    ]


@dataclass(frozen=True)
class Bench:
    """An engine that judges: `device` in words with its versions, `backend` its attention backend."""

    llm: LLM
    device: tuple[str, dict[str, str]]
    backend: str


@contextmanager
def opened(common: Common, fragments: int, sentences: int, at_once: int) -> Iterator[Bench]:
    """An engine for haystacks of up to so many fragments, which keeps none of them after a query.

    Raises: CommandError for a shape: its random weights answer nothing.
    """
    if common.shape is not None:
        raise CommandError("the hay is text: give a model with a tokenizer and a chat template", "shape")
    from dagengine import LLM
    from dagengine.devices import describe
    from dagengine.fragments import FragmentStates

    say(f"loading {common.label}")
    with common.folder() as model:
        engine = common.engine(tokens=_room(fragments, sentences, at_once), sequences=at_once)
        with LLM(model, **engine) as llm:
            llm.fragments = FragmentStates(most=0)
            device, backend = llm.engine.ask(
                lambda core: (describe(core.attention.device), core.default_backend)
            )
            yield Bench(llm, device, backend)


def _room(fragments: int, sentences: int, at_once: int) -> int:
    """KV tokens that judging takes at once, at most: fragments, and calls that see two of them each anew."""
    fragment = sentences * TOKENS_PER_SENTENCE + TOKENS_PER_MESSAGE
    return max(at_once, fragments) * (3 * fragment + 3 * (ANSWER + TOKENS_PER_MESSAGE))


def _judged(llm: LLM, name: str, result: QueryResult, rounds: int) -> Judged:
    answers = {
        call["path"]: llm.tokenizer.decode(call["output"]["token_ids"]) for call in result.record["calls"]
    }
    calls = list(_sightings(result.plan.query, "", answers, name))
    return Judged(
        name,
        result.answers[0].text,
        rounds,
        result.usage.prompt_tokens,
        result.tokens.input,
        result.usage.completion_tokens,
        tuple(named == {name} for saw, named in calls if saw),
        tuple(bool(named) for saw, named in calls if not saw),
    )


def _sightings(
    query: Query, path: str, answers: dict[str, str], name: str
) -> Iterator[tuple[bool, frozenset[str]]]:
    """Every call: whether it saw `name`, in a message or in the answer of a call below it, and whom it named."""
    for index, child in enumerate(query.subqueries):
        yield from _sightings(child, join_path(path, query.step(index)), answers, name)
    if isinstance(query, Generate):
        shown = _shown(query.input, join_path(path, query.step(0)), answers)
        yield any(name in names_in(text) for text in shown), names_in(answers[join_path(path, "g")])


def _shown(query: Query, path: str, answers: dict[str, str]) -> Iterator[str]:
    """The texts of messages and of answers that a reader of the subtree sees."""
    if isinstance(query, Generate):
        yield answers[join_path(path, "g")]
    elif isinstance(query, Message | Fragment):
        yield query.text
    else:
        for index, child in enumerate(query.subqueries):
            yield from _shown(child, join_path(path, query.step(index)), answers)
