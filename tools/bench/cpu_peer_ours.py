"""dagengine's process: cpu_peer_ours.py MODEL THREADS BACKEND."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.cpu_peer_worker import Clock, now, own_output, serve
from dagengine.build import build_core
from dagengine.config import EngineConfig
from dagengine.core import EngineCore
from dagengine.inputs import InputEncoder, build_request, new_request_id
from dagengine.request import ContextRef, FinishedEvent, Keep, TokenEvent
from dagengine.sampling import SamplingParams


class Ours:
    """Requests stepped by hand, so that what is timed is the engine and no thread around it."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._encoder = core, InputEncoder(core.tokenizer)
        self._states: dict[str, list[str | None]] = {}
        self.implementation = ""

    def _submit(self, ids: list[int], tokens: int, context: tuple[ContextRef, ...] = ()) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True) if tokens else None
        request = build_request(
            self._encoder,
            ids,
            sampling=params,
            context=context,
            position="linear",
            position_options=None,
            backend=None,
            keep=None if tokens else Keep(),
            request_id=new_request_id(),
        )
        self._core.submit(request)

    def _run(self, clock: Clock | None = None) -> list[FinishedEvent]:
        finished: list[FinishedEvent] = []
        while self._core.has_work:
            counts: Counter[str] = Counter(clock.counts if clock else ())
            for event in self._core.step():
                if isinstance(event, TokenEvent):
                    counts[event.request_id] += len(event.token_ids)
                else:
                    finished.append(event)
            if clock is not None:
                clock.saw(counts)
        for event in finished:
            if event.error is not None:
                raise event.error
            self.implementation = str(event.choices[0].dag.record["implementation"])
        return finished

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        clock = Clock(len(prompts))
        for prompt in prompts:
            self._submit(prompt, tokens)
        ended = self._run(clock)
        return clock.result() | self._said(ended)

    def contexts(self, name: str, contexts: list[list[int]]) -> dict[str, Any]:
        begin = now()
        for context in contexts:
            self._submit(context, 0)
        self._states[name] = [event.choices[0].dag.state for event in self._run()]
        end = now()
        return {"contexts_s": end[0] - begin[0], "contexts_cpu_s": end[1] - begin[1]}

    def readers(self, name: str, questions: list[list[int]], tokens: int) -> dict[str, Any]:
        states = self._states[name]
        clock = Clock(len(questions))
        for index, question in enumerate(questions):
            self._submit(question, tokens, (ContextRef(state=states[index % len(states)]),))
        ended = self._run(clock)
        return clock.result() | self._said(ended)

    def _said(self, ended: list[FinishedEvent]) -> dict[str, Any]:
        firsts = [event.choices[0].token_ids[0] for event in ended]
        return {"first_tokens": sorted(firsts), "implementation": self.implementation}


def main() -> None:
    answers = own_output()
    model, threads, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = EngineConfig(
        device="cpu", dtype="bfloat16", threads=threads, attention_backend=backend, kv_memory_gib=2.0
    )
    ours = Ours(build_core(model, config))
    runs = {"generate": ours.generate, "contexts": ours.contexts, "readers": ours.readers}
    serve({"engine": "dagengine"}, runs, answers)


if __name__ == "__main__":
    main()
