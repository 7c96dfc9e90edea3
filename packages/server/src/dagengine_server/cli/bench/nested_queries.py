"""`dagengine bench nested --endpoint`: a judge over candidates, all of it one span query, beside calls and a prompt.

    span query     g(⋈(system, repeat(n, g(⋈(system, task))), question)) to `/v1/query/execute`: n candidates, and a
                   judge that reads their turns as they were computed
    prefix reuse   n calls to `/v1/chat/completions` at once, then one more over system, the n answers and the question
                   as a plain prompt, of which what was computed before is found again as a prefix

One prompt, task and question for all runs of a case; above temperature 0 every run has seeds of its own, so that the
candidates are new ones. Both ways take turns. Times are those of the client, but for when the last candidate of a span
query was there, which the server knows:

    sent ─ upload ─► body ─ submit ─► the engine has all requests ─ waited ─► last candidate ─ first ─► at the client

    judge's first token         ttft - submit - waited: `first`, and the query's upload until the last of it came
    with all before candidates  ttft - waited: also reading, planning and tokenizing all n + 1 calls, making requests
    of a plain judge            ttft of its own call: upload, reading and tokenizing its prompt, its token at the client
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dagengine_core_graph.query import Query, cross, g, repeat, system, user

from .endpoint import Endpoint, Message, Reply
from .published import Mark
from .record import Figure
from .report import Bar, times_sooner
from .settings import WARM_UPS
from .texts import Texts

TASK = 8
JUDGE, REUSE = "judge's first token, span query", "prefix reuse"
WITH_SUBMIT = "judge's first token with all before the candidates, span query"
CASE = "temperature 0.5, through the endpoint"
WIDE = f"llama-3.1-8b, 24 candidates x 256, prompt 512, question 32, {CASE}"
NARROW = f"llama-3.1-8b, 1 candidates x 256, prompt 512, question 32, {CASE}"
BARS = (
    Bar("judge over 24 x 256 as a span query", WIDE, JUDGE, REUSE, times_sooner, 20.0, "x sooner", True),
    Bar("judge over 1 x 256 as a span query", NARROW, JUDGE, REUSE, times_sooner, 1.0, "x sooner", True),
)
MARKS = {24: Mark("12 to 13, median", 13.0), 1: Mark("7 to 32 % lower, 1.08 to 1.47", 1.47)}
"""By fan-out, above temperature 0."""


@dataclass(frozen=True)
class Run:
    """One run of one way.

    Attributes:
        judge: the judge's stream.
        submit: seconds that reading, planning, tokenizing and submitting the query took; 0 where there is none.
        inner: seconds until all candidates were there, `submit` included. first: from then to the judge's first token.
        candidates: their outputs, to be told apart. lengths: tokens of each.
    """

    judge: Reply
    submit: float
    inner: float
    first: float
    candidates: Sequence[object]
    lengths: Sequence[int]

    @classmethod
    def of_query(cls, judge: Reply) -> Self:
        """Of a span query's answer."""
        inner = judge.submit + judge.waited
        outputs = [tuple(call["output"]["token_ids"]) for call in judge.record["calls"][:-1]]
        return cls(judge, judge.submit, inner, judge.ttft - inner, outputs, [len(ids) for ids in outputs])

    @property
    def whole(self) -> float:
        """Seconds until the judge's last token."""
        return self.inner + self.first + self.judge.e2e - self.judge.ttft

    @property
    def computed(self) -> int:
        """Tokens of the judge's prompt that were computed for it."""
        return int(self.judge.dag["tokens"]["computed"])

    @property
    def found(self) -> float:
        """The part of the judge's prompt that was there already."""
        return int(self.judge.dag["tokens"]["reused"]) / self.judge.seen

    @property
    def diversity(self) -> float:
        """Different candidates, as a part of all."""
        return len(set(self.candidates)) / len(self.candidates)


class NestedQueries:
    """The runs of one fan-out, candidate length and temperature.

    Args:
        prompt, question, answer: tokens of what all share, of the judge's question as a message, of its answer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        texts: Texts,
        seed: int,
        *,
        fan: int,
        length: int,
        temperature: float,
        prompt: int,
        question: int,
        answer: int,
    ) -> None:
        self._endpoint, self._random = endpoint, random.Random(seed)
        self._fan, self._length, self._temperature, self._answer = fan, length, temperature, answer
        self._prompt, self._task = (texts.text(n) for n in (prompt, TASK))
        self._question = texts.question(question)
        self._seed = 0

    def measure(self, case: str, repeats: int) -> list[Figure]:
        """Both ways, warmed up."""
        runs: dict[str, list[Run]] = {"spans": [], "plain": []}
        ways = {"spans": self._spans, "plain": self._plain}
        for repeat_ in range(-WARM_UPS, repeats):
            for name in self._random.sample(sorted(ways), len(ways)):
                found = ways[name]()
                if repeat_ >= 0:
                    runs[name].append(found)
        for name in ways:
            self._endpoint.release(name)
        return self._figures(case, runs["spans"], runs["plain"])

    @property
    def _options(self) -> dict[str, Any]:
        """Of the candidates; every use takes seeds that none had."""
        self._seed += self._fan
        return {"ignore_eos": True, "seed": self._seed}

    def _query(self) -> Query:
        candidate = g(
            cross(system(self._prompt), user(self._task)),
            max_tokens=self._length,
            temperature=self._temperature,
            options=self._options,
        )
        return g(
            cross(system(self._prompt), repeat(self._fan, candidate), user(self._question)),
            max_tokens=self._answer,
            temperature=0.0,
            options={"ignore_eos": True},
        )

    def _spans(self) -> Run:
        return Run.of_query(self._endpoint.query(self._query(), "spans"))

    def _plain(self) -> Run:
        options = self._options
        calls = [
            {"max_tokens": self._length, "temperature": self._temperature, "seed": options["seed"] + index}
            for index in range(self._fan)
        ]
        found, begin = self._endpoint.answers(self._messages(user=self._task), "plain", calls)
        messages = self._messages(*(answer.text for answer in found), user=self._question)
        judge = self._endpoint.chat(messages, "plain", max_tokens=self._answer, temperature=0)
        texts, lengths = [answer.text for answer in found], [answer.tokens for answer in found]
        return Run(judge, 0.0, judge.begin - begin, judge.ttft, texts, lengths)

    def _messages(self, *answers: str, user: str) -> list[Message]:
        said = [("system", self._prompt), *(("assistant", text) for text in answers), ("user", user)]
        return [{"role": role, "content": text} for role, text in said]

    def _figures(self, case: str, spans: Sequence[Run], plain: Sequence[Run]) -> list[Figure]:
        backend = spans[0].judge.backend

        def both(metric: str, measure: Callable[[Run], Sequence[float]], unit: str) -> tuple[Figure, Figure]:
            """A figure of either way, the first beside the second."""
            one, other = (
                Figure.of(case, backend, f"{metric}, {way}", [x for run in runs for x in measure(run)], unit)
                for way, runs in (("span query", spans), (REUSE, plain))
            )
            return one.against(REUSE, other.value), other

        judge, text = both("judge's first token", lambda run: [run.first * 1e3], "ms")
        with_submit = [(run.submit + run.first) * 1e3 for run in spans]
        figures = [
            judge,
            text,
            Figure.of(case, backend, WITH_SUBMIT, with_submit, "ms").against(REUSE, text.value),
        ]
        mark = MARKS.get(self._fan)
        if mark is not None and self._temperature > 0:
            figures.append(
                mark.beside(case, backend, "judge sooner than with prefix reuse", text.value / judge.value)
            )
        for metric, measure, unit in (
            ("query sent to the judge's first token", lambda run: [(run.inner + run.first) * 1e3], "ms"),
            (
                "judge's first token in the engine",
                lambda run: [(run.judge.engine_ttft - run.judge.waited) * 1e3],
                "ms",
            ),
            ("candidates generated", lambda run: [run.inner * 1e3], "ms"),
            ("judge's TPOT", lambda run: [] if run.judge.tpot is None else [run.judge.tpot * 1e3], "ms"),
            ("throughput, one query at a time", lambda run: [1 / run.whole], "queries/s"),
            ("judge's input", lambda run: [run.judge.seen], "tokens"),
            ("judge's tokens computed", lambda run: [run.computed], "tokens"),
            ("judge's input that was there", lambda run: [run.found], "fraction"),
            ("fan-out", lambda run: [len(run.lengths)], "candidates"),
            ("candidate length", lambda run: run.lengths, "tokens"),
            ("candidate diversity", lambda run: [run.diversity], "fraction"),
        ):
            if measure(spans[0]) and measure(plain[0]):
                figures += both(metric, measure, unit)
        timings = [run.judge.timing for run in spans]
        extra = [self._extra(run) for run in spans]
        return [
            *figures,
            Figure.of(case, backend, "submitting", [timing["submit"] for timing in timings], "ms"),
            Figure.of(case, backend, "planning", [timing["plan"] for timing in timings], "ms"),
            Figure.of(case, backend, "tokenizing", [timing["tokenize"] for timing in timings], "ms"),
            Figure.of(case, backend, "padding", [max(0, tokens) for tokens in extra], "tokens"),
            Figure.of(case, backend, "cropping", [max(0, -tokens) for tokens in extra], "tokens"),
        ]

    def _extra(self, run: Run) -> int:
        """Tokens that the judge saw beyond those that were said and generated; below zero: short of them."""
        said = self._messages(user=self._question)
        with_turn, without = (self._endpoint.count_chat(said, generate=turn) for turn in (True, False))
        return run.judge.seen - (with_turn + sum(run.lengths) + len(run.lengths) * (with_turn - without))
