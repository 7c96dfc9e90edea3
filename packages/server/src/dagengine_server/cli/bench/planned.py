"""Figures without a model's arithmetic: compiling contexts, laying them out, and long chains."""

from __future__ import annotations

import gc
import time

from dagengine import ContextRef, EngineConfig
from dagengine.explain import explain
from dagengine.request import Request
from dagengine_core_graph import ContextGraph, Inherit, passed, visible

from ..planning import planning_core
from .record import Figure

SEGMENTS = (100, 1000)
CHAINS = (1000, 10000)


def measure_planning(model: str, repeats: int) -> list[Figure]:
    """Compile and lay out a request over many one-token fragments, as the engine does it."""
    figures = []
    config = EngineConfig(page_size=1, kv_pages=max(SEGMENTS) + 8)
    for count in SEGMENTS:
        core = planning_core(model, config)
        parents = [Request(f"d{i}", (1,), None) for i in range(count)]
        context = tuple(ContextRef(request=parent.id) for parent in parents)
        reader = Request("reader", (1,), None, context=context)
        compiled, laid_out = [], []
        for repeat in range(-2, repeats):
            found = explain(core, [*parents, reader])[-1]
            if found.error is not None:
                raise found.error
            if repeat >= 0:
                compiled.append(found.compile_ms)
                laid_out.append(found.layout_ms)
        case = f"{count} segments"
        both = [a + b for a, b in zip(compiled, laid_out, strict=True)]
        figures += [
            Figure.of(case, "", "context compile", compiled, "ms"),
            Figure.of(case, "", "position layout", laid_out, "ms"),
            Figure.of(case, "", "compile and layout", both, "ms"),
        ]
    return figures


def measure_chain(repeats: int) -> list[Figure]:
    """Time per node of adding a chain of inherits and compiling every node of it.

    For every long chain as many nodes of short ones are built, so that a busy machine harms both alike.
    """
    short, long = CHAINS
    times: dict[int, list[float]] = {length: [] for length in CHAINS}
    for repeat in range(-1, repeats):
        for length in CHAINS:
            seconds = sum(build_chain(length) for _ in range(long // length))
            if repeat >= 0:
                times[length].append(seconds / long * 1e6)
    base = Figure.of(f"chain of {short}", "", "add and compile, per node", times[short], "us")
    longer = Figure.of(f"chain of {long}", "", "add and compile, per node", times[long], "us")
    return [base, longer.against(f"chain of {short}", base.value)]


def build_chain(length: int) -> float:
    """Seconds to add `length` nodes, each inheriting the one before, and to compile each of them."""
    gc.collect()
    begin = time.perf_counter()
    graph = ContextGraph()
    graph.add(0, length=3, sealed=True)
    for node in range(1, length):
        graph.add(node, (Inherit(node - 1),), length=3, sealed=True)
        assert visible(graph, node).num_tokens == passed(graph, node).num_tokens == 3 * node
    return time.perf_counter() - begin
