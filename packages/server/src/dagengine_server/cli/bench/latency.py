"""When tokens came, and what follows from it: TTFT, TPOT, ITL, end to end, and goodput. Knows no engine and no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .record import Figure, percentile


@dataclass
class Stream:
    """One answer as it came in. Times are seconds of one monotonic clock.

    Attributes:
        begin: when it was asked for. end: when the last of its events was there.
        sampled: when each token came; tokens of one event came together.
        gaps: between events that brought tokens.
        tokens: how many came in all, where events do not say how many they brought.
    """

    begin: float = 0.0
    end: float = 0.0
    sampled: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int | None = None

    def tell(self, at: float, tokens: int) -> None:
        """Note that `tokens` tokens came."""
        if tokens and self.sampled:
            self.gaps.append(at - self.sampled[-1])
        self.sampled += [at] * tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.sampled[0] - self.begin

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.sampled[-1] - self.begin

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is only one."""
        count = len(self.sampled) if self.tokens is None else self.tokens
        return (self.sampled[-1] - self.sampled[0]) / (count - 1) if count > 1 else None

    @property
    def intervals_s(self) -> list[float]:
        """Between sampled tokens; the first token, which ends the prefill, is not one of them."""
        return [b - a for a, b in zip(self.sampled, self.sampled[1:], strict=False)]

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.sampled) - 1) / (self.sampled[-1] - self.sampled[0])


MEASURES: Mapping[str, Callable[[Stream], list[float]]] = {
    "TTFT": lambda s: [s.ttft],
    "ITL": lambda s: s.gaps,
    "TPOT": lambda s: [s.tpot] if s.tpot is not None else [],
    "E2E": lambda s: [s.e2e],
}
"""Milliseconds of these are reported: to the first token; between events; per token after the first; to the last."""


def latency_figures(case: str, backend: str, streams: Sequence[Stream]) -> list[Figure]:
    """p50, p95 and p99 of every measure, and p90 as a figure of its own, in milliseconds."""
    figures = []
    for name, measure in MEASURES.items():
        samples = sorted(value * 1e3 for stream in streams for value in measure(stream))
        if samples:
            figures.append(Figure.of(case, backend, name, samples, "ms"))
            figures.append(Figure.count(case, backend, f"{name}, p90", percentile(samples, 0.9), "ms"))
    return figures


@dataclass(frozen=True)
class Objective:
    """What counts as served well, in milliseconds; None leaves a measure out."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2e_ms))
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits if limit is not None)

    def met(self, stream: Stream) -> bool:
        found = (
            (stream.ttft, self.ttft_ms),
            (stream.tpot or 0.0, self.tpot_ms),
            (stream.e2e, self.e2e_ms),
        )
        return all(limit is None or seconds * 1e3 <= limit for seconds, limit in found)
