"""Times of calls: CUDA graph replays on a GPU, a wall clock on the CPU. Knows calls, not what they compute.

Contenders of one case are captured first and replayed in turns, so that a change of the card's clocks meets them all.
One graph holds many calls. Cold: the calls go round input sets that together exceed the L2 cache several times, as the
layers of a model do. Warm: every call reads the same set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Call = Callable[[], object]

GRAPH_US = 2500.0
MOST_CALLS = 64


@dataclass
class Captured:
    """One contender: its graph, how many calls a replay makes, and samples of microseconds per call.

    `held` keeps alive what the captured calls read: a graph holds addresses only.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    held: Sequence[Call]
    samples: list[float] = field(default_factory=list)


def capture(calls: Sequence[Call], sets: int) -> Captured:
    """Capture calls in order, repeated until a replay takes about GRAPH_US; each of `sets` sets equally often.

    `calls[i]` runs on set i. Every call runs once before, so that nothing is compiled or allocated in the capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    estimate = max(1.0, start.elapsed_time(end) * 1000 / len(calls))
    rounds = max(1, round(min(MOST_CALLS, GRAPH_US / estimate) / sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return Captured(graph, rounds * len(calls), calls)


def race(contenders: dict[str, Captured], replays: int) -> None:
    """Replay all contenders in turns, `replays` times each, and add a sample per replay."""
    for captured in contenders.values():
        captured.graph.replay()
    torch.cuda.synchronize()
    for _ in range(replays):
        for captured in contenders.values():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            captured.graph.replay()
            start.record()
            captured.graph.replay()
            end.record()
            end.synchronize()
            captured.samples.append(start.elapsed_time(end) * 1000 / captured.calls)


def eager(call: Call, repeats: int) -> list[float]:
    """Microseconds per call between events, launches and host work included: for what no graph can hold."""
    samples = []
    for i in range(repeats + 1):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if i:
            samples.append(start.elapsed_time(end) * 1000)
    return samples


def wall(calls: dict[str, Call], seconds: float, least: int = 5, most: int = 400) -> dict[str, list[float]]:
    """Microseconds of wall clock of each call, in turns, until `seconds` have passed in all."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    stop = time.perf_counter() + seconds
    for turn in range(most):
        if turn >= least and time.perf_counter() > stop:
            break
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - begin) * 1e6)
    return samples
