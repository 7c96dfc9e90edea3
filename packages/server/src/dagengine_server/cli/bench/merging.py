"""Requests over cached fragments in a new order: every backend's stages, and the first token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dagengine import State

from .baseline import Transformers
from .probe import Probe, Trace
from .record import Figure
from .settings import Settings

COMPARED_WITH = ("reference", "naive")
COMPARISONS = 3


def measure_backends(probe: Probe, settings: Settings, backends: Sequence[str]) -> list[Figure]:
    """The stages of one request over fragments, by backend, on the same inputs, orders and states.

    In every repeat the backends take turns at going first.
    """
    states = probe.prefill([probe.ids(settings.fragment_length) for _ in range(settings.fragments)])
    traces: dict[str, list[Trace]] = {name: [] for name in backends}
    temporary = dict.fromkeys(backends, 0)
    for repeat in range(-1, settings.repeats):
        order, question = probe.shuffled(states), probe.ids(settings.question)
        first = repeat % len(backends)
        for name in (*backends[first:], *backends[:first]):
            probe.temp_bytes(reset=True)
            trace = probe.generate(question, context=order, tokens=settings.decode + 1, backend=name)
            if repeat >= 0:
                traces[name].append(trace)
                temporary[name] = max(temporary[name], probe.temp_bytes()[name])
    figures = []
    for name in backends:
        found = _stages(settings.merge_case, name, traces[name])
        found.append(Figure.count(settings.merge_case, name, "temporary bytes", temporary[name], "B"))
        shared = settings.visible * probe.costs.kv_bytes
        found.append(Figure.count(settings.merge_case, name, "shared KV bytes", shared, "B"))
        figures += [_beside(figure, name, traces, settings) for figure in found]
    _release(states)
    return figures


def measure_differences(probe: Probe, settings: Settings, backends: Sequence[str]) -> list[Figure]:
    """The largest difference of any logit, by backend, over the same fragments in orders that change.

    The probe observes logits; its fragments are those of `measure_backends` where both begin with one seed.
    """
    states = probe.prefill([probe.ids(settings.fragment_length) for _ in range(settings.fragments)])
    compared = next((name for name in COMPARED_WITH if name in backends), backends[0])
    worst = dict.fromkeys(backends, 0.0)
    for _ in range(min(COMPARISONS, settings.repeats)):
        order, question = probe.shuffled(states), probe.ids(settings.question)
        traces = {
            name: probe.generate(question, context=order, tokens=settings.decode + 1, backend=name)
            for name in backends
        }
        for name in backends:
            worst[name] = max(worst[name], _difference(traces[name], traces[compared]))
    _release(states)
    return [
        Figure.count(settings.merge_case, name, "max |delta logit|", worst[name], "logit").against(
            compared, 0.0
        )
        for name in backends
    ]


def measure_first_token(probe: Probe, settings: Settings, baseline: Transformers | None) -> list[Figure]:
    """First token over fragments in a new order, against plain prefills and against one contiguous state.

    Times are what the caller waits for an answer of one token. Our own plain prefill is of fresh tokens: the
    engine would find the pages of the first fragment again.
    """
    case, length = settings.merge_case, settings.fragment_length
    fragments = [probe.ids(length) for _ in range(settings.fragments)]
    ids_of = dict(zip(probe.prefill(fragments), fragments, strict=True))
    (whole,) = probe.prefill([probe.ids(settings.visible)])
    merged: list[float] = []
    contiguous: list[float] = []
    plain: list[float] = []
    theirs: list[float] = []
    for repeat in range(-1, settings.repeats):
        order, question = probe.shuffled(list(ids_of)), probe.ids(settings.question)
        pair: list[tuple[list[float], list[State]]] = [(merged, order), (contiguous, [whole])]
        for times, context in pair if repeat % 2 else reversed(pair):
            trace = probe.generate(question, context=context)
            if repeat >= 0:
                times.append(trace.end - trace.begin)
        if 0 <= repeat < settings.baseline_repeats:
            trace = probe.generate(probe.ids(settings.visible + settings.question))
            plain.append(trace.end - trace.begin)
            if baseline is not None:
                prompt = [token for state in order for token in ids_of[state]] + question
                theirs.append(baseline.generate(prompt, 1)[0][0])
    _release([*ids_of, whole])
    backend = probe.core.default_backend

    def figure(metric: str, times: Sequence[float]) -> Figure:
        return Figure.of(case, backend, metric, [t * 1e3 for t in times], "ms")

    own, one = figure("first token", merged), figure("first token, one contiguous state", contiguous)
    again = figure("first token, plain prefill", plain)
    figures = [one, again]
    figures += [own.against("one contiguous state", one.value), own.against("plain prefill", again.value)]
    if theirs:
        other = Figure.of(case, "", "first token, transformers", [t * 1e3 for t in theirs], "ms")
        figures += [other, *(f.against("transformers", other.value) for f in (own, again))]
    return figures


def _stages(case: str, backend: str, traces: Sequence[Trace]) -> list[Figure]:
    timings = [trace.choice.dag.timing for trace in traces if trace.choice is not None]
    stages = (
        ("context compile", [t.compile for t in timings]),
        ("position layout", [t.layout for t in timings]),
        ("KV preparation", [t.kv_prepare for t in timings]),
        ("first token after the merge", [t.first_token for t in timings]),
        ("later decode, per token", [i * 1e3 for trace in traces for i in trace.intervals_s]),
    )
    return [Figure.of(case, backend, metric, samples, "ms") for metric, samples in stages]


def _beside(figure: Figure, name: str, traces: dict[str, list[Trace]], settings: Settings) -> Figure:
    """Times of the steps that attend are set beside the naive backend's."""
    timed = figure.metric in ("first token after the merge", "later decode, per token")
    if not timed or "naive" not in traces or name == "naive":
        return figure
    other = {f.metric: f for f in _stages(settings.merge_case, "naive", traces["naive"])}
    return figure.against("naive", other[figure.metric].value)


def _difference(one: Trace, other: Trace) -> float:
    """Largest difference of two runs' logits, as far as both sampled the same tokens."""
    assert one.choice is not None and other.choice is not None
    worst = 0.0
    for step, (a, b) in enumerate(zip(one.logits, other.logits, strict=True)):
        worst = max(worst, float((_finite(a) - _finite(b)).abs().max()))
        if one.choice.token_ids[step : step + 1] != other.choice.token_ids[step : step + 1]:
            break
    return worst


def _finite(logits: Any) -> Any:
    """Ids beyond the tokenizer's are masked to -inf in all runs; a NaN must show as a difference."""
    return logits.nan_to_num(nan=1e30, neginf=0.0)


def _release(states: Sequence[State]) -> None:
    for state in states:
        state.release()
