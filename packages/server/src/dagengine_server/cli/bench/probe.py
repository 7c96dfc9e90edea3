"""An engine that is watched: when each token was sampled, from which logits, with how many pages in use."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from dagengine import LLM, DagError, EngineConfig, Keep, SamplingParams, State
from dagengine.build import build_core
from dagengine.core import EngineCore
from dagengine.request import Choice, Request

LOWEST_ID = 100


@dataclass
class Trace:
    """One watched request.

    Attributes:
        begin: when it was submitted, seconds of `time.perf_counter`.
        sampled: when the logits of each sampled token were there.
        logits: [vocab] of each sampled token, if asked for.
        pages: pages in use at each sampled token, if asked for.
    """

    want_logits: bool = False
    want_pages: bool = False
    begin: float = 0.0
    end: float = 0.0
    sampled: list[float] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    choice: Choice | None = None

    @property
    def intervals_s(self) -> list[float]:
        """Between sampled tokens; the first token, which ends the prefill, is not one of them."""
        return [b - a for a, b in zip(self.sampled, self.sampled[1:], strict=False)]

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.sampled) - 1) / (self.sampled[-1] - self.sampled[0])


class Probe:
    """One engine with random inputs drawn from a seed.

    Args:
        options: fields of `EngineConfig`.
    """

    def __init__(self, model: str, *, seed: int, options: Mapping[str, Any]) -> None:
        self._watched: dict[str, Trace] = {}
        self.core: EngineCore = build_core(model, EngineConfig(**options), observer=self._observe)
        self.llm = LLM(core=self.core)
        self._random = random.Random(seed)
        self._highest_id = min(self.core.geometry.vocab_size, 1 << 20)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of KV over all layers."""
        geometry = self.core.geometry
        numbers = sum(2 * g.num_kv_heads * g.head_dim * len(g.layers) for g in geometry.groups)
        size = {"float64": 8, "bfloat16": 2, "float16": 2}.get(self.core.config.dtype, 4)
        return numbers * size * self.core.config.page_size

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.core.config.page_size

    def ids(self, count: int) -> list[int]:
        """Random token ids; no two calls give the same ones."""
        return [self._random.randrange(LOWEST_ID, self._highest_id) for _ in range(count)]

    def shuffled(self, states: Sequence[State]) -> list[State]:
        """The same states in a new order."""
        return self._random.sample(list(states), len(states))

    def prefill(self, inputs: Sequence[Sequence[int]]) -> list[State]:
        states: list[State] = self.llm.prefill(list(inputs))
        return states

    def run(self, requests: Sequence[Request], traces: Sequence[Trace]) -> list[Trace]:
        """Run requests at once and fill in their traces. Raises DagError where one is refused or fails."""
        for request, trace in zip(requests, traces, strict=True):
            self._watched[request.id] = trace
        begin = time.perf_counter()
        events = self.llm.run(requests)
        end = time.perf_counter()
        for event, trace in zip(events, traces, strict=True):
            del self._watched[event.request_id]
            if event.error is not None:
                raise event.error
            trace.begin, trace.end, trace.choice = begin, end, event.choices[0]
        return list(traces)

    def generate(
        self,
        ids: Sequence[int],
        *,
        context: Sequence[State] = (),
        tokens: int = 1,
        backend: str | None = None,
        logits: bool = False,
        keep: bool = False,
    ) -> Trace:
        """One greedy answer of exactly `tokens` tokens. Raises DagError where its own input was reused."""
        request = self.request(ids, context=context, tokens=tokens, backend=backend, keep=keep)
        trace = self.run([request], [Trace(want_logits=logits)])[0]
        assert trace.choice is not None
        dag = trace.choice.dag
        if dag.reused != dag.visible:
            raise DagError("internal", f"{dag.reused} tokens were reused where {dag.visible} are cached")
        return trace

    def request(
        self,
        ids: Sequence[int],
        *,
        context: Sequence[State] = (),
        tokens: int = 1,
        backend: str | None = None,
        keep: bool = False,
    ) -> Request:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return self.llm.request(
            list(ids), sampling, context=context, backend=backend, keep=Keep() if keep else None
        )

    def temp_bytes(self, *, reset: bool = False) -> dict[str, int]:
        return self.llm.engine.call(lambda core: core.temp_bytes(reset=reset)).result()

    def pages_live(self) -> int:
        return self.llm.engine.call(lambda core: core.store.stats().pages_live).result()

    def close(self) -> None:
        self.llm.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _observe(self, request_id: str, index: int, offset: int, logits: Any) -> None:
        """Runs on the engine's thread, before sampling."""
        trace = self._watched.get(request_id)
        if trace is None:
            return
        trace.sampled.append(time.perf_counter())
        if trace.want_logits:
            trace.logits.append(logits.clone())
        if trace.want_pages:
            trace.pages.append(self.core.store.stats().pages_live)
