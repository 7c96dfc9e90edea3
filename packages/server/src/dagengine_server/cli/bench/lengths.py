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
INPUT_LEN, OUTPUT_LEN = 1024, 128


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


def fixed_sizes(name: str, input_len: int | None, output_len: int | None) -> tuple[int, int]:
    """The lengths that `fixed` takes, those not given as `INPUT_LEN` and `OUTPUT_LEN`.

    Raises:
        CommandError: a name that is none of `DISTRIBUTIONS`; lengths given beside another one than fixed.
    """
    if name not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise CommandError(f"one of {known}, not {name!r}{suggestion(name, DISTRIBUTIONS)}", "lengths")
    for field, given in (("input_len", input_len), ("output_len", output_len)):
        if given is not None and name != "fixed":
            raise CommandError(f"--lengths {name} draws the lengths; set --lengths fixed", field)
    return (
        INPUT_LEN if input_len is None else input_len,
        OUTPUT_LEN if output_len is None else output_len,
    )
