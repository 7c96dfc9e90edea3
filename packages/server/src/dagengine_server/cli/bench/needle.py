"""`dagengine bench needle`: a name among growing hay, asked of one wide judge and of the same judge reduced.

Four ways, over the same haystacks: a flat judge and one reduced to calls of at most k candidates, each over fragments
that see no others (span queries) and over plain prompts. What a right answer is, is fixed in `haystack`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import say
from . import arguments
from .arguments import Common, counts
from .haystack import CHANCE, make_haystack
from .judged_figures import fraction, mean, share, table
from .judging import Judged, Way, judge_all, opened
from .publish import publish
from .record import Figure, circumstances, command_line
from .report import Bar, ratio_of

if TYPE_CHECKING:
    from dagengine import LLM

FRAGMENTS = (2, 4, 8, 16, 32, 64)
RIGHT = "right answers"
FLAT, PLAIN = "flat", "flat, plain prompt"
SHORTEST = "shortest hay"
BARS = (
    Bar(
        "the flat judge at the shortest hay: lower end of its 95 % interval against chance",
        SHORTEST,
        f"{RIGHT}, from",
        "chance",
        ratio_of,
        1.0,
        "x chance",
        True,
    ),
)
COLUMNS = (
    "fragments",
    "way",
    "right (95 %)",
    "above chance",
    "calls",
    "rounds",
    "tokens seen",
    "tokens computed",
    "tokens sampled",
    "kept by a call that saw it",
    "names from calls that did not",
)
ABOUT = f"""One fragment has the needle. *Flat*: one judge over all fragments, which see no others. *k*: the same
judge reduced to calls of at most k candidates, whose answers the next round judges. *Plain prompt*: the same calls
where each fragment sees those before it. Right is an answer that names the right one of 26 names and no other; by
naming any one of them {CHANCE:.1%} are. Calls, rounds and tokens are means per question; *computed* is where nothing is
cached. *Kept* says whether the reducer is as closed as it was declared.
"""


def needle(
    common: Common,
    fragments: Annotated[
        list[int] | None, typer.Option(help="of a haystack, repeatable  [default: 2, 4, 8, 16, 32, 64]")
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="of hay in a fragment")] = 2,
    k: Annotated[int, typer.Option("--k", min=2, help="most candidates of a reduced call")] = 2,
    runs: Annotated[int, typer.Option(min=1, help="haystacks of each size")] = 200,
    at_once: Annotated[int, typer.Option(min=1, help="fragments of the haystacks that run together")] = 256,
) -> None:
    """A name among growing hay: one wide judge against the same judge reduced to narrow ones. Needs a real model."""
    sizes = sorted(counts(fragments, FRAGMENTS, "fragments"))
    say(str(common.threads))
    where = circumstances(command_line("needle"), common.threads.count)
    figures: list[Figure] = []
    rows: list[list[object]] = []
    with opened(common, max(sizes), sentences, at_once) as bench:
        for size in sizes:
            found = _judge(bench.llm, common.seed, size, sentences, k, runs, at_once)
            case = f"{common.label}, {size} fragments x {sentences} sentences"
            figures += _figures(case, bench.backend, found, k)
            if size == sizes[0]:
                shortest = _right(f"{case}, {SHORTEST}", bench.backend, f"{RIGHT}, flat", found[FLAT][0])
                figures.append(replace(shortest[1], metric=f"{RIGHT}, from").against("chance", CHANCE))
            rows += [_row(size, name, judged) for name, (judged, _) in found.items()]
    publish(
        "needle",
        figures,
        where.on(*bench.device),
        common.destination,
        BARS,
        f"{ABOUT}\n{table(COLUMNS, rows)}",
    )


command = arguments.command(needle)


def ways(k: int) -> tuple[Way, ...]:
    """Flat and reduced, over fragments and over plain prompts."""
    return (
        Way(FLAT),
        Way(f"k={k}", arity=k),
        Way(PLAIN, plain=True),
        Way(f"k={k}, plain prompt", arity=k, plain=True),
    )


def _judge(
    llm: LLM, seed: int, size: int, sentences: int, k: int, runs: int, at_once: int
) -> dict[str, tuple[list[Judged], float]]:
    """By way: what became of every haystack, and the seconds of all."""
    stacks = [make_haystack(size, sentences, Random(f"{seed} {size} {run}")) for run in range(runs)]
    found = {}
    for way in ways(k):
        begin = time.perf_counter()
        judged = judge_all(llm, way, stacks, at_once)
        found[way.name] = judged, time.perf_counter() - begin
        right = share(sum(one.right for one in judged), runs)
        say(f"{size} fragments, {way.name}: {right} right, {found[way.name][1]:.1f} s")
    return found


def _figures(case: str, backend: str, found: dict[str, tuple[list[Judged], float]], k: int) -> list[Figure]:
    figures: list[Figure] = []
    for name, (judged, seconds) in found.items():
        right, low, high = _right(case, backend, f"{RIGHT}, {name}", judged)
        base = FLAT if name == f"k={k}" else PLAIN if name == f"k={k}, plain prompt" else None
        if base is None:
            right = right.against("chance", CHANCE)
        else:
            right = right.against(base, mean([one.right for one in found[base][0]]))
        figures += [right, low, high]
        beside = None if base is None else found[base][0]
        for metric, unit, field in (
            ("calls", "", "calls"),
            ("rounds", "", "rounds"),
            ("tokens seen", "tokens", "seen"),
            ("tokens computed", "tokens", "own"),
            ("tokens sampled", "tokens", "sampled"),
        ):
            value = mean([getattr(one, field) for one in judged])
            figure = replace(Figure.count(case, backend, f"{metric}, {name}", value, unit), n=len(judged))
            if beside is not None:
                figure = figure.against(str(base), mean([getattr(one, field) for one in beside]))
            figures.append(figure)
        kept = [kept for one in judged for kept in one.kept]
        strays = [stray for one in judged for stray in one.strays]
        figures.append(_share(case, backend, f"needle kept by a call that saw it, {name}", kept))
        if strays:
            figures.append(_share(case, backend, f"names from calls that did not see it, {name}", strays))
        figures.append(Figure.count(case, backend, f"time of all, {name}", seconds, "s"))
    return figures


def _right(case: str, backend: str, metric: str, judged: Sequence[Judged]) -> list[Figure]:
    return fraction(case, backend, metric, sum(one.right for one in judged), len(judged))


def _share(case: str, backend: str, metric: str, found: Sequence[bool]) -> Figure:
    return fraction(case, backend, metric, sum(found), len(found))[0]


def _row(size: int, name: str, judged: Sequence[Judged]) -> list[object]:
    hits, n = sum(one.right for one in judged), len(judged)
    low = fraction("", "", "", hits, n)[1].value
    kept = [kept for one in judged for kept in one.kept]
    strays = [stray for one in judged for stray in one.strays]
    return [
        size,
        name,
        share(hits, n),
        "yes" if low > CHANCE else "no",
        f"{mean([one.calls for one in judged]):.0f}",
        f"{mean([one.rounds for one in judged]):.0f}",
        f"{mean([one.seen for one in judged]):,.0f}",
        f"{mean([one.own for one in judged]):,.0f}",
        f"{mean([one.sampled for one in judged]):,.0f}",
        f"{mean(kept):.2f}",
        f"{mean(strays):.2f}" if strays else "",
    ]
