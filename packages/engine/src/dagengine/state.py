"""What a Python user holds: states, references to them, and results. All calls end at the engine's thread."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from .async_engine import EngineThread
from .errors import DagError
from .request import Choice, ContextRef, DagInfo, SpanName, TokenLogprob

Span = SpanName | tuple[int, int] | None


@dataclass(frozen=True)
class Reference:
    """A reference that keeps its state alive until it was used."""

    ref: ContextRef
    state: State


class State:
    """A handle on sealed KV. It is released when closed, left as a context manager, or collected.

    Attributes:
        id: the state id, `st_...`, which the HTTP interface of the same engine knows too.
        spans: half-open named spans in the state's own tokens.
    """

    def __init__(self, engine: EngineThread, state_id: str, spans: Mapping[str, tuple[int, int]]) -> None:
        self.id, self.spans = state_id, dict(spans)
        self._engine = engine
        self._finalizer = weakref.finalize(self, _release, engine, state_id)

    def __len__(self) -> int:
        return self.spans["all"][1]

    def __repr__(self) -> str:
        return f"<State {self.id}, {len(self)} tokens{'' if self._finalizer.alive else ', released'}>"

    def __enter__(self) -> State:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def inherit(self, *, start: int | None = None) -> Reference:
        """Read all that the state passes on and all of its tokens, and pass both on."""
        return Reference(ContextRef(state=self.id, mode="inherit", start=start), self)

    def digest(self, *, start: int | None = None) -> Reference:
        """Read the same as `inherit`, but pass nothing of it on."""
        return Reference(ContextRef(state=self.id, mode="digest", start=start), self)

    def artifact(self, span: Span = None, *, start: int | None = None) -> Reference:
        """Read only a span of the state's own tokens: its output, or all of a state that sampled nothing."""
        return Reference(ContextRef(state=self.id, mode="artifact", span=span, start=start), self)

    def fork(self, at: int) -> State:
        """A new handle on the first `at` tokens. Raises DagError `span_out_of_range`."""
        forked = self._engine.ask(lambda core: core.fork(self.id, at))
        spans = {name: (min(a, at), min(b, at)) for name, (a, b) in self.spans.items()}
        return State(self._engine, forked, spans)

    def reposition(self, start: int, *, copy: bool = False) -> State:
        """A new state of the same tokens whose K is stored from position `start` on.

        Reading turns queries instead and moves nothing: this is for whoever reads pages with other kernels. Without
        `copy` the new state takes this one's pages, and this one is computed again when it is read.

        Raises DagError: `state_shared` or `state_in_use` where others may read the pages (ask for a copy),
        `already_repositioned`, `not_resident`, `position_overflow`.
        """
        moved = self._engine.ask(lambda core: core.reposition(self.id, start, copy=copy))
        return State(self._engine, moved, self.spans)

    def offload(self) -> None:
        """Move its pages to the host as soon as nothing needs them on the device; reading it brings them back.

        Raises: DagError `unsupported` without a host tier, `capacity` if the host has no room.
        """
        self._engine.ask(lambda core: core.offload_state(self.id))

    def prefetch(self) -> None:
        """Begin to bring back what was offloaded of it and of what it passes on, as far as pages are unused.

        Raises: DagError `unsupported` without a host tier.
        """
        self._engine.ask(lambda core: core.prefetch_state(self.id))

    def release(self) -> None:
        """Let go of the state; whatever reads it keeps what it reads. Releasing twice is no error."""
        self._finalizer()

    close = release


def _release(engine: EngineThread, state_id: str) -> None:
    engine.release((state_id,))


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer: what the prompt sees and holds, how much of that was there already, what was sampled."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Result:
    """One finished answer, which holds its state until closed or collected.

    Attributes:
        state: None where it was not kept.
        dag: what was read, how it was laid out, and how long it took.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    stop_reason: int | str | None
    usage: Usage
    state: State | None
    choice: Choice

    @property
    def dag(self) -> DagInfo:
        return self.choice.dag

    def inherit(self, *, start: int | None = None) -> Reference:
        return self._kept().inherit(start=start)

    def digest(self, *, start: int | None = None) -> Reference:
        return self._kept().digest(start=start)

    def artifact(self, span: Span = None, *, start: int | None = None) -> Reference:
        return self._kept().artifact(span, start=start)

    def fork(self, at: int) -> State:
        return self._kept().fork(at)

    def close(self) -> None:
        """Release the state, if there is one."""
        if self.state is not None:
            self.state.release()

    def _kept(self) -> State:
        if self.state is None:
            raise DagError("state_not_found", "this result was not kept; ask for it with keep=True", "keep")
        return self.state


def make_result(engine: EngineThread, choice: Choice) -> Result:
    state = State(engine, choice.dag.state, choice.dag.spans) if choice.dag.state is not None else None
    return Result(
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        usage=Usage(choice.dag.visible + choice.dag.input, choice.dag.reused, choice.num_sampled),
        state=state,
        choice=choice,
    )


ContextItem = State | Result | Reference | ContextRef | str


def context_refs(context: Sequence[ContextItem] | None) -> tuple[ContextRef, ...]:
    """References from what users pass: a state or a result is inherited, a text is a state id.

    Raises:
        DagError: `invalid_request`, naming `context[i]`.
    """
    refs = []
    if context is not None and (isinstance(context, str) or not isinstance(context, Sequence)):
        raise DagError("invalid_request", "context is a list of states, results or references", "context")
    for index, item in enumerate(context or ()):
        if isinstance(item, Reference):
            refs.append(item.ref)
        elif isinstance(item, State):
            refs.append(item.inherit().ref)
        elif isinstance(item, Result):
            refs.append(item.inherit().ref)
        elif isinstance(item, ContextRef):
            refs.append(item)
        elif isinstance(item, str):
            refs.append(ContextRef(state=item))
        else:
            raise DagError(
                "invalid_request",
                f"a reference is a state, a result, .artifact(), .digest() or a state id, not {type(item).__name__}",
                f"context[{index}]",
            )
    return tuple(refs)
