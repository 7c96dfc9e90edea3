"""`AsyncLLM`: the same engine for asyncio. Cancelling a call cancels its requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from types import TracebackType
from typing import Any

from dagengine_core_graph.query import Query

from .async_engine import EngineThread, MakeRequests
from .calls import Prompt, Prompts, release_states
from .core import EngineCore
from .explain import Explanation
from .graph import AsyncGraph
from .llm import LLM
from .query_results import QueryResult
from .query_run import stream_query
from .request import Event, FinishedEvent, Keep, Request, TokenEvent
from .sampling import SamplingParams
from .state import ContextItem, Result, make_result


async def stream_events(engine: EngineThread, make: MakeRequests) -> AsyncGenerator[Event, None]:
    """Submit what `make` gives and yield its events; leaving the iterator early cancels what has not finished.

    States of answers that were not yielded by then are released.

    Raises:
        DagError: the submission was refused as a whole.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event] = asyncio.Queue()
    ended: set[str] = set()
    left = False

    def receive(event: Event) -> None:
        if not left:
            queue.put_nowait(event)
        elif isinstance(event, FinishedEvent):
            release_states(engine, event)

    def forward(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(receive, event)
        except RuntimeError:
            engine.post(lambda core: core.abort(event.request_id))

    def give_up(accepted: Future[Sequence[Request]]) -> None:
        if accepted.exception() is None:
            for request in accepted.result():
                if request.id not in ended:
                    engine.post(lambda core, r=request.id: core.abort(r))  # type: ignore[misc]

    accepted = engine.submit_made(make, forward)
    told = asyncio.wrap_future(accepted)
    # Nobody may be left to hear a refusal: it is looked at here.
    told.add_done_callback(lambda future: future.cancelled() or future.exception())
    try:
        requests = await asyncio.shield(told)
        while len(ended) < len(requests):
            event = await queue.get()
            if isinstance(event, FinishedEvent):
                ended.add(event.request_id)
            yield event
    finally:
        left = True
        while not queue.empty():
            receive(queue.get_nowait())
        accepted.add_done_callback(give_up)


class AsyncLLM:
    """Mirrors `LLM`; what takes time is awaited. Takes the same arguments."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        position: str | None = None,
        chat_template: str | None = None,
        core: EngineCore | None = None,
        **options: Any,
    ) -> None:
        self._llm = LLM(model, position=position, chat_template=chat_template, core=core, **options)
        self.engine = self._llm.engine
        self.tokenizer = self._llm.tokenizer

    async def prefill(self, prompts: Prompts, *, context: Sequence[ContextItem] = (), **layout: Any) -> Any:
        """Compute inputs and keep them as states: a list for a list of inputs, one `State` for one.

        Args:
            layout: `position`, `position_options`, `backend`, `keep`, as `LLM.prefill` has them.
        """
        call = await asyncio.to_thread(self._llm.prefill_call, prompts, context=context, **layout)
        return call.states(self.engine, await self.run(call.requests))

    async def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        context: Sequence[ContextItem] = (),
        keep: bool | Keep = True,
        **options: Any,
    ) -> Any:
        """Generate from each prompt over the same context. Takes and returns what `LLM.generate` does."""
        call = await asyncio.to_thread(
            self._llm.generate_call, prompts, sampling, context=context, keep=keep, **options
        )
        return call.results(self.engine, await self.run(call.requests))

    chat = generate

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        context: Sequence[ContextItem] = (),
        keep: bool | Keep = False,
        **options: Any,
    ) -> AsyncGenerator[TokenEvent | Result, None]:
        """Text as it comes, then the `Result` of each answer. Takes what `generate` takes, for one prompt."""
        call = await asyncio.to_thread(
            self._llm.generate_call, [prompt], sampling and [sampling], context=context, keep=keep, **options
        )
        async with aclosing(stream_events(self.engine, lambda core: call.requests)) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    yield event
                    continue
                if event.error is not None:
                    raise event.error
                for choice in event.choices:
                    yield make_result(self.engine, choice)

    def graph(self, *, raise_errors: bool = True) -> AsyncGraph:
        """Build a graph of nodes in an `async with` block; it runs when the block ends."""
        return AsyncGraph(raise_errors=raise_errors, llm=self)

    async def query(self, query: Query | str, **options: Any) -> QueryResult:
        """Plan a span query and run it as one graph. Takes and raises what `LLM.query` does, but for `on_text`."""
        async with aclosing(self.stream_query(query, **options)) as parts:
            async for part in parts:
                if isinstance(part, QueryResult):
                    return part
        raise AssertionError("a stream of a query ends with its result")

    async def stream_query(
        self, query: Query | str, **options: Any
    ) -> AsyncGenerator[tuple[int, str] | QueryResult, None]:
        """New texts of the answers as (number, text), then the `QueryResult`. Takes what `LLM.query` takes."""
        came = time.perf_counter()
        encoded, settings = await asyncio.to_thread(self._llm.query_call, query, **options)
        async with aclosing(stream_query(self._llm, encoded, settings, came, stream_events)) as parts:
            async for part in parts:
                yield part

    async def explain(
        self, prompt: Prompt | None = None, *, context: Sequence[ContextItem] = (), **options: Any
    ) -> Explanation:
        """What a request would see; the model does not run. Takes what `LLM.explain` takes."""
        return await asyncio.to_thread(self._llm.explain, prompt, context=context, **options)

    def request(self, prompt: Prompt, sampling: SamplingParams | None, **options: Any) -> Request:
        """The request that the other methods would submit; takes as long as encoding the prompt does."""
        return self._llm.request(prompt, sampling, **options)

    async def run(self, requests: Sequence[Request]) -> list[FinishedEvent]:
        """Submit requests as one group and wait for their terminal events, in the order of the requests."""
        found: dict[str, FinishedEvent] = {}
        try:
            async with aclosing(stream_events(self.engine, lambda core: requests)) as events:
                async for event in events:
                    if isinstance(event, FinishedEvent):
                        found[event.request_id] = event
        except BaseException:
            for finished in found.values():
                release_states(self.engine, finished)
            raise
        return [found[request.id] for request in requests]

    async def close(self) -> None:
        """Cancel what runs and stop the engine."""
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
