"""Bytes of KV in use while many requests read one state."""

from __future__ import annotations

from .probe import Probe, Trace
from .record import Figure
from .settings import Settings

QUESTION = 16
ANSWER = 8


def measure_readers(probe: Probe, settings: Settings) -> list[Figure]:
    """The most pages in use while all readers run, less what was in use before the state was made."""
    case = f"{settings.readers} readers of one state of {settings.shared}"
    backend = probe.core.default_backend
    before = probe.pages_live()
    (state,) = probe.prefill([probe.ids(settings.shared)])
    copy = probe.pages_live() - before
    requests = [
        probe.request(probe.ids(QUESTION), context=[state], tokens=ANSWER + 1)
        for _ in range(settings.readers)
    ]
    probe.temp_bytes(reset=True)
    traces = probe.run(requests, [Trace(want_pages=True) for _ in requests])
    peak = max(pages for trace in traces for pages in trace.pages) - before
    tails = settings.readers * -(-(QUESTION + ANSWER) // probe.core.config.page_size)
    temporary = probe.temp_bytes()[backend]
    state.release()
    size = probe.page_bytes
    used = Figure.count(case, backend, "KV bytes in use", peak * size, "B")
    return [
        used.against("one copy and own tails", (copy + tails) * size),
        used.against("a copy for each reader", (copy * settings.readers + tails) * size),
        Figure.count(case, backend, "temporary bytes", temporary, "B"),
    ]
