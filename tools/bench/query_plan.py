"""What planning and lowering a span query cost the host, in milliseconds: median and 95th percentile.

    PYTHONPATH=tools python -m bench.query_plan

Queries over 100 fragments of about 100 words: as a client sends them, retrieved, and as candidates of a judge that
are generated from one input.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

from dagengine_core_graph.query import (
    Query,
    cross,
    fragment,
    g,
    lower,
    plan,
    plus,
    repeat,
    retrieve,
    system,
)


def queries(fragments: int) -> dict[str, Query]:
    """The queries that are measured, by name."""
    pieces = [fragment(text) for text in texts(fragments)]
    draft = g(cross(system("Write."), "A draft."), model="m", temperature=1.0)
    return {
        "fragments": g(cross(system("Answer."), plus(*pieces), "What?"), model="m"),
        "retrieval": g(cross(system("Answer."), retrieve("shelf", "What?"), "What?"), model="m"),
        "judge": g(cross(system("Judge."), repeat(min(fragments, 255), draft), "Which?"), model="m"),
    }


def texts(count: int) -> list[str]:
    return [f"{index} " + "words of a fragment " * 25 for index in range(count)]


def measure(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 95th percentile of so many runs, in milliseconds."""
    times = []
    gc.collect()
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), statistics.quantiles(times, n=20)[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.query_plan", description="Planning and lowering of span queries"
    )
    parser.add_argument("--fragments", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=500)
    options = parser.parse_args(arguments)
    found = texts(options.fragments)
    print(f"{'query':<12}{'nodes':>7}{'plan':>16}{'lower':>16}{'both':>16}   ms, p50 / p95")
    for name, query in queries(options.fragments).items():
        planned = plan(query, retriever=lambda _: found)
        rows = (
            measure(lambda query=query: plan(query, retriever=lambda _: found), options.repeats),
            measure(lambda planned=planned: lower(planned), options.repeats),
            measure(lambda query=query: lower(plan(query, retriever=lambda _: found)), options.repeats),
        )
        cells = "".join(f"{f'{middle:.2f} / {high:.2f}':>16}" for middle, high in rows)
        print(f"{name:<12}{len(lower(planned).nodes):>7}{cells}")


if __name__ == "__main__":
    main()
