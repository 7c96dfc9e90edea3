"""`LLM`: an engine in this process, called like a function. `AsyncLLM` is the same for asyncio.

with LLM("path/or/id") as llm:
    docs = llm.prefill(["...", "..."])
    answer = llm.generate("Question: ...", context=docs, max_tokens=32)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from .async_engine import EngineThread
from .build import build_core
from .config import EngineConfig
from .core import EngineCore
from .errors import DagError
from .explain import Explanation, explain
from .inputs import Input, InputEncoder, build_request, new_request_id
from .request import ContextRef, Event, FinishedEvent, Keep, Request, SpanName
from .sampling import SamplingParams
from .state import ContextItem, Result, context_refs, make_result

Prompt = Input
Prompts = Prompt | Sequence[Prompt]


@dataclass(frozen=True)
class NodeRef:
    """A node of a graph that is being built, to be used in other nodes' contexts."""

    id: str

    def inherit(self, *, at: int | None = None, start: int | None = None) -> ContextRef:
        return ContextRef(request=self.id, mode="inherit", at=at, start=start)

    def digest(self, *, at: int | None = None, start: int | None = None) -> ContextRef:
        return ContextRef(request=self.id, mode="digest", at=at, start=start)

    def artifact(
        self,
        span: SpanName | tuple[int, int] | None = None,
        *,
        at: int | None = None,
        start: int | None = None,
    ) -> ContextRef:
        return ContextRef(request=self.id, mode="artifact", span=span, at=at, start=start)


@dataclass
class Graph:
    """Nodes built first and run at once, when the `with` block ends. `results` maps each node to its result.

    A node that failed has its error in `errors`; leaving the block raises the first of them unless
    `raise_errors` is false.
    """

    llm: LLM
    raise_errors: bool = True
    requests: list[Request] = field(default_factory=list)
    results: dict[NodeRef, Result] = field(default_factory=dict)
    errors: dict[NodeRef, DagError] = field(default_factory=dict)

    def node(
        self,
        prompt: Prompt,
        *,
        context: Sequence[ContextItem | NodeRef] = (),
        sampling: SamplingParams | None = None,
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: bool = True,
        **options: Any,
    ) -> NodeRef:
        """Add a node. It samples iff `sampling` or a sampling option such as `max_tokens` is given."""
        items = [item.inherit() if isinstance(item, NodeRef) else item for item in context]
        params = _sampling(sampling, options) if sampling is not None or options else None
        request = self.llm.request(
            prompt,
            params,
            context=items,
            position=position,
            position_options=position_options,
            backend=backend,
            keep=Keep() if keep else None,
        )
        self.requests.append(request)
        return NodeRef(request.id)

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self.requests:
            return
        for event in self.llm.run(self.requests):
            ref = NodeRef(event.request_id)
            if event.error is not None:
                self.errors[ref] = event.error
            else:
                self.results[ref] = make_result(self.llm.engine, event.choices[0])
        if self.errors and self.raise_errors:
            raise next(iter(self.errors.values()))


class LLM:
    """An engine with its own thread.

    Args:
        model: a Hugging Face folder, or a Hub id (with the extra `hub`).
        position: the position policy of requests that name none.
        options: any field of `EngineConfig`.
        core: an engine core to use instead of loading `model`; it is handed over.

    Raises:
        DagError: the model cannot be loaded, or an option is unknown or wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        position: str = "linear",
        chat_template: str | None = None,
        core: EngineCore | None = None,
        **options: Any,
    ) -> None:
        config = _engine_config(position, options)
        if core is None:
            if model is None:
                raise DagError("invalid_request", "give the folder or the Hub id of a model", "model")
            core = build_core(model, config, chat_template=chat_template)
        self._position = position
        self.tokenizer = core.tokenizer
        self._encoder = InputEncoder(core.tokenizer)
        self.engine = EngineThread(core)

    def prefill(
        self,
        prompts: Prompts,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: Keep | None = None,
    ) -> Any:
        """Compute inputs and keep them as states: a list for a list of inputs, one `State` for one."""
        single = _is_single(prompts)
        requests = [
            self.request(
                prompt,
                None,
                context=context,
                position=position,
                position_options=position_options,
                backend=backend,
                keep=keep or Keep(),
            )
            for prompt in ([prompts] if single else prompts)
        ]
        states = [make_result(self.engine, c).state for e in self._finished(requests) for c in e.choices]
        return states[0] if single else states

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: bool | Keep = True,
        **options: Any,
    ) -> Any:
        """Generate from each prompt over the same context.

        Args:
            prompts: text, token ids or messages, or a list of these.
            sampling: one for all, one per prompt, or None; `options` are fields of `SamplingParams`.
            keep: whether results keep their states, or how.

        Returns:
            One `Result` for one prompt, a list for a list; with n > 1 a list of n in place of each.
        """
        single = _is_single(prompts)
        listed: Sequence[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        if isinstance(sampling, Sequence):
            if len(sampling) != len(listed):
                raise DagError(
                    "invalid_request", f"{len(listed)} prompts need as many sampling params", "sampling"
                )
            each = [_sampling(params, options) for params in sampling]
        else:
            each = [_sampling(sampling, options)] * len(listed)
        kept = keep if isinstance(keep, Keep) else Keep() if keep else None
        requests = [
            self.request(
                prompt,
                params,
                context=context,
                position=position,
                position_options=position_options,
                backend=backend,
                keep=kept,
            )
            for prompt, params in zip(listed, each, strict=True)
        ]
        results: list[Any] = []
        for params, event in zip(each, self._finished(requests), strict=True):
            answers = [make_result(self.engine, choice) for choice in event.choices]
            results.append(answers if params.n > 1 else answers[0])
        return results[0] if single else results

    chat = generate

    def graph(self, *, raise_errors: bool = True) -> Graph:
        """Build a graph of nodes in a `with` block; it runs when the block ends."""
        return Graph(self, raise_errors)

    def explain(
        self,
        prompt: Prompt | None = None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Explanation:
        """What a request would see, where, and at what cost; the model does not run.

        Without a prompt a single token stands for it.
        """
        params = _sampling(sampling, options) if sampling is not None or options else None
        request = self.request(
            [0] if prompt is None else prompt,
            params,
            context=context,
            position=position,
            position_options=position_options,
        )
        found = self.engine.call(lambda core: explain(core, [request])).result()[0]
        if found.error is not None:
            raise found.error
        return found

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: Keep | None = None,
    ) -> Request:
        """The request that the other methods would submit."""
        return build_request(
            self._encoder,
            prompt,
            sampling=sampling,
            context=context_refs(context),
            position=position or self._position,
            position_options=position_options,
            backend=backend,
            keep=keep,
            request_id=new_request_id(),
        )

    def run(
        self, requests: Sequence[Request], on_event: Callable[[Event], None] | None = None
    ) -> list[FinishedEvent]:
        """Submit requests as one group and wait for their terminal events, in the order of the requests."""
        finished: dict[str, FinishedEvent] = {}
        done = threading.Event()

        def collect(event: Event) -> None:
            if on_event is not None:
                on_event(event)
            if isinstance(event, FinishedEvent):
                finished[event.request_id] = event
                if len(finished) == len(requests):
                    done.set()

        if requests:
            self.engine.submit(requests, collect).result()
            done.wait()
        return [finished[request.id] for request in requests]

    def close(self) -> None:
        """Cancel what runs and stop the engine; states end with it."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finished(self, requests: Sequence[Request]) -> list[FinishedEvent]:
        events = self.run(requests)
        for event in events:
            if event.error is not None:
                for other in events:
                    for choice in other.choices:
                        make_result(self.engine, choice).close()
                raise event.error
        return events


def _engine_config(position: str, options: Mapping[str, Any]) -> EngineConfig:
    try:
        return replace(EngineConfig(), position_policy=position, **options)
    except TypeError:
        known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
        unknown = next(name for name in options if name not in EngineConfig.__dataclass_fields__)
        raise DagError("invalid_request", f"unknown option {unknown!r}; known: {known}", unknown) from None


def _sampling(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if params is None:
        return SamplingParams.from_mapping(options)
    if options:
        raise DagError(
            "invalid_request", "give sampling options or SamplingParams, not both", next(iter(options))
        )
    return params


def _is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt: text, ids or messages; a list of those is not."""
    if isinstance(prompts, str):
        return True
    return bool(prompts) and isinstance(prompts[0], int | Mapping)
