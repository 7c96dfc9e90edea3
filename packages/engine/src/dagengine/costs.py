"""What bringing evicted KV back costs, as this engine measured it: computing again, or loading from the host.

Knows seconds, tokens and pages; decides nothing. Times are linear in what a step or a load consists of,

    step    seconds = c0 + c1 · tokens + c2 · pairs (query, key)          as prefill and restores showed
    load    seconds = c0 + c1 · pages

and each c is fitted by least squares of the relative error, newer measurements counting more. Until there are enough of
them, rough speeds of the device stand in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dagengine_kvstore import NodeRecord, Tier, page_tier
from dagengine_positions import ModelGeometry

KEPT = 0.97
PRIOR_WEIGHT = 0.02
SURPRISE = 8.0


class StepCosts(Protocol):
    """A store's cost model that is told what the engine measures."""

    def recompute(self, node: NodeRecord) -> int: ...

    def reload(self, num_pages: int) -> int: ...

    def observe_step(self, tokens: int, pairs: int, seconds: float) -> None:
        """A step that computed mostly input took so long."""
        ...

    def observe_load(self, num_pages: int, seconds: float) -> None:
        """A load took so long."""
        ...


@dataclass(frozen=True)
class Priors:
    """Seconds before anything was measured: of a step, a token, a pair, a load and a page."""

    step: float
    token: float
    pair: float
    load: float
    page: float

    @classmethod
    def of(cls, geometry: ModelGeometry, page_bytes: int, device_type: str) -> Priors:
        """Rough speeds: products at 200 teraflops on a GPU and 20 gigaflops on a CPU, copies at 20 and 4 GB/s."""
        flops, bandwidth, start = (2e14, 2e10, 1e-3) if device_type == "cuda" else (2e10, 4e9, 1e-4)
        heads, dim = geometry.num_heads + 2 * geometry.num_kv_heads, geometry.head_dim
        weights = geometry.hidden_size * (
            heads * dim + geometry.num_heads * dim + 3 * geometry.intermediate_size
        )
        return cls(
            step=start,
            token=2 * geometry.num_layers * weights / flops,
            pair=4 * geometry.num_layers * geometry.num_heads * dim / flops,
            load=start,
            page=page_bytes / bandwidth,
        )


class Fit:
    """Coefficients >= 0 of a linear cost; old measurements fade.

    A measurement far from what is expected, such as a first step that compiles kernels, is not believed: it moves the
    expectation towards it by a factor of `SURPRISE`, and what was measured before is forgotten.

    Args:
        prior: positive coefficients; they stay, and count little.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.coefficients = np.asarray(prior, np.float64)
        self._begin(self.coefficients)

    def __call__(self, *amounts: float) -> float:
        """Seconds."""
        return float(self.coefficients @ np.asarray(amounts, np.float64))

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Take a measurement in."""
        row, expected = np.asarray(amounts, np.float64), self(*amounts)
        believed = min(max(seconds, expected / SURPRISE), expected * SURPRISE)
        if believed != seconds:
            self._begin(self._prior * (believed / (self._prior @ row)))
            return
        self._matrix = KEPT * self._matrix + np.outer(row, row) / seconds**2
        self._target = KEPT * self._target + row / seconds
        prior = np.diag(1 / self._prior)
        self.coefficients = _non_negative(
            self._matrix + PRIOR_WEIGHT * prior**2, self._target + PRIOR_WEIGHT * prior.sum(axis=1)
        )

    def _begin(self, prior: NDArray[np.float64]) -> None:
        self.coefficients = self._prior = prior
        self._matrix = np.zeros((len(prior), len(prior)))
        self._target = np.zeros(len(prior))


class MeasuredCosts:
    """
    Args:
        page_size: tokens per page.
        max_tokens: most tokens that one step computes.
    """

    def __init__(self, page_size: int, max_tokens: int, priors: Priors) -> None:
        self._page_size, self._max_tokens = page_size, max_tokens
        self._step = Fit((priors.step, priors.token, priors.pair))
        self._load = Fit((priors.load, priors.page))

    def observe_step(self, tokens: int, pairs: int, seconds: float) -> None:
        self._step.observe((1, tokens, pairs), seconds)

    def observe_load(self, num_pages: int, seconds: float) -> None:
        self._load.observe((1, num_pages), seconds)

    def recompute(self, node: NodeRecord) -> int:
        """Microseconds to compute what is missing of a node, or all of it, and what that reads and is nowhere."""
        return round(1e6 * self._recompute(node, set()))

    def reload(self, num_pages: int) -> int:
        """Microseconds to bring so many pages back."""
        return round(1e6 * self._load(1, num_pages))

    def _recompute(self, node: NodeRecord, seen: set[int]) -> float:
        seen.add(node.uid)
        missing = node.pages.count(None) or len(node.pages)
        tokens = min(node.length, missing * self._page_size)
        visible = sum(read.stop - read.start for read in node.reads)
        pairs = tokens * (visible + node.length - tokens / 2)
        seconds = self._step(-(-tokens // self._max_tokens), tokens, pairs)
        on_host = 0
        for read in node.reads:
            source, size = read.node, self._page_size
            if None not in source.pages:
                continue
            tiers = [page_tier(source, i) for i in range(read.start // size, -(-read.stop // size))]
            on_host += tiers.count(Tier.HOST)
            if Tier.NOWHERE in tiers and source.uid not in seen:
                seconds += self._recompute(source, seen)
        return seconds + (self._load(1, on_host) if on_host else 0.0)


def _non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares under x >= 0: what comes out negative is left out, the most negative first."""
    used = np.ones(len(target), bool)
    while True:
        found = np.zeros(len(target))
        found[used] = np.linalg.solve(matrix[np.ix_(used, used)], target[used])
        if (found >= 0).all():
            return found
        used[found.argmin()] = False
