"""How sure a fraction is."""

from __future__ import annotations

from math import sqrt

Z95 = 1.959963984540054
"""Two-sided 95 % of a normal distribution, in standard deviations."""


def wilson(hits: int, n: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of `hits` of `n` (Wilson, JASA 22 (1927), 209-212), within 0 and 1; n is at least 1."""
    assert 0 <= hits <= n and n >= 1
    share, square = hits / n, z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * sqrt(share * (1 - share) / n + square / (4 * n * n))
    low = 0.0 if hits == 0 else middle - half
    high = 1.0 if hits == n else middle + half
    return low, high
