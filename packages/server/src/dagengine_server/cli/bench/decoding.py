"""Decode without a context: one stream against transformers, several streams against one."""

from __future__ import annotations

from itertools import pairwise

from .baseline import Transformers
from .probe import Probe
from .record import Figure
from .settings import Settings


def measure_single_stream(probe: Probe, settings: Settings, baseline: Transformers | None) -> list[Figure]:
    """Tokens a second after the first, ours and theirs in turns, on the same prompts."""
    case = f"1 stream, prompt {settings.prompt}, answer {settings.answer}"
    backend = probe.core.default_backend
    rates: list[float] = []
    intervals: list[float] = []
    their_rates: list[float] = []
    their_intervals: list[float] = []

    def ours(prompt: list[int], keep: bool) -> None:
        trace = probe.generate(prompt, tokens=settings.answer + 1)
        if keep:
            rates.append(trace.decode_rate)
            intervals.extend(t * 1e3 for t in trace.intervals_s)

    def theirs(prompt: list[int], keep: bool) -> None:
        if baseline is None:
            return
        times, _ = baseline.generate(prompt, settings.answer + 1)
        if keep:
            their_rates.append(settings.answer / (times[-1] - times[0]))
            their_intervals.extend((b - a) * 1e3 for a, b in pairwise(times))

    for repeat in range(-1, settings.repeats):
        prompt = probe.ids(settings.prompt)
        for turn in (ours, theirs) if repeat % 2 else (theirs, ours):
            turn(prompt, repeat >= 0)
    rate = Figure.of(case, backend, "decode rate", rates, "tokens/s")
    step = Figure.of(case, backend, "time per token", intervals, "ms")
    if baseline is None:
        return [rate, step]
    their_rate = Figure.of(case, "", "decode rate, transformers", their_rates, "tokens/s")
    their_step = Figure.of(case, "", "time per token, transformers", their_intervals, "ms")
    return [
        their_rate,
        their_step,
        rate.against("transformers", their_rate.value),
        step.against("transformers", their_step.value),
    ]


def measure_streams(probe: Probe, settings: Settings) -> list[Figure]:
    """Tokens a second while all streams decode, against one stream, in turns."""
    backend = probe.core.default_backend
    case = f"{settings.streams} streams, prompt {settings.prompt}, answer {settings.answer}"
    many: list[float] = []
    one: list[float] = []
    for repeat in range(-1, settings.repeats):
        for count, rates in ((1, one), (settings.streams, many)):
            rate = together(probe, count, settings)
            if repeat >= 0:
                rates.append(rate)
    alone = Figure.of(case, backend, "decode rate, one of them alone", one, "tokens/s")
    all_of_them = Figure.of(case, backend, "decode rate", many, "tokens/s")
    return [alone, all_of_them.against("one stream", alone.value)]


def together(probe: Probe, count: int, settings: Settings) -> float:
    """Tokens a second of `count` requests while each of them is past its first and before its last token."""
    tokens = settings.answer + 1
    requests = [probe.request(probe.ids(settings.prompt), tokens=tokens) for _ in range(count)]
    traces = probe.run(requests)
    begin, end = max(t.sampled[0] for t in traces), min(t.sampled[-1] for t in traces)
    assert begin < end, "the streams never ran together; ask for longer answers"
    return sum(begin < at <= end for trace in traces for at in trace.sampled) / (end - begin)
