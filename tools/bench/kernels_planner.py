"""The planner's time for a batch of the size that its bar names. Knows the planner's public functions only."""

from __future__ import annotations

import random
import time
from functools import partial

from bench.kernels_bars import PLANNER_CASE
from bench.kernels_journal import Journal
from bench.kernels_record import Figure
from dagengine_kernels.fused import native, planner
from dagengine_kernels.fused.plan import PlanParameters
from dagengine_kernels.graph_cases import GraphBuilder

PAGE_SIZE = 64


def time_planner(journal: Journal, seconds: float = 4.0) -> None:
    """64 requests that each see 64 of 256 segments, planned as the CUDA kernels ask for it."""
    builder = GraphBuilder(PAGE_SIZE, 64, random.Random(0))
    nodes = [builder.node(builder.rng.randint(40, 400)) for _ in range(256)]
    spans = builder.batch([builder.rng.sample(nodes, 64) for _ in range(64)])
    parameters = PlanParameters(
        group=4, num_kv_heads=8, rows_per_tile=(64, 128), workers=(264, 132), boxes=1, owners=True
    )
    missing = native.why_missing()
    shown = "planner, C++" if missing is None else "planner, Python twin"
    if missing is not None:
        journal.note(f"The planner ran as its Python twin: {missing}")
    table = spans.to_segments()
    for metric, call in (
        ("plan", partial(planner.plan_spans, spans, parameters)),
        ("plan of a segment table", partial(planner.plan_table, table, parameters)),
    ):
        samples, stop = [], time.perf_counter() + seconds / 2
        arrays = call()
        while len(samples) < 200 and (len(samples) < 3 or time.perf_counter() < stop):
            start = time.perf_counter()
            arrays = call()
            samples.append((time.perf_counter() - start) * 1e6)
        journal.figure(Figure.of(PLANNER_CASE, shown, metric, samples, "us"))
    journal.figure(Figure.count(PLANNER_CASE, shown, "read ratio", arrays.read_ratio, "x"))
