"""Span queries through a real engine: executed as they were given, call by call, and planned, they give the same.

The scripted model's tokens depend on all that it sees and on where it stands, and under the policy `native` on no order
of the children of a +. So equal answers mean equal contexts.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_text import PAGES, Words, text_core, text_engine

from dagengine import LLM, AsyncLLM, DagError, Keep
from dagengine.fragments import FragmentStates
from dagengine.request import ContextRef, Request
from dagengine.sampling import SamplingParams
from dagengine_core_graph.query import (
    Fragment,
    GenerateParams,
    Message,
    Query,
    Retrieve,
    cross,
    evaluate,
    g,
    monad,
    plus,
    repeat,
    retrieve,
    system,
    user,
)
from dagengine_core_graph.query.definition import Bag, Shown, View, answered, digest, shown

sys.path.append(str(Path(__file__).parents[2] / "packages/core-graph/tests"))
import scripted_queries

QUERIES, MOST, SEED = 300, 3, 11
NATIVE: dict[str, Any] = {"position": "native", "max_tokens": MOST, "seed": SEED}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with text_engine() as found:
        yield found


class AsGiven:
    """The model of the definition: one call at a time, each over nodes that are made for it alone.

    An answer's text begins with the call's number, so that no two answers are taken for one.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.numbers = llm, iter(range(10**6))
        self.answers: dict[str, str] = {}
        self.texts: Counter[str] = Counter()

    def __call__(self, params: GenerateParams, prompt: View, nth: int) -> str:
        context, messages = self.context(prompt, last=True)
        sampling = SamplingParams(max_tokens=params.max_tokens or MOST, temperature=0.0)
        choice = self.run(messages, context, sampling)
        text = f"{next(self.numbers)}|{choice.text}"
        self.answers[answered(text, prompt).digest] = choice.dag.state
        if params.max_tokens != 1:  # preparations need not be made
            self.texts[choice.text] += 1
        return text

    def context(self, view: View, *, last: bool) -> tuple[list[ContextRef], list[Shown]]:
        """References to what the view shows, and (with `last`) the messages at its end that have no node yet."""
        refs: list[list[ContextRef]] = []
        index = 0
        while index < len(view):
            entry = view[index]
            if isinstance(entry, Bag):
                refs.append([ref for member in entry.members for ref in self.context(member, last=False)[0]])
            elif entry.digest in self.answers:
                state = self.answers[entry.digest]
                refs.append([ContextRef(state=state, mode="artifact", span="turn")])
            else:
                start = next(
                    start
                    for start in range(index + 1)
                    if shown(entry.role, entry.text, view[start:index]).digest == entry.digest
                )
                stop = index
                while stop < len(view) and self.follows(view, start, stop):
                    stop += 1
                messages = [part for part in view[index:stop] if isinstance(part, Shown)]
                before = [ref for group in refs[start:index] for ref in group]
                if last and stop == len(view) and start == 0:
                    return before, messages
                state = self.run(messages, before, None).dag.state
                refs += [[ContextRef(state=state)], *[[] for _ in messages[1:]]]
                index = stop - 1
            index += 1
        return [ref for group in refs for ref in group], []

    def follows(self, view: View, start: int, index: int) -> bool:
        entry = view[index]
        return (
            isinstance(entry, Shown)
            and entry.digest not in self.answers
            and shown(entry.role, entry.text, view[start:index]).digest == entry.digest
        )

    def run(self, messages: list[Shown], context: list[ContextRef], sampling: SamplingParams | None) -> Any:
        words = [{"role": part.role, "content": part.text} for part in messages]
        prompt = Words().chat(words, generate=sampling is not None, has_context=bool(context))
        request = Request(
            f"as-given-{next(self.numbers)}",
            prompt.input_ids,
            sampling,
            tuple(context),
            position="native",
            keep=Keep(ttl_s=1000),
            turn_start=prompt.turn_start,
        )
        event = self.llm.run([request])[0]
        assert event.error is None, event.error
        return event.choices[0]


def one_model(query: Query) -> Query:
    """The query with one model for all calls, a few tokens each, and nothing left to chance."""
    below = tuple(one_model(part) for part in query.subqueries)
    found = query.with_subqueries(below) if below else query
    params = getattr(found, "params", None)
    if not isinstance(params, GenerateParams):
        return found
    return replace(found, params=GenerateParams(None, min(params.max_tokens, MOST), 0.0))  # type: ignore[call-arg]


def said(query: Query) -> str:
    """What a result says, whatever the order of its + and the numbers of its answers."""

    def plain(part: Query) -> Query:
        if isinstance(part, Message):
            return replace(part, text=part.text.rpartition("|")[2])
        return part.with_subqueries(tuple(map(plain, part.subqueries))) if part.subqueries else part

    return digest(evaluate(plain(query), lambda *_: "").view)


def release_all(llm: LLM) -> None:
    def release(core: Any) -> None:
        llm.fragments.clear(core)
        for info in core.store.states():
            core.release_state(info.id)
        core.store.check()
        stats = core.store.stats()
        assert (stats.pages_free + stats.pages_cached, stats.writers, stats.leases) == (PAGES, 0, 0)

    llm.engine.ask(release)


def test_a_query_gives_the_same_as_given_and_planned(llm: LLM) -> None:
    compared = 0
    for number in range(QUERIES):
        query = one_model(scripted_queries.random_query(random.Random(number), 4))
        model = AsGiven(llm)
        given = evaluate(query, model, scripted_queries.scripted_retriever)
        found = llm.query(query, retriever=scripted_queries.scripted_retriever, keep=False, **NATIVE)
        assert said(found.query) == said(given.result), number
        texts = Counter(
            llm.tokenizer.decode(ids)  # type: ignore[union-attr]
            for call in found.record["calls"]
            if len(ids := call["output"]["token_ids"]) > 1
        )
        assert texts == model.texts, number
        compared += texts.total()
        release_all(llm)
    assert compared > QUERIES


def test_equal_calls_are_samples_of_their_own_and_a_seed_decides_them(llm: LLM) -> None:
    query = repeat(6, g("Draft.", temperature=1.0))
    options = {"max_tokens": 8, "position": "native"}
    first, again, other = (llm.query(query, seed=seed, keep=False, **options) for seed in (1, 1, 2))
    texts = [[answer.text for answer in found.answers] for found in (first, again, other)]
    assert len(set(texts[0])) > 1
    assert texts[0] == texts[1] != texts[2]
    release_all(llm)


def test_what_is_equal_is_computed_once_and_stays_two(llm: LLM) -> None:
    once, twice = (
        llm.query(g(cross(plus(*["a piece"] * count), "which?")), keep=False, **NATIVE) for count in (1, 2)
    )
    assert once.text != twice.text, "both are seen"
    seen = [found.record["reuse"] for found in (once, twice)]
    assert seen[1]["input"] == seen[0]["input"] + 3
    many = llm.query(plus(*(g(cross(plus("shared", f"own {i}"), f"q {i}")) for i in range(5))), **NATIVE)
    assert many.tokens.reused >= 4 * 3, "four of five readers found the shared piece"
    many.close()
    release_all(llm)


def test_a_result_is_read_by_the_next_query_as_it_was_computed(llm: LLM) -> None:
    inner = g(cross(system("s"), plus("a", "b"), "draft"))
    judge = lambda read: g(cross(system("judge"), read, "which?"))  # noqa: E731
    nested = llm.query(judge(inner), keep=False, **NATIVE)
    first = llm.query(inner, **NATIVE)
    held = llm.query(judge(first.held), keep=False, **NATIVE)
    told = llm.query(judge(first.query), keep=False, **NATIVE)
    assert held.text == nested.text != told.text
    assert first.query == Message("assistant", first.text)
    assert held.record["query"] is None and nested.record["query"] is not None
    both = llm.query(judge(plus(first.held, first.held)), keep=False, **NATIVE)
    assert both.text == held.text, "one answer that is read twice is seen once"
    first.close()
    with pytest.raises(DagError) as error:
        llm.query(judge(first.held), **NATIVE)
    assert (error.value.code, error.value.field) == ("state_released", "g")
    release_all(llm)


def test_fragments_are_kept_to_be_read_again_within_bounds(llm: LLM) -> None:
    def ask(*pieces: str) -> Any:
        return llm.query(g(cross(plus(*pieces), "which?")), keep=False, **NATIVE)

    first, again = ask("one", "two", "three"), ask("three", "one")
    assert len(llm.fragments) == 3 and again.tokens.computed == again.tokens.input - 6
    assert first.record["reuse"]["reused"] == 0
    llm.fragments.most = 2
    try:
        ask("four")
        assert len(llm.fragments) == 2
    finally:
        llm.fragments.most = 4096
    for info in llm.engine.ask(lambda core: core.store.states()):
        llm.engine.ask(lambda core, info=info: core.release_state(info.id))
    assert ask("four").text == ask("four").text, "what was released behind its back is computed again"
    release_all(llm)


def test_fragments_are_found_within_one_salt_only(llm: LLM) -> None:
    def ask(**options: Any) -> Any:
        return llm.query(g(cross(plus("salted", "peppered"), "which?")), keep=False, **NATIVE, **options)

    first, other, again = ask(), ask(cache_salt="other"), ask(cache_salt="other")
    assert first.tokens.reused == other.tokens.reused == 0 and again.tokens.reused > 0
    assert first.text == other.text == again.text
    for wrong in ("", 7, "\ud800"):
        with pytest.raises(DagError) as error:
            ask(cache_salt=wrong)
        assert (error.value.code, error.value.field) == ("invalid_request", "cache_salt")
    release_all(llm)


def test_an_answer_says_how_long_it_waited_for_what_it_reads(llm: LLM) -> None:
    found = llm.query(g(cross(system("judge"), g("a"), "which?")), keep=False, **NATIVE)
    timing = found.answers[0].dag.timing
    assert 0 < timing.waited < timing.first_token
    alone = llm.query(g("which?"), keep=False, **NATIVE).answers[0].dag.timing
    assert alone.waited < alone.first_token and alone.waited < timing.waited
    assert found.timing.plan > 0 and found.timing.tokenize > 0
    release_all(llm)


def test_a_query_says_how_long_it_took_until_the_engine_had_it(llm: LLM) -> None:
    query = g(cross(retrieve("slow", user("which?")), "say"))

    def slowly(asked: Retrieve) -> list[str | Fragment]:
        time.sleep(0.02)
        return ["one"]

    begin = time.perf_counter()
    found = llm.query(query, keep=False, retriever=slowly, **NATIVE)
    all_ms, timing = (time.perf_counter() - begin) * 1e3, found.timing
    assert 20 < timing.plan < timing.plan + timing.tokenize < timing.submit
    assert timing.submit + found.answers[0].dag.timing.first_token < all_ms
    release_all(llm)


def test_a_preparation_is_waited_for_and_shared(llm: LLM) -> None:
    long = "a long prompt that several samples share"
    found = llm.query(repeat(4, g(cross(*[long] * 6), temperature=1.0)), keep=False, **NATIVE)
    assert "distribute_plus" in found.record["rewrites"]
    whole = found.tokens.input
    assert found.tokens.computed <= 18 + 4 * (2 + 4), f"of {whole} tokens the prompt was computed once"
    release_all(llm)


@pytest.mark.parametrize(
    ("query", "options", "code", "field"),
    [
        (plus(g("a", model="m"), g("b", model="n")), {}, "unsupported", "model"),
        (g(plus("a"), options={"top_p": 7}), {}, "invalid_request", "g.options.top_p"),
        (
            plus(g("a", options={"ignore_eos": True}), g("a", options={"ignore_eos": 1})),
            {},
            "invalid_request",
            "plus[2].g.options.ignore_eos",
        ),
        (g(cross("x", g("a", max_tokens=4000))), {}, "position_overflow", "g.input.cross[1].g.max_tokens"),
        (g(monad("a")), {}, "invalid_request", "g.input"),
        (g("a"), {"position": "sideways"}, "policy_unsupported", "position"),
        (g("a"), {"max_tokens": 0}, "invalid_request", "max_tokens"),
        (g("a"), {"backend": "none"}, "unsupported", "backend"),
        (7, {}, "invalid_request", "query"),
    ],
)
def test_a_refusal_names_the_subtree(
    llm: LLM, query: Any, options: dict[str, Any], code: str, field: str
) -> None:
    with pytest.raises(DagError) as error:
        llm.query(query, **{**NATIVE, **options})
    assert (error.value.code, error.value.field) == (code, field)
    release_all(llm)


def test_a_default_limit_is_cut_to_what_fits(llm: LLM) -> None:
    found = llm.query(g("a"), keep=False)
    assert found.answers[0].usage.completion_tokens == 320 - 5, "2048 do not fit"
    release_all(llm)


def test_a_request_waits_for_others_of_its_submission_without_reading_them(llm: LLM) -> None:
    words = tuple(range(1, 9))
    first = Request("first", words, None)
    second = Request("second", words, SamplingParams(max_tokens=2, temperature=0.0), after=("first",))
    alone, waited = llm.run([replace(second, after=())])[0], llm.run([first, second])[1]
    assert waited.choices[0].dag.visible == 0 and waited.choices[0].dag.computed < len(words)
    assert waited.choices[0].token_ids == alone.choices[0].token_ids
    fails = replace(first, sampling=SamplingParams(max_tokens=4000))
    events = llm.run([fails, second])
    assert [event.error.code for event in events if event.error] == ["position_overflow", "parent_failed"]
    limited = replace(second, after=(), sampling=SamplingParams(temperature=0.0), most_tokens=3)
    assert llm.run([limited])[0].choices[0].num_sampled == 3
    for wrong, field in (
        ({"after": ("second",)}, "after[0]"),
        ({"after": ("none",)}, "after[0]"),
        ({"after": "first"}, "after"),
        ({"after": (1,)}, "after[0]"),
        ({"most_tokens": 0}, "most_tokens"),
        ({"most_tokens": "3"}, "most_tokens"),
    ):
        for group in ([replace(second, **wrong)], [first, replace(second, **wrong)]):
            with pytest.raises(DagError) as error:
                llm.run(group)
            assert error.value.field == field
    release_all(llm)


def test_asyncio_gives_the_same_and_leaves_nothing_behind() -> None:
    nested = g(cross(plus(g("a"), g("b")), "which?"))
    both = plus(nested, g("c"))

    async def run() -> None:
        llm = AsyncLLM(core=text_core())
        streamed: dict[int, str] = {}
        result = None
        async for part in llm.stream_query(both, **NATIVE):
            if isinstance(part, tuple):
                streamed[part[0]] = streamed.get(part[0], "") + part[1]
            else:
                result = part
        assert result is not None
        assert [streamed[index] for index in range(2)] == [answer.text for answer in result.answers]
        again = await llm.query(both, **NATIVE)
        assert again.query == result.query
        assert 0 < result.timing.plan + result.timing.tokenize < result.timing.submit
        with pytest.raises(DagError) as error:
            await llm.query(g("a", max_tokens=4000))
        assert error.value.field == "g.max_tokens"
        result.close()
        again.close()
        async for _ in llm.stream_query(g(cross(nested, "long"), max_tokens=200), **{**NATIVE, "keep": True}):
            break
        await settled(llm)
        handles = await asyncio.wrap_future(
            llm.engine.call(lambda core: [info.name for info in core.store.states()])
        )
        assert set(handles) <= {"fragment", None} and len(handles) <= 5, (
            "answers that nobody was given are gone"
        )
        await llm.close()

    asyncio.run(run())


def test_a_query_that_is_cancelled_while_its_requests_are_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = g(cross(plus("one piece", "another one"), "which?"))
    looked, go_on = threading.Event(), threading.Event()
    find = FragmentStates.find

    def slowly(self: FragmentStates, core: Any, keys: Any) -> Any:
        found = find(self, core, keys)
        looked.set()
        assert found and go_on.wait(30)
        return found

    async def run() -> None:
        llm = AsyncLLM(core=text_core())
        (await llm.query(query, **NATIVE)).close()
        await settled(llm)
        before = await asyncio.wrap_future(llm.engine.call(lambda core: core.store.stats().handles))
        monkeypatch.setattr(FragmentStates, "find", slowly)
        call = asyncio.ensure_future(llm.query(query, **NATIVE))
        await asyncio.to_thread(looked.wait, 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()
        await settled(llm)
        after = await asyncio.wrap_future(llm.engine.call(lambda core: core.store.stats().handles))
        assert after == before
        await llm.close()

    asyncio.run(run())


async def settled(llm: AsyncLLM) -> None:
    for _ in range(2000):
        if not await asyncio.wrap_future(llm.engine.call(lambda core: core.has_work)):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("something still runs")


def test_a_synchronous_listener_hears_every_answers_text(llm: LLM) -> None:
    heard: dict[int, str] = {}
    found = llm.query(
        plus(g("a"), g("b")),
        on_text=lambda index, text: heard.__setitem__(index, heard.get(index, "") + text),
        keep=False,
        **NATIVE,
    )
    assert [heard[0], heard[1]] == [answer.text for answer in found.answers]
    release_all(llm)
