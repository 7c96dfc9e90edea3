"""`LLM` and `AsyncLLM`: the same calls with the same answers, and nothing left behind by a call that is left."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted_model import scripted_core

from dagengine import LLM, AsyncLLM, DagError, Keep, Result, SamplingParams, State
from dagengine.request import Event, Request, TokenEvent
from dagengine.submitted import Submitted

GREEDY = {"max_tokens": 4, "temperature": 0.0}
DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7, 8]]


def asynchronous(work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with AsyncLLM(core=scripted_core()) as llm:
            found = await work(llm)
            await settled(llm)
            return found

    return asyncio.run(run())


async def settled(llm: AsyncLLM) -> None:
    """Nothing runs, and once the results are collected no handle is left."""
    for _ in range(2000):
        if not await asyncio.wrap_future(llm.engine.call(lambda core: core.has_work)):
            break
        await asyncio.sleep(0.005)
    await asyncio.wrap_future(llm.engine.call(lambda core: core.store.check()))


async def num_handles(llm: AsyncLLM) -> int:
    await settled(llm)
    return await asyncio.wrap_future(llm.engine.call(lambda core: core.store.stats().handles))


def refused(call: Callable[[], Any]) -> tuple[str, str | None]:
    with pytest.raises(DagError) as error:
        call()
    return error.value.code, error.value.field


def test_asyncio_gives_what_the_plain_calls_give() -> None:
    with LLM(core=scripted_core()) as llm:
        docs = llm.prefill(DOCUMENTS)
        one = llm.generate([9, 9], context=docs, **GREEDY)
        many = llm.generate([[1], [2]], SamplingParams(**GREEDY), context=docs, position="native")
        with llm.graph() as graph:
            x = graph.node([1, 2])
            y = graph.node([3], context=[x, docs[0]], **GREEDY)
        expected = (
            [len(doc) for doc in docs],
            [one.token_ids, *(answer.token_ids for answer in many), graph.results[y].token_ids],
            llm.explain([1], context=docs, position="native", max_tokens=3).segments,
        )

    async def work(llm: AsyncLLM) -> Any:
        docs = await llm.prefill(DOCUMENTS)
        one = await llm.generate([9, 9], context=docs, **GREEDY)
        many = await llm.generate([[1], [2]], SamplingParams(**GREEDY), context=docs, position="native")
        async with llm.graph() as graph:
            x = graph.node([1, 2])
            y = graph.node([3], context=[x, docs[0]], **GREEDY)
        explained = await llm.explain([1], context=docs, position="native", max_tokens=3)
        answers = [one.token_ids, *(answer.token_ids for answer in many), graph.results[y].token_ids]
        return [len(doc) for doc in docs], answers, explained.segments

    found = asynchronous(work)
    assert found[:2] == expected[:2]
    assert [row[1:] for row in found[2]] == [row[1:] for row in expected[2]]


def test_a_stream_takes_what_generate_takes() -> None:
    async def work(llm: AsyncLLM) -> None:
        doc = await llm.prefill(DOCUMENTS[0])
        assert isinstance(doc, State)
        events = [event async for event in llm.stream([9], context=[doc], position="native", **GREEDY)]
        *tokens, result = events
        assert isinstance(result, Result) and result.dag.policy == "native" and result.state is None
        said = [token for event in tokens if isinstance(event, TokenEvent) for token in event.token_ids]
        assert tuple(said) == result.token_ids

    asynchronous(work)


def test_no_option_is_taken_and_ignored() -> None:
    params = SamplingParams(**GREEDY)
    with LLM(core=scripted_core()) as llm:
        assert refused(lambda: llm.generate([1], params, max_tokens=2)) == ("invalid_request", "max_tokens")
        assert refused(lambda: llm.generate([1], max_tokns=2)) == ("invalid_request", "max_tokns")
        assert refused(lambda: llm.generate([[1]], [params] * 2)) == ("invalid_request", "sampling")
        assert refused(lambda: llm.generate([1], params, keep="yes")) == ("invalid_request", "keep")
        assert refused(lambda: llm.graph().node([1], n=2, temperature=1.0)) == ("unsupported", "n")

    async def work(llm: AsyncLLM) -> None:
        for options in ({"max_tokens": 2}, {"bogus": 1}):
            with pytest.raises(DagError):
                await llm.generate([1], params, **options)
            with pytest.raises(DagError):
                [event async for event in llm.stream([1], params, **options)]

    asynchronous(work)


def test_a_refused_submission_ends_nobody_elses_request_of_that_id() -> None:
    with LLM(core=scripted_core()) as llm:
        long = Request("same", (1, 2, 3), SamplingParams(max_tokens=100, temperature=0.0))
        first = Submitted(llm.engine, lambda core: [long])
        first.start()
        with pytest.raises(DagError) as error:
            llm.run([long])
        assert (error.value.code, error.value.field) == ("invalid_request", "id")
        assert [event.error for event in first.wait()] == [None]


def test_a_listener_that_raises_keeps_nobody_waiting() -> None:
    def refuse(event: Event) -> None:
        raise RuntimeError("planted")

    with LLM(core=scripted_core()) as llm:
        found = llm.run([Request("q", (1, 2, 3), SamplingParams(**GREEDY))], refuse)
        assert [(event.error, len(event.choices[0].token_ids)) for event in found] == [(None, 4)]


def test_a_refusal_of_a_call_that_was_cancelled_is_no_unhandled_error() -> None:
    unhandled: list[dict[str, Any]] = []

    async def work(llm: AsyncLLM) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        go_on = threading.Event()
        llm.engine.post(lambda core: go_on.wait(20))
        call = asyncio.ensure_future(llm.run([Request("q", (1,), None, position="sideways")]))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go_on.set()
        await settled(llm)
        del call
        gc.collect()

    asynchronous(work)
    assert not unhandled


def test_one_refusal_releases_what_the_others_of_the_call_kept() -> None:
    async def work(llm: AsyncLLM) -> int:
        fits, endless = [1, 2, 3], [1] * 5000
        with pytest.raises(DagError):
            await llm.generate([fits, fits, endless], **GREEDY)
        return await num_handles(llm)

    assert asynchronous(work) == 0
    with LLM(core=scripted_core()) as llm:
        assert refused(lambda: llm.prefill([[1, 2], [1] * 5000]))[1] == "input"
        assert llm.engine.call(lambda core: core.store.stats().handles).result() == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.002, 0.02, 0.1])
def test_a_call_that_is_cancelled_keeps_nothing(wait_s: float) -> None:
    async def work(llm: AsyncLLM) -> int:
        long = SamplingParams(max_tokens=250, temperature=0.0)
        short = SamplingParams(max_tokens=1, temperature=0.0)
        call = asyncio.ensure_future(
            llm.generate([[1], [2], [3]], [short, long, long], keep=Keep(name="answer"))
        )
        await asyncio.sleep(wait_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await num_handles(llm)

    assert asynchronous(work) == 0
