"""The runs of `dagengine bench bulk`: bulks of span queries, and the same questions as plain prompts, in one engine.

    span queries   `LLM.query_bulk` of one bulk after the other, which orders each of them and runs it in windows;
                   planning and tokenizing are in its time
    plain prompts  the same bulks in the order given, so many at once, found again as prefixes alone. They are tokenized
                   before the clock starts, as a server would do beside its work; a bulk of one, which has no work
                   beside it, on the clock

A first token is counted from when the whole bulk was given, so that what waits in the bulk counts in both ways; beside
that, of span queries from when their window was submitted, of plain prompts from when one of the places took them.

Every run has a cache salt of its own: nothing is found that an earlier run left.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from dagengine import LLM, SamplingParams
from dagengine.request import Choice, FinishedEvent, Request
from dagengine_core_graph.query import Query, cross, g, plus, system, user

from ..console import CommandError
from .load import ClosedLoop
from .overlap import NQ_LIKE, WIKI_LIKE, Workload
from .published import Mark
from .record import Figure
from .report import Bar, ratio_of, times_sooner

SPANS, PLAIN = "span queries", "plain prompts, prefix caching"
THROUGHPUT = "throughput"
SINCE_GIVEN = "first token since the bulk was given"
MEAN = f"mean {SINCE_GIVEN}"
ALL = "all"
ALONE = 4
"""Queries that warm up bulks of one."""

FACTORS: Mapping[float, tuple[str, Mapping[str, float]]] = {
    WIKI_LIKE: ("2Wiki", {"1": 1.21, "1024": 1.31, ALL: 1.59}),
    NQ_LIKE: ("NQ", {"1": 1.03, "1024": 1.05, ALL: 1.13}),
}
"""Published factors of the mean first token, by overlap and bulk."""

BARS = tuple(
    Bar(
        f"{name}-like, bulk {bulk}, {words}",
        f"llama-3.1-8b, 10 fragments x 100, question 32, overlap {overlap:g}, bulk {bulk},",
        f"{metric}, {SPANS}", PLAIN, measured, factor, unit, True,
    )
    for words, metric, measured, unit in (
        ("throughput", THROUGHPUT, ratio_of, "x"), ("mean first token", MEAN, times_sooner, "x sooner")
    )
    for overlap, (name, factors) in FACTORS.items()
    for bulk, factor in factors.items()
)  # fmt: skip


@dataclass
class _Run:
    """One run over all questions.

    Attributes:
        seconds: of all bulks.
        first: seconds to each first token, of a query from when its window was submitted, planning and tokenizing it
            included; of a prompt from when it was submitted, or began to be tokenized on the clock.
        since_given: seconds to each first token from when its bulk was given.
        seen, found: tokens of each prompt, and those of them that were there.
        plan, tokenize: milliseconds of each query.
        read, reused: tokens that stand before the questions, and those of them that were there for a query.
    """

    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    since_given: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    tokenize: list[float] = field(default_factory=list)
    read: int = 0
    reused: int = 0


class BulkRuns:
    """The runs over one workload.

    Args:
        before: what stands before the fragments of every question.
        window: most queries at once.
        answer: tokens of an answer.
    """

    def __init__(
        self, llm: LLM, workload: Workload, before: str, *, window: int, answer: int, seed: int
    ) -> None:
        self._llm, self._workload, self._window, self._answer = llm, workload, window, answer
        self._random, self._name, self._runs = random.Random(seed), uuid.uuid4().hex, 0
        self._pages, self._page_size = llm.engine.ask(
            lambda core: (core.store.num_pages, core.store.page_size)
        )
        options = {"max_tokens": answer, "temperature": 0.0}
        self._sampling = SamplingParams(**options, ignore_eos=True)
        self._queries: list[Query] = []
        self._messages: list[list[dict[str, str]]] = []
        for question, reads in zip(workload.questions, workload.reads, strict=True):
            texts = [workload.fragments[index] for index in reads]
            parts = cross(system(before), plus(*map(user, texts)), user(question))
            self._queries.append(g(parts, **options, options={"ignore_eos": True}))
            said = [("system", before), *(("user", text) for text in (*texts, question))]
            self._messages.append([{"role": role, "content": text} for role, text in said])

    def warm_up(self) -> None:
        """A window of either way, and some of it alone: whatever kinds of steps there are. Not measured."""
        first = range(min(self._window, len(self._queries)))
        for run in (self._spans, self._plain):
            run([first, *(range(index, index + 1) for index in first[:ALONE])])

    def measure(self, case: str, bulk: str, repeats: int) -> list[Figure]:
        """Both ways in turns, in bulks of so many queries, or `all`."""
        total = len(self._queries)
        size = total if bulk == ALL else int(bulk)
        bulks = [range(begin, min(begin + size, total)) for begin in range(0, total, size)]
        ways: dict[str, Callable[[Sequence[range]], _Run]] = {SPANS: self._spans, PLAIN: self._plain}
        runs: dict[str, list[_Run]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name in self._random.sample(sorted(ways), len(ways)):
                runs[name].append(ways[name](bulks))
        return list(self._figures(case, bulk, runs[SPANS], runs[PLAIN]))

    def _salt(self) -> str:
        """One that no run had."""
        self._runs += 1
        return f"bench-{self._name}-{self._runs}"

    def _spans(self, bulks: Sequence[range]) -> _Run:
        run, salt = _Run(), self._salt()
        for bulk in bulks:
            queries = [self._queries[index] for index in bulk]
            begin = time.perf_counter()
            done = self._llm.query_bulk(queries, window=self._window, cache_salt=salt)
            run.seconds += time.perf_counter() - begin
            for index, error in done.errors.items():
                raise CommandError(f"query {bulk[index]} failed: {error.message}", error.field, error.code)
            for result in done.results:
                assert result is not None
                dag, timing = result.answers[0].dag, result.timing
                run.first.append((dag.timing.first_token + timing.plan + timing.tokenize) / 1e3)
                run.since_given.append((timing.submit + dag.timing.first_token) / 1e3)
                run.seen.append(dag.visible + dag.input)
                run.found.append(result.usage.cached_tokens)
                run.read += result.tokens.input - dag.input
                run.reused += result.tokens.reused
                run.plan.append(timing.plan)
                run.tokenize.append(timing.tokenize)
        self._llm.engine.ask(self._llm.fragments.clear)
        return run

    def _plain(self, bulks: Sequence[range]) -> _Run:
        run, salt = _Run(), self._salt()
        ahead = [None if len(bulk) == 1 else self._requests(bulk, salt) for bulk in bulks]
        for bulk, requests in zip(bulks, ahead, strict=True):
            begin = time.perf_counter()
            on_clock = requests is None
            self._closed_loop(requests or self._requests(bulk, salt), run, begin, on_clock=on_clock)
        return run

    def _requests(self, bulk: range, salt: str) -> list[Request]:
        """The questions of a bulk as plain prompts, tokenized now."""
        return [
            replace(self._llm.request(self._messages[index], self._sampling), salt=salt) for index in bulk
        ]

    def _closed_loop(self, requests: Sequence[Request], run: _Run, begin: float, *, on_clock: bool) -> None:
        """Run a bulk of prompts that was given at `begin`, of `time.perf_counter`; `on_clock`: tokenized since then."""
        choices: dict[str, Choice] = {}

        def keep(event: FinishedEvent) -> None:
            if event.error is None:
                choices[event.request_id] = event.choices[0]

        streams = ClosedLoop(self._llm.engine, requests, self._window, keep).run()
        run.seconds += time.perf_counter() - begin
        for request, stream in zip(requests, streams, strict=True):
            dag = choices[request.id].dag
            run.first.append(stream.sampled[0] - (begin if on_clock else stream.begin))
            run.since_given.append(stream.sampled[0] - begin)
            run.seen.append(dag.visible + dag.input)
            run.found.append(dag.reused)

    def _figures(
        self, case: str, bulk: str, spans: Sequence[_Run], plain: Sequence[_Run]
    ) -> Iterator[Figure]:
        backend, total = self._llm.engine.ask(lambda core: core.default_backend), len(self._queries)

        def both(metric: str, unit: str, measure: Callable[[_Run], Sequence[float]]) -> tuple[Figure, Figure]:
            one, other = (
                Figure.of(case, backend, f"{metric}, {way}", [x for run in runs for x in measure(run)], unit)
                for way, runs in ((SPANS, spans), (PLAIN, plain))
            )
            return one.against(PLAIN, other.value), other

        rate, plain_rate = both(THROUGHPUT, "queries/s", lambda run: [total / run.seconds])
        first, plain_first = both(MEAN, "ms", lambda run: [mean(run.since_given) * 1e3])
        yield from (rate, plain_rate, first, plain_first)
        yield from both(SINCE_GIVEN, "ms", lambda run: [seconds * 1e3 for seconds in run.since_given])
        yield from both("first token", "ms", lambda run: [seconds * 1e3 for seconds in run.first])
        mark = self._mark(bulk)
        if mark is not None:
            yield mark.beside(
                case, backend, "throughput against plain prompts", rate.value / plain_rate.value
            )
            yield mark.beside(
                case, backend, f"{MEAN}, sooner than of plain prompts", plain_first.value / first.value
            )
        yield from both("input that was there", "fraction", lambda run: [sum(run.found) / sum(run.seen)])
        yield from both("judge's input", "tokens", lambda run: run.seen)
        hits = [run.reused / run.read for run in spans]
        yield Figure.of(case, backend, f"span hit rate, {SPANS}", hits, "fraction")
        for metric, measure in (
            ("planning", lambda run: run.plan),
            ("tokenizing", lambda run: run.tokenize),
        ):
            yield Figure.of(case, backend, metric, [ms for run in spans for ms in measure(run)], "ms")
        extra = [a - b for a, b in zip(spans[0].seen, plain[0].seen, strict=True)]
        yield Figure.of(case, backend, "padding", [max(0, tokens) for tokens in extra], "tokens")
        yield Figure.of(case, backend, "cropping", [max(0, -tokens) for tokens in extra], "tokens")
        yield from self._of_the_workload(case)

    def _of_the_workload(self, case: str) -> Iterator[Figure]:
        workload, tokenizer = self._workload, self._llm.tokenizer
        assert tokenizer is not None
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in workload.fragments]
        said = [[{"role": "user", "content": text}] for text in workload.fragments]
        states = [tokenizer.chat(each, generate=False, has_context=True).input_ids for each in said]
        pages = sum(-(-len(ids) // self._page_size) for ids in states)
        yield Figure.of(case, "", "fragment length", lengths, "tokens")
        yield Figure.of(case, "", "fan-out", [len(reads) for reads in workload.reads], "fragments")
        yield Figure.count(case, "", "fragment overlap", workload.overlap, "fraction")
        yield Figure.count(case, "", "cache pressure, pages of all fragments", pages, "pages").against(
            "the pool", self._pages
        )

    def _mark(self, bulk: str) -> Mark | None:
        """The published mark of this bulk, where the workload was made with the overlap that it stands beside."""
        for overlap, (name, factors) in FACTORS.items():
            if overlap == self._workload.made_with and bulk in factors:
                return Mark(f"{name}, bulk {bulk}, mean first token", factors[bulk])
        return None
