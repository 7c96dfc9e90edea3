"""Graphs that are built node by node in a `with` block, and run at once when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .calls import Prompt, keep_of, sampling_params
from .errors import DagError
from .request import ContextRef, FinishedEvent, Keep, Request, SpanName
from .sampling import SamplingParams
from .state import ContextItem, Result, make_result

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .llm import LLM


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
class _Nodes:
    """What both kinds of graph share: nodes as they are added, and what became of them."""

    llm: Any
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
        keep: bool | Keep = True,
        **options: Any,
    ) -> NodeRef:
        """Add a node. It samples iff `sampling` or a sampling option such as `max_tokens` is given; n is 1.

        Raises:
            DagError: `unsupported` for several answers; what `LLM.request` raises.
        """
        items = [item.inherit() if isinstance(item, NodeRef) else item for item in context]
        params = sampling_params(sampling, options) if sampling is not None or options else None
        if params is not None and params.n > 1:
            raise DagError("unsupported", "a node of a graph block has one answer", "n")
        request = self.llm.request(
            prompt,
            params,
            context=items,
            position=position,
            position_options=position_options,
            backend=backend,
            keep=keep_of(keep),
        )
        self.requests.append(request)
        return NodeRef(request.id)

    def _collect(self, events: Sequence[FinishedEvent]) -> None:
        for event in events:
            ref = NodeRef(event.request_id)
            if event.error is not None:
                self.errors[ref] = event.error
            else:
                self.results[ref] = make_result(self.llm.engine, event.choices[0])
        if self.errors and self.raise_errors:
            raise next(iter(self.errors.values()))


@dataclass
class Graph(_Nodes):
    """Nodes built first and run at once, when the `with` block ends. `results` maps each node to its result.

    A node that failed has its error in `errors`; leaving the block raises the first of them unless
    `raise_errors` is false.
    """

    llm: LLM

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.requests:
            self._collect(self.llm.run(self.requests))


@dataclass
class AsyncGraph(_Nodes):
    """`Graph` for asyncio: nodes run when the `async with` block ends. Adding a node encodes its prompt at once."""

    llm: AsyncLLM

    async def __aenter__(self) -> AsyncGraph:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.requests:
            self._collect(await self.llm.run(self.requests))
