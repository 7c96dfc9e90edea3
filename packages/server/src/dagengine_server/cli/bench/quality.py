"""`dagengine bench quality`: what reading fragments as states does to answers, and what their order does.

The same haystacks, judged by one call each, in the order given and shuffled:

    plain prompt   fragments as one text, each seeing those before it
    linear         fragments that see no others, laid out one after another
    native         fragments that see no others, each at the positions it was encoded at
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import say
from . import arguments
from .arguments import Common, counts
from .haystack import CHANCE, Haystack, make_haystack, names_in
from .judged_figures import fraction, share, table
from .judging import Judged, Way, judge_all, opened
from .publish import publish
from .record import Figure, circumstances, command_line

if TYPE_CHECKING:
    from dagengine import LLM

FRAGMENTS = (1, 2, 4, 8, 16, 32)
PLAIN = Way("plain prompt", plain=True)
WAYS = (PLAIN, Way("linear"), Way("native", position="native"))
COLUMNS = (
    "fragments",
    "way",
    "right, given order",
    "right, shuffled",
    "same answer when shuffled",
    "same name when shuffled",
    "same answer as the plain prompt",
    "same name as the plain prompt",
    "right where plain is wrong",
    "wrong where plain is right",
)
ABOUT = f"""One call over all fragments, one of which has the needle; what a right answer is, `bench needle` says; by
chance {CHANCE:.1%} are right. *Same answer*: the same text. *Same name*: the same verdict, whether right or wrong. The
last two columns count questions, in the order given. Fractions of answers with their 95 % intervals (Wilson).
"""


@dataclass(frozen=True)
class Answers:
    """What one way made of every haystack: in the order given, and in other orders."""

    given: Sequence[Judged]
    shuffled: Sequence[Sequence[Judged]]


def quality(
    common: Common,
    fragments: Annotated[
        list[int] | None, typer.Option(help="of a haystack, repeatable  [default: 1, 2, 4, 8, 16, 32]")
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="of hay in a fragment")] = 2,
    runs: Annotated[int, typer.Option(min=1, help="haystacks of each size")] = 200,
    orders: Annotated[int, typer.Option(min=1, help="other orders of each, at most")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="fragments of the haystacks that run together")] = 256,
) -> None:
    """Answers to plain prompts and over fragments, under `linear` and `native`, as given and shuffled."""
    sizes = sorted(counts(fragments, FRAGMENTS, "fragments"))
    say(str(common.threads))
    where = circumstances(command_line("quality"), common.threads.count)
    figures: list[Figure] = []
    rows: list[list[object]] = []
    with opened(common, max(sizes), sentences, at_once) as bench:
        for size in sizes:
            found = _judge(bench.llm, common.seed, size, sentences, runs, orders, at_once)
            case = f"{common.label}, {size} fragments x {sentences} sentences"
            for way in WAYS:
                figures += _figures(case, bench.backend, way.name, found[way.name], found[PLAIN.name])
                rows.append(_row(size, way.name, found[way.name], found[PLAIN.name]))
    publish(
        "quality",
        figures,
        where.on(*bench.device),
        common.destination,
        (),
        f"{ABOUT}\n{table(COLUMNS, rows)}",
    )


command = arguments.command(quality)


def other_orders(stack: Haystack, most: int, rng: Random) -> list[Haystack]:
    """The haystack in different other orders: as many as asked for, fewer where there are no more."""
    found: list[tuple[str, ...]] = []
    for _ in range(20 * most):
        order = tuple(rng.sample(stack.fragments, len(stack.fragments)))
        if order != stack.fragments and order not in found:
            found.append(order)
        if len(found) == most:
            break
    return [Haystack(stack.name, order) for order in found]


def _judge(
    llm: LLM, seed: int, size: int, sentences: int, runs: int, orders: int, at_once: int
) -> dict[str, Answers]:
    """By way."""
    stacks, others = [], []
    for run in range(runs):
        rng = Random(f"{seed} {size} {run}")
        stacks.append(make_haystack(size, sentences, rng))
        others.append(other_orders(stacks[-1], orders, rng))
    found = {}
    for way in WAYS:
        flat = [stack for stack, more in zip(stacks, others, strict=True) for stack in (stack, *more)]
        judged = iter(judge_all(llm, way, flat, at_once))
        answers = [[next(judged) for _ in range(1 + len(more))] for more in others]
        found[way.name] = Answers([found[0] for found in answers], [found[1:] for found in answers])
        right = share(sum(one.right for one in found[way.name].given), runs)
        say(f"{size} fragments, {way.name}: {right} right as given")
    return found


@dataclass(frozen=True)
class _Counts:
    """Hits and samples of each column."""

    right: tuple[int, int]
    right_shuffled: tuple[int, int]
    same_text: tuple[int, int]
    same_name: tuple[int, int]
    plain_text: tuple[int, int]
    plain_name: tuple[int, int]
    gained: int
    lost: int

    @classmethod
    def of(cls, found: Answers, plain: Answers) -> _Counts:
        pairs = [(g, o) for g, others in zip(found.given, found.shuffled, strict=True) for o in others]
        beside = list(zip(found.given, plain.given, strict=True))
        return cls(
            _hits([one.right for one in found.given]),
            _hits([other.right for _, other in pairs]),
            _hits([given.answer == other.answer for given, other in pairs]),
            _hits([names_in(given.answer) == names_in(other.answer) for given, other in pairs]),
            _hits([one.answer == base.answer for one, base in beside]),
            _hits([names_in(one.answer) == names_in(base.answer) for one, base in beside]),
            sum(one.right and not base.right for one, base in beside),
            sum(base.right and not one.right for one, base in beside),
        )


def _figures(case: str, backend: str, name: str, found: Answers, plain: Answers) -> list[Figure]:
    counted, base = _Counts.of(found, plain), _Counts.of(plain, plain)
    n = len(found.given)

    def beside(metric: str, hits: tuple[int, int], of: tuple[int, int]) -> list[Figure]:
        first, *interval = fraction(case, backend, f"{metric}, {name}", *hits)
        if found is plain:
            return [first.against("chance", CHANCE), *interval]
        return [first.against(PLAIN.name, of[0] / of[1]), *interval]

    figures = beside("right answers, given order", counted.right, base.right)
    if counted.same_text[1]:
        figures += beside("right answers, shuffled", counted.right_shuffled, base.right_shuffled)
        for metric, hits in (
            ("same answer when shuffled", counted.same_text),
            ("same name when shuffled", counted.same_name),
        ):
            figures += fraction(case, backend, f"{metric}, {name}", *hits)
    if found is not plain:
        for metric, hits in (
            ("same answer as the plain prompt", counted.plain_text),
            ("same name as the plain prompt", counted.plain_name),
            ("right where the plain prompt is wrong", (counted.gained, n)),
            ("wrong where the plain prompt is right", (counted.lost, n)),
        ):
            first = replace(
                Figure.count(case, backend, f"{metric}, {name}", hits[0] / hits[1], "fraction"), n=n
            )
            figures.append(first)
    return figures


def _row(size: int, name: str, found: Answers, plain: Answers) -> list[object]:
    counted, alone = _Counts.of(found, plain), found is plain
    several = counted.same_text[1] > 0
    return [
        size,
        name,
        share(*counted.right),
        share(*counted.right_shuffled) if several else "",
        share(*counted.same_text) if several else "",
        share(*counted.same_name) if several else "",
        "" if alone else share(*counted.plain_text),
        "" if alone else share(*counted.plain_name),
        "" if alone else counted.gained,
        "" if alone else counted.lost,
    ]


def _hits(found: Sequence[bool]) -> tuple[int, int]:
    return sum(found), len(found)
