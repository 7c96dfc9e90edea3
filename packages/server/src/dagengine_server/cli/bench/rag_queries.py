"""`dagengine bench rag --endpoint`: questions over documents as span queries through a server, beside plain prompts.

A question is g(⋈(system, +(documents), question)) to `/v1/query/execute`, or the same messages as one plain prompt to
`/v1/chat/completions`, where what is found again is a prefix. Both see the same tokens of the same server.

    cached         the documents were prepared; each query reads all of them in a new order, and asks a new question
    again          one query once more, word for word
    cold           fresh documents: they are computed for the query, none of them seeing another
    plain, new     the documents of `cached` as a plain prompt, in a new order, with a new question
    plain, again   one plain prompt once more, word for word

Each repeat begins in an order of its own. Times are those of the client, from sending a query to the first text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from dagengine_core_graph.query import Query, cross, g, plus, system, user

from .endpoint import Endpoint, Message, Reply
from .published import Mark
from .record import Figure
from .report import Bar, times_sooner, value_of
from .settings import WARM_UPS
from .texts import Texts

SYSTEM = 16
MOST = "llama-3.1-8b, 32 documents x 2857, question 64, through the endpoint"
CACHED, COLD = "first token, span query, cached, new order", "first token, span query, cold"
AGAIN, PLAIN_AGAIN = "first token, span query, again", "first token, plain prompt, again"
PLAIN = "first token, plain prompt, new order"
NEW, IDENTICAL = "plain prompt in a new order", "the identical plain prompt again"
HIT, MISS = Mark("10 to 20", 20.0), Mark("about 3", 3.0)
BARS = (
    Bar("cached span query, a new order each time: first token", MOST, CACHED, None, value_of, 20.0, "ms", False),
    Bar("cached span query against a plain prompt", MOST, CACHED, NEW, times_sooner, 280.0, "x sooner", True),
    Bar("cold span query against a plain prompt", MOST, COLD, NEW, times_sooner, 2.55, "x sooner", True),
)  # fmt: skip


class Question:
    """One question: what stands before the documents, the documents in order, and what is asked."""

    def __init__(self, before: str, documents: Sequence[str], asked: str) -> None:
        self.before, self.documents, self.asked = before, tuple(documents), asked

    def query(self, answer: int) -> Query:
        return g(
            cross(system(self.before), plus(*(user(text) for text in self.documents)), user(self.asked)),
            max_tokens=answer,
            temperature=0.0,
            options={"ignore_eos": True},
        )

    @property
    def messages(self) -> list[Message]:
        texts = [("system", self.before), *(("user", text) for text in (*self.documents, self.asked))]
        return [{"role": role, "content": text} for role, text in texts]

    def overlap(self, other: Question | None) -> float:
        """The part of its documents that another question had too."""
        shared = set(self.documents) & set(other.documents if other else ())
        return len(shared) / len(self.documents)


class RagQueries:
    """The runs over so many documents.

    Args:
        tokens, question, answer: of a document's text, of a question as a message, of an answer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        texts: Texts,
        seed: int,
        *,
        count: int,
        tokens: int,
        question: int,
        answer: int,
    ) -> None:
        self._endpoint, self._texts, self._random = endpoint, texts, random.Random(seed)
        self._count, self._tokens, self._question, self._answer = count, tokens, question, answer
        self._before = texts.text(SYSTEM)
        self._replies: dict[str, list[Reply]] = {}
        self._asked: dict[str, list[Question]] = {}

    def measure(self, case: str, repeats: int, slow_repeats: int) -> list[Figure]:
        """All five ways, each warmed up."""
        endpoint, documents = self._endpoint, self._documents()
        fixed = self._new(documents)
        endpoint.prepare(fixed.query(self._answer), "spans")
        quick: dict[str, Callable[[], tuple[Question, Reply]]] = {
            CACHED: lambda: self._spans(self._new(documents), "spans"),
            AGAIN: lambda: self._spans(fixed, "spans"),
            PLAIN_AGAIN: lambda: self._plain(fixed),
        }
        slow: dict[str, Callable[[], tuple[Question, Reply]]] = {
            COLD: self._cold,
            PLAIN: lambda: self._plain(self._new(documents)),
        }
        self._take_turns(quick, WARM_UPS, repeats)
        self._take_turns(slow, 1, slow_repeats)
        for name in ("spans", "plain"):
            endpoint.release(name)
        length = mean(endpoint.count(text) for text in documents)
        return self._figures(case, length, endpoint.count_chat(fixed.messages))

    def _documents(self) -> list[str]:
        return [self._texts.text(self._tokens) for _ in range(self._count)]

    def _new(self, documents: Sequence[str]) -> Question:
        """A new question over the documents in a new order."""
        order = self._random.sample(documents, len(documents))
        return Question(self._before, order, self._texts.question(self._question))

    def _take_turns(
        self, ways: Mapping[str, Callable[[], tuple[Question, Reply]]], warm_ups: int, repeats: int
    ) -> None:
        for repeat in range(-warm_ups, repeats):
            for name in self._random.sample(sorted(ways), len(ways)):
                asked, reply = ways[name]()
                self._asked.setdefault(name, []).append(asked)
                if repeat >= 0:
                    self._replies.setdefault(name, []).append(reply)

    def _spans(self, question: Question, name: str) -> tuple[Question, Reply]:
        return question, self._endpoint.query(question.query(self._answer), name)

    def _cold(self) -> tuple[Question, Reply]:
        """Under a name of its own: not even what stands before the documents is there."""
        name = f"cold-{len(self._asked.get(COLD, ()))}"
        try:
            return self._spans(self._new(self._documents()), name)
        finally:
            self._endpoint.release(name)

    def _plain(self, question: Question) -> tuple[Question, Reply]:
        options = {"max_tokens": self._answer, "temperature": 0}
        return question, self._endpoint.chat(question.messages, "plain", **options)

    def _figures(self, case: str, length: float, plain_tokens: int) -> list[Figure]:
        replies = self._replies
        backend = replies[CACHED][0].backend
        firsts = {
            name: Figure.of(case, backend, name, [reply.ttft * 1e3 for reply in found], "ms")
            for name, found in replies.items()
        }
        plain, again = firsts[PLAIN].value, firsts[PLAIN_AGAIN].value
        cached, cold = firsts[CACHED], firsts[COLD]
        figures = [
            cached,
            cached.against(NEW, plain),
            cached.against(IDENTICAL, again),
            firsts[AGAIN].against(IDENTICAL, again),
            cold,
            cold.against(NEW, plain),
            firsts[PLAIN],
            firsts[PLAIN_AGAIN],
            HIT.beside(case, backend, "sooner than a plain prompt, cached", plain / cached.value),
            MISS.beside(case, backend, "sooner than a plain prompt, cold", plain / cold.value),
        ]
        for name, found in replies.items():
            figures.append(
                Figure.of(
                    case,
                    backend,
                    f"in the engine: {name}",
                    [reply.engine_ttft * 1e3 for reply in found],
                    "ms",
                )
            )
        for name in (CACHED, COLD):
            figures += self._columns(case, name, length, plain_tokens)
        figures += self._pace(case, backend)
        return figures

    def _columns(self, case: str, name: str, length: float, plain_tokens: int) -> list[Figure]:
        """What a query's times depend on and consist of; all from what ran."""
        found, asked = self._replies[name], self._asked[name]
        way = name.rpartition("query, ")[2]
        backend = found[0].backend

        def many(metric: str, samples: Sequence[float], unit: str) -> Figure:
            return Figure.of(case, backend, f"{metric}, {way}", samples, unit)

        counted = asked[-len(found) :]
        befores = asked[-len(found) - 1 : -1]
        overlaps = [one.overlap(other) for one, other in zip(counted, befores, strict=True)]
        extra = [reply.seen - plain_tokens for reply in found]
        return [
            many("fragment length", [length], "tokens"),
            many("fan-out", [len(one.documents) for one in counted], "fragments"),
            many("fragment overlap with the query before", overlaps, "fraction"),
            many("span hit rate", [hit_rate(reply) for reply in found], "fraction"),
            many("judge's input", [reply.seen for reply in found], "tokens"),
            many("planning", [reply.timing["plan"] for reply in found], "ms"),
            many("tokenizing", [reply.timing["tokenize"] for reply in found], "ms"),
            many("padding", [max(0, tokens) for tokens in extra], "tokens"),
            many("cropping", [max(0, -tokens) for tokens in extra], "tokens"),
        ]

    def _pace(self, case: str, backend: str) -> list[Figure]:
        """TPOT, and answers a second of one client that asks one question after the other."""
        figures = []
        for metric, unit, measure in (
            ("TPOT", "ms", lambda reply: None if reply.tpot is None else reply.tpot * 1e3),
            ("throughput, one question at a time", "questions/s", lambda reply: 1 / reply.e2e),
        ):
            samples = {name: [measure(reply) for reply in self._replies[name]] for name in (CACHED, PLAIN)}
            told = {
                name: [value for value in values if value is not None] for name, values in samples.items()
            }
            if not all(told.values()):
                continue
            base = Figure.of(case, backend, f"{metric}, plain prompt, new order", told[PLAIN], unit)
            spans = Figure.of(case, backend, f"{metric}, span query, cached", told[CACHED], unit)
            figures += [spans.against(NEW, base.value), base]
        return figures


def hit_rate(reply: Reply) -> float:
    """The part of the input tokens before the question that was there when the query came."""
    reuse, tokens = reply.record["reuse"], reply.dag["tokens"]
    own = int(tokens["input"])
    found_of_own = max(0, own - int(tokens["computed"]))
    return (int(reuse["reused"]) - found_of_own) / (int(reuse["input"]) - own)
