"""`AsyncLLM`: the same engine for asyncio. Cancelling a call cancels its requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from .async_engine import EngineThread
from .core import EngineCore
from .explain import Explanation, explain
from .llm import LLM
from .request import Event, FinishedEvent, Keep, Request, TokenEvent
from .sampling import SamplingParams
from .state import ContextItem, Result, State, make_result


async def stream_events(engine: EngineThread, requests: Sequence[Request]) -> AsyncIterator[Event]:
    """Submit requests and yield their events; leaving the iterator early cancels what has not finished.

    Raises:
        DagError: the submission was refused as a whole.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Event] = asyncio.Queue()
    open_ids = {request.id for request in requests}

    def forward(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, event)
        except RuntimeError:
            engine.post(lambda core: core.abort(event.request_id))

    accepted = engine.submit(requests, forward)
    try:
        await asyncio.shield(asyncio.wrap_future(accepted))
        while open_ids:
            event = await queue.get()
            if isinstance(event, FinishedEvent):
                open_ids.discard(event.request_id)
            yield event
    finally:
        for request_id in open_ids:
            engine.post(lambda core, r=request_id: core.abort(r))  # type: ignore[misc]


class AsyncLLM:
    """Mirrors `LLM`; what takes time is awaited. Takes the same arguments."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        position: str = "linear",
        chat_template: str | None = None,
        core: EngineCore | None = None,
        **options: Any,
    ) -> None:
        self._llm = LLM(model, position=position, chat_template=chat_template, core=core, **options)
        self.engine = self._llm.engine
        self.tokenizer = self._llm.tokenizer

    async def prefill(
        self, prompt: Any, *, context: Sequence[ContextItem] = (), keep: Keep | None = None, **layout: Any
    ) -> State:
        """Compute one input and keep it as a state."""
        request = await self._request(prompt, None, context=context, keep=keep or Keep(), **layout)
        state = (await self._finish(request))[0].state
        assert state is not None
        return state

    async def generate(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        context: Sequence[ContextItem] = (),
        keep: bool | Keep = True,
        position: str | None = None,
        position_options: Any = None,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        """Generate from one prompt: a `Result`, or a list of n with n > 1."""
        params = sampling if sampling is not None else SamplingParams.from_mapping(options)
        request = await self._request(
            prompt,
            params,
            context=context,
            keep=keep if isinstance(keep, Keep) else Keep() if keep else None,
            position=position,
            position_options=position_options,
            backend=backend,
        )
        results = await self._finish(request)
        return results if params.n > 1 else results[0]

    async def stream(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        context: Sequence[ContextItem] = (),
        keep: bool | Keep = False,
        **options: Any,
    ) -> AsyncIterator[TokenEvent | Result]:
        """Text as it comes, then the `Result` of each answer."""
        params = sampling if sampling is not None else SamplingParams.from_mapping(options)
        kept = keep if isinstance(keep, Keep) else Keep() if keep else None
        request = await self._request(prompt, params, context=context, keep=kept)
        async with aclosing(stream_events(self.engine, [request])) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    yield event
                    continue
                if event.error is not None:
                    raise event.error
                for choice in event.choices:
                    yield make_result(self.engine, choice)

    async def explain(
        self, prompt: Any = None, *, context: Sequence[ContextItem] = (), **layout: Any
    ) -> Explanation:
        """What a request would see; the model does not run."""
        request = await self._request([0] if prompt is None else prompt, None, context=context, **layout)
        found = (await asyncio.wrap_future(self.engine.call(lambda core: explain(core, [request]))))[0]
        if found.error is not None:
            raise found.error
        return found

    async def close(self) -> None:
        """Cancel what runs and stop the engine."""
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _request(self, prompt: Any, sampling: SamplingParams | None, **layout: Any) -> Request:
        return await asyncio.to_thread(lambda: self._llm.request(prompt, sampling, **layout))

    async def _finish(self, request: Request) -> list[Result]:
        async with aclosing(stream_events(self.engine, [request])) as events:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    if event.error is not None:
                        raise event.error
                    return [make_result(self.engine, choice) for choice in event.choices]
        raise AssertionError("every request ends with a terminal event")
