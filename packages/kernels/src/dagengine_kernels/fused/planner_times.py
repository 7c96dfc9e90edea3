"""How long planning takes here: `python -m dagengine_kernels.fused.planner_times`. Knows batches to plan, not kernels.

Per batch the least and the median time of plan_spans and of plan_table, and what the plan reads.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

from dagengine_kernels.fused import planner
from dagengine_kernels.fused.native import why_missing
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable
from dagengine_kernels.graph_cases import GRAPH_CASES, GraphBuilder, graph_case

PARAMETERS = PlanParameters(
    group=4, num_kv_heads=8, rows_per_tile=(64, 128), workers=(264, 132), boxes=1, owners=True
)
SEQUENCES = SEGMENTS = 64


def shared(tokens: int, nodes: int = SEGMENTS) -> SpanTable:
    """Each sequence sees 64 of the nodes, in an order of its own."""
    build = GraphBuilder(64, 0, random.Random(0))
    listed = [build.node(tokens) for _ in range(nodes)]
    return build.batch([build.rng.sample(listed, SEGMENTS) for _ in range(SEQUENCES)])


def private(tokens: int) -> SpanTable:
    """No sequence sees what another one sees."""
    build = GraphBuilder(64, 0, random.Random(0))
    return build.batch([[build.node(tokens) for _ in range(SEGMENTS)] for _ in range(SEQUENCES)])


def sliced(tokens: int) -> SpanTable:
    """Each sequence sees a slice of every node, cut at one of three places at either end."""
    rng = random.Random(0)
    count = -(-tokens // 64)
    nodes = [list(range(i * count, (i + 1) * count)) for i in range(SEGMENTS)]
    sequences = []
    for _ in range(SEQUENCES):
        view, spans = 0, []
        for pages in rng.sample(nodes, SEGMENTS):
            start = rng.choice((0, 10, tokens // 3))
            stop = rng.choice((tokens * 2 // 3, tokens - 10, tokens))
            spans.append((pages, start, stop, start, view - start))
            view += stop - start
        sequences.append(SequenceSpans(view - 1, 1, spans))
    return SpanTable.from_sequences(sequences, page_size=64)


def batches() -> dict[str, SpanTable]:
    made = {
        "64 x 64 shared, 300 tokens": shared(300),
        "64 x 64 shared, 2857 tokens": shared(2857),
        "64 x 64 of 128, 300 tokens": shared(300, 128),
        "64 x 64 sliced, 300 tokens": sliced(300),
        "64 x 64 private, 300 tokens": private(300),
    }
    return {**made, **{name: graph_case(name) for name in GRAPH_CASES}}


def times(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least and median time in µs."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        function()
        found.append((time.perf_counter_ns() - began) / 1e3)
    found.sort()
    return found[0], found[len(found) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the planner.")
    parser.add_argument(
        "--repeats", type=int, default=200, help="plans per batch and function (default: 200)"
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    print(
        f"planner: {planner.implementation()}{f' ({why_missing()})' if why_missing() else ''}; µs, least and median"
    )
    print(
        f"{'batch':<30} {'plan_spans':>16} {'plan_table':>16} {'spans':>7} {'extents':>8} {'read ratio':>11}"
    )
    for name, spans in batches().items():
        table = spans.to_segments()
        of_spans = times(lambda spans=spans: planner.plan_spans(spans, PARAMETERS), options.repeats)
        of_table = times(lambda table=table: planner.plan_table(table, PARAMETERS), options.repeats)
        ratio = planner.plan_spans(spans, PARAMETERS).read_ratio
        both = " ".join(f"{least:>7.0f} {median:>8.0f}" for least, median in (of_spans, of_table))
        print(f"{name:<30} {both} {len(spans.spans):>7} {len(table.extents):>8} {ratio:>11.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
