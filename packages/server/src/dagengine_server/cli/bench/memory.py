"""Bytes of KV in use while many requests read one state, and how long a step of them takes."""

from __future__ import annotations

from itertools import pairwise

from .probe import Probe, Trace
from .record import Figure
from .settings import Settings

QUESTION = 16
ANSWER = 32


def measure_readers(probe: Probe, settings: Settings) -> list[Figure]:
    """The most pages in use while all readers run, less what was in use before the state was made.

    A step of all readers is set beside a step of one, which reads as long a context. Pages are counted in a run of
    their own: counting them at each token takes time.
    """
    case = f"{settings.readers} readers of one state of {settings.shared}"
    backend = probe.core.default_backend
    before = probe.pages_live()
    (state,) = probe.prefill([probe.ids(settings.shared)])
    copy = probe.pages_live() - before

    def read(count: int, *, want_pages: bool = False) -> list[Trace]:
        requests = [
            probe.request(probe.ids(QUESTION), context=[state], tokens=ANSWER + 1) for _ in range(count)
        ]
        return probe.run(requests, [Trace(want_pages=want_pages) for _ in requests])

    for count in (1, settings.readers):
        read(count)
    probe.temp_bytes(reset=True)
    counted = read(settings.readers, want_pages=True)
    peak = max(pages for trace in counted for pages in trace.pages) - before
    traces, one = read(settings.readers), read(1)
    tails = settings.readers * -(-(QUESTION + ANSWER) // probe.core.config.page_size)
    temporary = probe.temp_bytes()[backend]
    state.release()
    size = probe.page_bytes
    step = _step(case, "time per token", traces, backend)
    alone = _step(case, "time per token, one reader", one, backend)
    used = Figure.count(case, backend, "KV bytes in use", peak * size, "B")
    return [
        used.against("one copy and own tails", (copy + tails) * size),
        used.against("a copy for each reader", (copy * settings.readers + tails) * size),
        Figure.count(case, backend, "temporary bytes", temporary, "B"),
        step.against("one reader", alone.value),
        alone,
    ]


def _step(case: str, metric: str, traces: list[Trace], backend: str) -> Figure:
    """Between tokens while all decode."""
    begin = max(trace.sampled[0] for trace in traces)
    gaps = [(later - at) * 1e3 for trace in traces for at, later in pairwise(trace.sampled) if at >= begin]
    return Figure.of(case, backend, metric, gaps, "ms")
