"""An engine that is watched: when the host knew each token, from which logits, with how many pages in use.

It speaks token ids alone: no tokenizer is loaded unless asked for, so that no text is made of random ids, and every
token has an event of its own. Times are those of events; logits are looked at only by an engine that was made for it,
since whoever looks at them may hold the engine back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from dagengine import LLM, DagError, EngineConfig, Keep, SamplingParams, State
from dagengine.build import build_core
from dagengine.core import EngineCore
from dagengine.devices import describe
from dagengine.request import Choice, Event, Request, TokenEvent
from dagengine.state import ContextItem

from ...garbage import seldom_collected
from .costs import Costs
from .latency import Stream
from .lengths import LOWEST_ID


@dataclass
class Trace(Stream):
    """One watched request.

    Attributes:
        want_pages: whether to note the pages in use at each token.
        logits: [vocab] of each sampled token, where the probe observes them.
    """

    want_pages: bool = False
    logits: list[Any] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    choice: Choice | None = None


class Probe:
    """One engine with random inputs drawn from a seed.

    Args:
        options: fields of `EngineConfig`.
        observe: keep the logits of every sampled token.
        text: load the tokenizer too, for what `llm` is given as text.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int,
        options: Mapping[str, Any],
        observe: bool = False,
        text: bool = False,
    ) -> None:
        self._watched: dict[str, Trace] = {}
        self.core: EngineCore = build_core(
            model, EngineConfig(**options), observer=self._observe if observe else None, text=text
        )
        self.llm = LLM(core=self.core)
        self._process = ExitStack()
        self._process.enter_context(seldom_collected())  # as `dagengine serve` does it
        self._random = random.Random(seed)
        self._highest_id = min(self.core.geometry.vocab_size, 1 << 20)

    @property
    def costs(self) -> Costs:
        """What a step of this model reads and computes."""
        return Costs.of(self.core.geometry, self.core.config.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of KV over all layers."""
        return self.costs.kv_bytes * self.core.config.page_size

    @property
    def device(self) -> tuple[str, dict[str, str]]:
        """The GPU in words, and versions that belong to it; nothing for a CPU."""
        return describe(self.core.attention.device)

    def usable(self, backends: Sequence[str], report: Callable[[str], None]) -> list[str]:
        """Those of the backends that can run the model here; of the others the reason is reported."""
        found = []
        for name in backends:
            refused = self.llm.engine.call(lambda core, name=name: core.attention.why_not(name)).result()
            if refused is None:
                found.append(name)
            else:
                report(f"{name} is left out: {refused}")
        return found

    def read_bandwidth(self) -> list[float]:
        """Bytes a second that the device reads, in several trials; measured between steps."""
        from dagengine.ceilings import read_bandwidth

        return self.llm.engine.call(lambda core: read_bandwidth(core.attention.device)).result()

    def watched(self, run: Callable[[], None]) -> float | None:
        """Do `run`, and tell the share of decode steps that the device waited for the host; None on a CPU."""
        if self.core.attention.device.type != "cuda":
            run()
            return None
        times = self.llm.engine.call(lambda core: core.watch_host()).result()
        run()
        self.llm.engine.call(lambda core: core.unwatch_host()).result()
        share: float | None = times.share
        return share

    def ids(self, count: int) -> list[int]:
        """Random token ids; no two calls give the same ones."""
        return self._random.choices(range(LOWEST_ID, self._highest_id), k=count)

    def shuffled(self, states: Sequence[State]) -> list[State]:
        """The same states in a new order."""
        return self._random.sample(list(states), len(states))

    def prefill(self, inputs: Sequence[Sequence[int]]) -> list[State]:
        states: list[State] = self.llm.prefill(list(inputs))
        return states

    def run(self, requests: Sequence[Request], traces: Sequence[Trace] | None = None) -> list[Trace]:
        """Run requests at once and fill in their traces. Raises DagError where one is refused or fails."""
        found = [Trace() for _ in requests] if traces is None else list(traces)
        for request, trace in zip(requests, found, strict=True):
            self._watched[request.id] = trace
        begin = time.perf_counter()
        try:
            events = self.llm.run(requests, self._receive)
        finally:
            for request in requests:
                self._watched.pop(request.id, None)
        end = time.perf_counter()
        for event, trace in zip(events, found, strict=True):
            if event.error is not None:
                raise event.error
            trace.begin, trace.end, trace.choice = begin, end, event.choices[0]
        return found

    def generate(
        self,
        ids: Sequence[int],
        *,
        context: Sequence[ContextItem] = (),
        tokens: int = 1,
        backend: str | None = None,
        fresh: bool = True,
    ) -> Trace:
        """One greedy answer of exactly `tokens` tokens.

        Args:
            fresh: hold that of its own input nothing was there already. Raises DagError otherwise.
        """
        trace = self.run([self.request(ids, context=context, tokens=tokens, backend=backend)])[0]
        assert trace.choice is not None
        dag = trace.choice.dag
        if fresh and dag.reused != dag.visible:
            raise DagError("internal", f"{dag.reused} tokens were reused where {dag.visible} are cached")
        return trace

    def request(
        self,
        ids: Sequence[int],
        *,
        context: Sequence[ContextItem] = (),
        tokens: int = 1,
        backend: str | None = None,
        keep: bool = False,
        position: str | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Request:
        """A request for exactly `tokens` tokens."""
        sampling = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=seed)
        return self.llm.request(
            list(ids),
            sampling,
            context=context,
            position=position,
            backend=backend,
            keep=Keep() if keep else None,
        )

    def temp_bytes(self, *, reset: bool = False) -> dict[str, int]:
        return self.llm.engine.call(lambda core: core.temp_bytes(reset=reset)).result()

    def pages_live(self) -> int:
        return self.llm.engine.call(lambda core: core.store.stats().pages_live).result()

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        from dagengine.ceilings import release_memory

        self.llm.close()
        device = self.core.attention.device
        del self.core, self.llm
        self._process.close()
        release_memory(device)

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, event: Event) -> None:
        """Runs on the engine's thread."""
        trace = self._watched.get(event.request_id)
        if trace is None or not isinstance(event, TokenEvent):
            return
        trace.tell(time.perf_counter(), len(event.token_ids))
        if trace.want_pages:
            trace.pages.append(self.core.store.stats().pages_live)

    def _observe(self, request_id: str, index: int, offset: int, logits: Any) -> None:
        """Runs on the engine's thread, before sampling."""
        trace = self._watched.get(request_id)
        if trace is not None:
            trace.logits.append(logits.clone())
