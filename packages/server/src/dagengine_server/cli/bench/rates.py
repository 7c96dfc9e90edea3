"""Tokens a millisecond from times, beside the published mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .record import Figure, percentile

RATE = "tokens/ms"
PUBLISHED = "published for CIDRA, arXiv:2511.02749: at most 500 tokens/ms"
PUBLISHED_RATE = 500.0


def rate_of(case: str, backend: str, metric: str, tokens: int, times: Sequence[float]) -> Figure:
    """The rate of the median of times in milliseconds; p95 and p99 are the rates of the slow ends."""
    ordered = sorted(times)
    p50, p95, p99 = (tokens / percentile(ordered, q) for q in (0.5, 0.95, 0.99))
    rate = replace(Figure.count(case, backend, metric, p50, RATE), n=len(ordered), p50=p50, p95=p95, p99=p99)
    return rate.against(PUBLISHED, PUBLISHED_RATE)
