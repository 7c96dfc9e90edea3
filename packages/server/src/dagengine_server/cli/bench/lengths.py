"""How long inputs and outputs are: fixed, or drawn from a seed in the way conversations are.

`sharegpt` draws both from log-normal distributions, rounded and held to 4 … 1,024 tokens, independently:

    input     median  95 tokens, sigma 1.5     mean about 214
    output    median 128 tokens, sigma 1.0     mean about 200

The means and the long tail are about those of ShareGPT's conversations as serving benchmarks use them; the data itself
is neither needed nor copied.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ..console import CommandError, suggestion

LEAST, MOST = 4, 1024
LOWEST_ID = 100
"""Random token ids are drawn from here on: the ids below are often special."""

DISTRIBUTIONS = ("sharegpt", "fixed")


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    input: int
    output: int


@dataclass(frozen=True)
class LogNormal:
    """exp(N(ln median, sigma)), rounded and held to `LEAST` … `MOST`."""

    median: float
    sigma: float

    def draw(self, source: random.Random) -> int:
        value = math.exp(source.gauss(math.log(self.median), self.sigma))
        return max(LEAST, min(MOST, round(value)))


SHAREGPT_INPUT = LogNormal(95.0, 1.5)
SHAREGPT_OUTPUT = LogNormal(128.0, 1.0)


def sharegpt(count: int, seed: int) -> list[Lengths]:
    """Lengths of `count` requests; the first ones are the same however many are asked for."""
    source = random.Random(seed)
    return [Lengths(SHAREGPT_INPUT.draw(source), SHAREGPT_OUTPUT.draw(source)) for _ in range(count)]


def fixed(count: int, input_len: int, output_len: int) -> list[Lengths]:
    """`count` requests of one size."""
    return [Lengths(input_len, output_len)] * count


def check_distribution(name: str) -> None:
    """Raises CommandError for a name that is none of `DISTRIBUTIONS`."""
    if name not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise CommandError(f"one of {known}, not {name!r}{suggestion(name, DISTRIBUTIONS)}", "lengths")
